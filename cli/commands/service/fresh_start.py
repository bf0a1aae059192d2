"""The files and directories that a first `kvfs up` makes, removed again when the start fails."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cli.presentation import exits
from kvfs.base.config import Config


class Fresh:
    """Notes, before a start, what does not exist yet: a store, the directories above it and above
    the mountpoint."""

    def __init__(self, config: Config, *, mounted: bool) -> None:
        self._store = config.store.absolute()
        self._is_new = not os.path.lexists(self._store / "format")
        self._missing = list(_missing(self._store))
        if mounted and not self._is_mounted(config):
            self._missing += _missing(config.mount.absolute())
        self._started = False

    @staticmethod
    def _is_mounted(config: Config) -> bool:
        """Returns whether a mount is there already. It is not looked at: one that waits for this
        node (takeover_s) would not answer."""
        from gateway.fuse.channel import device

        return device.is_ours(str(config.mount.absolute()))

    def started(self) -> None:
        """Keeps everything from here on."""
        self._started = True

    @contextlib.contextmanager
    def kept_if_started(self) -> Iterator[None]:
        """Removes everything that the block made if it fails before `started`: a store only while
        it has never held a file. After a bug everything stays, with the log."""
        try:
            yield
        except BaseException as error:
            if not self._started and exits.exit_code(error) != exits.BUG:
                self._remove()
            raise

    def _remove(self) -> None:
        from gateway.bare_directory import open_to_writers
        from kvfs.datastore import layout

        if self._is_new:
            layout.remove_unused(self._store)
        for directory in self._missing:
            open_to_writers(directory)
            with contextlib.suppress(OSError):
                directory.rmdir()


def _missing(path: Path) -> Iterator[Path]:
    """Yields the directory and those above it that do not exist, deepest first."""
    while not os.path.lexists(path):
        yield path
        path = path.parent
