"""A client's operations on names: look up, list, remove, rename, make directories."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import stat_result
from typing import Final, TypeVar

from kvfs.base.clock import file_time_ns
from kvfs.base.errors import Conflict, NotADirectory, NotEmpty, NotFound, Stale
from kvfs.client.file_status import Stat, describe
from kvfs.datastore import file_sync
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of
from kvfs.session import paths
from kvfs.session.paths import Path, joined, naming
from kvfs.session.session import Session
from kvfs.tree import lifecycle, name_escaping, published_view, tree
from kvfs.tree.inodes import is_directory, read_inodes
from kvfs.tree.lifecycle import Unsettled
from kvfs.tree.namespaces import MAX_NAME
from kvfs.vfs import stage_records
from kvfs.vfs.names.name_search import LOOKS, NameSearch
from kvfs.vfs.names.settled_move import settled_rename
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.post_commit import Changed, Finisher
from kvfs.vfs.stage_records import Options, StagingTarget
from kvfs.vfs.touches import Touches

T = TypeVar("T")
Parts = tuple[bytes, ...]
_PAGE: Final = 1_000
_ATTEMPTS: Final = 8
_ODD: Final = frozenset((b"", b".", b".."))


class _Following(bytes):
    """The point where a listing goes on, as the engine has it: the entry there may be gone by
    then."""


class NameOperations:
    """The names of one client's store; any thread."""

    def __init__(
        self, session: Session, touches: Touches, finisher: Finisher, node: NodeClient
    ) -> None:
        self._session = session
        self._touches = touches
        self._finisher = finisher
        self._node = node
        self._search = NameSearch(session, node)

    def stat(self, path: Parts) -> Stat:
        """See `Client.stat`."""
        found = self._read(path, lambda t: self._find(t, path))
        name = path[-1] if path else b""
        return describe(name, found.ino, found.inode, self._data(found.ino, found.inode))

    def exist(self, wanted: Sequence[Path]) -> list[bool]:
        """See `Client.exists`."""
        raw = paths.encode_all(wanted)
        boot = self._session.boot
        answers, missing = self._session.read(lambda t: _exist(t, raw, boot))
        for _ in range(LOOKS):
            entries = [each.at if isinstance(each, NotFound) else each for each in missing]
            if not self._search.find({each: None for each in entries if each is not None}):
                break
            answers, missing = self._session.read(lambda t: _exist(t, raw, boot))
        if missing:
            self._touches.missed(missing)
        return answers

    def entries(self, path: Parts, after: bytes) -> Iterator[Stat]:
        """See `Client.list`."""
        following = after
        while True:
            page, following = self.page(path, following)
            yield from page
            if not following:
                return

    def page(self, path: Parts, after: bytes) -> tuple[list[Stat], bytes]:
        """Returns the entries that come next, and where to go on; empty when these are the last."""

        def fn(t: Transaction) -> tuple[list[published_view.ListedInode], bytes]:
            found = self._find(t, path)
            if not is_directory(found.inode):
                raise NotADirectory("not a directory")
            start = after if isinstance(after, _Following) else _place(t, found.ino, after)
            return published_view.list_children(t, found.ino, start, _PAGE, self._session.boot)

        listed, following = self._list(path, fn)
        entries = [
            describe(each.name, each.ino, each.inode, self._data(each.ino, each.inode))
            for each in listed
        ]
        return entries, _Following(following)

    def remove(self, path: Parts, name: bytes) -> None:
        """See `Client.remove`."""
        now = file_time_ns()

        def fn(t: Transaction, changed: Changed) -> None:
            parent = self._directory(t, path)
            self._find(t, (*path, name))
            changed.name(parent, name, tree.unlink(t, parent, name, now, _keep))

        self._search.found(lambda: self._change(fn, (*path, name)))

    def remove_directory(self, path: Parts, name: bytes) -> None:
        """See `Client.rmdir`."""
        now = file_time_ns()
        self._leave_empty((*path, name))

        def fn(t: Transaction, changed: Changed) -> None:
            parent = self._directory(t, path)
            removed = tree.rmdir(t, parent, name, now, _keep)
            changed.name(parent, name, removed)
            if removed.marker is not None:
                changed.name(removed.ino, b"", removed.marker)

        self._change(fn, (*path, name))

    def _leave_empty(self, path: Parts) -> None:
        """Raises NotEmpty if a directory that is about to be removed holds files of other nodes."""

        def look(t: Transaction) -> int:
            found = self._find(t, path)
            return found.ino if is_directory(found.inode) and tree.is_empty(t, found.ino) else 0

        directory = self._read(path, look)
        if directory and not self._search.may_remove(directory):
            with naming(path):
                raise NotEmpty("the directory is not empty: other nodes have files in it")

    def rename(
        self, old: tuple[Parts, bytes], new: tuple[Parts, bytes], *, exclusive: bool
    ) -> None:
        """See `Client.rename`."""
        now = file_time_ns()
        flags = tree.RENAME_NOREPLACE if exclusive else 0
        source_path, target_path = (*old[0], old[1]), (*new[0], new[1])

        def move(
            settled: published_view.FoundInode | None, t: Transaction, changed: Changed
        ) -> bool:
            if settled is not None and _is_still(t, settled):
                lifecycle.synced(t, settled.ino)
            with naming(source_path):
                source = self._directory(t, old[0])
                self._find(t, source_path)
            with naming(target_path):
                target = self._directory(t, new[0])
            replaced = settled_rename(
                *(t, (source, old[1]), (target, new[1])),
                flags=flags,
                now=now,
                keep=_keep,
                settled=0 if settled is None else settled.ino,
            )
            if isinstance(replaced, Unsettled):
                return False
            changed.name(source, old[1])
            changed.name(target, new[1], replaced)
            return True

        for _ in range(_ATTEMPTS):
            settled = self._settle_source(old, new)
            step = partial(move, settled)
            try:
                with naming(source_path, target_path):
                    is_done, changed = self._search.found(lambda: self._finisher.commit(step))  # noqa: B023
            except Stale:
                if settled is None:
                    raise
                continue
            if is_done:
                self._finisher.finish(changed)
                return
        raise Conflict(f"{joined(source_path)}: others replace it all the time: try again")

    def _settle_source(
        self, old: tuple[Parts, bytes], new: tuple[Parts, bytes]
    ) -> published_view.FoundInode | None:
        """Puts the file that is about to replace a durable one on disk, and returns it. Raises
        OSError, Unavailable."""

        def fn(t: Transaction) -> published_view.FoundInode | None:
            source, target = self._directory(t, old[0]), self._directory(t, new[0])
            found = lifecycle.unsettled_source(t, source, old[1], target, new[1])
            return None if found is None else published_view.FoundInode(*found)

        try:
            found = self._session.read(fn)
        except (NotADirectory, NotFound):
            return None
        if found is not None:
            self._sync(found)
        return found

    def _sync(self, found: published_view.FoundInode) -> None:
        try:
            fd = self._session.files.open(found.ino, found.inode.version, os.O_RDONLY)
        except FileNotFoundError:
            self._node.bring(found.ino)  # it is on disk when it has come
            return
        try:
            file_sync.sync(fd)
        finally:
            os.close(fd)

    def make_directory(self, target: StagingTarget, options: Options) -> None:
        """See `Client.mkdir`."""
        author = self._session.author()
        self._change(
            lambda t, changed: stage_records.make_directory(t, target, options, author, changed),
            (*target.directory, target.name),
        )

    def _change(self, step: Callable[[Transaction, Changed], None], *named: Parts) -> None:
        with naming(*named):
            _, changed = self._finisher.commit(step)
        self._finisher.finish(changed)

    def _read(self, path: Parts, fn: Callable[[Transaction], T]) -> T:
        return self._looked_up(path, lambda: self._session.read(fn))

    def _looked_up(self, path: Parts, look: Callable[[], T]) -> T:
        try:
            with naming(path):
                return self._search.found(look)
        except NotFound as error:
            self._touches.found_nothing(error)
            raise

    def _list(self, path: Parts, fn: Callable[[Transaction], T]) -> T:
        """Does `_read` for a list of what is in a directory."""

        def namespace(t: Transaction) -> int:
            return namespace_of(self._find(t, path).ino)

        def look() -> T:
            return self._search.listed(
                fn, of=namespace, detail="records", limit=_PAGE, is_deep=False
            )

        return self._looked_up(path, look)

    def _find(self, t: Transaction, path: Parts) -> published_view.FoundInode:
        return published_view.find(t, path, self._session.boot)

    def _directory(self, t: Transaction, path: Parts) -> int:
        found = self._find(t, path)
        if not is_directory(found.inode):
            raise NotADirectory("a part of the path is not a directory")
        return found.ino

    def _data(self, ino: int, inode: Inode) -> stat_result | None:
        """Returns the data file's own attributes if they are the truth."""
        if inode.flags & Flag.SEALED or not stat.S_ISREG(inode.mode):
            return None
        try:
            return self._session.files.stat(ino, inode.version)
        except FileNotFoundError:
            return None


