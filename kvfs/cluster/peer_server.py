"""The server that a node runs for its peers: data files by sendfile, and methods that others add.

Invariants
- Before a connection has proven its node, it may say hello and nothing else.
- A node that may not serve (it has no lease) refuses all but the hello, and what concerns names
  that are each node's own: nobody else answers for those.
- Payload never passes through this module: a response names a range of a file.
"""

import functools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import trio

from kvfs.base.errors import (
    UNDECODABLE,
    AccessDenied,
    Invalid,
    KvfsError,
    NotFound,
    NotSupported,
    Unavailable,
)
from kvfs.cluster import peer_protocol
from kvfs.cluster.handshake import LIMIT as HELLO_BYTES
from kvfs.cluster.handshake import Answering, Party
from kvfs.cluster.peer_protocol import Ask, Later, Lent, PeerAddress, PeerIdentity
from kvfs.cluster.tls.peer_tls import PeerTls
from kvfs.http.api import Field, FileRange, Head, Limits, RequestBody, Response, serve
from kvfs.policy.fanout_tree import Spreading

_SUMS: Final = "sums"
"""The method that tells a sealed file's checksums."""
log = logging.getLogger(__name__)

_LIMITS: Final = Limits(
    head_bytes=8 << 10, target_bytes=1 << 10, body_bytes=peer_protocol.BODY_BYTES, stop_s=2.0
)
_SENDING_THREADS: Final = 16
_INLINE_BYTES: Final = 4 << 20
"""Larger answers are sent in a thread, and so are bytes that would have to be read from a disk: the
loop is the mount's too. For 2 MiB the thread would be half of the time."""
_RWF_NOWAIT: Final = 8
_COMPLAINTS: Final = 64
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
Method = Callable[[Party, Any], Awaitable[Any]]


class Offer(NamedTuple):
    """Chunks that are here."""

    fd: int
    """Their file, closed once they were sent."""
    chunks: int
    """The number of chunks, from the first that was asked for on."""
    sums: bytes
    """Checksums of each of them; of all chunks of the file if the answer `tells_all`."""
    stamp: bytes = b""
    """The stamp of content that is not sealed: another one when it was changed."""


class OfFile(NamedTuple):
    """A method's result that is about one file, whose bytes may go with it."""

    result: Any
    ask: Ask
    """The request for all of them."""


class Shelf(Protocol):
    """The data that a node has for others."""

    def has(self, ino: int, version: int) -> bool:
        """Returns whether the file is here, or on its way."""

    async def offer(self, ask: Ask, peer: int) -> Offer:
        """Offers the data here that the node `peer` asks for, at least the first chunk.

        Raises NotFound, Conflict (the file has other content), Busy (it is being written), Later
        (it is still on its way), Unavailable, OSError."""

    async def sums(self, ino: int, version: int, size: int) -> bytes:
        """Returns the checksums of all chunks of a sealed file. Raises NotFound, Conflict."""


class Lender(Protocol):
    """Lends chunks to movers of others."""

    @property
    def most_chunks(self) -> int:
        """The most chunks that one request gets."""

    def knows(self, kind: bytes) -> bool:
        """Returns whether a reader's mover can take what this one lends."""

    async def lend(self, offer: Offer, ask: Ask, peer: int, host: str) -> Lent | None:
        """Lends the offer to the node `peer`, which is connected from `host`, until it gives it
        back, or for a while. None if that is impossible now. Raises OSError."""


