"""Who holds an access key: the engine's identities, remembered for a moment.

A key that is disabled, rotated or removed is refused a second later at the latest.
"""

import time
from typing import Final

from kvfs import identities
from kvfs.client.session import Session
from kvfs.encryption import SecretKey
from s3api.auth import credentials
from s3api.auth.credentials import Known

ADMINISTRATOR: Final = "admin"
"""The user that the first start makes; buckets that were made on the mount are its."""
_BELIEVED_S: Final = 1.0
_REMEMBERED: Final = 1024


class Identities:
    """Of one worker; its event loop."""

    administrator = ADMINISTRATOR

    def __init__(self, session: Session, key: SecretKey) -> None:
        self._session = session
        self._key = key
        self._known: dict[tuple[str, str], tuple[float, Known | None]] = {}

    @property
    def key(self) -> SecretKey:
        """With which secrets and session tokens are encrypted."""
        return self._key

    def find(self, access_key: str, session_token: str) -> Known | None:
        """Who holds the key; None: nobody, or a disabled user. Raises S3Error (ExpiredToken,
        InvalidToken)."""
        now = time.time()
        asked = access_key, session_token
        seen = self._known.get(asked)
        if seen is not None and now < seen[0]:
            return seen[1]
        found = self._resolve(access_key, session_token, now)
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        until = min(now + _BELIEVED_S, found.expires) if found and found.expires else 0
        self._known[asked] = (until or now + _BELIEVED_S, found)
        return found

    def secret_of(self, access_key: str, session_token: str) -> bytes | None:
        """See `auth.verified.SecretOf`."""
        found = self.find(access_key, session_token)
        return None if found is None else found.secret

    def names(self, name: str) -> bool:
        """Whether there is a user of this name."""
        return self._session.read(lambda t: any(name == each for each, _ in identities.list_all(t)))

    def _resolve(self, access_key: str, session_token: str, now: float) -> Known | None:
        return self._session.read(
            lambda t: credentials.resolve(
                self._key,
                lambda asked: identities.find(t, asked),
                access_key,
                session_token,
                now,
            )
        )
