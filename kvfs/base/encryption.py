"""Secrets at rest: encrypted with a key that lies beside the engine, readable by its owner alone.

XChaCha20-Poly1305 of libsodium: its nonces are long enough to be random, so nothing need be counted
across processes and restarts. A reader of the whole store has key and ciphertext; protected are
copies of the engine: backups, exports, another node's replica.
"""

import hashlib
import os
from pathlib import Path
from typing import Final

from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_decrypt,
    crypto_aead_xchacha20poly1305_ietf_encrypt,
)
from nacl.bindings.crypto_aead import crypto_aead_xchacha20poly1305_ietf_NPUBBYTES
from nacl.exceptions import CryptoError

from kvfs.base import private_file
from kvfs.base.errors import Corrupt, Invalid

KEY_NAME: Final = "secret.key"
"""The file in the store with the key that encrypts secrets in its metadata."""
KEY_SIZE: Final = 32
_NONCE_SIZE: Final = crypto_aead_xchacha20poly1305_ietf_NPUBBYTES


class SecretKey:
    """A key of KEY_SIZE bytes. Its repr does not show it."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_SIZE:
            raise Invalid(f"an encryption key has {KEY_SIZE} bytes")
        self._key = key

    def __repr__(self) -> str:
        return "SecretKey(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretKey) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def wrapped(self, by: "SecretKey", context: bytes) -> bytes:
        """Returns this key, encrypted by another one."""
        return by.encrypt(self._key, context)

    def derived(self, purpose: bytes) -> bytes:
        """Returns 32 bytes that follow from this key, and do not reveal it."""
        return hashlib.blake2b(purpose, digest_size=32, key=self._key).digest()

    def encrypt(self, plain: bytes, context: bytes) -> bytes:
        """Returns nonce and ciphertext; `context` names the purpose and must be given to decrypt
        it."""
        nonce = os.urandom(_NONCE_SIZE)
        return nonce + crypto_aead_xchacha20poly1305_ietf_encrypt(plain, context, nonce, self._key)

    def decrypt(self, encrypted: bytes, context: bytes) -> bytes:
        """Decrypts. Raises Corrupt if it was changed, or made with another key or for another
        context."""
        nonce, text = encrypted[:_NONCE_SIZE], encrypted[_NONCE_SIZE:]
        try:
            return crypto_aead_xchacha20poly1305_ietf_decrypt(text, context, nonce, self._key)
        except (CryptoError, ValueError):
            raise Corrupt(
                "a secret cannot be decrypted: it is damaged, or the store's key was replaced"
            ) from None


def open_key(path: Path) -> SecretKey:
    """Returns the key in the file `path`, made if missing; of several processes that make it one
    wins.

    Raises Invalid (others may read the file), Corrupt (it holds no key), OSError.
    """
    try:
        return _read(path)
    except FileNotFoundError:
        private_file.make(path, os.urandom(KEY_SIZE))
        return _read(path)


def unwrap(wrapped: bytes, by: SecretKey, context: bytes) -> SecretKey:
    """Decrypts the result of `SecretKey.wrapped`. Raises Corrupt: made by another key, or
    damaged."""
    return SecretKey(by.decrypt(wrapped, context))


def replace_key(path: Path, key: SecretKey) -> None:
    """Puts this key into the file `path`, replacing an existing one. Raises OSError."""
    private_file.replace(path, key._key)


def _read(path: Path) -> SecretKey:
    with open(path, "rb") as file:
        if private_file.is_open_to_others(file.fileno()):
            raise Invalid(f"others may read or write {path}: chmod 600 it, and rotate all users")
        key = file.read(KEY_SIZE + 1)
    if len(key) != KEY_SIZE:
        raise Corrupt(f"{path} holds no key: restore it from a backup, or remove it and add users")
    return SecretKey(key)
