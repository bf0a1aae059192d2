"""The header of a safetensors file to be written, byte for byte as the format's own library
composes it. Pure.

Order: by dtype, those with the largest elements first (the last of `BITS`), then by name; so each
tensor begins at a multiple of its element, counted from the first byte of the data, which is a
multiple of eight. The JSON has no spaces except at its end.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from gds.format.safetensors import BITS, MOST_HEADER_BYTES
from kvfs.base.errors import Invalid

_METADATA: Final = "__metadata__"
_ALIGNMENT: Final = 8
_ORDER: Final[Mapping[str, int]] = {dtype: at for at, dtype in enumerate(BITS)}


class TensorDescription(NamedTuple):
    """A tensor that is to be saved."""

    name: str
    dtype: str
    """A key of `BITS`."""
    shape: tuple[int, ...]
    """The shape in elements."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


class Composed(NamedTuple):
    """The beginning of a file."""

    head: bytes
    order: tuple[int, ...]
    """The order in which the tensors' bytes follow, numbered as they were given."""
    size_bytes: int
    """Bytes of the whole file."""


def compose(tensors: Iterable[TensorDescription], metadata: Mapping[str, str] | None) -> Composed:
    """Composes the beginning of a file. Names must be unique. Raises Invalid."""
    given = list(tensors)
    order = sorted(range(len(given)), key=lambda at: (-_ORDER[given[at].dtype], given[at].name))
    entries: dict[str, object] = {}
    if metadata is not None:
        _require_texts(metadata)
        entries[_METADATA] = dict(metadata)
    at = 0
    for tensor in (given[number] for number in order):
        if tensor.name == _METADATA:
            raise Invalid(f"no tensor can be named {_METADATA}: that is what the metadata have")
        end = at + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (at, end),
        }
        at = end
    head = _head(entries)
    return Composed(head, tuple(order), len(head) + at)


def _head(entries: Mapping[str, object]) -> bytes:
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(f"a name or the metadata are no text: {error}") from None
    raw += b" " * (-len(raw) % _ALIGNMENT)
    if len(raw) > MOST_HEADER_BYTES:
        raise Invalid(
            f"the header would have {len(raw)} bytes, {MOST_HEADER_BYTES} are allowed: save fewer "
            "tensors in one file"
        )
    return len(raw).to_bytes(8, "little") + raw


def _require_texts(metadata: Mapping[str, str]) -> None:
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise Invalid("metadata are texts by name")
