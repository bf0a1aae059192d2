"""The protocol between nodes, over HTTP/1.1. No I/O.

| request | answer |
|---|---|
| `POST /v1/hello`, a handshake's hello | 200, its reply: first on each connection |
| `GET /v1/data/NAME?size=&first=&count=&sealed=&insist=` | 200, chunks and their checksums |
| `POST /v1/do/METHOD`, msgpack | 200, msgpack |

The node that dialed proves its identity in a header field of the request that follows the hello:
that costs no round trip. A holder that gives the file to others already answers 307 with nodes that
have it or are getting it, unless the request insists; a node that is getting it and has not got so
far answers 202, again and again. Every other failure is an error of the core by name and message,
raised again by the caller.

A call may say in a field how many bytes of a file it takes along. A method whose result is about
one file may then be answered with the file's bytes in the body, and in fields with the result and
the request for data that they answer. Nodes that do not know the field ignore it.

A node that has a mover (`transfer.rdma`) says so in a field of a request for data. A holder that
has one of the same kind may then answer without the bytes, with their places in memory that its
mover lends. `POST /v1/do/taken` gives them back. Nodes that do not know it ignore the field.
"""

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from kvfs.base import errors
from kvfs.base.errors import UNDECODABLE, Invalid, KvfsError, Unavailable
from kvfs.cluster.handshake import Party
from kvfs.cluster.secrets import Secrets

CHUNK_BYTES: Final = 4 << 20
"""The unit of requests, transfers and verification, as in `kvfs.datastore.checksum`."""
DIGEST_BYTES: Final = 16
MOST_CHUNKS: Final = 16
"""Chunks of one answer: their checksums stand in its head."""
MOST_SUMS: Final = 64
"""A sealed file of at most so many chunks has the checksums of all of them in the head of each
answer."""
MOST_PEERS: Final = 8
"""Peers in one redirect."""
BODY_BYTES: Final = 1 << 20
"""Bytes of a method's parameters."""
RESULT_BYTES: Final = 64 << 20
"""Bytes of a method's answer: 16 TiB of checksums."""
HELLO: Final = b"/v1/hello"
DATA: Final = b"/v1/data/"
METHODS: Final = b"/v1/do/"
PROOF: Final = b"x-kvfs-proof"
AT: Final = b"x-kvfs-at"
"""The address at which others reach the asking node: host and port."""
SUMS: Final = b"x-kvfs-sums"
STAMP: Final = b"x-kvfs-stamp"
"""The stamp of content that is not sealed: another one when it was changed."""
MOVER: Final = b"x-kvfs-mover"
"""The kind of mover that the reader has, in a request."""
LENT: Final = b"x-kvfs-lent"
"""The places of the chunks of an answer without bytes, in the form of `Lent`."""
TAKES: Final = b"x-kvfs-takes"
"""The most bytes of a file that a call takes along."""
RESULT: Final = b"x-kvfs-result"
"""The result of a method whose answer has a file's bytes, in base64."""
FILE: Final = b"x-kvfs-file"
"""The target of the request for data that such bytes answer."""
TAKEN: Final = "taken"
"""The method that gives back lent chunks; its parameters are the tickets."""
_LENT: Final = re.compile(rb"(\d{1,5}) (\d{1,19})((?: [0-9a-f]{1,16}){1,%d})" % MOST_CHUNKS)
_TARGET: Final = re.compile(
    rb"/v1/data/([0-9a-f]{16})\.([0-9a-f]{1,16})"
    rb"\?size=(\d{1,19})&first=(\d{1,14})&count=(\d{1,2})&sealed=([01])&insist=([01])"
)
_AT: Final = re.compile(rb"([0-9A-Za-z.:_-]{1,253}) (\d{1,5})")
_SMALL: Final = re.compile(rb"\d{1,7}")
_RESULT_BYTES: Final = 3 << 10
"""Bytes of a result that stands in a field."""
_METHOD: Final = re.compile(rb"/v1/do/([a-z][a-z-]{0,31})")
_STATUSES: Final = {
    "AccessDenied": 403,
    "Busy": 503,
    "Conflict": 409,
    "Corrupt": 500,
    "Invalid": 400,
    "NoSpace": 507,
    "NotFound": 404,
    "NotSupported": 501,
    "Unavailable": 503,
}
_OTHER_STATUS: Final = 500


class PeerAddress(NamedTuple):
    """The address at which a node's peers reach it."""

    node: int
    host: str
    port: int


@dataclass(slots=True)
class PeerIdentity:
    """The identity that this node shows its peers; shared by its server and its client."""

    party: Party
    secrets: Callable[[], Secrets]
    """The secrets that are valid now: they change while the node runs."""
    at: PeerAddress
    """The address at which the others reach it."""


class Ask(NamedTuple):
    """A request for `chunks` of a data file from the chunk `first` on; the file has `size`
    bytes."""

    ino: int
    version: int
    size: int
    first: int
    chunks: int
    sealed: bool
    """Whether its content is that of its seal, whose checksums the holder knows: else it reads for
    them."""
    insist: bool = False
    """Whether no redirect is wanted: the nodes of a redirect did not have it."""

    @property
    def offset(self) -> int:
        return self.first * CHUNK_BYTES

    @property
    def tells_all(self) -> bool:
        """Whether an answer has the checksums of all chunks of the file."""
        return self.sealed and chunks_of(self.size) <= MOST_SUMS

    def length(self, count: int) -> int:
        """Returns the bytes of its first `count` chunks."""
        return min(self.size, (self.first + count) * CHUNK_BYTES) - self.offset


class Lent(NamedTuple):
    """Chunks that a holder's mover lends for a while."""

    port: int
    """The port of the mover."""
    ticket: int
    at: tuple[int, ...]
    """The address of each chunk in the holder's memory."""


