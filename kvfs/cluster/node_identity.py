"""A store's record of its cluster: the secrets, and which node it is."""

from pathlib import Path
from typing import Final

import msgspec

from kvfs.base import private_file
from kvfs.base.errors import Corrupt
from kvfs.cluster import secrets
from kvfs.cluster.secrets import Secret, Secrets
from kvfs.datastore.layout import Store

SECRETS: Final = "cluster.key"
"""The usual file of the secrets, in the store."""
_NODE: Final = "node"
_LIMIT: Final = 1024


class Kept(msgspec.Struct, frozen=True):
    """The store's identity as a node of a cluster."""

    cluster: str
    node: int
    incarnation: int
    """The incarnation of its last start: an engine that knows only older ones lost data."""


def which_node(store: Store) -> Kept | None:
    """Returns the store's identity; None: it never joined a cluster. Raises Corrupt, Invalid,
    OSError."""
    path = store.root / _NODE
    text = private_file.read(path, _LIMIT)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Kept)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} is damaged ({error}): restore it from a backup") from None


def keep_node(store: Store, kept: Kept) -> None:
    """Raises OSError."""
    private_file.replace(store.root / _NODE, msgspec.json.encode(kept) + b"\n")


def forget_node(store: Store) -> None:
    """Makes it join as a new node next time. Raises OSError."""
    (store.root / _NODE).unlink(missing_ok=True)


def read_secrets(path: Path) -> Secrets | None:
    """Returns the secrets; None: there is no such file. Raises Invalid, OSError."""
    text = private_file.read(path, secrets.LIMIT)
    return None if text is None else secrets.parse(text, str(path))


def make_secret(path: Path, secret: Secret) -> tuple[Secrets, bool]:
    """Returns the secrets in the file, this one if there was none, and whether that is so. Raises
    Invalid, OSError."""
    made = private_file.make(path, secret.as_text().encode())
    found = read_secrets(path)
    return (Secrets((secret,)) if found is None else found), made


def keep_secrets(path: Path, those: Secrets) -> None:
    """Raises OSError."""
    private_file.replace(path, those.as_text().encode())