def _place(t: Transaction, directory: int, key: bytes) -> bytes:
    """Returns the place in the engine of the entry that shows this `Stat.key`."""
    if b"%" not in key or t.get(keys.entries(directory) + key) is not None:
        return key
    place = name_escaping.find(t, directory, key.removesuffix(b"/"))
    return key if place is None else place or name_escaping.NUL


def _exist(
    t: Transaction, wanted: list[bytes], boot: int
) -> tuple[list[bool], list[bytes | NotFound]]:
    """Returns whether each exists, and the missing entries, or the errors of their directories.
    Paths of one directory cost one look-up of it; then an entry each."""
    answers = [False] * len(wanted)
    missing: list[bytes | NotFound] = []
    prefixes: dict[bytes, bytes | NotFound] = {}
    entries: list[bytes] = []
    places: list[int] = []
    for at, path in enumerate(wanted):
        directory, _, name = path.rpartition(b"/")
        if directory not in prefixes:
            prefixes[directory] = _prefix(t, directory, boot)
        prefix = prefixes[directory]
        if type(prefix) is not bytes:
            missing.append(prefix)
            continue
        if len(name) > MAX_NAME:
            missing.append(NotFound("no such name"))
            continue
        if name in _ODD or b"%" in name:
            (found,) = published_view.find_many(t, [paths.parse(path)], boot)
            if isinstance(found, published_view.FoundInode):
                answers[at] = True
            else:
                missing.append(found)
            continue
        entries.append(prefix + name)
        places.append(at)
    there = published_view.exist(t, entries)
    for at, is_there in zip(places, there, strict=True):
        answers[at] = is_there
    if not all(there):
        missing += (entry for entry, is_there in zip(entries, there, strict=True) if not is_there)
    return answers, missing


def _prefix(t: Transaction, directory: bytes, boot: int) -> bytes | NotFound:
    """Returns the prefix of the entries of a directory; the error if there is no such directory."""
    ino = published_view.find_directory(t, paths.parse(directory), boot)
    return ino if isinstance(ino, NotFound) else keys.entries(ino)


def _is_still(t: Transaction, found: published_view.FoundInode) -> bool:
    """Returns whether nothing was published since."""
    (now,) = read_inodes(t, [found.ino])
    return now is not None and _content(now) == _content(found.inode)


def _content(inode: Inode) -> tuple[int, int, int]:
    return inode.version, inode.size, inode.mtime_ns


def _keep(_: int) -> bool:
    # An orphan first: a kill between the record's end and the data file's must not leak the latter.
    return True
