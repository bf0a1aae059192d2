"""The identity of a verified request, and the look-ups that verifying one needs."""

import enum
from collections.abc import Callable
from typing import Final

import msgspec

from s3api.auth.signing import SigningKey

SecretOf = Callable[[str, str], bytes | None]
"""Returns the secret of an access key, given the key and the session token that came with it ('':
none); None if there is no such key or it may not be used. Raises S3Error: ExpiredToken,
InvalidToken."""


class Payload(enum.Enum):
    """The protection of the body; the values are those of x-amz-content-sha256."""

    DIGEST = b""
    """The body is signed by the SHA-256 that the request names: the caller compares it with the
    body's."""
    UNSIGNED = b"UNSIGNED-PAYLOAD"
    SIGNED_CHUNKS = b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    SIGNED_CHUNKS_TRAILER = b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
    UNSIGNED_CHUNKS_TRAILER = b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"


class AuthType(enum.Enum):
    """The place of the signature; the values are those of the policy condition s3:authType."""

    HEADER = "REST-HEADER"
    QUERY = "REST-QUERY-STRING"
    POST = "POST"


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose signature is right. For version 2, the fields of version 4 alone are
    empty."""

    access_key: str
    auth_type: AuthType
    version: int
    """The version of the signature: 2 or 4."""
    signed_at: int
    """Seconds since the epoch, as the client says; 0 if it does not (query, version 2)."""
    session_token: str = ""
    """The session token, accepted by the `SecretOf` that was asked."""
    service: bytes = b"s3"
    """`s3` or `sts`: a request signed for one must not be served as the other."""
    payload: Payload = Payload.UNSIGNED
    payload_sha256: bytes = b""
    """With Payload.DIGEST: 64 lower-case hexadecimal digits."""
    signed_headers: frozenset[bytes] = frozenset()
    timestamp: bytes = b""
    """The signed time: 20130524T000000Z."""
    scope: bytes = b""
    """20130524/us-east-1/s3/aws4_request."""
    signing_key: SigningKey | None = None
    signature: bytes = b""
    """64 hexadecimal digits: the seed of the chain of chunk signatures."""

    valid_from: float = 0.0
    """Seconds since the epoch."""
    valid_until: float = -1.0
    """Seconds since the epoch; before `valid_from` if nobody needs to know."""

    def is_valid(self, now: float) -> bool:
        """Returns whether the signature, once found right, is accepted at this time."""
        return self.valid_from <= now <= self.valid_until

    def __repr__(self) -> str:
        return f"Verified({self.access_key!r}, {self.auth_type.value}, version {self.version})"


PAYLOADS: Final = {mode.value: mode for mode in Payload if mode is not Payload.DIGEST}
