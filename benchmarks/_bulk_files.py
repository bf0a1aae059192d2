"""Many files in a lone node's store that is stopped, or at a cluster's server while no node runs,
by the functions and records with which the product makes them.

There are directories of a thousand files each, whose names are digests. In a store all have the
content of one file that the node wrote and sealed: each data file is a link to one of a few copies
of it, so that millions of them take no room. At a server a node that no store has holds them.
"""

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import NAME, Index, Sealed
from kvfs.datastore.layout import Store, open_store
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.gathered_writes import GatheredWrites
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Flag, Inode, namespace_root
from kvfs.meta.redis.scripts import TOP, keys_of
from kvfs.tree import namespaces, tree
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inode

EACH: Final = 1_000
"""Files of a directory."""
_TOGETHER: Final = 8
"""Directories that are made in one transaction."""
_ELSEWHERE: Final = keys.pack_node(60_000)
"""The number of a node that no store has."""
_MOST_LINKS: Final = 60_000
"""Of one file: ext4 allows 65,000."""
_DIGITS: Final = 64
"""Of a file's name."""
_OF_FILES: Final = frozenset(b"eiph")
"""The kinds of the keys that each file has of its own."""


def path_of(number: int) -> str:
    """The path of a file below its namespace."""
    directory, at = divmod(number, EACH)
    return f"{directory:06}/{_names(directory)[at].decode()}"


def fill_store(root: Path, namespace: str, sample: int, count: int) -> None:
    """Makes so many files like the one with this inode, which is sealed."""
    store = open_store(root)
    with contextlib.closing(EmbeddedEngine(store.meta)) as engine:
        inode = engine.read_now(lambda t: read_inode(t, sample))
        index = Index(engine.database(NAME))
        known = index.get(sample)
        assert inode.checksum, "it is sealed"
        assert known is not None
        number = engine.read_now(lambda t: namespaces.by_name(t, namespace.encode())[0])
        links = _Links(store, sample, inode.version)
        for some in _parts(count):
            made = engine.transact_now(lambda t: _make(t, number, some, inode))  # noqa: B023
            links.make(made)
            sums, blocks = known.chunks, known.blocks
            index.store(Sealed(ino, inode.version, sums, blocks) for ino in made)


def fill_server(ask: Callable[..., Any], prefix: str, namespace: str, count: int) -> None:
    """Makes so many sealed files, each held by a node elsewhere. `ask` sends a command, and returns
    its answer."""
    values = keys_of(prefix, TOP)[0]
    gathered = _Gathered(lambda key: ask("HGET", values, key))
    number = namespaces.by_name(gathered, namespace.encode())[0]
    inode = Inode(
        mode=stat.S_IFREG | 0o644,
        uid=0,
        gid=0,
        nlink=0,
        size=4096,
        blocks=8,
        atime_ns=0,
        mtime_ns=0,
        ctime_ns=0,
        parent=0,
        name=b"",
        flags=Flag.PUBLISHED | Flag.SEALED,
        checksum=bytes(range(16)),
    )
    for some in _parts(count):
        made = _make(gathered, number, some, inode)
        for ino in made:
            placements.hold(gathered, ino, 0)
        words = [part for pair in gathered.taken() for part in pair]
        ask("HSET", values, *words)


def _parts(count: int) -> Iterator[range]:
    directories = count // EACH
    for first in range(0, directories, _TOGETHER):
        yield range(first, min(directories, first + _TOGETHER))


def _make(t: Transaction, namespace_id: int, directories: range, like: Inode) -> list[int]:
    """Makes directories with their files, which are like this one; returns the numbers of the
    files."""
    first = namespaces.allocate_inodes(t, namespace_id, len(directories) * (EACH + 1))
    now, made = time.time_ns(), list[int]()
    like = msgspec.structs.replace(like, atime_ns=now, mtime_ns=now, ctime_ns=now)
    directory = msgspec.structs.replace(
        like, mode=stat.S_IFDIR | 0o755, size=0, blocks=0, flags=Flag.PUBLISHED, checksum=b""
    )
    for number in directories:
        new = msgspec.structs.replace(directory)
        parent = tree.add(t, namespace_root(namespace_id), b"%06d" % number, first, new)
        for at, name in enumerate(_names(number)):
            inode = msgspec.structs.replace(like)
            made.append(tree.add(t, parent, name, first + 1 + at, inode))
        first += EACH + 1
    return made


def _names(directory: int) -> list[bytes]:
    seeds = (b"%d %d" % (directory, number) for number in range(EACH))
    return sorted(hashlib.blake2b(seed, digest_size=32).hexdigest().encode() for seed in seeds)


class _Gathered(GatheredWrites):
    """What is written to a server at whose metadata nobody else works."""

    node = _ELSEWHERE

    def __init__(self, read: Callable[[bytes], bytes | None]) -> None:
        super().__init__(writable=True)
        self._read = read
        self._known: dict[bytes, bytes | None] = {}

    def get(self, key: bytes, /) -> bytes | None:
        if key in self.writes:
            return self.writes[key]
        if key[0] in _OF_FILES and key not in self._known and len(key) > _DIGITS:
            return None  # a name of a file, all of which are new
        if key not in self._known:
            self._known[key] = self._read(key)
        return self._known[key]

    def get_many(self, names: Any, /) -> list[bytes | None]:
        return [self.get(key) for key in names]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        """Yields nothing: what is looked for is of files that are new."""
        del start, end
        return iter(())

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        del start, end
        return iter(())

    def taken(self) -> list[tuple[bytes, bytes]]:
        """Returns all that was written since the last time, of which it remembers little."""
        written = [(key, value) for key, value in self.writes.items() if value is not None]
        for key, value in written:
            if key in self._known:
                self._known[key] = value
        self.writes.clear()
        return written


class _Links:
    """Data files that are links to copies of one."""

    def __init__(self, store: Store, sample: int, version: int) -> None:
        self._files = DataFiles(store.data)
        self._version = version
        self._original = Path(self._files.path(sample, version))
        self._sources = self._copies()
        self._made: set[int] = set()

    def make(self, inos: list[int]) -> None:
        for ino in inos:
            path = self._files.path(ino, self._version)
            if ino >> 10 not in self._made:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                self._made.add(ino >> 10)
            os.link(next(self._sources), path)

    def _copies(self) -> Iterator[str]:
        """A file with the content, again and again, until it has as many links as it may; then
        another one."""
        content = self._original.read_bytes()
        while True:
            copy = self._original.with_suffix(f".copy{time.monotonic_ns()}")
            copy.write_bytes(content)
            for _ in range(_MOST_LINKS):
                yield str(copy)
            copy.unlink()
