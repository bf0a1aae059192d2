"""The fast path: stands between /dev/fuse and pyfuse3, answers the hot requests itself and relays
the rest.

- One event-loop task reads requests. It drives a handler to its end in one step and writes the
  reply at once: no task, no wake-up. A handler that has to wait for another host goes on as a task
  from there (`kvfs.base.detach`). One that waits for other reasons (fsync, fallocate, copies,
  pressure on a cache's capacity) runs as a task from its beginning. Payload of relay mode that may
  wait for a disk goes to worker threads.
- A waiting request ends early only with its caller, whatever other signals the caller gets
  (INTERRUPT): no local filesystem answers EINTR, and programs take it for a failure. A wait for a
  lock, however, is ended by any signal, as on every filesystem.
- Nobody waits for a RELEASE (the close that sent it has returned), so it is served after other
  requests.
- `poll_strategy` decides how to wait for the next request.
- INIT goes to libfuse, whose reply is replaced: pyfuse3 cannot ask for passthrough, KVFS can.
"""

import contextlib
import errno
import io
import logging
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, NamedTuple

import trio

from gateway.fuse.channel import relay_payload
from gateway.fuse.channel.backing_registry import BackingRegistry
from gateway.fuse.channel.cluster_answers import ClusterAnswers
from gateway.fuse.channel.handlers import MAY_WAIT, Handlers, KernelRequest
from gateway.fuse.channel.lock_requests import LockHandlers
from gateway.fuse.channel.plain_answers import Answer, PlainAnswers
from gateway.fuse.channel.plain_changes import PlainChanges
from gateway.fuse.channel.poll_strategy import Attention, Rest
from gateway.fuse.channel.resent_requests import ResentRequests
from gateway.fuse.codec import protocol
from gateway.fuse.codec.errno_map import errno_of
from gateway.fuse.codec.protocol import IN_HEADER, OUT_HEADER, Fattr, Init, Op
from gateway.fuse.codec.set_attributes import NO_ATTRIBUTES
from gateway.fuse.files.kernel_inodes import OTHER, ino_of
from gateway.fuse.files.open_file import OpenFile
from gateway.fuse.operations import Operations
from gateway.holder.mount_journal import AGAIN, MountJournal
from kvfs.base import detach
from kvfs.base.errors import KvfsError
from kvfs.meta.asked_requests import asking
from kvfs.meta.records import ROOT_INODE
from kvfs.transfer.transfer import Transfer
from kvfs.vfs import kernel_notify

_WORKERS_DEADLINE_S: Final = 10.0
_INLINE_BYTES: Final = 64 << 10
"""The event loop always serves WRITEs up to this size itself."""
_HEADER: Final = IN_HEADER.size
_OUT_SIZE: Final = OUT_HEADER.size
_unpack_header: Final = IN_HEADER.unpack_from
_unpack_unique: Final = struct.Struct("<4xIQ").unpack_from
_pack_header: Final = OUT_HEADER.pack
_GONE: Final = (errno.ENOENT, errno.ENODEV)
"""The request was given up, or the mount has gone: nobody takes the reply."""
_NO_REQUEST: Final = (errno.EINTR, errno.ENOENT, errno.ECONNABORTED)
"""A read was ended by a signal, or its request was given up: none is there now."""
_APPENDS: Final = os.O_APPEND | os.O_DIRECT
"""Flags of writes that go past the page cache: several parts may arrive at a time, in any order."""
_SOCKET_BYTES: Final = 4 * protocol.BUFFER_BYTES
_SO_SNDBUFFORCE: Final = 32
_WANTED: Final = (
    Init.ASYNC_READ
    | Init.EXPORT_SUPPORT
    | Init.BIG_WRITES
    | Init.DO_READDIRPLUS
    | Init.READDIRPLUS_AUTO
    | Init.ASYNC_DIO
    | Init.PARALLEL_DIROPS
    | Init.MAX_PAGES
    | Init.CACHE_SYMLINKS
    | Init.EXPLICIT_INVAL_DATA
    | Init.HANDLE_KILLPRIV_V2
    | Init.INIT_EXT
    | Init.DIRECT_IO_ALLOW_MMAP
)
_SIGKILL_BIT: Final = 1 << (signal.SIGKILL - 1)
_LOOK_S: Final = 0.25
"""The kernel reports the first signal alone: from then on callers are checked this often."""
_DEFERRED: Final = 32
"""At most this many RELEASEs wait; fewer than the kernel sends without an answer
(_MAX_BACKGROUND)."""
_BURST: Final = 16
"""After at most as many requests without a pause the loop looks at the time, and whether its other
tasks are due."""
_TRUSTED: Final = 16
"""After a look that found no request the loop waits, without another look, as often as this: one
caller asks at a time."""
_MAX_READAHEAD: Final = 8 << 20
_MAX_BACKGROUND: Final = 64
log = logging.getLogger(__name__)