class PeerServer:
    """Answers other nodes."""

    def __init__(
        self,
        identity: PeerIdentity,
        shelf: Shelf,
        may_serve: Callable[[], bool],
        demanded: Callable[[int], None],
        methods: Mapping[str, Method] | None = None,
        lender: Lender | None = None,
        *,
        unleased: Collection[str] = (),
        is_own: Callable[[int], bool] = lambda _ino: False,
        tls: PeerTls | None = None,
    ) -> None:
        """`demanded` is told of each file that a node begins to ask for. `methods`, by name: their
        parameters and results are of msgpack's types; they raise KvfsError. `lender`: lends chunks
        to the movers of others. Without a lease, the methods `unleased` are served, and data of
        files that no other node has under its record (`is_own`), and of sealed ones: whoever asks
        for these compares what comes with the checksum in its own record."""
        self._identity = identity
        self._shelf = shelf
        self._may_serve = may_serve
        self._demanded = demanded
        self._spreading: Spreading[PeerAddress] = Spreading()
        self._threads = trio.CapacityLimiter(_SENDING_THREADS)
        self._complained: set[str] = set()
        self._methods: dict[str, Method] = {_SUMS: self._sums, **(methods or {})}
        self._lends = lender
        self._unleased = {*unleased, _SUMS}
        self._is_own = is_own
        self._tls = tls
        self.counters = {"peers_refused": 0, "peers_redirected": 0, "peers_sent_bytes": 0}

    async def serve(
        self,
        listeners: Sequence[socket.socket],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves on `listeners`, which are closed at the end, until cancelled."""
        tls = None if self._tls is None else self._tls.server(self._refused)
        await serve(
            listeners, self._handle, _LIMITS, refuse=_refuse, tls=tls, task_status=task_status
        )

    async def _handle(self, head: Head, body: RequestBody) -> Response:
        try:
            return await self._answer(head, body)
        except Later:
            return Response(202)
        except KvfsError as error:
            return _problem(error)
        except OSError as error:
            return _problem(Unavailable(f"a data file cannot be read: {error.strerror}"))

    async def _answer(self, head: Head, body: RequestBody) -> Response:
        if head.target == peer_protocol.HELLO and head.method == "POST":
            return await self._hello(head, body)
        peer = self._known(head)
        if not self._may_serve() and not self._needs_no_lease(head):
            raise Unavailable("this node has no lease: it serves nothing until it has one again")
        if head.target.startswith(peer_protocol.DATA) and head.method == "GET":
            return await self._data(head, peer)
        if head.target.startswith(peer_protocol.METHODS) and head.method == "POST":
            return await self._call(head, body, peer)
        raise NotSupported("this is not spoken between nodes")

    def _needs_no_lease(self, head: Head) -> bool:
        """Raises Invalid."""
        if head.target.startswith(peer_protocol.DATA):
            ask = peer_protocol.parse_data_target(head.target)
            return ask.sealed or self._is_own(ask.ino)
        if head.target.startswith(peer_protocol.METHODS):
            return peer_protocol.parse_method_target(head.target) in self._unleased
        return False

    # --- who asks ---

    async def _hello(self, head: Head, body: RequestBody) -> Response:
        assert head.session is not None
        if self._tls is not None and self._tls.is_required and not head.secure:
            error = AccessDenied(
                "this node speaks TLS alone (peer_tls): upgrade the node that asks, or let it speak"
                " TLS; for as long as that takes, peer_tls = accept here"
            )
            self._complain(head.peer[0], error)
            response = _problem(error)
            response.close = True
            return response
        answering = Answering(self._identity.secrets(), self._identity.party)
        try:
            reply = answering.reply(await body.read(2 * HELLO_BYTES))
        except KvfsError as error:
            self._complain(head.peer[0], error)
            response = _problem(error)
            response.close = True
            return response
        head.session.value = answering
        return Response(200, [], reply)

    def _known(self, head: Head) -> Party:
        """Returns the node that the connection belongs to. Raises AccessDenied, Invalid."""
        assert head.session is not None
        known = head.session.value
        if isinstance(known, Party):
            return known
        proof = head.get(peer_protocol.PROOF)
        if not isinstance(known, Answering) or proof is None:
            raise AccessDenied("who asks has not said who it is")
        head.session.value = None
        try:
            party = known.conclude(peer_protocol.parse_proof(proof))
        except KvfsError as error:
            self._complain(head.peer[0], error)
            raise
        head.session.value = party
        head.session.prove()
        return party

    def _refused(self, host: str, reason: str) -> None:
        self._complain(
            host,
            AccessDenied(
                f"no certificate of this cluster's secret was shown, or ours was not accepted:"
                f" {reason}; `kvfs node join` gives a node the secret that `kvfs node secret`"
                " prints"
            ),
        )

    def _complain(self, host: str, error: KvfsError) -> None:
        """Logs once for each host and kind of error: a node that is refused asks again."""
        self.counters["peers_refused"] += 1
        what = f"{host} {type(error).__name__}"
        if what not in self._complained and len(self._complained) < _COMPLAINTS:
            self._complained.add(what)
            log.warning("a peer at %s was refused: %s", host, error)

    # --- what it asks ---

    async def _data(self, head: Head, peer: Party) -> Response:
        ask = peer_protocol.parse_data_target(head.target)
        if not self._shelf.has(ask.ino, ask.version):
            raise NotFound("this node does not have the file")
        if not ask.first:
            self._demanded(ask.ino)
        others = self._others(head, ask, peer)
        if others:
            return Response(307, [], peer_protocol.render_addresses(others))
        lender = self._lender(head)
        if lender is not None:
            ask = ask._replace(chunks=min(ask.chunks, lender.most_chunks))
        offer = await self._shelf.offer(ask, peer.node)
        lent = await _lent(lender, offer, ask, peer.node, head.peer[0])
        if lent is not None:
            self.counters["peers_sent_bytes"] += ask.length(offer.chunks)
            field = (peer_protocol.LENT, peer_protocol.render_lent(lent))
            return Response(200, [*_fields(offer), field], b"")
        return self._sent(offer, ask, [])

    def _sent(self, offer: Offer, ask: Ask, further: Sequence[Field]) -> Response:
        """Returns the answer whose body is what is offered."""
        length = ask.length(offer.chunks)
        self.counters["peers_sent_bytes"] += length
        return Response(
            200,
            [*_fields(offer), *further],
            FileRange(
                offer.fd,
                ask.offset,
                length,
                close=functools.partial(os.close, offer.fd),
                aside=None if _is_cached(offer.fd, ask.offset, length) else self._threads,
            ),
        )

    def _lender(self, head: Head) -> Lender | None:
        """Returns the lender, if the peer can take what it lends."""
        kind = head.get(peer_protocol.MOVER)
        return self._lends if kind and self._lends is not None and self._lends.knows(kind) else None

    def _others(self, head: Head, ask: Ask, peer: Party) -> list[PeerAddress]:
        """Returns the nodes to which the peer is redirected; empty: it is served."""
        at = peer_protocol.parse_at(peer.node, head.get(peer_protocol.AT))
        others = self._spreading.ask(
            (ask.ino, ask.version), ask.size, peer.node, at, trio.current_time(), ask.insist
        )
        self.counters["peers_redirected"] += bool(others)
        return others

    async def _call(self, head: Head, body: RequestBody, peer: Party) -> Response:
        method = self._methods.get(peer_protocol.parse_method_target(head.target))
        if method is None:
            raise NotSupported("this node does not know this method")
        try:
            params = _decode(await body.read(peer_protocol.BODY_BYTES))
        except UNDECODABLE as error:
            raise Invalid(f"these are no parameters: {error}") from None
        result = await method(peer, params)
        if not isinstance(result, OfFile):
            return Response(200, [], _encode(result))
        told = _encode(result.result)
        if result.ask.size <= peer_protocol.parse_takes(head.get(peer_protocol.TAKES)):
            enclosing = await self._enclosing(told, result.ask, peer)
            if enclosing is not None:
                return enclosing
        return Response(200, [], told)

    async def _enclosing(self, told: bytes, ask: Ask, peer: Party) -> Response | None:
        """Returns an answer with the bytes of a small file; None if they cannot be had now: then
        whoever wants them asks, and is told why."""
        field = peer_protocol.render_result(told)
        if field is None or not ask.size:
            return None
        try:
            offer = await self._shelf.offer(ask, peer.node)
        except (Later, KvfsError, OSError):
            return None
        self._demanded(ask.ino)
        fields = [
            (peer_protocol.RESULT, field),
            (peer_protocol.FILE, peer_protocol.data_target(ask)),
        ]
        return self._sent(offer, ask, fields)

    async def _sums(self, _peer: Party, params: Any) -> bytes:
        try:
            ino, version, size = map(int, params)
        except (TypeError, ValueError):
            raise Invalid("a file is an inode number, a version and a size") from None
        return await self._shelf.sums(ino, version, size)


def _fields(offer: Offer) -> list[Field]:
    return [
        (peer_protocol.SUMS, peer_protocol.render_sums(offer.sums)),
        (peer_protocol.STAMP, offer.stamp),
    ]


async def _lent(lender: Lender | None, offer: Offer, ask: Ask, node: int, host: str) -> Lent | None:
    """Lends the offer; None: the bytes are sent. Otherwise, and if it raises OSError, the offer's
    file is closed."""
    if lender is None:
        return None
    lent = None
    try:
        lent = await lender.lend(offer, ask, node, host)
    except BaseException:
        os.close(offer.fd)
        raise
    if lent is not None:
        os.close(offer.fd)
    return lent


def _is_cached(fd: int, offset: int, length: int) -> bool:
    """Returns whether only few bytes, which seem to be in memory, are to be sent."""
    if length > _INLINE_BYTES:
        return False
    byte = bytearray(1)
    try:
        for at in (offset, offset + length - 1):
            os.preadv(fd, [byte], at, _RWF_NOWAIT)
    except OSError:
        return False
    return True


def _problem(error: KvfsError) -> Response:
    status, body = peer_protocol.render_error(error)
    return Response(status, [], body)


def _refuse(status: int, reason: str) -> Response:
    """Returns the HTTP layer's refusals as errors of the peer protocol."""
    response = _problem(Invalid(reason) if status < 500 else Unavailable(reason))
    response.status = status
    return response
