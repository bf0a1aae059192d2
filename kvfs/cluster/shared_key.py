"""The key that encrypts secrets in the metadata, the same for all nodes of a cluster.

The first node brings its own; it lies in the engine, encrypted by a key derived from the cluster's
secret, and each node keeps a copy in its store. So the engine alone reveals no secret.
"""

from pathlib import Path
from typing import Final

from kvfs.base import encryption
from kvfs.base.encryption import SecretKey
from kvfs.base.errors import AccessDenied, Corrupt
from kvfs.cluster.secrets import Secrets
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction

_TOP: Final = 0
_KEY: Final = keys.setting(_TOP, b"key")
_PURPOSE: Final = b"metadata"


async def share_key(engine: Engine, path: Path, secrets: Secrets) -> None:
    """Puts the cluster's key into the file `path`. After the cluster's secret was replaced, the
    newest one encrypts it from here on.

    Raises AccessDenied (by none of these secrets), what `Engine.transact` raises, Invalid,
    OSError."""
    own = encryption.open_key(path)
    wrapping = [SecretKey(each.derive(_PURPOSE)) for each in secrets]

    def fn(t: Transaction) -> SecretKey:
        packed = t.get(_KEY)
        if packed is None:
            t.put(_KEY, own.wrapped(wrapping[0], _PURPOSE))
            return own
        for by in wrapping:
            try:
                key = encryption.unwrap(packed, by, _PURPOSE)
            except Corrupt:
                continue
            if by is not wrapping[0]:
                t.put(_KEY, key.wrapped(wrapping[0], _PURPOSE))
            return key
        raise AccessDenied(
            "the key of the cluster's secrets was encrypted by another secret than those that this"
            " node has: give it that one with `kvfs node join`"
        )

    key = await engine.transact(fn)
    if key != own:
        encryption.replace_key(path, key)
