"""The memory behind callers' buffers, as plain bytes that the kernel reads and writes.

Nothing is copied here: a view of one dimension is taken of the object's own memory. numpy arrays
have the buffer protocol; torch tensors have not, so theirs is reached by address, without importing
torch.
"""

import ctypes
import pickle
from typing import Any

from kvfs.base.errors import Invalid

Buffer = Any
"""An object with the buffer protocol (bytes, bytearray, memoryview, mmap, array, numpy.ndarray ...)
or a torch tensor on the CPU; contiguous in C order. The type of such objects has no name before
Python 3.12."""


def readable(buffer: Buffer) -> memoryview:
    """Returns the buffer's bytes. Raises Invalid for an object that is no buffer, or not
    contiguous."""
    if type(buffer) is bytes or type(buffer) is bytearray:
        return memoryview(buffer)
    if type(buffer) is not memoryview and _is_tensor(buffer):
        return _of_tensor(buffer)
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise Invalid(f"{_name(buffer)} gives no buffer: {error}") from None
    if not view.c_contiguous:
        raise Invalid(
            f"this {_name(buffer)} is not contiguous in C order (shape {view.shape}, strides "
            f"{view.strides}): make it so first, as numpy.ascontiguousarray does"
        )
    if view.ndim == 1 and view.format == "B":
        return view
    # memoryview.cast knows neither structured formats nor empty ones.
    return pickle.PickleBuffer(view).raw()


def writable(buffer: Buffer) -> memoryview:
    """Like `readable`, to write into. Raises Invalid for a read-only one too."""
    view = readable(buffer)
    if view.readonly:
        raise Invalid(f"this {_name(buffer)} is read-only: nothing can be read into it")
    return view


def _is_tensor(buffer: Buffer) -> bool:
    return hasattr(buffer, "data_ptr") and hasattr(buffer, "is_contiguous")


def _of_tensor(tensor: Any) -> memoryview:
    """Returns memory that is valid while the tensor lives, which the caller must ensure."""
    if tensor.device.type != "cpu":
        raise Invalid(
            f"this tensor lies on {tensor.device}: copy it to the CPU first, with tensor.cpu()"
        )
    if str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
        raise Invalid("this tensor is not contiguous: make it so first, with tensor.contiguous()")
    length = tensor.numel() * tensor.element_size()
    if not length:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * length).from_address(tensor.data_ptr())).cast("B")


def _name(buffer: Buffer) -> str:
    return type(buffer).__name__
