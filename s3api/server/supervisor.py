"""Keeps the workers: starts them, asks them for their counts, replaces those that die, ends them.

Each worker has a listener of its own on the shared port (SO_REUSEPORT), which the supervisor keeps
too: connections that come while a dead worker is replaced wait in it. Workers end when their
standard input does, and when the supervisor's process has ended, even if another process still
holds the other end: so none outlives the supervisor, whatever ends that.
"""

import contextlib
import errno
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import trio

from kvfs.base.config import Address
from kvfs.base.errors import Busy, Invalid, Unavailable
from kvfs.http.api import listen
from s3api.server.counters import Merger, Tally
from s3api.server.worker_messages import READY, REPORT, WorkerPlan

READY_S: Final = 30.0
REPORT_S: Final = 2.0
STOP_S: Final = 15.0
"""Time for a worker to end, more than the server gives to requests in flight."""
BACKOFF_S: Final = (0.1, 5.0)
"""Pause before a dead worker's successor is started: the first, and the longest; doubled each
time."""
_HEALTHY_S: Final = 30.0
"""A worker that lived for so long begins again with the shortest pause."""
_TAKEN_S: Final = 2.0
"""Time that the workers of a killed node may take to give up the port."""
_LINE_LIMIT: Final = 16 << 20
_PACKAGES: Final = Path(__file__).resolve().parents[2]
log = logging.getLogger(__name__)


async def open_listeners(
    address: Address, count: int, *, patient: bool = True
) -> list[list[socket.socket]]:
    """Returns `count` times the listeners of `address`, sharing its port with nobody else;
    `patient`: waits a moment for a port that is taken.

    The first are bound without SO_REUSEPORT, which refuses a port that any other program (a second
    node too) listens on, and share it then. Raises Busy, Invalid.
    """
    deadline = trio.current_time() + (_TAKEN_S if patient else 0)
    while True:
        try:
            return await trio.to_thread.run_sync(_listen, address, count)
        except socket.gaierror as error:
            raise Invalid(f"{address.host}: {error.strerror}") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE and trio.current_time() < deadline:
                await trio.sleep(0.05)
                continue
            raise _refused(error, address) from error


def _listen(address: Address, count: int) -> list[list[socket.socket]]:
    first = listen(address.host, address.port)
    found = [first]
    try:
        for listener in first:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = first[0].getsockname()[1]
        while len(found) < count:
            found.append(listen(address.host, port, share_port=True))
    except BaseException:
        close_all(found)
        raise
    return found


def _refused(error: OSError, address: Address) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return Busy(f"another program listens at {address}: choose another port")
    if error.errno == errno.EADDRNOTAVAIL:
        return Invalid(f"{address.host} is no address of this machine")
    if error.errno == errno.EACCES:
        return Invalid(f"no permission to listen at {address}: choose a port from 1024 on")
    return error


def close_all(listeners: list[list[socket.socket]]) -> None:
    """Closes each of them."""
    for each in listeners:
        for listener in each:
            listener.close()


