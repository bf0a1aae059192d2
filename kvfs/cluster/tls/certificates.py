"""The authority of a cluster, and the certificates of its nodes. No I/O.

The authority's key follows from the cluster's secret: whoever has the secret is a node, issues its
own certificate, and knows the authority by which it judges those of others. So nothing is handed
out beside the secret, and a secret that is replaced replaces the authority.

X.509 version 3 (RFC 5280) with Ed25519 keys (RFC 8410), in DER, which is only written here: OpenSSL
reads it.

Invariants
- An authority is the same on all nodes, whatever their clocks say, and valid as long as its secret.
- No message and no repr shows a key.
"""

import base64
import hashlib
import os
import time
from typing import Final, NamedTuple

from nacl.bindings import crypto_sign, crypto_sign_BYTES, crypto_sign_seed_keypair

from kvfs.cluster.secrets import Secret

BEFORE_S: Final = 30 * 86400
"""Time before its issue from which on a certificate is valid: clocks of nodes may differ so far."""
AFTER_S: Final = 90 * 86400
"""Time after its issue until which it is valid."""
_SEED_BYTES: Final = 32
_ED25519: Final = bytes.fromhex("300506032b6570")
_PUBLIC_KEY: Final = bytes.fromhex("302a300506032b6570032100")
_PRIVATE_KEY: Final = bytes.fromhex("302e020100300506032b657004220420")
_COMMON_NAME: Final = bytes.fromhex("0603550403")
_ALWAYS: Final = (b"\x17\x0d500101000000Z", b"\x18\x0f99991231235959Z")


class Issued(NamedTuple):
    """A certificate with its key. Its repr does not show the key."""

    certificate: bytes
    """In PEM."""
    key: bytes
    """In PEM."""
    expires_s: float
    """The time when it ends, in seconds of the epoch."""

    def __repr__(self) -> str:
        return f"Issued(..., expires_s={self.expires_s:.0f})"


class Authority:
    """The authority that follows from one secret of a cluster."""

    def __init__(self, secret: Secret) -> None:
        public, self._key = crypto_sign_seed_keypair(secret.derive(b"certificate authority"))
        self._key_id = hashlib.sha256(public).digest()[:20]
        self._name = _name(f"kvfs cluster {secret.cluster} {secret.digest.hex()}")
        extensions = (
            _extension("551d13", bytes.fromhex("30060101ff020100"), critical=True),
            _extension("551d0f", bytes.fromhex("03020204"), critical=True),
            _extension("551d0e", _tlv(0x04, self._key_id)),
        )
        validity = _sequence(*_ALWAYS)
        self.certificate: Final = self._signed(
            self._key_id, self._name, validity, public, extensions
        )
        """The certificate by which others' are judged, in PEM."""

    def __repr__(self) -> str:
        return "Authority(...)"

    def issue(self, name: str, now_s: float) -> Issued:
        """Returns a new certificate for a node that is called `name`, at this time of the epoch."""
        seed = os.urandom(_SEED_BYTES)
        public, _ = crypto_sign_seed_keypair(seed)
        extensions = (
            _extension("551d13", b"\x30\x00", critical=True),
            _extension("551d0f", bytes.fromhex("03020780"), critical=True),
            # serverAuth and clientAuth: a node is both.
            _extension("551d25", bytes.fromhex("301406082b0601050507030106082b06010505070302")),
            _extension("551d23", _sequence(_tlv(0x80, self._key_id))),
        )
        expires_s = now_s + AFTER_S
        validity = _sequence(_time(now_s - BEFORE_S), _time(expires_s))
        certificate = self._signed(os.urandom(16), _name(name), validity, public, extensions)
        return Issued(certificate, _pem("PRIVATE KEY", _PRIVATE_KEY + seed), expires_s)

    def _signed(
        self,
        serial: bytes,
        subject: bytes,
        validity: bytes,
        public: bytes,
        extensions: tuple[bytes, ...],
    ) -> bytes:
        told = _sequence(
            _tlv(0xA0, b"\x02\x01\x02"),
            _tlv(0x02, bytes([serial[0] & 0x7F | 0x40]) + serial[1:]),
            _ED25519,
            self._name,
            validity,
            subject,
            _PUBLIC_KEY + public,
            _tlv(0xA3, _sequence(*extensions)),
        )
        signature = crypto_sign(told, self._key)[:crypto_sign_BYTES]
        return _pem("CERTIFICATE", _sequence(told, _ED25519, _tlv(0x03, b"\0" + signature)))


def _tlv(tag: int, content: bytes) -> bytes:
    length = len(content)
    if length < 0x80:
        return bytes((tag, length)) + content
    size = (length.bit_length() + 7) // 8
    return bytes((tag, 0x80 | size)) + length.to_bytes(size, "big") + content


def _sequence(*parts: bytes) -> bytes:
    return _tlv(0x30, b"".join(parts))


def _name(text: str) -> bytes:
    return _sequence(_tlv(0x31, _sequence(_COMMON_NAME, _tlv(0x0C, text.encode()))))


def _extension(oid: str, value: bytes, *, critical: bool = False) -> bytes:
    flag = b"\x01\x01\xff" if critical else b""
    return _sequence(_tlv(0x06, bytes.fromhex(oid)), flag, _tlv(0x04, value))


def _time(seconds: float) -> bytes:
    """Returns a time as RFC 5280 asks: in two digits of the year from 1950 to 2049."""
    whole = time.strftime("%Y%m%d%H%M%SZ", time.gmtime(max(0.0, seconds))).encode()
    return _tlv(0x17, whole[2:]) if b"1950" <= whole < b"2050" else _tlv(0x18, whole)


def _pem(label: str, der: bytes) -> bytes:
    lines = base64.encodebytes(der).replace(b"\n", b"")
    body = b"\n".join(lines[at : at + 64] for at in range(0, len(lines), 64))
    return b"-----BEGIN %b-----\n%b\n-----END %b-----\n" % (label.encode(), body, label.encode())
