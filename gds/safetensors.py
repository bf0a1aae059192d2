"""The header of a safetensors file, read strictly. Pure but for `read_header`.

Format (https://huggingface.co/docs/safetensors, "Format"): u64 little-endian N, N bytes of JSON
that begin with `{` and may end in spaces, then the data. The JSON names tensors with dtype, shape
and data_offsets [begin, end) that count from the first byte of the data, and may have
`__metadata__`, texts by name. The tensors fill the data without overlaps and without holes.

What is not exactly so is refused with the file and the tensor named: a loader that trusted a header
would read beyond its memory, or give tensors each other's bytes.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kvfs.errors import Corrupt

MOST_HEADER_BYTES: Final = 100_000_000
"""As the format's own library has it."""
_MOST_DIMENSIONS: Final = 64
_LENGTH_BYTES: Final = 8
_MOST: Final = 1 << 63
"""Elements, bytes: what is more fits into no signed 64 bits, and no tensor has it."""
_METADATA: Final = "__metadata__"
_ENTRY_KEYS: Final = {"dtype", "shape", "data_offsets"}

BITS: Final[Mapping[str, int]] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Of an element, by the dtype's name."""


class TensorInfo(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    """A key of `BITS`."""
    shape: tuple[int, ...]
    """In elements."""
    begin: int
    """Its first byte, counted from the file's first."""
    end: int
    """Behind its last byte."""


class Header(NamedTuple):
    """Of one file."""

    tensors: tuple[TensorInfo, ...]
    """In the order of their bytes; empty ones before what begins at the same byte."""
    metadata: Mapping[str, str]
    data_begin: int
    """The first byte of the data."""


def read_header(fd: int, where: str) -> Header:
    """The header of the file open as `fd`. `where` names it in errors. Raises Corrupt, OSError."""
    size = os.fstat(fd).st_size
    try:
        length = header_length(os.pread(fd, _LENGTH_BYTES, 0), size, where)
        text = os.pread(fd, length, _LENGTH_BYTES)
    except OSError as error:
        raise OSError(error.errno, error.strerror, where) from None
    return parse_header(text, size, where)


def header_length(first: bytes, size: int, where: str) -> int:
    """How long the JSON is, from the first eight bytes of a file of `size` bytes. Raises
    Corrupt."""
    if len(first) < _LENGTH_BYTES or size < _LENGTH_BYTES:
        raise Corrupt(f"{where}: no safetensors file: it has {size} bytes")
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if length > MOST_HEADER_BYTES:
        raise Corrupt(
            f"{where}: no safetensors file: its header would have {length} bytes, "
            f"{MOST_HEADER_BYTES} are allowed"
        )
    if _LENGTH_BYTES + length > size:
        raise Corrupt(
            f"{where}: truncated: its header ends at byte {_LENGTH_BYTES + length}, the file at "
            f"{size}"
        )
    return length


def parse_header(text: bytes, size: int, where: str) -> Header:
    """The header whose JSON is `text`, of a file of `size` bytes. Raises Corrupt."""
    begin = _LENGTH_BYTES + len(text)
    entries = _entries(text, where)
    metadata = _metadata(entries.pop(_METADATA, {}), where)
    tensors = sorted(
        (_tensor(name, entry, begin, where) for name, entry in entries.items()),
        key=lambda each: (each.begin, each.end),
    )
    _require_no_gaps(tensors, begin, size, where)
    return Header(tuple(tensors), metadata, begin)


def _entries(text: bytes, where: str) -> dict[str, object]:
    if text[:1] != b"{":
        raise Corrupt(f"{where}: no safetensors file: its header is no JSON object")
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except _Duplicate as duplicate:
        raise Corrupt(f"{where}: its header names {duplicate} twice") from None
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: its header is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Corrupt(f"{where}: no safetensors file: its header is no JSON object")
    return found


class _Duplicate(Exception):
    """A key that comes twice in one object."""


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Duplicate(repr(name))
            seen.add(name)
    return found


def _metadata(found: object, where: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise Corrupt(f"{where}: its {_METADATA} is no object of texts")
    return found


def _tensor(name: str, entry: object, data_begin: int, where: str) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != _ENTRY_KEYS:
        raise Corrupt(f"{where}: tensor {name!r}: dtype, shape and data_offsets are wanted")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise Corrupt(f"{where}: tensor {name!r}: unknown dtype {dtype!r}")
    shape = _numbers(entry["shape"], _MOST_DIMENSIONS)
    # Strides count as if no dimension were empty.
    if shape is None or math.prod(each or 1 for each in shape) >= _MOST:
        raise Corrupt(f"{where}: tensor {name!r}: its shape is no list of sizes")
    offsets = _numbers(entry["data_offsets"], 2)
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Corrupt(f"{where}: tensor {name!r}: its data_offsets are no begin and end")
    bits = math.prod(shape) * BITS[dtype]
    if bits != (offsets[1] - offsets[0]) * 8:
        raise Corrupt(
            f"{where}: tensor {name!r}: {dtype} of shape {list(shape)} has {bits} bits, its "
            f"data_offsets span {offsets[1] - offsets[0]} bytes"
        )
    return TensorInfo(name, dtype, shape, data_begin + offsets[0], data_begin + offsets[1])


def _numbers(found: object, most: int) -> tuple[int, ...] | None:
    """None: not a list of so many whole numbers at most, none of them negative."""
    if not isinstance(found, list) or len(found) > most:
        return None
    # A bool is an int to Python, not to JSON.
    if not all(type(each) is int and 0 <= each < _MOST for each in found):
        return None
    return tuple(found)


def _require_no_gaps(tensors: Iterable[TensorInfo], data_begin: int, size: int, where: str) -> None:
    at = data_begin
    for tensor in tensors:
        if tensor.begin != at:
            what = "overlaps the one before it" if tensor.begin < at else "leaves a hole before it"
            raise Corrupt(
                f"{where}: tensor {tensor.name!r} {what}, at byte {min(at, tensor.begin)}"
            )
        at = tensor.end
    if at != size:
        what = "truncated" if at > size else "bytes that belong to no tensor"
        raise Corrupt(f"{where}: {what}: its tensors end at byte {at}, the file at {size}")
