"""Signing keys and signatures: what both sides of signature version 4 compute."""

import functools
import hmac
from hashlib import sha256
from typing import Final

ALGORITHM: Final = b"AWS4-HMAC-SHA256"
TERMINATOR: Final = b"aws4_request"
EMPTY_SHA256: Final = sha256(b"").hexdigest().encode()


class SigningKey:
    """The key of a secret for a day, region and service.

    It keeps the state that HMAC has after the key, which saves a third of each signature; and its
    repr shows nothing.
    """

    __slots__ = ("_begun",)

    def __init__(self, key: bytes) -> None:
        self._begun = hmac.new(key, digestmod="sha256")

    def sign(self, text: bytes) -> bytes:
        """64 lower-case hexadecimal digits."""
        begun = self._begun.copy()
        begun.update(text)
        return begun.hexdigest().encode()

    def matches(self, text: bytes, signature: bytes) -> bool:
        """Whether `signature` is that of `text`, in constant time."""
        return hmac.compare_digest(self.sign(text), signature)


@functools.lru_cache(maxsize=1024)
def signing_key(secret: bytes, date: bytes, region: bytes, service: bytes) -> SigningKey:
    """The key of a day, region and service; the last 1,024 are remembered."""
    key = b"AWS4" + secret
    for part in (date, region, service, TERMINATOR):
        key = hmac.digest(key, part, "sha256")
    return SigningKey(key)


def string_to_sign(timestamp: bytes, scope: bytes, request: bytes) -> bytes:
    """The string that is signed for a canonical request."""
    hashed = sha256(request).hexdigest().encode()
    return b"\n".join((ALGORITHM, timestamp, scope, hashed))