class _Answers:
    """A worker's answers, line by line."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._pending = bytearray()
        self.owed = 0
        """Answers that have not come yet."""

    async def next(self) -> bytes:
        """Returns the next line. Raises EOFError. Cancelled: nothing is lost."""
        while (end := self._pending.find(b"\n") + 1) == 0:
            part = await self._stream.receive_some()
            if not part or len(self._pending) > _LINE_LIMIT:
                raise EOFError
            self._pending += part
        line = bytes(self._pending[:end])
        del self._pending[:end]
        return line


class _Worker:
    """One place in the row of workers, and the process that fills it now."""

    def __init__(self, listeners: list[socket.socket]) -> None:
        self.listeners = listeners
        self.process: trio.Process | None = None
        self.answers: _Answers | None = None
        """Its answers, while it is ready."""
        self.answering = False
        """Whether it answered the last request."""
        self.last = Tally()
        self.busy = trio.Lock()
        """Held while it is asked."""
        self.is_replaced = trio.Event()
        """Set when another process fills the place."""


class Supervisor:
    """Supervises the workers. `run` is its task; the other methods may be called while that goes
    on."""

    def __init__(
        self, plan: Callable[[list[int]], WorkerPlan], listeners: list[list[socket.socket]]
    ) -> None:
        """`plan` is told the descriptors of a worker's listeners."""
        self._plan = plan
        self._workers = [_Worker(each) for each in listeners]
        self._merger = Merger()
        self._replacing = trio.Lock()
        self._leaving: list[trio.Process] = []
        """Processes that others have replaced, and that answer what they had begun."""
        self.restarts = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps the workers; started when all are ready. Raises Unavailable if one does not come up
        at the start. Cancelled: they are ended in order first, within STOP_S."""
        try:
            async with trio.open_nursery() as starting:
                for worker in self._workers:
                    starting.start_soon(self._start, worker)
            task_status.started()
            async with trio.open_nursery() as nursery:
                for worker in self._workers:
                    nursery.start_soon(self._keep, worker)
        finally:
            with trio.CancelScope(shield=True):
                await self._stop()

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run."""
        return [
            worker.process.pid
            for worker in self._workers
            if worker.process is not None and worker.process.poll() is None
        ]

    @property
    def wanted(self) -> int:
        """The wanted number of workers."""
        return len(self._workers)

    @property
    def answering(self) -> int:
        """The number of workers that answered the last `tally`."""
        return sum(worker.answering for worker in self._workers)

    async def tally(self) -> Tally:
        """Returns the counts of all workers; of one that does not answer, its last ones."""
        async with trio.open_nursery() as nursery:
            for worker in self._workers:
                nursery.start_soon(self._ask, worker)
        return self._merger.total(worker.last for worker in self._workers)

    async def replace_all(self) -> None:
        """Replaces each worker by a new process, one after the other: no connection is refused, and
        no request fails. Returns when the last of the old ones has ended. Raises Unavailable if a
        new one does not come up: then the old one of that place goes on. Cancelled: some are
        replaced."""
        async with self._replacing:
            for worker in self._workers:
                await self._replace(worker)

    # ---- one worker

    async def _replace(self, worker: _Worker) -> None:
        old = worker.process
        if old is None or worker.answers is None:
            return  # it has died, and is replaced anyway
        await self._ask(worker)
        await self._start(worker)
        self._merger.bury(worker.last)
        worker.last, worker.answering = Tally(), False
        replaced, worker.is_replaced = worker.is_replaced, trio.Event()
        replaced.set()
        self._leaving.append(old)
        try:
            await _end_in_order([old])
        finally:
            self._leaving.remove(old)

    async def _start(self, worker: _Worker) -> None:
        """Fills a place by a process that is ready. Raises Unavailable: it is as it was."""
        fds = [listener.fileno() for listener in worker.listeners]
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "s3api.server.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            cwd=_PACKAGES,
            start_new_session=True,  # ^C is for us: workers end when we end them
        )
        assert process.stdin is not None
        assert process.stdout is not None
        answers = _Answers(process.stdout)
        try:
            with trio.move_on_after(READY_S):
                with contextlib.suppress(trio.BrokenResourceError, EOFError):
                    await process.stdin.send_all(msgspec.json.encode(self._plan(fds)) + b"\n")
                    if await answers.next() == READY:
                        worker.process, worker.answers = process, answers
                        return
            raise Unavailable("a worker of the S3 API did not come up: its log says why")
        finally:
            if worker.process is not process:
                with trio.CancelScope(shield=True):
                    process.kill()
                    await process.wait()
                    await _close(process)

    async def _keep(self, worker: _Worker) -> None:
        """Replaces it whenever it dies."""
        pause_s, most_s = BACKOFF_S
        while True:
            began = time.monotonic()
            process, status = worker.process, await _ended(worker)
            if status is None or worker.process is not process:
                pause_s = BACKOFF_S[0]
                continue
            assert process is not None
            worker.answers = None
            await _close(process)
            self._merger.bury(worker.last)
            worker.last, worker.answering = Tally(), False
            if time.monotonic() - began > _HEALTHY_S:
                pause_s = BACKOFF_S[0]
            log.error("an S3 worker (process %d) ended: %s", process.pid, _end(status))
            while worker.answers is None:
                await trio.sleep(pause_s)
                pause_s = min(pause_s * 2, most_s)
                self.restarts += 1
                try:
                    await self._start(worker)
                except (Unavailable, OSError) as error:
                    log.error("an S3 worker could not be replaced: %s", error)

    async def _ask(self, worker: _Worker) -> None:
        process, answers = worker.process, worker.answers
        if process is None or process.stdin is None or answers is None:
            return
        async with worker.busy:
            worker.answering = False
            try:
                with trio.fail_after(REPORT_S):
                    worker.last = await _report(process.stdin, answers)
            except trio.TooSlowError:
                log.warning("the S3 worker %d does not say what it served", process.pid)
            except (trio.BrokenResourceError, trio.ClosedResourceError, EOFError):
                pass  # it has ended
            else:
                worker.answering = True

    # ---- the end

    async def _stop(self) -> None:
        close_all([worker.listeners for worker in self._workers])
        found = [worker.process for worker in self._workers if worker.process is not None]
        await _end_in_order([*found, *self._leaving])


async def _end_in_order(processes: list[trio.Process]) -> None:
    """Has workers answer what they have begun, and returns when they have ended, within STOP_S.
    Cancelled: they end all the same."""
    for process in processes:
        if process.stdin is not None:
            await process.stdin.aclose()
    with trio.move_on_after(STOP_S):
        for process in processes:
            await process.wait()
    for process in processes:
        if process.poll() is None:
            log.error("the S3 worker %d did not end: it is killed", process.pid)
            process.kill()
        await process.wait()
        await _close(process)


async def _ended(worker: _Worker) -> int | None:
    """Returns the status with which a worker's process ended; None: another one replaced it."""
    process, status = worker.process, None
    assert process is not None
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            nonlocal status
            status = await process.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait)
        await worker.is_replaced.wait()
        nursery.cancel_scope.cancel()
    return status


async def _close(process: trio.Process) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            await stream.aclose()


async def _report(stream: trio.abc.SendStream, answers: _Answers) -> Tally:
    """Returns the counts of a worker. Raises EOFError, trio.BrokenResourceError, and
    trio.ClosedResourceError. Cancelled: the answer may come later, and is ignored then."""
    while answers.owed:
        await answers.next()
        answers.owed -= 1
    answers.owed += 1
    await stream.send_all(REPORT)
    line = await answers.next()
    answers.owed -= 1
    return msgspec.json.decode(line, type=Tally)


def _end(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit code {status}"
