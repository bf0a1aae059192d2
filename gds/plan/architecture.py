"""Cuts of a transformer's tensors among ranks, by the config.json of its checkpoint. Pure.

They follow from the number and size of heads, from the model's kind (whether it stacks queries,
keys and values, and in which order), and from how weights are packed. In models of several parts
(pictures and text) the config means the text's part; heads of another size are another part's.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from gds.plan.tensor_parallel import (
    ROWS,
    TRANSFORMER,
    Cut,
    Cutting,
    Heads,
    Refused,
    Splits,
    Stacked,
)

_FLOATS: Final = r"\.(weight|bias)$"
_PACKED: Final = r"\.(qweight|qzeros|scales)$"
"""Weights of four bits as GPTQ and AWQ pack them: the output is along the second dimension."""
_GROUPED: Final = ("bloom", "gpt_neox", "internlm2")
"""Kinds that stack each key with its own queries."""
_DENSE: Final = ("bloom", "chatglm", "falcon", "gpt_neox")
"""Kinds whose modules have the names dense, dense_h_to_4h and dense_4h_to_h."""


class _Sizes(NamedTuple):
    queries: int
    keys: int
    head: int


def cutting_of(config: Mapping[str, object] | None, rank: int, ranks: int) -> Cutting:
    """Returns a rank's part by `splits_of`, none of whose patterns tells one number from another.
    Raises Invalid."""
    return Cutting(splits_of(config), rank, ranks, numbers_count=False)


def splits_of(config: Mapping[str, object] | None) -> Splits:
    """Returns the splits of a load without a plan. None, or a config without heads:
    `TRANSFORMER`."""
    if config is None:
        return TRANSFORMER
    text = config.get("text_config")
    part = text if isinstance(text, dict) else config
    sizes = _sizes(part)
    kind = str(part.get("model_type", ""))
    quantised = config.get("quantization_config", part.get("quantization_config"))
    found: dict[str, Cut] = {}
    if sizes is not None:
        found |= _heads(sizes)
        found |= _stacked(kind, sizes)
    if kind in _DENSE:
        found |= _dense(kind)
    found |= _packed_rows(quantised)
    # A pattern that both have is to mean what the config says.
    return found | {name: cut for name, cut in TRANSFORMER.items() if name not in found}


def _sizes(config: Mapping[str, object]) -> _Sizes | None:
    """Returns the sizes; None: the config does not tell."""
    queries = _number(config, "num_attention_heads", "n_head")
    hidden = _number(config, "hidden_size", "n_embed")
    head = _number(config, "head_dim", "kv_channels")
    if queries is None or (hidden is None and head is None):
        return None
    if head is None:
        assert hidden is not None
        head = hidden // queries
    return _Sizes(queries, _keys(config) or queries, head) if head else None


def _keys(config: Mapping[str, object]) -> int | None:
    if config.get("model_type") == "falcon" and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else None
    if config.get("multi_query_attention"):
        return _number(config, "multi_query_group_num")
    return _number(config, "num_key_value_heads", "num_kv_heads", "n_head_kv")


def _number(config: Mapping[str, object], *names: str) -> int | None:
    """Returns the first of these settings that exists."""
    for name in names:
        found = config.get(name)
        if type(found) is int and found > 0:
            return found
    return None


def _heads(sizes: _Sizes) -> dict[str, Cut]:
    queries, keys, head = sizes
    return {
        r"\b(q_proj|wq)" + _FLOATS: Heads(queries, size=head),
        r"\b([kv]_proj|w[kv])" + _FLOATS: Heads(keys=keys, size=head),
        r"\b(qkv_proj|W_pack)" + _FLOATS: Heads(queries, keys, size=head),
        r"\bq_proj" + _PACKED: Heads(queries, dimension=1),
        r"\b[kv]_proj" + _PACKED: Heads(keys=keys, dimension=1),
        r"\b(qkv_proj|W_pack)" + _PACKED: Heads(queries, keys, dimension=1),
        r"\b(qkv_proj|W_pack)\.g_idx$": None,
    }


def _stacked(kind: str, sizes: _Sizes) -> dict[str, Cut]:
    """Returns the cuts of tensors that the model's kind stacks in a known order."""
    queries, keys, head = sizes
    name = r"\b(query_key_value|wqkv)" + _FLOATS
    if kind in _GROUPED or (kind == "falcon" and keys > 1):
        return {name: Heads(queries, keys, grouped=True, size=head)}
    if kind in ("chatglm", "falcon"):
        return {name: Heads(queries, keys, size=head)}
    return {}


def _dense(kind: str) -> dict[str, Cut]:
    hidden: Cut = Stacked((1, 1)) if kind == "chatglm" else 0
    return {
        r"\bdense_h_to_4h" + _FLOATS: hidden,
        r"\b(dense_4h_to_h|(self_)?attention\.dense)\.weight$": 1,
        r"\b(embed_in|embed_out|word_embeddings|output_layer)\.weight$": 0,
    }


def _packed_rows(quantised: object) -> dict[str, Cut]:
    """Returns the cuts of scales and zeros of modules that are cut along their input: of groups of
    it. With GPTQ's desc_act any input is in any group, so all ranks have all groups."""
    if not isinstance(quantised, dict) or quantised.get("quant_method") not in ("awq", "gptq"):
        return {}
    is_whole = quantised.get("desc_act") or quantised.get("group_size") == -1
    is_known = quantised["quant_method"] == "awq" or isinstance(quantised.get("desc_act"), bool)
    cut: Cut = None if is_whole else 0
    unknown = Refused("config.json does not say whether desc_act was used")
    return {ROWS + r"\.(qzeros|scales)$": cut if is_known else unknown}
