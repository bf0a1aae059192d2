"""Two pinned buffers that a thread takes in turns: one is filled, or read, while a device copies
from or to the other."""

from typing import Final

from gds.device.devices import Device, Mark, Staging

_BUFFERS: Final = 2


class DoubleBuffer:
    """The buffers of one thread, of one size. They are lent when they are first taken."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._size = size
        self._buffers: list[Staging] = []
        self._copied: list[Mark | None] = []
        """The mark at which each may be taken again."""
        self._at = -1

    def take(self) -> Staging:
        """Returns the next buffer, once no copy from or to it is under way. Raises NoSpace,
        Unavailable."""
        self._at = (self._at + 1) % _BUFFERS
        if self._at == len(self._buffers):
            self._buffers.append(self._device.lend(self._size))
            self._copied.append(None)
        copied = self._copied[self._at]
        if copied is not None:
            copied.wait()
        return self._buffers[self._at]

    def copied_at(self, mark: Mark) -> None:
        """Notes that copies from or to the buffer that was taken last are done at `mark`."""
        self._copied[self._at] = mark

    def close(self) -> None:
        """Waits for all copies, and gives the buffers back. Raises Unavailable."""
        try:
            for mark in self._copied:
                if mark is not None:
                    mark.wait()
        finally:
            for staging in self._buffers:
                self._device.give_back(staging)
            self._buffers.clear()
            self._copied.clear()
