"""The part of each tensor that a tensor-parallel rank has. Pure.

As in Megatron-LM, a module that makes heads or hidden units is cut along its first dimension
(rows), one that takes them in along its second (columns), tables of tokens along the tokens; norms
and biases of the second kind are on every rank. Heads are cut whole. If tensors are stacked in one,
a rank has its part of each of them: several spans.

A tensor whose cut cannot be known from its name is refused by name: a wrong cut would give other
weights.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from gds.format.excerpt import shown
from gds.format.safetensors import TensorInfo
from kvfs.base.errors import Invalid


class Stacked(NamedTuple):
    """Several tensors in one; a rank has its part of each."""

    sizes: tuple[int, ...]
    """The size of each, in their order: elements along the dimension, or numbers in the same
    proportion."""
    dimension: int = 0


class Heads(NamedTuple):
    """Heads of attention, which are cut whole: of queries or of keys (or of values), or of all
    three in one tensor if both numbers are given. With more ranks than heads of keys, such a head
    is on several ranks: rank r has that of number r * keys // ranks, as in vLLM."""

    queries: int = 0
    keys: int = 0
    dimension: int = 0
    grouped: bool = False
    """Whether one tensor holds all three as groups: the queries of a key, the key and its value,
    then those of the next key. Else all queries come first, then the keys, then the values."""
    size: int | None = None
    """Elements of one head along the dimension; a tensor of another size has other heads."""


class Experts(NamedTuple):
    """Tensors of single experts. A rank has `total` / ranks of them, whole, and nothing of the
    others; an expert's number is the pattern's first group."""

    total: int


class Refused(NamedTuple):
    """A tensor whose cut is unknown. (All ranks have a tensor of one element.)"""

    why: str


Cut = int | Stacked | Heads | Experts | Refused | None
"""A number: the dimension to cut evenly along. None: all ranks have all of it."""
Splits = Mapping[str, Cut]
"""Cuts by a regular expression that is searched in the tensor's name; the first match counts. All
ranks have a tensor that none matches."""

