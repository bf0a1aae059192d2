"""One run of NFS-Ganesha: its log, and its readiness."""

import contextlib
import logging
import os
import re
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from gateway.nfs.jail import Jail
from kvfs.base.errors import Unavailable

READY_S: Final = 30.0
_READY: Final = "NFS SERVER INITIALIZED"
_REREAD: Final = "Reread exports complete"
_LINE_LIMIT: Final = 64 << 10
_REREAD_S: Final = 10.0
_REASONS: Final = 2
"""Complaints that are reported as the reason; the others follow from the first."""
_LAST_WORDS_S: Final = 2.0
_LEVELS: Final = {
    "EVENT": logging.DEBUG,
    "INFO": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "WARN": logging.WARNING,
    "CRIT": logging.ERROR,
    "MAJ": logging.ERROR,
    "FATAL": logging.ERROR,
}
_split: Final = re.compile(r":([A-Z0-9 _]+) :([A-Z]+) :(.*)").search
_HARMLESS: Final = re.compile(
    r"gssd_|krb5|realm|keytab|ccache|dbus|DBUS|Cannot register NFS V4|__Register_program"
    r"|No export entries|credential cache|RADOS|Setting log level"
).search
"""Complaints that are logged although nothing is wrong: no Kerberos, no message bus, no port
mapper."""
_left_out: Final = re.compile(
    r"^Config File \(\S+:(\d+)\): Errors processing block \(EXPORT\)"
).match
_place: Final = re.compile(r"^Config File \(\S+\): ")
log = logging.getLogger(__name__)


class Ganesha:
    """One run, started by this daemon or an earlier one. `run` begins or goes on with it, and
    relays its log until it ends."""

    def __init__(self, log_fd: int, pid: int = 0) -> None:
        """`log_fd`: what its log is read from; `pid`: of one that is ready."""
        self._log_fd = log_fd
        self.ready = trio.Event()
        if pid:
            self.ready.set()
        self._reread = trio.Event()
        self._silent = trio.Event()
        """Set when its log has ended."""
        self.pid = pid
        """The process id of Ganesha itself, once that is known."""
        self.complaint = ""
        """The last serious line of its log."""
        self.left_out: dict[int, str] = {}
        """Exports of its last configuration that it does not serve as configured: the first line of
        each, and the reason."""
        self._reasons: list[str] = []
        """Its complaints since then, or since the last of them."""

    async def run(
        self, jail: Jail, *, is_left: Callable[[], bool], task_status: trio.TaskStatus[None]
    ) -> int | None:
        """Started when it is ready. Returns its exit code, if that is known, when it has ended.
        Raises Unavailable if it ends before it is ready, or is not ready in time. Cancelled: it is
        ended in order, unless it is left to the next daemon."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._relay)
                with trio.move_on_after(READY_S):
                    await self._until_ready(jail)
                if self.ready.is_set():
                    task_status.started()
                    await jail.ended()
                with trio.move_on_after(_LAST_WORDS_S):
                    await self._silent.wait()
                nursery.cancel_scope.cancel()
            if not self.ready.is_set():
                raise Unavailable(
                    f"NFS-Ganesha does not start: {self.complaint or 'it says nothing'}"
                )
            return jail.code
        finally:
            with trio.CancelScope(shield=True):
                await jail.close(ends=not is_left())

    async def _until_ready(self, jail: Jail) -> None:
        async with trio.open_nursery() as nursery:

            async def until(wait: Callable[[], Awaitable[object]]) -> None:
                await wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until, self.ready.wait)
            nursery.start_soon(until, jail.ended)

    def end(self) -> None:
        """Makes it end; `run` returns then."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def reread(self) -> None:
        """Makes it read its configuration again; returns when it has. Raises Unavailable."""
        self._reread = trio.Event()
        self.left_out, self._reasons = {}, []
        try:
            os.kill(self.pid or -1 << 30, signal.SIGHUP)
        except ProcessLookupError:
            raise Unavailable("NFS-Ganesha has ended") from None
        with trio.move_on_after(_REREAD_S) as deadline:
            await self._reread.wait()
        if deadline.cancelled_caught:
            raise Unavailable("NFS-Ganesha does not read its configuration again")

    async def _relay(self) -> None:
        """Relays its log into the daemon's."""
        pending = b""
        async with trio.lowlevel.FdStream(self._log_fd) as stream:
            while part := await stream.receive_some():
                *lines, pending = (pending + part).split(b"\n")
                pending = pending[-_LINE_LIMIT:]
                for line in lines:
                    self._line(line.decode(errors="backslashreplace"))
        self._silent.set()

    def _line(self, line: str) -> None:
        if not self.pid and line.startswith("pid "):
            self.pid = int(line.removeprefix("pid "))
            return
        found = _split(line)
        level, text = (logging.ERROR, line) if found is None else _told(found)
        if _READY in text:
            self.ready.set()
        if _REREAD in text:
            self._reread.set()
        if level >= logging.ERROR and not _HARMLESS(text):
            self.complaint = text
            self._heed(text)
        log.log(logging.DEBUG if _HARMLESS(text) else level, "%s", text)

    def _heed(self, complaint: str) -> None:
        """Notes a complaint: it leaves out an export after giving the reason, and goes on without
        it."""
        found = _left_out(complaint)
        if found is None:
            self._reasons.append(_place.sub("", complaint))
        else:
            self.left_out[int(found[1])] = "; ".join(self._reasons[:_REASONS]) or complaint
            self._reasons.clear()


def _told(found: re.Match[str]) -> tuple[int, str]:
    return _LEVELS.get(found[2], logging.INFO), found[3].strip()
