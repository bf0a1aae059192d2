"""The keys of namespaces whose names and files are each node's own (`--coherence peer`). Pure.

| key of such a namespace | kept |
|---|---|
| its record, its settings, the counter of its inode numbers | at the server, as any key |
| what each node has of it, and how far it is with a change of its coherence | at the server |
| its root directory: the record and what hangs on it | at the server |
| the ranges of numbers that the node has taken of that counter | by the node alone |
| its usage, and the times of its root directory | at the server as made, then by the node |
| all others | by the node alone |
"""

from collections.abc import Container, Iterable, Iterator
from typing import Final

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Usage, pack, unpack_namespace

_COUNTER: Final = keys.counter(0)[0]
_HELD: Final = keys.HELD[0]
_ENTRY: Final = keys.ENTRY[0]
_TIMES: Final = keys.TIMES[0]
_SHARED: Final = keys.OF_REGISTRY
_OF_INODE: Final = frozenset(b"".join(keys.OF_NAMESPACES)) - _SHARED - frozenset(b"csd")
_OF_NAMESPACE: Final = frozenset(keys.USAGE + b"d")
LOCAL_KINDS: Final = tuple(kind for kind in keys.OF_NAMESPACES if kind[0] not in _SHARED)
"""The classes of keys that begin with a namespace's id and may be local."""
_ANYWHERE: Final = tuple(bytes([kind]) for kind in _OF_INODE | _OF_NAMESPACE)
ROOT: Final = b"\0\0\0\0\0\1"
"""The number of a namespace's root directory within it."""
NOTHING: Final = pack(Usage())
"""The usage of a namespace without files."""
TOLD: Final = b"told"
"""A node has told what it holds, as the first step of its part in a change of the coherence."""


def is_local_key(key: bytes, spaces: Container[bytes]) -> bool:
    """Returns whether a key is a node's own. `spaces`: the ids of these namespaces, as keys have
    them."""
    kind = key[0]
    if kind in _OF_INODE:
        if key[1:3] not in spaces:
            return False
        return kind in (_ENTRY, _TIMES) or key[3:9] != ROOT
    if kind == _HELD:
        return key[3:5] in spaces
    if kind in _OF_NAMESPACE:
        return key[1:3] in spaces
    return kind == _COUNTER and len(key) > 3 and key[1:3] in spaces


def local_beginnings(space: bytes) -> Iterator[bytes]:
    """Yields beginnings of three bytes: each key that has one, and not ROOT after it, is a node's
    own, if the namespace with this id is of the kind. Of others `is_local_key` has to be asked."""
    return (kind + space for kind in _ANYWHERE)


def is_namespaces_own(key: bytes) -> bool:
    """Returns whether a local key is of the namespace itself: what changes that may replace or
    remove it at the server too."""
    return key[0] in _OF_NAMESPACE or (key[0] == _TIMES and key[3:9] == ROOT)


def peer_spaces(t: Transaction) -> frozenset[bytes]:
    """Returns the ids of these namespaces, as keys have them."""
    records = t.scan(keys.NAMESPACE, keys.after(keys.NAMESPACE))
    return frozenset(key[1:] for key, value in records if unpack_namespace(value).is_peer)


def everybodys(
    pairs: Iterable[tuple[bytes, bytes]], spaces: Container[bytes]
) -> Iterator[tuple[bytes, bytes]]:
    """Yields the pairs as a server has them: without those of one node alone, and with the usage of
    a namespace without files."""
    for key, value in pairs:
        if not is_local_key(key, spaces):
            yield key, value
        elif key[:1] == keys.USAGE:
            yield key, NOTHING
