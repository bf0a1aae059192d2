"""Users and their access keys, in the engine.

Plain functions of a transaction. They hold no secret in clear: the caller encrypts it with the
store's key, under `secret_context`, and decrypts what `find` returns.

Invariants
- Each access key belongs to one user, whose record lists it; both are written in one transaction.
- An access key is never given to another user while it is there.
"""

import re
from typing import Final, NamedTuple

from kvfs.base.errors import Corrupt, Exists, Invalid, NotFound, TooLarge
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import AccessKey, User, pack, unpack_access_key, unpack_user

MAX_POLICY: Final = 20 << 10
"""Bytes; S3's own limit for a bucket's policy."""
_is_user_name: Final = re.compile(r"[A-Za-z0-9+=,.@_-]{1,64}").fullmatch
_is_access_key: Final = re.compile(r"[A-Za-z0-9._-]{3,128}").fullmatch


class Identity(NamedTuple):
    """The identity behind an access key."""

    user: str
    enabled: bool
    policy: str
    encrypted_secret: bytes


def secret_context(access_key: str) -> bytes:
    """Returns the context of an access key's encrypted secret, so that it is good for that key
    alone."""
    return b"access key " + access_key.encode()


def create(
    t: Transaction, name: str, access_key: str, secret: bytes, *, policy: str = "", now: int
) -> None:
    """Adds a user with one access key; `secret` is encrypted, `now` in nanoseconds.

    Raises Exists (the user, or the access key), Invalid, TooLarge.
    """
    if not _is_user_name(name):
        raise Invalid(f"a user's name has 1 to 64 of A-Z a-z 0-9 + = , . @ _ -, not '{name}'")
    if t.get(keys.user(name)) is not None:
        raise Exists(f"there is a user '{name}' already")
    _check_policy(policy)
    _add_key(t, name, access_key, secret, now)
    _write(t, name, User(access_keys=[access_key], created_ns=now, policy=policy))


def get(t: Transaction, name: str) -> User:
    """Raises NotFound."""
    value = t.get(keys.user(name)) if _is_user_name(name) else None
    if value is None:
        raise NotFound(f"there is no user '{name}'")
    return unpack_user(value)


def list_all(t: Transaction) -> list[tuple[str, User]]:
    """Returns every user with its name, in the order of names."""
    prefix = keys.user("")
    return [
        (key[len(prefix) :].decode(), unpack_user(value))
        for key, value in t.scan(prefix, keys.after(prefix))
    ]


def set_enabled(t: Transaction, name: str, enabled: bool) -> User:
    """Lets a user sign requests, or not; returns the user. Raises NotFound."""
    user = get(t, name)
    user.enabled = enabled
    _write(t, name, user)
    return user


def set_policy(t: Transaction, name: str, policy: str) -> User:
    """Gives a user a policy document in JSON ('': none); returns the user. Raises NotFound,
    TooLarge."""
    _check_policy(policy)
    user = get(t, name)
    user.policy = policy
    _write(t, name, user)
    return user


def rotate(t: Transaction, name: str, access_key: str, secret: bytes, *, now: int) -> list[str]:
    """Replaces all access keys of a user by a new one; returns the old ones.

    Sessions that were started with an old one end too. Raises NotFound, Exists, Invalid.
    """
    user = get(t, name)
    _add_key(t, name, access_key, secret, now)
    old, user.access_keys = user.access_keys, [access_key]
    for gone in old:
        t.delete(keys.access_key(gone))
    _write(t, name, user)
    return old


def remove(t: Transaction, name: str) -> list[str]:
    """Removes a user; returns the access keys that it had. Raises NotFound."""
    user = get(t, name)
    for gone in user.access_keys:
        t.delete(keys.access_key(gone))
    t.delete(keys.user(name))
    return user.access_keys


def find(t: Transaction, access_key: str) -> Identity | None:
    """Returns the identity behind an access key; None if there is none. Raises Corrupt."""
    value = t.get(keys.access_key(access_key)) if _is_access_key(access_key) else None
    if value is None:
        return None
    found = unpack_access_key(value)
    user = t.get(keys.user(found.user))
    if user is None:
        raise Corrupt(f"the access key {access_key} belongs to no user: remove and add the user")
    record = unpack_user(user)
    return Identity(found.user, record.enabled, record.policy, found.secret)


def _add_key(t: Transaction, name: str, access_key: str, secret: bytes, now: int) -> None:
    if not _is_access_key(access_key):
        raise Invalid("an access key has 3 to 128 of A-Z a-z 0-9 . _ -")
    if t.get(keys.access_key(access_key)) is not None:
        raise Exists(f"the access key {access_key} is in use")
    record = AccessKey(user=name, secret=secret, created_ns=now)
    t.put(keys.access_key(access_key), pack(record))


def _write(t: Transaction, name: str, user: User) -> None:
    t.put(keys.user(name), pack(user))


def _check_policy(policy: str) -> None:
    if len(policy.encode()) > MAX_POLICY:
        raise TooLarge(f"a policy has at most {MAX_POLICY} bytes")