def server_socket() -> tuple[socket.socket, socket.socket]:
    """Returns (our end, libfuse's end): libfuse takes its end for a device that is mounted
    already."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        try:
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SOCKET_BYTES)
        except PermissionError:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        end.setblocking(False)
    return ours, theirs


class _Waiting(NamedTuple):
    """A request that waits in a task."""

    scope: trio.CancelScope
    thread: int | None
    """The caller's thread, whose end alone ends the request; None: any signal does."""


def _thread_of(request: KernelRequest) -> int | None:
    return None if request.opcode == Op.SETLKW else request.pid


def _is_killed(thread: int) -> bool:
    """Returns whether the thread is about to end by a signal: the kernel then has SIGKILL pending
    for each thread of the process (proc(5), SigPnd). False for a thread that cannot be seen."""
    try:
        with open(f"/proc/{thread}/status", "rb") as status:
            masks = [line.split()[1] for line in status if line.startswith((b"SigPnd", b"ShdPnd"))]
    except OSError:
        return False
    return any(int(mask, 16) & _SIGKILL_BIT for mask in masks)


class FastPath:
    """Serves one mount."""

    def __init__(
        self,
        device: int,
        server: socket.socket | None,
        operations: Operations,
        backing: BackingRegistry,
        handlers: Handlers | None = None,
    ) -> None:
        """`server`: libfuse's socket; None: requests that are not answered here are not
        supported."""
        self._device = device
        # By this None says that nothing is there, where os.readv raises.
        self._read_into = io.FileIO(device, "r+b", closefd=False).readinto
        self._server = server
        self._operations = operations
        self._backing = backing
        self._handlers = handlers or Handlers(operations, backing)
        self._root = self._handlers.root
        self._orphans = operations.orphans.held
        self._plain: dict[int, Answer] = {}
        self._release_now: Callable[[int, memoryview], bool] | None = None
        engine, coherence = operations.node.local, operations.coherence
        if handlers is None and coherence is not None:
            self._plain = ClusterAnswers(operations, engine, coherence).table()
        elif handlers is None:
            self._plain = PlainAnswers(operations, engine, backing).table()
        if handlers is None:
            changes = PlainChanges(operations, backing, self._handlers)
            self._plain |= changes.table()
            self._release_now = changes.release
        if handlers is None and operations.locks is not None:
            self._handlers.waiting.update(LockHandlers(operations.locks).table())
        self._steps = operations.engine.reads_immediate
        self._immediate = operations.engine.immediate
        self._workers = relay_payload.Workers(device)
        self._lane = relay_payload.PayloadLane(device)
        self._pace = relay_payload.WritePace()
        self._buffers = relay_payload.PayloadBuffers()
        first = self._buffers.take()
        assert first is not None
        self._buffer = first
        self.workers_ended = False
        """Whether no thread of this mount is left; known after `run`."""
        self._nursery: trio.Nursery | None = None
        self._deferred: dict[int, KernelRequest] = {}
        """RELEASEs by inode. Nobody waits for them: they are served when nothing else is there, or
        when the same file is asked for again."""
        self._waiting: dict[int, _Waiting] = {}
        """Requests that run as tasks, by their unique number."""
        self._signalled: dict[int, _Waiting] = {}
        """Waiting requests whose callers were sent a signal and live on."""
        self._watched = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._init_unique = 0
        self.init = b""
        """The kernel's INIT, as it came."""
        self.kernel_minor = 0
        self._dispatcher = self._dispatch
        self._resent: ResentRequests | None = None
        self._journal: MountJournal | None = None
        self._mark = 0
        self.requests = 0
        self.initialised = trio.Event()

    def keep_journal(self, journal: MountJournal, mark: int = 0) -> None:
        """Says, for the mount's journal, which request is served, and which are answered; `mark`:
        bits that tell this connection's from others'. To be called before `run`."""
        self._dispatcher, self._journal = self._dispatch_journaled, journal
        self._mark = mark

    def go_on(self, init: bytes, resent: ResentRequests, known: Iterable[int] = ()) -> None:
        """Goes on with a mount whose kernel agreed on everything with an earlier daemon, by this
        INIT. To be called before `run`: then the kernel sends again what was not answered. `known`:
        numbers of the kernel's inodes whose attributes it asks for anew."""
        self._resent = resent
        self._heed(init)
        if self._server is not None:
            self._server.send(init)
        self.initialised.set()
        # Names first: others may have changed them while nobody served the mount.
        os.write(self._device, kernel_notify.EVERY_NAME)
        for number in known:
            with contextlib.suppress(FileNotFoundError):  # which the kernel has forgotten
                os.write(self._device, kernel_notify.inode(number, pages=False))
        os.write(self._device, kernel_notify.RESEND)

    @property
    def handlers(self) -> Handlers:
        """The handlers of this mount."""
        return self._handlers

    async def run(self) -> None:
        """Serves until the mount is gone. Cancelled: stops reading; the mount stays until it is
        unmounted."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                if self._server is not None:
                    nursery.start_soon(self._from_server, self._server)
                nursery.start_soon(self._watch_signalled)
                await self._serve()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                self.workers_ended = await trio.to_thread.run_sync(
                    self._workers.close, _WORKERS_DEADLINE_S
                )

    async def _serve(self) -> None:
        """Reads requests and has them served. In a cluster, questions and answers of other hosts
        come through the event loop, which is not kept busy while a request waits for them."""
        await trio.lowlevel.wait_readable(self._device)
        read_into, dispatch, deferred = self._read_into, self._dispatcher, self._deferred
        answered = trusted = 0
        with Attention(self._device) as attention:
            while True:
                try:
                    n = read_into(self._buffer)
                except OSError as error:
                    if error.errno == errno.ENODEV:  # the mount has gone
                        return
                    if error.errno not in _NO_REQUEST:
                        raise
                    n = None
                if n:
                    dispatch(n)
                    answered += 1
                    if answered < _BURST and (deferred or not trusted):
                        continue
                    trusted -= trusted > 0
                elif deferred:
                    self._release_of(next(iter(deferred)))
                    continue
                elif self._immediate or not self._waiting:
                    trusted = _TRUSTED
                if self._waiting and not self._immediate:
                    rest = Rest.SLEEP
                else:
                    rest = attention.rest(answered, block=not (self._waiting or deferred))
                answered = 0
                if rest is Rest.SLEEP and not deferred:
                    await trio.lowlevel.wait_readable(self._device)
                    attention.woken()
                elif rest is Rest.YIELD:
                    await trio.lowlevel.cancel_shielded_checkpoint()

    def _dispatch(self, n: int) -> None:
        """Serves a request; a bug in one is that request's EIO, not the end of the mount."""
        buffer = self._buffer
        _, opcode, unique, nodeid, uid, gid, pid, _, _ = _unpack_header(buffer)
        self.requests += 1
        if nodeid == ROOT_INODE:
            nodeid = self._root
        number = nodeid
        if number & OTHER:
            nodeid = ino_of(number)
        try:
            if nodeid in self._deferred:
                self._release_of(nodeid)
            plain = self._plain.get(opcode)
            if plain is not None:
                answer = plain(nodeid, buffer[_HEADER:n], uid, gid)
                if answer is not None:
                    if isinstance(answer, bytes):
                        message = _pack_header(_OUT_SIZE + len(answer), 0, unique) + answer
                    elif isinstance(answer, int):
                        message = _pack_header(_OUT_SIZE, -answer, unique)
                    else:
                        asked = KernelRequest(opcode, unique, number, uid, gid, pid, buffer[:0])
                        self._answer(asked, answer)
                        return
                    try:  # as `_reply`, a call less
                        os.write(self._device, message)
                    except OSError as error:
                        if error.errno not in _GONE:
                            raise
                    return
            request = KernelRequest(opcode, unique, number, uid, gid, pid, buffer[_HEADER:n])
            if opcode == Op.RELEASE and self._steps and nodeid not in self._orphans:
                self._defer(request)
            else:
                self._serve_generally(request, n)
        except Exception as e:  # logged, then translated
            self._reply_error(unique, e)

    def _dispatch_journaled(self, n: int) -> None:
        """Like `_dispatch`, for a mount with a journal."""
        buffer = self._buffer
        opcode, unique = _unpack_unique(buffer)
        asking.set(unique | self._mark)
        if unique & AGAIN and self._resent is not None:
            _, _, _, nodeid, uid, gid, pid, _, _ = _unpack_header(buffer)
            if nodeid == ROOT_INODE:
                nodeid = self._root
            request = KernelRequest(opcode, unique, nodeid, uid, gid, pid, buffer[_HEADER:n])
            handler = self._resent.handler(request)
            if handler is not None:  # it may not be done twice
                if request.nodeid in self._deferred:
                    self._release_of(request.nodeid)
                self._spawn(handler, request)
                return
        self._dispatch(n)
        if opcode != Op.WRITE and unique not in self._waiting:
            self._answered(unique)

    def _answered(self, unique: int) -> None:
        """Notes in the mount's journal that the kernel has the answer to a request."""
        if self._journal is not None:
            self._journal.answered(unique | self._mark)

    def _serve_generally(self, request: KernelRequest, n: int) -> None:
        """Serves a request of `n` bytes that has no plain answer."""
        opcode, unique, pid, buffer = request.opcode, request.unique, request.pid, self._buffer
        if opcode == Op.UNLINK:  # the kernel keeps what is not released: a handle would find it
            while self._deferred:
                self._release_of(next(iter(self._deferred)))
        handler = self._handlers.inline.get(opcode)
        if handler is not None:
            if self._steps and not (
                opcode in MAY_WAIT and self._handlers.may_wait(opcode, request)
            ):
                self._answer(request, handler(request))
            else:
                self._spawn(handler, request)
        elif opcode == Op.READ:
            self._read(unique, pid, buffer)
        elif opcode == Op.WRITE:
            self._write(unique, pid, buffer)
        elif opcode == Op.FORGET:
            self._forget(request.number, protocol.FORGET_IN.unpack_from(buffer, _HEADER)[0])
        elif opcode == Op.BATCH_FORGET:
            self._forget_many(buffer)
        elif (waiting := self._handlers.waiting.get(opcode)) is not None:
            self._spawn(waiting, request)
        elif opcode == Op.INTERRUPT:
            self._interrupt(buffer)
        elif opcode == Op.IOCTL:
            # What libfuse says too; but each open() of Python asks whether it is a terminal.
            relay_payload.reply_error(self._device, unique, errno.ENOSYS)
        else:
            self._relay(opcode, unique, n)

    def _defer(self, release: KernelRequest) -> None:
        release.detach()
        self._deferred[release.nodeid] = release
        if len(self._deferred) > _DEFERRED:
            self._release_of(next(iter(self._deferred)))

    def _release_of(self, nodeid: int) -> None:
        """Serves a deferred RELEASE, so that the next request finds the file closed, as its caller
        does."""
        request = self._deferred.pop(nodeid)
        try:
            if self._release_now is not None and self._release_now(nodeid, request.body):
                self._reply(request.unique, b"")
                return
        except Exception as e:  # logged, then translated
            self._reply_error(request.unique, e)
            return
        self._answer(request, self._handlers.release(request))

    # ---- answering

    def _answer(self, request: KernelRequest, step: Coroutine[Any, Any, bytes]) -> None:
        """Runs a handler as far as it gets without waiting, and replies; the rest of one that has
        to wait becomes a task."""
        unique = request.unique
        try:
            body = detach.begin(step)
        except Exception as e:  # translated at this one point
            self._reply_error(unique, e)
        else:
            if isinstance(body, detach.Unfinished):
                request.detach()
                self._run(unique, body, _thread_of(request))
            else:
                self._reply(unique, body)

    def _spawn(
        self, handler: Callable[[KernelRequest], Awaitable[bytes]], request: KernelRequest
    ) -> None:
        request.detach()
        self._run(request.unique, handler(request), _thread_of(request))

    def _run(self, unique: int, handling: Awaitable[bytes | None], thread: int | None) -> None:
        """Goes on in a task. `handling` returns the reply's body; None: it replied itself.
        `thread`: the caller's thread, whose end alone ends this; None: any signal does."""
        assert self._nursery is not None
        scope = trio.CancelScope()
        self._waiting[unique] = _Waiting(scope, thread)
        self._nursery.start_soon(self._answer_later, unique, handling, scope)

    async def _answer_later(
        self, unique: int, handling: Awaitable[bytes | None], scope: trio.CancelScope
    ) -> None:
        with scope:
            try:
                body = await handling
                if body is not None:
                    self._reply(unique, body)
            except Exception as e:  # translated at this one point
                self._reply_error(unique, e)
            finally:
                del self._waiting[unique]
                self._signalled.pop(unique, None)
        if scope.cancelled_caught:
            relay_payload.reply_error(self._device, unique, errno.EINTR)
        self._answered(unique)  # not where the mount goes on with another daemon, and it waits

    def _interrupt(self, buffer: memoryview) -> None:
        """Handles a signal to the caller. A request that does not wait ends by itself."""
        unique = protocol.INTERRUPT_IN.unpack_from(buffer, _HEADER)[0]
        waiting = self._waiting.get(unique)
        if waiting is None:
            return
        if waiting.thread is None or _is_killed(waiting.thread):
            waiting.scope.cancel()
        else:
            self._signalled[unique] = waiting
            self._watched.set()

    async def _watch_signalled(self) -> None:
        """Ends the requests whose callers are killed after another signal."""
        while True:
            await self._watched.wait()
            self._watched = trio.Event()
            while self._signalled:
                await trio.sleep(_LOOK_S)
                for waiting in self._signalled.values():
                    if waiting.thread is not None and _is_killed(waiting.thread):
                        waiting.scope.cancel()

    def _reply(self, unique: int, body: bytes) -> None:
        message = _pack_header(_OUT_SIZE + len(body), 0, unique) + body
        try:
            os.write(self._device, message)
        except OSError as e:
            if e.errno not in _GONE:
                raise

    def _reply_error(self, unique: int, error: Exception) -> None:
        if not isinstance(error, KvfsError | OSError):
            log.error("request failed by a bug", exc_info=error)
        relay_payload.reply_error(self._device, unique, errno_of(error))

    # ---- requests without a plain handler

    def _read(self, unique: int, thread: int, buffer: memoryview) -> None:
        fh, offset, size, _, _, _, _ = protocol.READ_IN.unpack_from(buffer, _HEADER)
        fd = self._operations.file(fh).fd
        size = min(size, protocol.MAX_WRITE)
        coming = self._operations.ranges.coming(fh, offset, size)
        if coming is not None:
            self._run(unique, self._read_come(unique, coming, fd, offset, size), thread)
            return
        if not self._lane.reply_cached(unique, fd, offset, size):
            self._workers.submit(lambda lane: lane.reply_read(unique, fd, offset, size))

    async def _read_come(
        self, unique: int, coming: Transfer, fd: int, offset: int, size: int
    ) -> None:
        """Has a READ of bytes that are not here yet answered once they are."""
        await coming.span(offset, size)
        if not self._lane.reply_cached(unique, fd, offset, size):
            self._workers.submit(lambda lane: lane.reply_read(unique, fd, offset, size))

    def _write(self, unique: int, thread: int, buffer: memoryview) -> None:
        fh, offset, size, how, _, flags, _ = protocol.WRITE_IN.unpack_from(buffer, _HEADER)
        file = self._operations.file(fh)
        if flags & _APPENDS == os.O_APPEND and not self._immediate:
            offset = self._end(unique, file, offset)
        if how & protocol.WRITE_KILL_SUIDGID:
            stripping = detach.begin(
                self._operations.attributes.setattr(file.ino, Fattr.KILL_SUIDGID, NO_ATTRIBUTES)
            )
            if isinstance(stripping, detach.Unfinished):
                start = _HEADER + protocol.WRITE_IN.size
                kept = bytes(buffer[start : start + size])  # the buffer is the next request's
                self._run(unique, self._write_after(stripping, file.fd, offset, kept), thread)
                return
        start = _HEADER + protocol.WRITE_IN.size
        data, fd = buffer[start : start + size], file.fd
        quick = size <= _INLINE_BYTES or self._pace.quick()
        other = None if quick else self._buffers.take()
        if other is None:
            with self._pace:
                relay_payload.write_payload(self._device, unique, fd, offset, data)
            self._answered(unique)
            return
        self._buffer = other

        def job(_: relay_payload.PayloadLane) -> None:
            relay_payload.write_payload(self._device, unique, fd, offset, data)
            self._buffers.give(buffer)
            self._answered(unique)

        self._workers.submit(job)

    def _end(self, unique: int, file: OpenFile, offset: int) -> int:
        """Returns the place of an append: where it comes again, that of the first time."""
        journal, resent = self._journal, self._resent
        if journal is None:
            return self._operations.ranges.end(file, offset)
        place = resent.place(unique) if resent is not None and unique & AGAIN else None
        if place is None:
            place = self._operations.ranges.end(file, offset)
            journal.note_append(unique | self._mark, place)
        return place

    async def _write_after(
        self, stripping: Awaitable[object], fd: int, offset: int, data: bytes
    ) -> bytes:
        """Writes to a file whose set-id bits have to go first, if that takes a while."""
        await stripping
        written = await trio.to_thread.run_sync(os.pwrite, fd, data, offset)
        return protocol.WRITE_OUT.pack(written, 0)

    def _forget_many(self, buffer: memoryview) -> None:
        count, _ = protocol.BATCH_FORGET_IN.unpack_from(buffer, _HEADER)
        at = _HEADER + protocol.BATCH_FORGET_IN.size
        one = protocol.FORGET_ONE
        for number, lookups in one.iter_unpack(buffer[at : at + count * one.size]):
            self._forget(number, lookups)

    def _forget(self, number: int, lookups: int) -> None:
        if number & OTHER:
            self._handlers.inodes.forgotten(number, lookups)
            number = ino_of(number)
        self._forget_file(number, lookups)

    def _forget_file(self, ino: int, lookups: int) -> None:
        self._operations.forget(ino, lookups)

    # ---- relaying

    def _relay(self, opcode: int, unique: int, n: int) -> None:
        if opcode == Op.INIT:
            self._heed(self._buffer[:n].tobytes())
        if self._server is None:
            self._answer_alone(opcode, unique)
            return
        try:
            self._server.send(self._buffer[:n])
        except BlockingIOError:
            relay_payload.reply_error(self._device, unique, errno.EAGAIN)

    def _heed(self, init: bytes) -> None:
        """Takes what the kernel can do."""
        self.init, self._init_unique = init, _unpack_header(init)[2]
        body = init[_HEADER : _HEADER + protocol.INIT_IN.size].ljust(protocol.INIT_IN.size, b"\0")
        _, self.kernel_minor, _, _, flags2 = protocol.INIT_IN.unpack(body)
        if not flags2 << 32 & Init.PASSTHROUGH:
            self._backing.passthrough, self._backing.stack_depth = False, 0
        if not flags2 << 32 & Init.DIRECT_IO_ALLOW_MMAP:
            self._backing.direct_reads = False

    def _answer_alone(self, opcode: int, unique: int) -> None:
        if opcode == Op.INIT:
            self._reply(unique, self._init_reply())
            self.initialised.set()
        else:
            relay_payload.reply_error(self._device, unique, errno.ENOSYS)

    async def _from_server(self, server: socket.socket) -> None:
        buffer = bytearray(protocol.BUFFER_BYTES)
        view = memoryview(buffer)
        while True:
            await trio.lowlevel.wait_readable(server)
            n = server.recv_into(buffer)
            if n == 0:
                return
            _, error, unique = OUT_HEADER.unpack_from(buffer)
            if unique == self._init_unique and not error and not self.initialised.is_set():
                self._reply(unique, self._init_reply())
                self.initialised.set()
            elif unique != self._init_unique or not self.initialised.is_set():
                # Else an earlier daemon answered it.
                relay_payload.reply(self._device, [view[:n]])

    def _init_reply(self) -> bytes:
        wanted = int(_WANTED)
        if self._backing.passthrough:
            # In relay mode a write is several requests: the kernel must truncate under the lock
            # that it holds for all of them, or another's O_TRUNC falls between two of them.
            wanted |= Init.PASSTHROUGH | Init.ATOMIC_O_TRUNC
        wanted |= self._backing.lock_flags
        return protocol.INIT_OUT.pack(
            7,
            min(self.kernel_minor, protocol.MINOR),
            _MAX_READAHEAD,
            wanted & 0xFFFFFFFF,
            _MAX_BACKGROUND,
            _MAX_BACKGROUND * 3 // 4,
            protocol.MAX_WRITE,
            1,
            protocol.MAX_PAGES,
            0,
            wanted >> 32,
            self._backing.stack_depth,
            0,
        )
