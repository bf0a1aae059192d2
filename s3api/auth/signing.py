"""Signing keys and signatures: the computations of both sides of signature version 4."""

import functools
import hmac
from hashlib import sha256
from typing import Final

ALGORITHM: Final = b"AWS4-HMAC-SHA256"
TERMINATOR: Final = b"aws4_request"
EMPTY_SHA256: Final = sha256(b"").hexdigest().encode()
_BLOCK_BYTES: Final = 64
_INNER: Final = bytes(each ^ 0x36 for each in range(256))
_OUTER: Final = bytes(each ^ 0x5C for each in range(256))


class SigningKey:
    """The key of a secret for a day, region and service.

    It keeps the states that HMAC (RFC 2104) has after the key, which saves a third of each
    signature, as those of hashlib, which calls nothing of Python; its repr shows nothing.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        block = key.ljust(_BLOCK_BYTES, b"\0")
        assert len(block) == _BLOCK_BYTES, "a longer key would be hashed first"
        self._inner = sha256(block.translate(_INNER))
        self._outer = sha256(block.translate(_OUTER))

    def sign(self, text: bytes) -> bytes:
        """Returns 64 lower-case hexadecimal digits, to be compared in constant time
        (`hmac.compare_digest`)."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(text)
        outer.update(inner.digest())
        return outer.hexdigest().encode()


@functools.lru_cache(maxsize=1024)
def signing_key(secret: bytes, date: bytes, region: bytes, service: bytes) -> SigningKey:
    """Returns the key of a day, region and service; the last 1,024 are remembered."""
    key = b"AWS4" + secret
    for part in (date, region, service, TERMINATOR):
        key = hmac.digest(key, part, "sha256")
    return SigningKey(key)


def string_to_sign(timestamp: bytes, scope: bytes, request: bytes) -> bytes:
    """Returns the string that is signed for a canonical request."""
    hashed = sha256(request).hexdigest().encode()
    return b"\n".join((ALGORITHM, timestamp, scope, hashed))
