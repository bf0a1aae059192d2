"""Tensors that are views of mapped files: nothing is read before it is used.

The mapping is private: a caller's writes to a tensor are the caller's alone. It keeps the file as
it is, even if it is evicted, replaced or removed, for as long as one of its tensors lives. Only
truncating the file itself takes away bytes that are not read yet; a process that touches them then
is ended by SIGBUS, as with any mapped file.
"""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch

from gds.io.source import SourceFile
from gds.io.tensors import bytes_of, dtype_of, per_element, torch_shape, view_of
from gds.plan.load_plan import WantedTensor
from gds.plan.tensor_parallel import TensorPart
from kvfs.base.errors import NoSpace

_MAP_NORESERVE: Final = 0x4000
"""Private writable pages of a file of any size are not counted before they are written. The module
mmap does not name it before Python 3.13."""


def map_tensors(
    sources: Sequence[SourceFile], wanted: Iterable[WantedTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor by its name, not converted. Tensors whose bytes do not begin where their
    elements may, and parts that lie in several spans, are copied, and therefore read. Raises
    NoSpace, NotSupported."""
    files = [bytes_of(_mapped(source)) for source in sources]
    for each in wanted:
        raw = files[each.file][each.tensor.begin : each.tensor.end]
        whole = view_of(raw, dtype_of(each), torch_shape(each._replace(part=None)))
        yield each.tensor.name, whole if each.part is None else _cut(whole, each, each.part)


def _mapped(source: SourceFile) -> memoryview:
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    try:
        return memoryview(mmap.mmap(source.fd, source.size, flags=flags))
    except OSError as error:
        raise NoSpace(f"{source.where}: it cannot be mapped: {error.strerror}") from None


def _cut(whole: torch.Tensor, wanted: WantedTensor, part: TensorPart) -> torch.Tensor:
    is_last = part.dimension == len(wanted.tensor.shape) - 1
    packed = per_element(wanted.tensor.dtype) if is_last else 1
    pieces = [
        whole.narrow(part.dimension, begin // packed, (end - begin) // packed)
        for begin, end in part.spans
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.dimension)
