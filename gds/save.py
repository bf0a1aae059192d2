"""Saves tensors as a safetensors file: `save_file`."""

import errno
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

import torch

from gds.format.checkpoint import Path
from gds.format.safetensors_writer import TensorDescription, compose
from gds.io.memory import allocate
from gds.io.tensors import bytes_of, name_of, per_element
from kvfs.base.errors import Invalid, NoSpace, NotSupported
from kvfs.client.buffers import readable
from kvfs.client.mount.mount_create import new_file

_PART_BYTES: Final = 64 << 20
"""Bytes of one write, and of the buffer through which a device's tensors go."""
_MOST_VIEWS: Final = 1024
"""The views that the kernel takes in one write (UIO_MAXIOV)."""


def save_file(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Saves the tensors in one file, with the bytes that `safetensors.torch.save_file` gives it.

    The memory of tensors on the CPU is written as it is, without a copy. `path` (on a KVFS mount,
    or any other) has the whole file when this returns; on a mount it is as durable as its namespace
    says. Before, and after an error or an interrupt, a previous file stays.

    Raises Invalid (tensors that are not contiguous or share memory, as the format's own library
    refuses them: save one and make the others contiguous), NotSupported (a dtype that the format
    has not, a sparse tensor), NotFound (no such directory), IsADirectory, NoSpace, OSError."""
    if not isinstance(tensors, Mapping):
        raise Invalid(f"tensors are given by name, in a dict, not in a {type(tensors).__name__}")
    given = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    _require_own_memory(given)
    names = list(given)
    described = [_described(name, tensor) for name, tensor in given.items()]
    composed = compose(described, metadata)
    with new_file(path, composed.size_bytes) as fd:
        output = _Output(fd)
        try:
            output.add(memoryview(composed.head))
            for at in composed.order:
                for view in _pieces(given[names[at]]):
                    output.add(view)
                    if not _is_on_host(given[names[at]]):
                        output.flush()
            output.flush()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(f"{os.fsdecode(path)}: {error.strerror}") from error
            raise


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor whose memory holds its elements. Raises Invalid, NotSupported."""
    if not isinstance(name, str):
        raise Invalid(f"{name!r} is no name of a tensor: that is a text")
    if not isinstance(tensor, torch.Tensor):
        raise Invalid(f"{name!r} is no tensor but {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise NotSupported(f"tensor {name!r} is {tensor.layout}: make it dense first")
    if tensor.device.type == "meta":
        raise Invalid(f"tensor {name!r} has no data: it is on the device meta")
    if not tensor.is_contiguous():
        raise Invalid(f"tensor {name!r} is not contiguous: save its .contiguous()")
    return tensor.detach().resolve_conj().resolve_neg()


def _described(name: str, tensor: torch.Tensor) -> TensorDescription:
    dtype = name_of(tensor.dtype)
    if dtype is None:
        raise NotSupported(f"tensor {name!r}: the format has no dtype for {tensor.dtype}")
    shape = tuple(tensor.shape)
    if (packed := per_element(dtype)) > 1:
        if not shape:
            raise NotSupported(f"tensor {name!r}: a scalar cannot be {dtype}")
        shape = (*shape[:-1], shape[-1] * packed)
    return TensorDescription(name, dtype, shape)


def _require_own_memory(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises Invalid if tensors share memory."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.nbytes
    )
    for (device, _, end, name), (where, begin, _, other) in pairwise(spans):
        if where == device and begin < end:
            raise Invalid(
                f"tensors {name!r} and {other!r} share memory: save one of them, or a .clone()"
            )


def _is_on_host(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields the tensor's bytes; a piece of one on a device is valid until the next is asked
    for."""
    if _is_on_host(tensor):
        yield readable(tensor)
        return
    raw = tensor.reshape(-1).view(torch.uint8)
    memory = allocate(min(_PART_BYTES, len(raw)))
    stage = bytes_of(memory)
    for begin in range(0, len(raw), _PART_BYTES):
        part = raw[begin : begin + _PART_BYTES]
        stage[: len(part)].copy_(part)
        yield memory[: len(part)]


class _Output:
    """Gathers views, and writes them with few calls."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self._views: list[memoryview] = []
        self._size = 0

    def add(self, view: memoryview) -> None:
        """Raises OSError."""
        for begin in range(0, len(view), _PART_BYTES):
            part = view[begin : begin + _PART_BYTES]
            if self._size + len(part) > _PART_BYTES or len(self._views) == _MOST_VIEWS:
                self.flush()
            self._views.append(part)
            self._size += len(part)

    def flush(self) -> None:
        """Raises OSError."""
        views, self._views, self._size = self._views, [], 0
        while views:
            done = os.pwritev(self._fd, views, self._at)
            self._at += done
            views = _behind(views, done)


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """Returns the rest of the views after their first `done` bytes."""
    for number, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[number + 1 :]]
        done -= len(view)
    return []