COLUMNS: Final = r"\b((q|k|v|q_b|kv_b|gate|up)_proj|w[qkv13]|fc1)"
"""Names of modules that make heads or hidden units."""
ROWS: Final = r"\b((o|out|down)_proj|w[o2]|fc2|self_attn\.dense)"
"""Names of modules that take heads or hidden units in."""
_NUMBER: Final = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""A number between two dots, or a dot and an end."""
_MOST_KINDS: Final = 4096
_DIMENSION: Final = "the number of a dimension is wanted, from 0 on"
_STACKED: Final = r"\b(qkv(_proj)?|query_key_value|W_?(pack|qkv)|wqkv|c_attn)"

TRANSFORMER: Final[Splits] = {
    r"\bexperts\.(gate_up|gate|up|down)_proj(_\w+|\.\w+)?$": Refused("experts are stacked in it"),
    r"\b(in_proj(_\w+)?|x_proj|dt_proj|conv1d)\.": Refused("a state space is cut in another way"),
    COLUMNS + r"\.(weight|bias)$": 0,
    ROWS + r"\.weight$": 1,
    ROWS + r"\.bias$": None,
    r"(\b(embed_tokens|tok_embeddings|lm_head|wte)|^output)\.(weight|bias)$": 0,
    r"\bgate_up_proj\.(weight|bias)$": Stacked((1, 1)),
    # Four bits packed as GPTQ and AWQ have them: the output is along the second dimension.
    COLUMNS + r"\.(qweight|qzeros|scales)$": 1,
    COLUMNS + r"\.g_idx$": None,
    r"\bgate_up_proj\.(qweight|qzeros|scales)$": Stacked((1, 1), 1),
    r"\bgate_up_proj\.g_idx$": None,
    ROWS + r"\.(qweight|g_idx)$": 0,
    ROWS + r"\.(qzeros|scales)$": Refused("the checkpoint's config.json would say how"),
    _STACKED + r"\.": Refused(
        "several tensors are stacked in it, and the checkpoint's config.json would say which"
    ),
    rf"({COLUMNS}|{ROWS}|\bgate_up_proj)\.": Refused("its module is cut"),
}
"""Names as in Llama, Qwen, Mistral, Mixtral, InternLM, OPT and Phi. Heads cannot be known from
names: these are cut as if there were at least as many of them as ranks."""


class TensorPart(NamedTuple):
    """Elements along one dimension of a tensor."""

    dimension: int
    spans: tuple[tuple[int, int], ...]
    """[begin, end) of each, in their order, none of them empty by itself. No span: the rank has no
    part of the tensor."""

    @property
    def size(self) -> int:
        """Elements of all spans."""
        return sum(end - begin for begin, end in self.spans)


def require_splits(splits: Splits) -> None:
    """Raises Invalid, naming the fault, for an invalid plan."""
    if not isinstance(splits, Mapping):
        raise Invalid(f"plan {splits!r}: a mapping of regular expressions to cuts is wanted")
    for pattern, cut in splits.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise Invalid(f"plan: {pattern!r} is no regular expression: {error}") from None
        wanted = _lacks(cut)
        if wanted:
            raise Invalid(f"plan: {pattern!r}: {cut!r}: {wanted}")


def _lacks(cut: object) -> str | None:
    """Returns a description of what is wanted instead; None: it is a valid cut."""
    match cut:
        case Stacked(sizes, dimension):
            if not sizes or not all(_is_number(each, 1) for each in sizes):
                return "sizes of one or more are wanted"
            return None if _is_number(dimension, 0) else _DIMENSION
        case Heads():
            return _heads_lack(cut)
        case Experts(total):
            return None if _is_number(total, 1) else "a number of experts is wanted"
        case None | Refused():
            return None
        case int():
            return None if _is_number(cut, 0) else _DIMENSION
    return f"{_DIMENSION}, or Stacked, Heads, Experts, Refused, None"


def _heads_lack(heads: Heads) -> str | None:
    numbers = (heads.queries, heads.keys)
    if not all(_is_number(each, 0) for each in numbers) or not any(numbers):
        return "numbers of heads are wanted"
    if heads.grouped and not all(numbers):
        return "heads in groups are of queries and of keys"
    if heads.size is not None and not _is_number(heads.size, 1):
        return "a size of one or more is wanted"
    return None if _is_number(heads.dimension, 0) else _DIMENSION


def _is_number(found: object, least: int) -> bool:
    return type(found) is int and found >= least


class Cutting:
    """The parts that one of several ranks has by a plan."""

    def __init__(
        self, splits: Splits, rank: int, ranks: int, *, numbers_count: bool = True
    ) -> None:
        """`numbers_count` False: to the plan, names that differ only in numbers between dots, those
        of layers and experts, are the same. It is then asked for some dozens of a million names.
        Raises Invalid."""
        if not 0 <= rank < ranks:
            raise Invalid(f"rank {rank} is none of {ranks} ranks, which count from 0")
        self._cuts = [(re.compile(pattern), cut) for pattern, cut in splits.items()]
        self._rank = rank
        self._ranks = ranks
        self._numbers_count = numbers_count
        self._known: dict[tuple[str, tuple[int, ...]], TensorPart | None] = {}
        """Parts by a name without its numbers, and a shape."""

    def part(self, tensor: TensorInfo) -> TensorPart | None:
        """Returns the part of the tensor that the rank has; None: all of it. Raises Invalid."""
        if self._ranks == 1:
            return None
        if self._numbers_count:
            return self._part(tensor)
        kind = _NUMBER.sub("0", tensor.name), tensor.shape
        if kind not in self._known:
            if len(self._known) == _MOST_KINDS:
                self._known.clear()
            self._known[kind] = self._part(tensor)
        return self._known[kind]

    def _part(self, tensor: TensorInfo) -> TensorPart | None:
        rank, ranks = self._rank, self._ranks
        cut, number = self._cut_of(tensor)
        match cut:
            case None:
                return None
            case Refused(why):
                _require_one_element(tensor, why)
                return None
            case Experts(total):
                return _of_experts(tensor, number, total, rank, ranks)
            case Heads():
                return _of_heads(_Along(tensor, cut.dimension, rank, ranks), cut)
            case Stacked(sizes, dimension):
                return _of_stacked(_Along(tensor, dimension, rank, ranks), sizes)
        return _evenly(_Along(tensor, cut, rank, ranks))

    def _cut_of(self, tensor: TensorInfo) -> tuple[Cut, str | None]:
        """Returns the cut, and the first group of the pattern that gives it."""
        for pattern, cut in self._cuts:
            found = pattern.search(tensor.name)
            if found is not None:
                return cut, found.group(1) if pattern.groups else None
        return None, None


def _require_one_element(tensor: TensorInfo, why: str) -> None:
    if math.prod(tensor.shape) > 1:
        raise Invalid(
            f"tensor {shown(tensor.name)} of shape {shown(list(tensor.shape))}: how it is cut is "
            f"not known: {why}. Name it in the plan, or load it whole, with one rank"
        )


def _of_experts(
    tensor: TensorInfo, number: str | None, total: int, rank: int, ranks: int
) -> TensorPart | None:
    if number is None or not number.isdecimal() or int(number) >= total:
        given = shown(number)
        raise Invalid(
            f"tensor {shown(tensor.name)}: {given} is no number of one of {total} experts"
        )
    if total % ranks:
        raise Invalid(
            f"tensor {shown(tensor.name)}: {total} experts cannot be divided among {ranks} ranks"
        )
    return None if int(number) * ranks // total == rank else TensorPart(0, ())


class _Along:
    """A tensor along the dimension that is cut, for one rank. Raises Invalid."""

    def __init__(self, tensor: TensorInfo, dimension: int, rank: int, ranks: int) -> None:
        if not 0 <= dimension < len(tensor.shape):
            raise Invalid(
                f"tensor {shown(tensor.name)} of shape {shown(list(tensor.shape))} has no "
                f"dimension {dimension}"
            )
        self.name = tensor.name
        self.dimension = dimension
        self.size = tensor.shape[dimension]
        self.rank = rank
        self.ranks = ranks

    def part(self, spans: Iterable[tuple[int, int]]) -> TensorPart:
        return TensorPart(self.dimension, tuple(spans))

    def share(self, number: int, what: str = "") -> tuple[int, int]:
        """Returns [begin, end) of the rank's share of so many."""
        each, rest = divmod(number, self.ranks)
        if rest:
            raise self.refusal(f"{number}{what} cannot be divided among {self.ranks} ranks")
        return self.rank * each, (self.rank + 1) * each

    def unit(self, number: int, what: str) -> int:
        """Returns the elements of each of so many equal units that fill the dimension."""
        unit, rest = divmod(self.size, number)
        if rest:
            raise self.refusal(f"{self.size} are not {number} {what}")
        return unit

    def refusal(self, why: str) -> Invalid:
        return Invalid(f"tensor {shown(self.name)}: {why} (along dimension {self.dimension})")


