"""Tensors of torch on memory that files were read into."""

import math
from collections.abc import Mapping
from typing import Final

import torch

from gds.format.excerpt import shown
from gds.format.safetensors import TensorInfo
from gds.plan.load_plan import WantedTensor, shape_of
from kvfs.base.errors import NotSupported

_NAMES: Final = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
DTYPES: Final[Mapping[str, torch.dtype]] = {
    dtype: getattr(torch, name) for dtype, name in _NAMES.items() if hasattr(torch, name)
}
"""The dtypes that this torch has: the smallest came with 2.7 and 2.8."""
_PACKED: Final = {"F4": 2}


def name_of(dtype: torch.dtype) -> str | None:
    """Returns the format's name of a dtype of torch; None: it has none."""
    return next((name for name, each in DTYPES.items() if each == dtype), None)


def dtype_of(wanted: WantedTensor) -> torch.dtype:
    """Returns the dtype in which torch has the elements of the file. Raises NotSupported."""
    tensor = wanted.tensor
    if tensor.dtype not in DTYPES:
        raise NotSupported(f"tensor {shown(tensor.name)}: torch has no dtype for {tensor.dtype}")
    return DTYPES[tensor.dtype]


def is_converted(tensor: TensorInfo, dtype: torch.dtype) -> bool:
    """Returns whether its elements become `dtype`, if a conversion is asked for: floating point
    elements do, except packed ones, which torch cannot convert."""
    found = DTYPES.get(tensor.dtype, dtype)
    return found != dtype and found.is_floating_point and tensor.dtype not in _PACKED


def is_target(dtype: torch.dtype) -> bool:
    """Returns whether floating point elements may be converted to it: they stay floating point,
    unpacked."""
    return dtype.is_floating_point and name_of(dtype) not in _PACKED


def per_element(dtype: str) -> int:
    """Returns how many elements of the file torch has in one of its own."""
    return _PACKED.get(dtype, 1)


def torch_shape(wanted: WantedTensor) -> tuple[int, ...]:
    """Returns its shape in torch. Raises NotSupported for an odd number of elements that torch
    packs in pairs."""
    shape = shape_of(wanted)
    packed = per_element(wanted.tensor.dtype)
    if packed == 1:
        return shape
    if not shape or shape[-1] % packed:
        raise NotSupported(
            f"tensor {shown(wanted.tensor.name)}: torch packs {packed} elements of "
            f"{wanted.tensor.dtype}, its last dimension must be a multiple of that"
        )
    return (*shape[:-1], shape[-1] // packed)


def bytes_of(memory: memoryview) -> torch.Tensor:
    """Returns memory of the host as uint8, without a copy."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)


def view_of(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns `raw`, contiguous bytes, as a tensor: on its memory, or on a copy if the bytes do not
    begin where elements may. It is detached, for torch's notes on views take 600 bytes each."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device=raw.device)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(shape).detach()
