"""The holders of access keys: the engine's identities, decrypted once.

The identity is looked at each time, so a key that is disabled, rotated or removed is refused at
once.
"""

import math
import time
from typing import Final, NamedTuple

from kvfs.base.encryption import SecretKey
from kvfs.session.read_cache import Remembering
from kvfs.session.session import Session
from kvfs.tree import identities
from kvfs.tree.identities import Identity
from s3api.auth import credentials
from s3api.auth.credentials import KeyOwner

ADMINISTRATOR: Final = "admin"
"""The user that the first start makes; buckets that were made on the mount are its."""
_REMEMBERED: Final = 1024


class _Seen(NamedTuple):
    """The holder of a key as last seen."""

    until: float
    """When its session ends, in seconds since the epoch."""
    named: str
    """The access key that was looked up: of a session, the one that began it."""
    identity: Identity | None
    known: KeyOwner | None


class Identities:
    """The identities for one worker; its event loop."""

    administrator = ADMINISTRATOR

    def __init__(self, session: Session, key: SecretKey) -> None:
        self._session = session
        self._key = key
        self._identities = Remembering[str, Identity | None](session, _REMEMBERED)
        self._seen: dict[tuple[str, str], _Seen] = {}

    @property
    def key(self) -> SecretKey:
        """The key with which secrets and session tokens are encrypted."""
        return self._key

    def find(self, access_key: str, session_token: str) -> KeyOwner | None:
        """The holder of the key; None: nobody, or a disabled user. Raises S3Error (ExpiredToken,
        InvalidToken)."""
        now, asked = time.time(), (access_key, session_token)
        seen = self._seen.get(asked)
        if seen is not None and now < seen.until and self._look_up(seen.named) is seen.identity:
            return seen.known
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen[asked] = found = self._resolve(access_key, session_token, now)
        return found.known

    def secret_of(self, access_key: str, session_token: str) -> bytes | None:
        """See `auth.verified.SecretOf`."""
        found = self.find(access_key, session_token)
        return None if found is None else found.secret

    def names(self, name: str) -> bool:
        """Whether there is a user of this name."""
        return self._session.read(lambda t: any(name == each for each, _ in identities.list_all(t)))

    def _look_up(self, access_key: str) -> Identity | None:
        return self._identities.get(access_key, lambda t: identities.find(t, access_key))

    def _resolve(self, access_key: str, session_token: str, now: float) -> _Seen:
        looked_up: list[tuple[str, Identity | None]] = []

        def find(named: str) -> Identity | None:
            looked_up.append((named, self._look_up(named)))
            return looked_up[-1][1]

        known = credentials.resolve(self._key, find, access_key, session_token, now)
        until = known.expires if known is not None and known.expires else math.inf
        return _Seen(until, *looked_up[-1], known)
