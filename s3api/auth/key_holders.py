"""The holders of access keys: the engine's identities, decrypted once.

The identity is read each time, so a key that is disabled, rotated or removed is refused at once.
"""

import time
from typing import Final

from kvfs.base.encryption import SecretKey
from kvfs.meta.engine import Transaction
from kvfs.objects.object_store import ObjectStore
from kvfs.objects.store_cache import NOW, Wanted
from kvfs.tree import identities
from s3api.auth import credentials
from s3api.auth.credentials import KeyOwner
from s3api.http.s3_errors import S3Error

ADMINISTRATOR: Final = "admin"
"""The user that the first start makes, and the owner of buckets that were made on the mount."""


class Identities:
    """The identities for one worker; its event loop."""

    administrator = ADMINISTRATOR

    def __init__(self, store: ObjectStore, key: SecretKey) -> None:
        self._session = store.session
        self._cache = store.cache
        self._key = key

    @property
    def key(self) -> SecretKey:
        """The key with which secrets and session tokens are encrypted."""
        return self._key

    def find(self, access_key: str, session_token: str, generation: int = NOW) -> KeyOwner | None:
        """Returns the holder of the key as of that generation or newer; None: nobody, or a disabled
        user. Raises S3Error (ExpiredToken, InvalidToken)."""
        entry = self._cache.entry((access_key, session_token))
        found: KeyOwner | None
        if entry is not None and entry.generation >= generation:
            found = entry.value
        else:
            found = self._cache.get(*self.wanted(access_key, session_token), generation)
        if found is not None and found.expires and time.time() >= found.expires:
            raise S3Error("ExpiredToken")
        return found

    def wanted(self, access_key: str, session_token: str) -> Wanted:
        """Returns the holder, for `StoreCache.look`."""

        def read(t: Transaction) -> KeyOwner | None:
            return credentials.resolve(
                self._key,
                lambda named: identities.find(t, named),
                access_key,
                session_token,
                time.time(),
            )

        return (access_key, session_token), read

    def secret_of(self, access_key: str, session_token: str) -> bytes | None:
        """Does what `auth.verified.SecretOf` describes."""
        found = self.find(access_key, session_token)
        return None if found is None else found.secret

    def names(self, name: str) -> bool:
        """Returns whether there is a user of this name."""
        return self._session.read(lambda t: any(name == each for each, _ in identities.list_all(t)))
