"""The client's side of the protocol between nodes: connections that are kept, each proven once.

Invariants
- Nothing is asked of a node before it has proven that it is of this cluster, and the one meant.
- A connection is used again only after its last answer has come whole.
- Every wait has a deadline; a peer's message is bounded before it is read.
"""

import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import trio

from kvfs.base.errors import UNDECODABLE, AccessDenied, Conflict, Corrupt, Invalid, Unavailable
from kvfs.cluster import handshake, peer_protocol
from kvfs.cluster.peer_protocol import Ask, Later, Lent, PeerAddress, PeerIdentity
from kvfs.cluster.tls.peer_tls import PeerTls
from kvfs.http.api import (
    ClientConnection,
    ConnectionLost,
    Field,
    ResponseHead,
    Untrusted,
    connect,
)
from kvfs.policy.answers_ahead import AnswersAhead

CALL_S: Final = 5.0
"""Time for an answer, connecting included, if the caller says nothing else."""
_CONNECT_S: Final = 2.0
_IDLE_MOST: Final = 32
"""Connections kept to a node."""
_ERROR_BYTES: Final = 64 << 10
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Redirected(Exception):
    """The holder gives the file to other nodes: these have it, or are getting it."""

    def __init__(self, addresses: list[PeerAddress]) -> None:
        super().__init__(addresses)
        self.addresses = addresses


class IncomingChunks:
    """Chunks on their way; see `ClientConnection` for how they are received."""

    __slots__ = ("all_sums", "ask", "connection", "lent", "stamp", "sums")

    def __init__(
        self,
        ask: Ask,
        sums: bytes,
        all_sums: bytes,
        stamp: bytes,
        connection: ClientConnection,
        lent: Lent | None = None,
    ) -> None:
        self.ask = ask
        self.sums = sums
        """Checksums of each chunk that comes: perhaps fewer than were asked for."""
        self.all_sums = all_sums
        """Checksums of each chunk of the file, if it `tells_all`."""
        self.stamp = stamp
        """The stamp of content that is not sealed."""
        self.connection = connection
        self.lent = lent
        """The places of the chunks, in an answer without bytes."""

    @property
    def count(self) -> int:
        """The number of chunks that come."""
        return len(self.sums) // peer_protocol.DIGEST_BYTES


class _Peer:
    """A connection that a node was met on."""

    def __init__(self, connection: ClientConnection, proof: bytes) -> None:
        self.connection = connection
        self.proof: bytes | None = proof
        """The proof to be sent with the first request."""


class _Ahead(NamedTuple):
    """An answer whose body is still to be read."""

    peer: _Peer
    answer: ResponseHead

    def close(self) -> None:
        self.peer.connection.close()


