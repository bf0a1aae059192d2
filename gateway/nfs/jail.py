"""The process of the jail (`jail_process`), as its daemon has it: started, or taken over from an
earlier one."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import trio

from gateway.fuse.views.kept_views import KeptItem
from gateway.nfs import jail_process
from gateway.nfs.jail_control import JailControl, TakenJail
from kvfs.base import priority
from kvfs.base.errors import Unavailable

STOP_S: Final = 10.0
_PACKAGES: Final = Path(__file__).resolve().parent.parent.parent
_WORDS_MOST: Final = 4096
LOG: Final = "log"
"""The key of what Ganesha's log is read from."""
log = logging.getLogger(__name__)


class Jail:
    """The process. It ends with Ganesha."""

    def __init__(
        self, control: JailControl, pidfd: int, child: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        """`child`: it is this process's."""
        self._control = control
        self._pidfd = pidfd
        self._child = child

    @classmethod
    def taken(cls, control: JailControl, taken: TakenJail) -> "Jail":
        """Returns one that was taken over."""
        return cls(control, taken.pidfd)

    @property
    def code(self) -> int | None:
        """The exit code of Ganesha, once it has ended; None: not known here."""
        return self._child.poll() if self._child is not None else None

    async def ended(self) -> None:
        """Returns when it has ended."""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def close(self, *, ends: bool) -> None:
        """Parts from it, once it has ended Ganesha in order and itself (`ends`)."""
        if ends:
            with contextlib.suppress(OSError):  # it has ended
                await trio.to_thread.run_sync(self._control.end)
            with trio.move_on_after(STOP_S) as deadline:
                await self.ended()
            if deadline.cancelled_caught:
                log.error("NFS-Ganesha did not end: it is killed")
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                await self.ended()
        self.code  # noqa: B018  reaps it
        os.close(self._pidfd)


async def start(
    control: JailControl,
    arguments: tuple[str, ...],
    *,
    wait_s: int,
    about: Mapping[str, Any],
    items: Mapping[str, KeptItem],
) -> tuple[Jail, int]:
    """Starts one, which has Ganesha begin once it keeps `items`, and waits so long for another
    daemon when this one has died. `arguments`: ROOT to GANESHA; `about`: what the next daemon will
    be told. Returns it, and what its log is read from. Raises OSError, Unavailable."""
    return await trio.to_thread.run_sync(lambda: _start(control, arguments, wait_s, about, items))


def _start(
    control: JailControl,
    arguments: tuple[str, ...],
    wait_s: int,
    about: Mapping[str, Any],
    items: Mapping[str, KeptItem],
) -> tuple[Jail, int]:
    with contextlib.ExitStack() as failing:
        read, write = os.pipe2(os.O_CLOEXEC)
        failing.callback(os.close, read)
        with contextlib.closing(control.listening()) as listener, os.fdopen(write, "wb") as log_end:
            child = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", jail_process.BEGIN, str(_PACKAGES)),
                    *(str(jail_process.VERSION), str(os.getpid()), *arguments),
                    *(str(listener.fileno()), str(wait_s), json.dumps(dict(about))),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log_end,
                pass_fds=[listener.fileno()],
                cwd="/",
                start_new_session=True,
            )
        failing.callback(child.wait)
        failing.callback(child.kill)
        priority.follow(child.pid)  # clients wait for Ganesha as programs do for the mount
        try:
            for key, item in {LOG: KeptItem(b"", (read,)), **items}.items():
                control.keep(key, *item)
            control.begin()
        except OSError as error:
            child.kill()
            child.wait()
            os.set_blocking(read, False)
            said = os.read(read, _WORDS_MOST).decode(errors="replace").strip()
            raise Unavailable(f"NFS-Ganesha does not start: {said or error}") from None
        jail = Jail(control, os.pidfd_open(child.pid), child)
        failing.pop_all()
        return jail, read
