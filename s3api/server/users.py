"""Users and their key pairs, as the command line and the first start make them.

The engine is the node's own or one opened beside it. Secrets are encrypted with the store's key;
the key pair of the user that the first start makes is also in a file of the store, for an
administrator who missed the output.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvfs.base.encryption import KEY_NAME, SecretKey, open_key
from kvfs.base.errors import Exists, NotFound
from kvfs.meta.blocking_engine import BlockingEngine
from kvfs.meta.engine import Transaction
from kvfs.meta.records import User
from kvfs.tree import identities
from kvfs.tree.identities import secret_context
from s3api.auth import credentials
from s3api.auth.credentials import Credentials
from s3api.auth.key_holders import ADMINISTRATOR

CREDENTIALS_NAME: Final = "s3-credentials"
"""The file in the store with the administrator's key pair, as AWS tools read it."""
ALLOW_ALL: Final = (
    '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'
)


class Users:
    """The users of one store. A change is on disk when its method returns. Raises Invalid or
    Corrupt if the store's key is not usable."""

    def __init__(self, root: Path, engine: BlockingEngine) -> None:
        self._root = root
        self._engine = engine
        self._key: SecretKey = open_key(root / KEY_NAME)

    def add(self, name: str, policy: str = "") -> Credentials:
        """Adds a user and returns its key pair. Raises Exists, Invalid, TooLarge."""
        pair = credentials.generate()
        secret = credentials.encrypt_secret(self._key, pair)
        self._change(
            lambda t: identities.create(
                t, name, pair.access_key, secret, policy=policy, now=time.time_ns()
            )
        )
        return pair

    def rotate(self, name: str) -> Credentials:
        """Replaces a user's key pairs by a new one, and returns it. Raises NotFound."""
        pair = credentials.generate()
        secret = credentials.encrypt_secret(self._key, pair)
        self._change(
            lambda t: identities.rotate(t, name, pair.access_key, secret, now=time.time_ns())
        )
        if name == ADMINISTRATOR:
            self._write_file(pair)
        return pair

    def remove(self, name: str) -> None:
        """Raises NotFound."""
        self._change(lambda t: identities.remove(t, name))

    def set_enabled(self, name: str, enabled: bool) -> None:
        """Raises NotFound."""
        self._change(lambda t: identities.set_enabled(t, name, enabled))

    def set_policy(self, name: str, policy: str) -> None:
        """Sets the policy; empty: none. Raises NotFound, TooLarge."""
        self._change(lambda t: identities.set_policy(t, name, policy))

    def policy(self, name: str) -> str:
        """Raises NotFound."""
        return self._engine.read_now(lambda t: identities.get(t, name)).policy

    def list_all(self) -> list[tuple[str, User]]:
        """Returns all users in the order of names."""
        return self._engine.read_now(identities.list_all)

    def find(self, name: str) -> Credentials:
        """Returns a user's key pair. Raises NotFound, Corrupt."""
        user = self._engine.read_now(lambda t: identities.get(t, name))
        if not user.access_keys:
            raise NotFound(f"the user '{name}' has no access key: `kvfs s3 user rotate {name}`")
        access_key = user.access_keys[0]
        found = self._engine.read_now(lambda t: identities.find(t, access_key))
        if found is None:
            raise NotFound(f"the user '{name}' was changed meanwhile: try again")
        secret = self._key.decrypt(found.encrypted_secret, secret_context(access_key))
        return Credentials(access_key, secret.decode())

    def first_start(self) -> Credentials | None:
        """Makes the administrator where there is no user at all, and returns its key pair."""
        if self._engine.read_now(identities.list_all):
            self._restore_file()
            return None
        try:
            pair = self.add(ADMINISTRATOR, ALLOW_ALL)
        except Exists:  # another node of the cluster starts for the first time, too
            self._restore_file()
            return None
        self._write_file(pair)
        return pair

    def _change(self, fn: Callable[[Transaction], object]) -> None:
        self._engine.transact_now(fn)
        self._engine.sync_now()

    def _restore_file(self) -> None:
        """Repairs the file after a kill between the engine's commit and it."""
        if (self._root / CREDENTIALS_NAME).exists():
            return
        try:
            self._write_file(self.find(ADMINISTRATOR))
        except NotFound:
            pass  # it was removed, so there is nothing to write

    def _write_file(self, pair: Credentials) -> None:
        """Writes the file whole or not at all; 0600 from its first byte on."""
        path = self._root / CREDENTIALS_NAME
        draft = path.with_name(f".{CREDENTIALS_NAME}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(
                f"[default]\naws_access_key_id = {pair.access_key}\n"
                f"aws_secret_access_key = {pair.secret}\n"
            )
            file.flush()
            os.fsync(fd)
        draft.replace(path)
