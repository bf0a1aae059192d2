"""Reads into GPU memory by cuFile, through kvikio: the only module that imports it.

It is used only if the probe (`gds.probe.capability`) finds another mode than POSIX: without a CUDA
driver kvikio can be imported and fails at its first read; without /proc/modules opening a file
never ends. kvikio raises RuntimeError, and ValueError for invalid settings (KVIKIO_*); failed reads
raise what `SourceFile` raises.
"""

import os
from typing import Any, Final

import torch

from gds.device.device_target import DeviceLane, DeviceTarget
from gds.device.devices import Device, first_line
from gds.io.source import SourceFile
from gds.io.target import Lane
from gds.io.timings import Stage, during
from gds.plan.load_plan import InPlace, LoadPlan
from gds.plan.pages import PAGE_BYTES, page_down, page_up
from kvfs.base.errors import Corrupt, KvfsError, NotSupported, Unavailable

_REFUSALS: Final = (RuntimeError, ValueError)


def require() -> Any:
    """Returns kvikio, imported. Raises NotSupported: it is not installed, or lacks a library."""
    try:
        import kvikio
        import kvikio.defaults
    except (ImportError, OSError, *_REFUSALS) as error:
        what = first_line(error)
        raise NotSupported(
            f"kvikio cannot be loaded ({what}): pip install 'kvfs[gds-cu13]' "
            "(CUDA 12: kvfs[gds-cu12]) brings it and what finds its libraries (rapids-logger)"
        ) from None
    return kvikio


def avoids_cufile() -> bool:
    """Returns whether kvikio itself would rather read without cuFile (its library is missing,
    /run/udev cannot be read, KVIKIO_COMPAT_MODE says so). Raises NotSupported, Unavailable
    (settings that kvikio does not accept)."""
    kvikio = require()
    try:
        return bool(kvikio.defaults.is_compat_mode_preferred())
    except _REFUSALS as error:
        raise Unavailable(f"kvikio does not start: {first_line(error)}") from None


class CuFile:
    """One open file; reads come from any thread."""

    def __init__(self, source: SourceFile) -> None:
        """`source` must stay open for longer. Raises Unavailable, NotSupported."""
        self._source = source
        try:
            self._file: Any = require().CuFile(f"/proc/self/fd/{source.fd}")
        except _REFUSALS as error:
            raise Unavailable(f"{source.where}: cuFile cannot open it: {error}") from None

    def read_into(self, to: torch.Tensor, offset: int) -> None:
        """Fills `to`, uint8 on the GPU that this thread is at, with the file's bytes from `offset`
        on. Raises Corrupt (it ends before), Unavailable."""
        done = 0
        while done < len(to):
            try:
                count = self._file.raw_read(to[done:], None, offset + done)
            except _REFUSALS as error:
                raise self._failed(offset + done, len(to) - done, str(error)) from None
            if not count:
                raise self._failed(offset + done, len(to) - done, "nothing came")
            done += count

    def _failed(self, offset: int, size: int, error: str) -> KvfsError:
        """Returns the error for a failed read: cuFile's text for a read beyond the file's end
        differs with its mode."""
        end = os.fstat(self._source.fd).st_size
        if end < offset + size:
            return Corrupt(f"{self._source.where}: truncated: it ends at byte {end}")
        return Unavailable(f"{self._source.where}: cuFile cannot read it at {offset}: {error}")

    def close(self) -> None:
        """Closes it; no thread may be reading. Idempotent."""
        self._file.close()


class CuFileTarget(DeviceTarget):
    """Memory of a GPU that lies page by page as the file does, which GDS needs."""

    def __init__(
        self,
        plan: LoadPlan,
        device: Device,
        dtype: torch.dtype | None,
        files: dict[SourceFile, CuFile],
    ) -> None:
        super().__init__(plan, device, dtype)
        self._files = files

    def lane(self) -> Lane:
        return CuFileLane(self, self._device)

    def read(self, source: SourceFile, step: InPlace) -> None:
        """Reads a step's bytes, and the rest of its first and last page, up to the end of the file,
        beyond which kvikio does not read."""
        base = page_down(self._plan.runs[step.run].begin)
        first, end = page_down(step.begin), min(page_up(step.end), source.size)
        pages = self._runs[step.run][first - base : end - base]
        self.ready(step.run).wait()
        with during(Stage.READ, step.end - step.begin):
            self._files[source].read_into(pages, first)

    def _make_run(self, number: int) -> torch.Tensor:
        size = self._plan.runs[number].room
        made = self._device.empty((size + PAGE_BYTES,), torch.uint8)
        self._ready[number] = self._device.ready()
        skip = -made.data_ptr() % PAGE_BYTES
        return made[skip : skip + size]

    def _start(self, number: int) -> int:
        return self._plan.runs[number].start


class CuFileLane(DeviceLane):
    """A lane of cuFile. Pages in the page cache are copied from there through buffers, the rest is
    read past it; so are pages of which the kernel does not tell whether they are cached (a machine
    with GDS has disks for it)."""

    _target: CuFileTarget

    def read_in_place(self, source: SourceFile, step: InPlace) -> None:
        if not (source.is_alone() and source.is_cold(step.begin, step.end) is not False):
            super().read_in_place(source, step)
        else:
            self._target.read(source, step)