class PeerClient:
    """Asks other nodes. For one event loop."""

    def __init__(self, identity: PeerIdentity, tls: PeerTls | None = None) -> None:
        """Without `tls` all connections are plain."""
        self._identity = identity
        self._tls = tls
        self._idle: dict[PeerAddress, list[_Peer]] = {}
        self.ahead: Final = AnswersAhead[Ask, _Ahead](trio.current_time)
        """The answers that brought a file's bytes along."""
        self.connected = 0
        """Connections made since the start."""

    def close(self) -> None:
        """Lets go of idle connections; idempotent."""
        self.ahead.close()
        for peers in self._idle.values():
            for peer in peers:
                peer.connection.close()
        self._idle.clear()

    async def call(
        self,
        address: PeerAddress,
        method: str,
        params: Any,
        deadline_s: float = CALL_S,
        takes: int = 0,
    ) -> Any:
        """Calls a method of the node with `params` (of msgpack's types). It may have run twice if a
        connection broke. `takes`: of a file that the result is about, so many bytes may come along:
        `data` has them then, for a moment.

        Raises the KvfsError that the method raised, Unavailable if no answer came in time,
        AccessDenied, NotSupported, Conflict, Invalid (the nodes do not fit)."""
        body = _encode(params)
        with _in_time(deadline_s, address):
            fields = [(peer_protocol.TAKES, b"%d" % takes)] if takes else []
            peer, answer = await self._ask(
                address, "POST", peer_protocol.method_target(method), body, fields
            )
            if takes and peer_protocol.FILE in answer.fields:
                return self._taken_along(address, peer, answer, takes)
            try:
                await _check(answer, peer.connection)
                return _decode(await peer.connection.read(peer_protocol.RESULT_BYTES))
            except UNDECODABLE:
                raise Unavailable(f"{_named(address)} gave no proper answer") from None
            finally:
                self._keep(address, peer)

    def _taken_along(
        self, address: PeerAddress, peer: _Peer, answer: ResponseHead, takes: int
    ) -> Any:
        """Returns the result of an answer that has a file's bytes, which stay for `data`. Raises
        Unavailable."""
        try:
            ask = peer_protocol.parse_data_target(answer.fields[peer_protocol.FILE])
            told = peer_protocol.parse_result(answer.fields.get(peer_protocol.RESULT, b""))
            result = _decode(told)
            if answer.status != 200 or not answer.length == ask.size <= takes:
                raise Invalid("these are not the bytes of the file")
        except (Invalid, *UNDECODABLE):
            peer.connection.close()
            raise Unavailable(f"{_named(address)} gave no proper answer") from None
        self.ahead.put((address, ask.ino, ask.version), ask, _Ahead(peer, answer))
        return result

    @asynccontextmanager
    async def data(
        self, address: PeerAddress, ask: Ask, deadline_s: float = CALL_S, mover: bytes = b""
    ) -> AsyncIterator[IncomingChunks]:
        """Receives chunks of a data file, at least the first that is asked for; `deadline_s` is for
        the head of the answer. With the kind of a `mover` the holder may lend them and send no
        bytes.

        Raises Redirected, Later (it does not have the chunk yet), NotFound, Conflict (it has other
        content), Busy (it is written there), Unavailable (no answer), Corrupt (an answer that
        cannot be right), and what `call` raises; ConnectionLost if the connection breaks inside the
        block."""
        ahead = self.ahead.take((address, ask.ino, ask.version), ask._replace(insist=False))
        if ahead is not None:
            peer, answer = ahead.peer, ahead.answer
        else:
            with _in_time(deadline_s, address):
                fields = [(peer_protocol.MOVER, mover)] if mover else []
                target = peer_protocol.data_target(ask)
                peer, answer = await self._ask(address, "GET", target, b"", fields)
        try:
            if answer.status != 200:
                with _in_time(deadline_s, address):
                    await _check(answer, peer.connection)
            yield _incoming(ask, answer, peer.connection, may_lend=bool(mover))
        finally:
            self._keep(address, peer)

    def _keep(self, address: PeerAddress, peer: _Peer) -> None:
        """Keeps the connection for the next request, if the last answer was taken to its end."""
        idle = self._idle.setdefault(address, [])
        if peer.connection.is_reusable and len(idle) < _IDLE_MOST:
            idle.append(peer)
        else:
            peer.connection.close()

    async def _ask(
        self,
        address: PeerAddress,
        method: str,
        target: bytes,
        body: bytes,
        fields: Sequence[Field] = (),
    ) -> tuple[_Peer, ResponseHead]:
        while (peer := self._take_idle(address)) is not None:
            try:
                return peer, await self._send(peer, method, target, body, fields)
            except ConnectionLost:
                continue  # it was idle for too long: the next, or a new one
        peer = await self._meet(address)
        return peer, await self._send(peer, method, target, body, fields)

    def _take_idle(self, address: PeerAddress) -> _Peer | None:
        idle = self._idle.get(address, [])
        while idle:
            peer = idle.pop()
            if peer.connection.is_reusable:
                return peer
            peer.connection.close()
        return None

    async def _send(
        self, peer: _Peer, method: str, target: bytes, body: bytes, further: Sequence[Field]
    ) -> ResponseHead:
        fields = [(peer_protocol.AT, peer_protocol.render_at(self._identity.at)), *further]
        if peer.proof is not None:
            fields.append((peer_protocol.PROOF, peer_protocol.render_proof(peer.proof)))
        try:
            answer = await peer.connection.ask(method, target, fields, body)
        except BaseException:
            peer.connection.close()
            raise
        peer.proof = None
        return answer

    async def _meet(self, address: PeerAddress) -> _Peer:
        """Returns a new connection to the node. Raises ConnectionLost, Unavailable, AccessDenied,
        NotSupported, Conflict, Invalid."""
        offers = [] if self._tls is None else self._tls.to_node(address.node)
        if not offers:
            return await self._greet(address)
        refusal: Untrusted | None = None
        for name, context in offers:
            try:
                return await self._greet(address, context, name)
            except Untrusted as error:
                refusal = error
        raise AccessDenied(
            f"{_named(address)} has another secret of the cluster than this node, or its clock is"
            f" weeks away ({refusal}): give it the one that `kvfs node secret` prints here, with"
            " `kvfs node join`"
        )

    async def _greet(
        self, address: PeerAddress, tls: ssl.SSLContext | None = None, server_name: str = ""
    ) -> _Peer:
        """Raises Untrusted, and what `_meet` raises."""
        with _in_time(_CONNECT_S, address):
            connection = await connect(address.host, address.port, tls, server_name or None)
        self.connected += 1
        try:
            dialing = handshake.Dialing(self._identity.secrets(), self._identity.party)
            answer = await connection.ask("POST", peer_protocol.HELLO, body=dialing.hello)
            await _check(answer, connection)
            party, proof = dialing.conclude(await connection.read(2 * handshake.LIMIT))
            if party.node != address.node:
                raise Conflict(f"{_named(address)} is node {party.node} now")
        except BaseException:
            connection.close()
            raise
        return _Peer(connection, proof)


