"""`safe_open`: a safetensors file whose tensors are read when they are asked for, whole or in part.

It replaces `safetensors.safe_open`, with the same names, and reads straight from the data file of a
file on a mount, past the page cache if it is not cached. The errors are those of
`gds.load_file`."""

import contextlib
from types import TracebackType
from typing import Any, Final

import torch

from gds.format.checkpoint import Checkpoint, Path, open_checkpoint
from gds.format.safetensors import TensorInfo
from gds.format.tensor_index import is_basic, narrow, scaled
from gds.io.tensors import dtype_of, torch_shape
from gds.load import read_wanted
from gds.plan.load_plan import WantedTensor
from gds.plan.tensor_parallel import TensorPart
from gds.probe.io_path import device_of
from kvfs.base.errors import Invalid, NotFound, NotSupported

_TORCH: Final = ("pt", "torch", "pytorch")
_NUMPY: Final = ("np", "numpy")


def safe_open(
    filename: Path, framework: str = "pt", device: str | torch.device | int = "cpu"
) -> "SafeOpen":
    """Opens a file. `framework`: that of the results, `pt` (torch) or `np` (numpy, for dtypes that
    it has).

    Use it as a context. The file keeps its content while it is open, even if it is replaced or
    evicted. Raises NotFound, Corrupt, Invalid, NotSupported, OSError."""
    return SafeOpen(filename, framework, device)


class SafeOpen:
    """One open file. Any thread may read; the caller must ensure that none does when it is
    closed."""

    def __init__(
        self, filename: Path, framework: str = "pt", device: str | torch.device | int = "cpu"
    ) -> None:
        if framework not in (*_TORCH, *_NUMPY):
            raise NotSupported(f"framework {framework!r}: only pt and np")
        self._numpy = framework in _NUMPY
        self._device = device_of(f"cuda:{device}" if isinstance(device, int) else device)
        self._closing = contextlib.ExitStack()
        self._checkpoint: Checkpoint | None = self._closing.enter_context(
            open_checkpoint([filename])
        )
        (self._header,) = self._checkpoint.headers
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}

    def __enter__(self) -> "SafeOpen":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Idempotent; tensors stay."""
        self._checkpoint = None
        self._closing.close()

    def keys(self) -> list[str]:
        """Returns the names of all tensors, sorted."""
        return sorted(self._by_name)

    def offset_keys(self) -> list[str]:
        """Returns the names of all tensors in the order of the file."""
        return list(self._by_name)

    def metadata(self) -> dict[str, str] | None:
        """Returns the metadata; None: there are none."""
        assert self._open
        return dict(self._header.metadata) or None

    def get_tensor(self, name: str) -> Any:
        """Returns a whole tensor. Raises NotFound, Corrupt, Conflict, NoSpace, NotSupported,
        OSError."""
        return self._given(self._read([WantedTensor(0, self._info(name))])[name])

    def get_tensors(self) -> dict[str, Any]:
        """Returns all tensors, in one go. Raises what `get_tensor` raises."""
        found = self._read([WantedTensor(0, tensor) for tensor in self._header.tensors])
        return {name: self._given(tensor) for name, tensor in found.items()}

    def get_slice(self, name: str) -> "TensorSlice":
        """Returns a tensor of which only the indexed part is read. Raises NotFound."""
        return TensorSlice(self, self._info(name))

    def _info(self, name: str) -> TensorInfo:
        if name not in self._by_name:
            raise NotFound(f"{self._open.sources[0].where}: it has no tensor {name!r}")
        return self._by_name[name]

    @property
    def _by_name(self) -> dict[str, TensorInfo]:
        assert self._open
        return self._tensors

    @property
    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            raise Invalid("this file is closed")
        return self._checkpoint

    def _read(self, wanted: list[WantedTensor]) -> dict[str, torch.Tensor]:
        return read_wanted(self._open, wanted, self._device)

    def _read_index(self, info: TensorInfo, index: Any) -> Any:
        whole = WantedTensor(0, info)
        shape = torch_shape(whole)
        if not is_basic(index):
            return self._given(self._read([whole])[info.name][index])
        # Raises what torch raises for an index that makes no sense, before anything is read.
        meant = torch.empty((), dtype=dtype_of(whole)).expand(shape)[index]
        if not meant.numel():
            found = torch.empty(meant.shape, dtype=meant.dtype, device=self._device)
            return self._given(found)
        part, rest = narrow(index, shape)
        read = self._read([whole._replace(part=_of_file(part, info, shape))])[info.name]
        return self._given(read[rest].contiguous())

    def _given(self, tensor: torch.Tensor) -> Any:
        if not self._numpy:
            return tensor
        try:
            return tensor.numpy()
        except TypeError as error:
            raise NotSupported(f"numpy has no such dtype: {error}") from None


class TensorSlice:
    """A tensor that is read as it is indexed, in the ways in which torch's are."""

    def __init__(self, file: SafeOpen, info: TensorInfo) -> None:
        self._file = file
        self._info = info

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor, in elements of the file."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Returns the dtype's name in the file: `BF16`."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        """Reads the rows, columns or more that hold the indexed part. Raises IndexError, ValueError
        and TypeError as torch does, else what `SafeOpen.get_tensor` raises."""
        return self._file._read_index(self._info, index)


def _of_file(
    part: TensorPart | None, info: TensorInfo, shape: tuple[int, ...]
) -> TensorPart | None:
    """Returns the part in elements of the file, several of which torch may pack in one."""
    if part is None or info.shape == shape:
        return part
    last = part.dimension == len(shape) - 1
    return scaled(part, info.shape[-1] // shape[-1]) if last else part
