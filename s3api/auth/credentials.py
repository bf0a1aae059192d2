"""Key pairs, and temporary ones for jobs: their making, and the look-up of their holders.

A session token holds its whole session, encrypted with the store's key: starting a session writes
nothing, none must be cleaned up, and each node that has the key can check it. It still ends with
the user's access key from which it was started: `resolve` asks for that one each time.
"""

import secrets
import string
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from typing import Final

import msgspec

from kvfs.base.encryption import SecretKey
from kvfs.base.errors import Corrupt
from kvfs.tree.identities import Identity, secret_context
from s3api.http.s3_errors import S3Error

MIN_SESSION_S: Final = 900
MAX_SESSION_S: Final = 12 * 3600
MAX_SESSION_POLICY: Final = 2048
"""Most characters of a session's policy."""
MAX_TOKEN: Final = 8192
_CONTEXT: Final = b"session token"
_KEY_CHARACTERS: Final = string.ascii_uppercase + "234567"
_SECRET_CHARACTERS: Final = string.ascii_letters + string.digits
_KEY_LENGTH: Final = 16
_SECRET_LENGTH: Final = 40


class Credentials(msgspec.Struct, frozen=True):
    """A client's credentials."""

    access_key: str
    secret: str
    session_token: str = ""
    expires: int = 0
    """Time of expiry in seconds since the epoch; 0: never."""

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r})"


class KeyOwner(msgspec.Struct, frozen=True):
    """The holder of an access key."""

    user: str
    policy: str
    """The policy of the user, in JSON; empty: none."""
    session_policy: str
    """The restriction of a session, in JSON; empty: no less than its user's rights."""
    secret: bytes
    expires: int = 0
    """Time of expiry in seconds since the epoch; 0: never."""

    def __repr__(self) -> str:
        return f"Known({self.user!r})"


class _Session(msgspec.Struct, array_like=True):
    access_key: str
    secret: str
    parent: str
    """The access key that started it."""
    expires: int
    policy: str

    def __repr__(self) -> str:
        return f"_Session({self.access_key!r})"


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Session).decode


def generate(prefix: str = "KVFS") -> Credentials:
    """Returns a new key pair: 20 characters of access key (80 random bits), 40 of secret (238)."""
    return Credentials(
        prefix + "".join(secrets.choice(_KEY_CHARACTERS) for _ in range(_KEY_LENGTH)),
        "".join(secrets.choice(_SECRET_CHARACTERS) for _ in range(_SECRET_LENGTH)),
    )


def encrypt_secret(key: SecretKey, credentials: Credentials) -> bytes:
    """Returns the secret as `kvfs.tree.identities` keeps it."""
    return key.encrypt(credentials.secret.encode(), secret_context(credentials.access_key))


def start_session(
    key: SecretKey, parent: str, *, now: float, duration_s: int, policy: str = ""
) -> Credentials:
    """Returns temporary credentials for the holder of the access key `parent`.

    The caller has verified `parent`, which must not be of a session itself. Raises S3Error
    (ValidationError, PackedPolicyTooLarge: codes of STS).
    """
    if not MIN_SESSION_S <= duration_s <= MAX_SESSION_S:
        raise S3Error(
            "ValidationError",
            f"DurationSeconds must be between {MIN_SESSION_S} and {MAX_SESSION_S}",
            status=400,
        )
    if len(policy) > MAX_SESSION_POLICY:
        raise S3Error(
            "PackedPolicyTooLarge",
            f"A session policy has at most {MAX_SESSION_POLICY} characters",
            status=400,
        )
    pair = generate("KVFT")
    expires = int(now) + duration_s
    session = _Session(pair.access_key, pair.secret, parent, expires, policy)
    token = urlsafe_b64encode(key.encrypt(_encode(session), _CONTEXT)).decode()
    return Credentials(pair.access_key, pair.secret, token, expires)


def resolve(
    key: SecretKey,
    find: Callable[[str], Identity | None],
    access_key: str,
    session_token: str,
    now: float,
) -> KeyOwner | None:
    """Returns the holder of an access key; None if there is none or its user is disabled.

    `find` is `kvfs.tree.identities.find` in a transaction, or a cache of it. Raises S3Error:
    InvalidToken, ExpiredToken.
    """
    if session_token:
        return _resolve_session(key, find, access_key, session_token, now)
    identity = find(access_key)
    if identity is None or not identity.enabled:
        return None
    secret = key.decrypt(identity.encrypted_secret, secret_context(access_key))
    return KeyOwner(identity.user, identity.policy, "", secret)


def _resolve_session(
    key: SecretKey,
    find: Callable[[str], Identity | None],
    access_key: str,
    session_token: str,
    now: float,
) -> KeyOwner:
    session = _open_session(key, session_token)
    if session.access_key != access_key:
        raise S3Error("InvalidToken")
    if now >= session.expires:
        raise S3Error("ExpiredToken")
    identity = find(session.parent)
    if identity is None or not identity.enabled:
        raise S3Error("InvalidToken")
    return KeyOwner(
        identity.user, identity.policy, session.policy, session.secret.encode(), session.expires
    )


def _open_session(key: SecretKey, token: str) -> _Session:
    if len(token) > MAX_TOKEN:
        raise S3Error("InvalidToken")
    try:
        return _decode(key.decrypt(urlsafe_b64decode(token), _CONTEXT))
    except (ValueError, Corrupt, msgspec.MsgspecError):
        raise S3Error("InvalidToken") from None