def _incoming(
    ask: Ask, answer: ResponseHead, connection: ClientConnection, *, may_lend: bool
) -> IncomingChunks:
    """Raises Corrupt."""
    told, lent = answer.fields.get(peer_protocol.SUMS), None
    try:
        length = answer.length
        if may_lend and peer_protocol.LENT in answer.fields and not length:
            lent = peer_protocol.parse_lent(answer.fields[peer_protocol.LENT], ask)
            length = ask.length(len(lent.at))
        sums, all_sums = peer_protocol.parse_sums(told, ask, length)
    except Invalid as error:
        raise Corrupt(str(error)) from None
    stamp = answer.fields.get(peer_protocol.STAMP, b"")
    return IncomingChunks(ask, sums, all_sums, stamp, connection, lent)


async def _check(answer: ResponseHead, connection: ClientConnection) -> None:
    """Raises the error of an answer other than 200."""
    if answer.status == 200:
        return
    body = await connection.read(_ERROR_BYTES)
    if answer.status == 202:
        raise Later
    if answer.status == 307:
        raise Redirected(peer_protocol.parse_addresses(body))
    raise peer_protocol.parse_error(body)


@contextmanager
def _in_time(deadline_s: float, address: PeerAddress) -> Iterator[None]:
    """Raises Unavailable for failures on the way to the peer."""
    try:
        with trio.fail_after(deadline_s):
            yield
    except trio.TooSlowError:
        raise Unavailable(f"{_named(address)} did not answer in {deadline_s:g} s") from None
    except Untrusted:
        raise
    except ConnectionLost as error:
        raise Unavailable(f"{_named(address)} is not reached: {error}") from None


def _named(address: PeerAddress) -> str:
    return f"node {address.node} at {address.host} port {address.port}"
