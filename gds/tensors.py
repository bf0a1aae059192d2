"""Tensors of torch on memory that files were read into."""

import math
from typing import Final

import torch

from gds.load_plan import Wanted, shape_of
from kvfs.errors import NotSupported

DTYPES: Final = {
    "BOOL": torch.bool,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_PACKED: Final = {"F4": 2}
"""Elements that torch has in one of its own."""


def dtype_of(wanted: Wanted) -> torch.dtype:
    """In which torch has the elements of the file. Raises NotSupported."""
    tensor = wanted.tensor
    if tensor.dtype not in DTYPES:
        raise NotSupported(f"tensor {tensor.name!r}: torch has no dtype for {tensor.dtype}")
    return DTYPES[tensor.dtype]


def torch_shape(wanted: Wanted) -> tuple[int, ...]:
    """Its shape to torch. Raises NotSupported where elements that torch packs in pairs are odd in
    number."""
    shape = shape_of(wanted)
    packed = _PACKED.get(wanted.tensor.dtype, 1)
    if packed == 1:
        return shape
    if not shape or shape[-1] % packed:
        raise NotSupported(
            f"tensor {wanted.tensor.name!r}: torch packs {packed} elements of "
            f"{wanted.tensor.dtype}, its last dimension must be a multiple of that"
        )
    return (*shape[:-1], shape[-1] // packed)


def bytes_of(memory: memoryview, device: torch.device) -> torch.Tensor:
    """The memory as uint8, without a copy."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(memory, dtype=torch.uint8)


def view_of(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """`raw`, bytes in a row, as a tensor: a view of it, or a copy where the bytes do not begin
    where elements may."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device=raw.device)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(shape)
