"""Things of views that a process beside the daemon keeps through the daemon's end.

| key | content |
|---|---|
| `view/NAMESPACE` | the view's device, its connection's `abort`, and on what its kernel agreed |
| `lock/NAMESPACE/HANDLE` | a descriptor on the mount, to which the locks of a handle belong |

A lock belongs to the open file of its descriptor, so it stays while anybody has that. The keeper is
what serves clients from the views (`gateway.nfs`): while it may answer, views do not end. Without
one, or when it has ended, views end with the daemon.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from gateway.fuse.channel import device as dev

_VIEW: Final = "view/"
_LOCK: Final = "lock/"
log = logging.getLogger(__name__)


class ViewKeeper(Protocol):
    """Such a process."""

    def keep(self, key: str, data: bytes, fds: Sequence[int]) -> None:
        """Has it keep these until `drop`, in place of what it has under this key. Raises
        OSError."""

    def drop(self, key: str) -> None:
        """Has it close them. Raises OSError."""


class KeptItem(NamedTuple):
    """Something that is kept."""

    data: bytes
    fds: tuple[int, ...]


class _About(msgspec.Struct, frozen=True):
    """Facts about a view for the next daemon."""

    directory: str
    init: bytes
    """The kernel's INIT."""
    is_read_only: bool


class KeptView(NamedTuple):
    """A view without a daemon, which the caller serves from now on."""

    device: int
    abort: int
    """-1: there is none."""
    directory: str
    init: bytes
    is_read_only: bool
    locks: dict[int, int]
    """Descriptors on the mount, by the view's handles."""


class KeptViews:
    """The things of one mount's views that are to be kept. Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[str, KeptItem] = {}
        self._keeper: ViewKeeper | None = None

    def begin(self, keeper: ViewKeeper) -> dict[str, KeptItem]:
        """Has a new process keep what comes from now on; returns what it is to begin with."""
        with self._lock:
            self._keeper = keeper
            return dict(self._items)

    def end(self) -> None:
        """Notes that this process has ended, or does not begin."""
        self._keeper = None

    def went_on(self, items: Mapping[str, KeptItem], keeper: ViewKeeper) -> None:
        """Begins with what a keeper has of an earlier daemon's views; other things among `items`
        are their owner's."""
        self._items = {key: items[key] for key in items if key.startswith((_VIEW, _LOCK))}
        self._keeper = keeper

    def put_view(
        self, namespace: int, directory: str, init: bytes, device: int, *, is_read_only: bool
    ) -> None:
        """Keeps a view whose kernel has agreed."""
        key = f"{_VIEW}{namespace}"
        before = self._items.get(key)
        if before is not None:
            fds = before.fds
        else:
            abort = dev.open_abort(directory)
            fds = (device,) if abort is None else (device, abort)
        about = _About(directory, init, is_read_only)
        self._put(key, KeptItem(msgspec.msgpack.encode(about), fds))

    def drop_view(self, namespace: int) -> None:
        """Drops a view that is unmounted; its device is the caller's. Its connection ends, whoever
        has its device."""
        key = f"{_VIEW}{namespace}"
        item = self._items.get(key)
        for abort in item.fds[1:] if item is not None else ():
            with contextlib.suppress(OSError):
                os.write(abort, b"1")
        self._drop(key, closes_from=1)

    def put_lock(self, namespace: int, fh: int, fd: int) -> None:
        """Keeps the locks of a handle."""
        self._put(f"{_LOCK}{namespace}/{fh}", KeptItem(b"", (fd,)))

    def drop_lock(self, namespace: int, fh: int) -> None:
        """Drops them; the descriptor is the caller's."""
        self._drop(f"{_LOCK}{namespace}/{fh}", closes_from=1)

    def _put(self, key: str, item: KeptItem) -> None:
        with self._lock:
            self._items[key] = item
            if self._keeper is not None:
                try:
                    self._keeper.keep(key, *item)
                except OSError as error:
                    log.warning("%s ends with this daemon: nobody keeps it: %s", key, error)

    def _drop(self, key: str, *, closes_from: int) -> None:
        with self._lock:
            item = self._items.pop(key, None)
            if item is None:
                return
            if self._keeper is not None:
                try:
                    self._keeper.drop(key)
                except OSError as error:
                    log.debug("%s is not dropped: %s", key, error)
        for each in item.fds[closes_from:]:
            os.close(each)


def views_of(items: Mapping[str, KeptItem]) -> dict[int, KeptView]:
    """Returns the views among what an earlier daemon had kept; a lock without its view is left
    out."""
    found: dict[int, KeptView] = {}
    for key, item in items.items():
        if not key.startswith(_VIEW):
            continue
        about = msgspec.msgpack.decode(item.data, type=_About)
        device, *more = item.fds
        found[int(key.removeprefix(_VIEW))] = KeptView(
            device, more[0] if more else -1, about.directory, about.init, about.is_read_only, {}
        )
    for key, item in items.items():
        if key.startswith(_LOCK):
            namespace, fh = map(int, key.removeprefix(_LOCK).split("/"))
            if namespace in found:
                found[namespace].locks[fh] = item.fds[0]
    return found
