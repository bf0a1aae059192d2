"""The handshake by which two connected nodes find out that both are of one cluster. No I/O.

    client                                         server
    Dialing.hello          -- who I am, nonce -->  Answering.reply
    Dialing.conclude       <-- who I am, nonce, which secret, proof --
    -- proof ------------>  Answering.conclude

A proof is an HMAC-SHA256, under the secret, of its sender's role and of both nodes' messages: it
holds for this connection, this direction and these messages alone, so it can be neither replayed
nor sent back. The server names one of the secrets that the client has, the newest that both know.

Invariants
- Nothing that a peer said counts before its proof was compared, in constant time. Refusals before
  that tell a stranger versions and ids, which are no secrets.
- From then on the connection is trusted: that nobody writes into it on its way is for TLS
  (`cluster.tls`), inside which it stands.
"""

import hashlib
import hmac
import os
from typing import Annotated, Final, TypeVar

import msgspec

from kvfs.base.errors import UNDECODABLE, AccessDenied, Conflict, Invalid
from kvfs.base.version import PROTOCOL, VERSION
from kvfs.cluster import version_range
from kvfs.cluster.secrets import DIGEST_SIZE, MOST, Secret, Secrets

T = TypeVar("T")
LIMIT: Final = 1024
"""Bytes of a message."""
NONCE_SIZE: Final = 32
PROOF_SIZE: Final = hashlib.sha256().digest_size
_DIALS: Final = b"kvfs peer, who dials"
_ANSWERS: Final = b"kvfs peer, who answers"

_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_SIZE, max_length=NONCE_SIZE)]
_Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_SIZE, max_length=PROOF_SIZE)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_SIZE, max_length=DIGEST_SIZE)]
_Word = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._+-]{1,64}\Z")]
"""A word that stands in logs before anything is proven."""


class Party(msgspec.Struct, frozen=True, array_like=True):
    """The identity that a node declares."""

    cluster: _Word
    node: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    incarnation: Annotated[int, msgspec.Meta(ge=0)]
    name: _Word
    protocol: Annotated[int, msgspec.Meta(ge=0)] = PROTOCOL
    version: _Word = VERSION


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    party: Party
    nonce: _Nonce
    digests: Annotated[tuple[_Digest, ...], msgspec.Meta(min_length=1, max_length=MOST)]


class _Reply(msgspec.Struct, frozen=True, array_like=True):
    party: Party
    nonce: _Nonce
    digest: _Digest


class _Proven(msgspec.Struct, frozen=True, array_like=True):
    reply: Annotated[bytes, msgspec.Meta(max_length=LIMIT)]
    proof: _Proof


_encode = msgspec.msgpack.Encoder().encode
_hello = msgspec.msgpack.Decoder(_Hello)
_reply = msgspec.msgpack.Decoder(_Reply)
_proven = msgspec.msgpack.Decoder(_Proven)


class Dialing:
    """The side that connects."""

    def __init__(self, secrets: Secrets, me: Party) -> None:
        self._secrets = secrets
        self._me = me
        self.hello = _encode(_Hello(me, os.urandom(NONCE_SIZE), secrets.digests))
        """The first message."""

    def conclude(self, reply: bytes) -> tuple[Party, bytes]:
        """Returns the peer that answered, and the proof to send it. Raises AccessDenied,
        NotSupported, Conflict, Invalid."""
        proven = _decoded(_proven, reply)
        told = _decoded(_reply, proven.reply)
        _check(told.party, self._me)
        secret = self._secrets.common((told.digest,))
        if secret is None or not _is_proof(secret, _ANSWERS, self.hello, proven):
            raise _refused(told.party)
        return told.party, _proof(secret, _DIALS, self.hello, proven.reply)


class Answering:
    """The side that is connected to. First `reply`, then `conclude`, each once."""

    def __init__(self, secrets: Secrets, me: Party) -> None:
        self._secrets = secrets
        self._me = me
        self._expected: bytes | None = None
        self._peer: Party | None = None

    def reply(self, hello: bytes) -> bytes:
        """Returns the answer to the first message. Raises AccessDenied, NotSupported, Conflict,
        Invalid."""
        if self._peer is not None:
            raise Invalid("a handshake has one hello")
        told = _decoded(_hello, hello)
        _check(told.party, self._me)
        secret = self._secrets.common(told.digests)
        if secret is None:
            raise _refused(told.party)
        reply = _encode(_Reply(self._me, os.urandom(NONCE_SIZE), secret.digest))
        self._peer = told.party
        self._expected = _proof(secret, _DIALS, hello, reply)
        return _encode(_Proven(reply, _proof(secret, _ANSWERS, hello, reply)))

    def conclude(self, proof: bytes) -> Party:
        """Returns the peer that dialed, if `proof` is its proof. Raises AccessDenied, Invalid."""
        expected, self._expected = self._expected, None
        if self._peer is None or expected is None:
            raise Invalid("a handshake begins with a hello, and has one proof")
        if not hmac.compare_digest(proof, expected):
            raise _refused(self._peer)
        return self._peer


def _check(peer: Party, me: Party) -> None:
    version_range.check(peer.protocol, peer.version, who=_named(peer))
    if peer.cluster != me.cluster:
        raise Conflict(
            f"{_named(peer)} is of the cluster {peer.cluster}, this one of {me.cluster}: an address"
            " leads to the wrong host"
        )


def _proof(secret: Secret, role: bytes, hello: bytes, reply: bytes) -> bytes:
    whole = b"%b\0%d:%b%d:%b" % (role, len(hello), hello, len(reply), reply)
    return hmac.digest(secret.derive(b"handshake"), whole, hashlib.sha256)


def _is_proof(secret: Secret, role: bytes, hello: bytes, proven: _Proven) -> bool:
    return hmac.compare_digest(proven.proof, _proof(secret, role, hello, proven.reply))


def _refused(peer: Party) -> AccessDenied:
    return AccessDenied(
        f"{_named(peer)} has another secret of the cluster than this node: give it the one that"
        " `kvfs node secret` prints here, with `kvfs node join`"
    )


def _named(peer: Party) -> str:
    return f"node {peer.node} ({peer.name})"


def _decoded(decoder: msgspec.msgpack.Decoder[T], message: bytes) -> T:
    if len(message) > LIMIT + PROOF_SIZE + 16:
        raise Invalid(f"a message of a handshake has at most {LIMIT} bytes, not {len(message)}")
    try:
        return decoder.decode(message)
    except UNDECODABLE as error:
        raise Invalid(f"not a message of a handshake: {error}") from None