def _evenly(along: _Along) -> TensorPart:
    return along.part([along.share(along.size)])


def _of_stacked(along: _Along, sizes: tuple[int, ...]) -> TensorPart:
    whole, spans, at = sum(sizes), [], 0
    for size in sizes:
        elements, rest = divmod(along.size * size, whole)
        if rest:
            raise along.refusal(f"{along.size} are not as {':'.join(map(str, sizes))}")
        begin, end = along.share(elements)
        spans.append((at + begin, at + end))
        at += elements
    return along.part(spans)


def _of_heads(along: _Along, heads: Heads) -> TensorPart:
    is_stacked = bool(heads.queries and heads.keys)
    number = heads.queries + heads.keys * (2 if is_stacked else 1)
    if heads.size is not None and along.size != number * heads.size:
        if is_stacked:
            raise along.refusal(f"{along.size} are not {number} heads of {heads.size}")
        return _evenly(along)
    if heads.grouped:
        return along.part(_groups(along, heads, along.unit(number, "heads")))
    sections = [(heads.queries, False), *[(heads.keys, True)] * (2 if is_stacked else 1)]
    unit, spans, at = along.unit(number, "heads"), [], 0
    for count, may_repeat in sections:
        if count:
            begin, end = _whole_heads(along, count, may_repeat)
            spans.append(((at + begin) * unit, (at + end) * unit))
        at += count
    return along.part(spans)


def _whole_heads(along: _Along, count: int, may_repeat: bool) -> tuple[int, int]:
    if may_repeat and count < along.ranks and along.ranks % count == 0:
        begin = along.rank * count // along.ranks
        return begin, begin + 1
    return along.share(count, " heads")


def _groups(along: _Along, heads: Heads, unit: int) -> list[tuple[int, int]]:
    """Returns whole groups; with fewer groups than ranks, a part of a group's queries with its key
    and value."""
    queries, rest = divmod(heads.queries, heads.keys)
    if rest:
        raise along.refusal(f"{heads.queries} heads cannot be divided among {heads.keys} keys")
    group = (queries + 2) * unit
    begin, end = _whole_heads(along, heads.keys, may_repeat=True)
    if heads.keys >= along.ranks:
        return [(begin * group, end * group)]
    first, last = along.share(heads.queries, " heads")
    within, at = first - begin * queries, begin * group
    return [
        (at + within * unit, at + (within + last - first) * unit),
        (at + queries * unit, at + group),
    ]
