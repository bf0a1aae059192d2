"""Signing keys and signatures: what both sides of signature version 4 compute."""

import functools
from hashlib import sha256
from hmac import compare_digest, digest
from typing import Final

ALGORITHM: Final = b"AWS4-HMAC-SHA256"
TERMINATOR: Final = b"aws4_request"
EMPTY_SHA256: Final = sha256(b"").hexdigest().encode()


@functools.lru_cache(maxsize=1024)
def signing_key(secret: bytes, date: bytes, region: bytes, service: bytes) -> bytes:
    """The key of a day, region and service; the last 1,024 are remembered."""
    key = digest(b"AWS4" + secret, date, "sha256")
    for part in (region, service, TERMINATOR):
        key = digest(key, part, "sha256")
    return key


def string_to_sign(timestamp: bytes, scope: bytes, request: bytes) -> bytes:
    """What is signed of a canonical request."""
    hashed = sha256(request).hexdigest().encode()
    return b"\n".join((ALGORITHM, timestamp, scope, hashed))


def sign(key: bytes, text: bytes) -> bytes:
    """64 lower-case hexadecimal digits."""
    return digest(key, text, "sha256").hex().encode()


def matches(key: bytes, text: bytes, signature: bytes) -> bool:
    """Whether `signature` is that of `text`, in constant time."""
    return compare_digest(sign(key, text), signature)
