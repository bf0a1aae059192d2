"""The header of a safetensors file, read strictly. Pure but for `read_header`.

Format (https://huggingface.co/docs/safetensors, "Format"): u64 little-endian N, N bytes of JSON
that begin with `{` and may end in spaces, then the data. The JSON names tensors with dtype, shape
and data_offsets [begin, end) that count from the first byte of the data, and may have
`__metadata__`, texts by name. The tensors fill the data without overlaps and without holes.

A header that deviates is refused with the file and the tensor named: a loader that trusted it would
read beyond its memory, or give tensors each other's bytes. Like the format's own library, it passes
over other keys of a tensor's entry, and `__metadata__` may be null. That library also reads a key
that occurs twice, which is refused here.
"""

import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from gds.format.excerpt import no_json, shown
from gds.format.json_members import Duplicate, members
from kvfs.base.errors import Corrupt

MOST_HEADER_BYTES: Final = 100_000_000
"""The limit of the format's own library."""
_LENGTH_BYTES: Final = 8
_PART_BYTES: Final = 1 << 20
"""Bytes of the header in memory at a time."""
_MOST: Final = 1 << 63
"""Limit of elements and bytes: more than that fits into no signed 64 bits, and no tensor has it."""
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
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of an element, by the dtype's name; in the order of the format's own library, which has the
smallest first."""


class TensorInfo(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: str
    """A key of `BITS`."""
    shape: tuple[int, ...]
    """The shape in elements."""
    begin: int
    """Its first byte, counted from the file's first."""
    end: int
    """The offset behind its last byte."""


class Header(NamedTuple):
    """The header of one file."""

    tensors: tuple[TensorInfo, ...]
    """The tensors in the order of their bytes; empty ones before the tensor that begins at the same
    byte."""
    metadata: Mapping[str, str]
    data_begin: int
    """The first byte of the data."""


def read_header(fd: int, where: str) -> Header:
    """Returns the header of the file open as `fd`. `where` names it in errors. Raises Corrupt,
    OSError."""
    size = os.fstat(fd).st_size
    try:
        length = header_length(os.pread(fd, _LENGTH_BYTES, 0), size, where)
        return parse_header(_parts(fd, length), length, size, where)
    except OSError as error:
        raise OSError(error.errno, error.strerror, where) from None


def _parts(fd: int, length: int) -> Iterator[bytes]:
    """Yields the JSON of so many bytes. Raises OSError."""
    end = _LENGTH_BYTES + length
    for begin in range(_LENGTH_BYTES, end, _PART_BYTES):
        yield os.pread(fd, min(_PART_BYTES, end - begin), begin)


def header_length(first: bytes, size: int, where: str) -> int:
    """Returns how long the JSON is, from the first eight bytes of a file of `size` bytes. Raises
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


def parse_header(parts: Iterable[bytes], length: int, size: int, where: str) -> Header:
    """Returns the header whose JSON comes in parts, `length` bytes of a file of `size` bytes.
    Raises Corrupt, and what `parts` raises."""
    begin = _LENGTH_BYTES + length
    metadata: dict[str, str] = {}
    tensors: list[TensorInfo] = []
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for name, entry in _entries(parts, where):
        if name == _METADATA:
            metadata = _metadata(entry, where)
        else:
            tensor = _tensor(name, entry, begin, where)
            # A header may have a million tensors, and of each shape and dtype thousands.
            shape = shapes.setdefault(tensor.shape, tensor.shape)
            tensors.append(tensor._replace(shape=shape, dtype=sys.intern(tensor.dtype)))
    tensors.sort(key=lambda each: (each.begin, each.end))
    _require_no_gaps(tensors, begin, size, where)
    return Header(tuple(tensors), metadata, begin)


def _entries(parts: Iterable[bytes], where: str) -> Iterator[tuple[str, object]]:
    parts = iter(parts)
    first = next(parts, b"")
    if first[:1] != b"{":
        raise Corrupt(f"{where}: no safetensors file: its header is no JSON object")
    try:
        yield from members(itertools.chain([first], parts))
    except Duplicate as duplicate:
        raise Corrupt(f"{where}: its header names {shown(duplicate.name)} twice") from None
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: its header is no JSON: {no_json(error)}") from None


def _metadata(found: object, where: str) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise Corrupt(f"{where}: its {_METADATA} is no object of texts")
    return found


def _tensor(name: str, entry: object, data_begin: int, where: str) -> TensorInfo:
    if not isinstance(entry, dict) or not set(entry) >= _ENTRY_KEYS:
        raise Corrupt(f"{where}: tensor {shown(name)}: dtype, shape and data_offsets are wanted")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise Corrupt(f"{where}: tensor {shown(name)}: unknown dtype {shown(dtype)}")
    shape = _numbers(entry["shape"])
    if shape is None or not _is_possible(shape):
        raise Corrupt(f"{where}: tensor {shown(name)}: its shape is no list of sizes")
    offsets = _numbers(entry["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Corrupt(f"{where}: tensor {shown(name)}: its data_offsets are no begin and end")
    bits = math.prod(shape) * BITS[dtype]
    if bits != (offsets[1] - offsets[0]) * 8:
        raise Corrupt(
            f"{where}: tensor {shown(name)}: {dtype} of shape {shown(list(shape))} has {bits} "
            f"bits, its data_offsets span {offsets[1] - offsets[0]} bytes"
        )
    return TensorInfo(name, dtype, shape, data_begin + offsets[0], data_begin + offsets[1])


def _numbers(found: object) -> tuple[int, ...] | None:
    """Returns the numbers; None: it is not a list of whole numbers, none of them negative."""
    if not isinstance(found, list):
        return None
    # A bool is an int to Python, not to JSON.
    if not all(type(each) is int and 0 <= each < _MOST for each in found):
        return None
    return tuple(found)


def _is_possible(shape: Iterable[int]) -> bool:
    number = 1
    for each in shape:
        number *= each or 1  # strides count as if no dimension were empty
        if number >= _MOST:
            return False
    return True


def _require_no_gaps(tensors: Iterable[TensorInfo], data_begin: int, size: int, where: str) -> None:
    at = data_begin
    for tensor in tensors:
        if tensor.begin != at:
            what = "overlaps the one before it" if tensor.begin < at else "leaves a hole before it"
            raise Corrupt(
                f"{where}: tensor {shown(tensor.name)} {what}, at byte {min(at, tensor.begin)}"
            )
        at = tensor.end
    if at != size:
        what = "truncated" if at > size else "bytes that belong to no tensor"
        raise Corrupt(f"{where}: {what}: its tensors end at byte {at}, the file at {size}")