class Later(Exception):
    """The chunk is on its way to the node that was asked: ask again."""


class PeerError(msgspec.Struct, array_like=True):
    """An error, as it travels."""

    name: str
    message: str


_encode = msgspec.msgpack.Encoder().encode
_problem = msgspec.msgpack.Decoder(PeerError)
_addresses = msgspec.msgpack.Decoder(list[PeerAddress])


def chunks_of(size: int) -> int:
    """Returns how many chunks a file of `size` bytes has."""
    return -(-size // CHUNK_BYTES)


def data_target(ask: Ask) -> bytes:
    """Returns the request target for this request."""
    return b"%b%016x.%x?size=%d&first=%d&count=%d&sealed=%d&insist=%d" % (
        *(DATA, ask.ino, ask.version, ask.size, ask.first, ask.chunks, ask.sealed, ask.insist),
    )


def parse_data_target(target: bytes) -> Ask:
    """Returns the request of a target. Raises Invalid if it makes no sense."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise Invalid("this is no request for data")
    ask = Ask(
        int(match[1], 16),
        int(match[2], 16),
        int(match[3]),
        int(match[4]),
        int(match[5]),
        match[6] == b"1",
        match[7] == b"1",
    )
    if not 1 <= ask.chunks <= MOST_CHUNKS or ask.first + ask.chunks > chunks_of(ask.size):
        raise Invalid("these are no chunks of the file")
    return ask


def method_target(method: str) -> bytes:
    return METHODS + method.encode()


def parse_method_target(target: bytes) -> str:
    """Raises Invalid."""
    match = _METHOD.fullmatch(target)
    if match is None:
        raise Invalid("this is no method")
    return match[1].decode()


def render_at(address: PeerAddress) -> bytes:
    return f"{address.host} {address.port}".encode()


def parse_at(node: int, value: bytes | None) -> PeerAddress | None:
    """Returns the address that `node` gives for itself; None if it gives none that can be
    understood."""
    match = _AT.fullmatch(value or b"")
    if match is None or not 0 < int(match[2]) < 1 << 16:
        return None
    return PeerAddress(node, match[1].decode(), int(match[2]))


def render_result(result: bytes) -> bytes | None:
    """Returns it for a field; None: it is too long."""
    return base64.b64encode(result) if len(result) <= _RESULT_BYTES else None


def parse_result(value: bytes) -> bytes:
    """Raises Invalid."""
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise Invalid("this is no result") from None


def parse_takes(value: bytes | None) -> int:
    """Returns the bytes of a file that a call takes along."""
    return int(value) if value is not None and _SMALL.fullmatch(value) else 0


def render_proof(proof: bytes) -> bytes:
    return base64.b64encode(proof)


def parse_proof(value: bytes) -> bytes:
    """Raises Invalid."""
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise Invalid("this is no proof") from None


def render_sums(sums: bytes) -> bytes:
    return sums.hex().encode()


def parse_sums(value: bytes | None, ask: Ask, length: int) -> tuple[bytes, bytes]:
    """Returns the checksums of the chunks that follow in `length` bytes, no more than were asked
    for, and those of all chunks of the file if they are told. Raises Invalid."""
    try:
        sums = bytes.fromhex((value or b"").decode("ascii"))
    except ValueError:
        sums = b""
    count = chunks_of(length)
    told = chunks_of(ask.size) if ask.tells_all else count
    if not 1 <= count <= ask.chunks or length != ask.length(count):
        raise Invalid(f"{length} bytes are no answer to what was asked for")
    if len(sums) != told * DIGEST_BYTES:
        raise Invalid("an answer without the checksums of what was asked for")
    if not ask.tells_all:
        return sums, b""
    return sums[ask.first * DIGEST_BYTES : (ask.first + count) * DIGEST_BYTES], sums


def render_lent(lent: Lent) -> bytes:
    return b"%d %d %b" % (lent.port, lent.ticket, b" ".join(b"%x" % at for at in lent.at))


def parse_lent(value: bytes, ask: Ask) -> Lent:
    """Raises Invalid."""
    match = _LENT.fullmatch(value)
    if match is None or not 0 < int(match[1]) < 1 << 16:
        raise Invalid("an answer that lends chunks without saying where")
    at = tuple(int(each, 16) for each in match[3].split())
    if len(at) > ask.chunks:
        raise Invalid("an answer that lends more chunks than were asked for")
    return Lent(int(match[1]), int(match[2]), at)


def render_addresses(addresses: Sequence[PeerAddress]) -> bytes:
    """Encodes the addresses, at most MOST_PEERS of them."""
    return _encode(addresses[:MOST_PEERS])


def parse_addresses(body: bytes) -> list[PeerAddress]:
    """Raises Invalid."""
    try:
        addresses = _addresses.decode(body)[:MOST_PEERS]
    except UNDECODABLE as error:
        raise Invalid(f"not a redirect: {error}") from None
    if any(parse_at(each.node, render_at(each)) != each for each in addresses):
        raise Invalid("not a redirect: it leads to no address")
    return addresses


def render_error(error: KvfsError) -> tuple[int, bytes]:
    """Returns status and body."""
    name = type(error).__name__
    return _STATUSES.get(name, _OTHER_STATUS), _encode(PeerError(name, str(error)))


def parse_error(body: bytes) -> KvfsError:
    """Returns the error that a peer told; Unavailable if it is none that we know."""
    try:
        problem = _problem.decode(body)
    except UNDECODABLE:
        return Unavailable("a node answered with an error that cannot be understood")
    kind = getattr(errors, problem.name, None)
    if not isinstance(kind, type) or not issubclass(kind, KvfsError):
        return Unavailable(problem.message)
    return kind(problem.message)
