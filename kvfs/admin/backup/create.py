"""Makes a backup of a store, beside its node or without one.

| step | after a kill |
|---|---|
| 1 sealed: files that are closed get their checksums | done again |
| 2 read: all metadata in one transaction, into a temporary file | nothing |
| 3 put: pages, contents | objects that the next `create` uses |
| 4 on disk, then the manifest | the same, or a whole backup |
| 5 older backups deleted: manifests first, then what no other one names | done again |

Invariants
- The metadata are of one moment. Contents are those of that moment, or they are left out: a name
  stands for one content (`contents`).
- A manifest names nothing that was not put before it.
"""

import base64
import contextlib
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Final, NamedTuple, Protocol

import msgspec

from kvfs.admin.backup import contents, manifest
from kvfs.admin.backup.contents import SHOWN, ContentWriter, StoredContent
from kvfs.admin.backup.manifest import Manifest, SortedTable
from kvfs.admin.backup.pages import TableWriter, object_of, rows
from kvfs.admin.backup.repository import Repository
from kvfs.admin.backup.selection import (
    WantedContent,
    caches,
    content_of,
    is_file,
    selected,
    shown_path,
)
from kvfs.admin.partial_replica import missing_namespaces, shown
from kvfs.base.clock import now
from kvfs.base.encryption import KEY_NAME, KEY_SIZE
from kvfs.base.errors import Conflict, Corrupt, KvfsError, NotFound, Unavailable
from kvfs.base.version import VERSION
from kvfs.cluster.node_identity import which_node
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.engine_copy import refuse_unfinished
from kvfs.meta.records import Flag, unpack_inode
from kvfs.meta.replica.replica_mark import read_mark
from kvfs.session.session import Session
from kvfs.tree import namespaces

Progress = Callable[[int], None]
_SEALED_AT_ONCE: Final = 256
_SEAL_S: Final = 60.0
_BRING_S: Final = 600.0
_PAUSE_S: Final = 0.1
_HEAD: Final = struct.Struct(">BI")
"""Lengths of a page's name, empty for a content, and of what follows it."""
_encode: Final = msgspec.msgpack.Encoder().encode
_content: Final = msgspec.msgpack.Decoder(WantedContent)


class RunningNode(Protocol):
    """The node of the store. Methods raise KvfsError."""

    def seal(self, inos: list[int]) -> bool:
        """Returns whether each of these is sealed by now, or in use."""

    def bring(self, ino: int) -> bool:
        """Returns whether a file's data are here by now; False: ask again. Raises NotFound."""


class Made(NamedTuple):
    """The result of a backup."""

    manifest: Manifest
    left_out: list[str]
    """The first files whose content is not in it."""
    deleted: list[str]
    """The backups that were deleted for it."""


def create(
    session: Session,
    repository: Repository,
    node: RunningNode | None,
    progress: Progress,
    *,
    keep: int = 0,
    with_secrets: bool = False,
) -> Made:
    """Makes a backup. `node`: None, if none runs; `keep`: the number of backups that stay, 0: all.

    Raises Conflict (the place has those of another store, or of a time to come; the node lacks
    metadata), Busy (a
    namespace is being changed), and what a Repository raises."""
    source = _source_of(session)
    base = manifest.newest_whole(repository)
    if base is not None and base.source != source:
        raise Conflict(
            f"{repository.shown} has the backups of another store ({base.source}, this one is"
            f" {source}): name another place for this one"
        )
    if node is not None:
        _seal(session, node)
    known = _known(repository, base)
    with tempfile.TemporaryFile(prefix="kvfs-backup-") as spool:
        made_ns = time.time_ns()
        manifest.require_past(repository, made_ns)
        found = session.read_as_it_is(lambda t: _read_all(t, spool, known))
        put = _Putter(session, repository, node, known)
        table = put.run(spool, base, progress)
        counts = put.writer.counts
        made = Manifest(
            name=manifest.name_at(made_ns),
            made_ns=made_ns,
            version=VERSION,
            source=source,
            schema=found.schema,
            records=found.records,
            contents=table,
            packs=sorted(put.writer.packs),
            large=counts.large,
            files=counts.files,
            bytes=counts.bytes,
            added_bytes=counts.added_bytes,
            in_cold_tier=counts.in_cold_tier,
            left_out=counts.left_out_files + found.unsealed_files,
            secret_key=_secret_key(session) if with_secrets else "",
        )
        repository.settle()
        manifest.write(repository, made)
        put.writer.forget_begun()
    inos = (found.unsealed + counts.left_out)[:SHOWN]
    left_out = session.read_as_it_is(lambda t: [shown_path(t, ino) for ino in inos])
    return Made(made, left_out, _delete_older(repository, keep) if keep else [])


def _known(repository: Repository, base: Manifest | None) -> set[str]:
    """Returns the pages of an earlier backup that are there still."""
    if base is None:
        return set()
    there = {name.rpartition("/")[2] for name in repository.names("pages")}
    return there.intersection(base.records.pages + base.contents.pages)


class _Found(msgspec.Struct):
    """The findings in the metadata."""

    records: SortedTable
    schema: str
    unsealed_files: int = 0
    unsealed: list[int] = []


class _Putter:
    """Puts pages and contents."""

    def __init__(
        self,
        session: Session,
        repository: Repository,
        node: RunningNode | None,
        known: set[str],
    ) -> None:
        self._session = session
        self._repository = repository
        self._node = node
        self._known = known
        self._table = TableWriter(self._put)
        self.writer = ContentWriter(repository, self._table, self._opened)

    def run(self, spool: IO[bytes], base: Manifest | None, progress: Progress) -> SortedTable:
        """Returns the table of the contents when all is put."""
        self.writer.run(self._wanted(spool), self._before(base), progress)
        return self._table.finish()

    def _before(self, base: Manifest | None) -> Iterator[tuple[bytes, StoredContent]]:
        """Yields the contents that an earlier backup has, up to the first page that is damaged:
        what is after it is put anew, and so are the pages."""
        if base is None:
            return
        try:
            yield from contents.stored(rows(self._repository, base.contents))
        except Corrupt:
            self._known.difference_update(base.contents.pages)

    def _wanted(self, spool: IO[bytes]) -> Iterator[WantedContent]:
        """Yields the contents that were found, and puts the pages between them."""
        spool.seek(0)
        while head := spool.read(_HEAD.size):
            name_bytes, size = _HEAD.unpack(head)
            name, data = spool.read(name_bytes), spool.read(size)
            if name:
                self._put(name.decode(), data)
            else:
                yield _content.decode(data)

    def _put(self, name: str, page: bytes) -> None:
        if name not in self._known:
            self._repository.put(object_of(name), page)

    def _opened(self, each: WantedContent) -> int | None:
        """Returns a descriptor of a content; one that another node has is fetched first."""
        files = self._session.files
        with contextlib.suppress(FileNotFoundError):
            return files.open_unseen(each.ino, each.version)
        if self._node is None or each.is_cold:
            return None
        end = now() + _BRING_S
        try:
            while not self._node.bring(each.ino) and now() < end:
                time.sleep(_PAUSE_S)
            return files.open_unseen(each.ino, each.version)
        except (KvfsError, FileNotFoundError):
            return None


def _read_all(t: Transaction, spool: IO[bytes], known: set[str]) -> _Found:
    """Reads all metadata of a backup, and spools what is to be put."""
    refuse_unfinished(t)
    namespaces.check_format(t)
    _refuse_partial(t)

    def sink(name: str, page: bytes) -> None:
        if name not in known:
            _spool(spool, name, page)

    table = TableWriter(sink)
    found = _Found(table.table, (t.get(keys.VERSION) or b"").decode())
    for key, value in selected(t):
        table.add(key, value)
        if key[:1] != keys.INODE:
            continue
        content = content_of(key, value)
        if content is not None:
            _spool(spool, "", _encode(content))
        elif _is_unsealed(value):
            found.unsealed_files += 1
            if len(found.unsealed) < SHOWN:
                found.unsealed.append(keys.unpack_u64(key, 1))
    table.finish()
    return found


def _is_unsealed(value: bytes) -> bool:
    """Returns whether it is a file that was closed once, and is written or not sealed yet."""
    inode = unpack_inode(value)
    return is_file(inode) and bool(inode.nlink) and bool(inode.flags & Flag.PUBLISHED)


def _spool(file: IO[bytes], name: str, data: bytes) -> None:
    file.write(_HEAD.pack(len(name), len(data)) + name.encode() + data)


def _refuse_partial(t: Transaction) -> None:
    """Raises Conflict if this node does not have all metadata of its cluster."""
    mark = read_mark(t)
    if mark is not None and mark.filled is not None:
        raise Conflict("the metadata replica of this node is being read anew: try again later")
    if found := missing_namespaces(t):
        raise Conflict(
            f"this node does not have all of {shown(found)}: list each of them here (`kvfs ls"
            " /NAME`), or make the backup on a node that has"
        )


def _seal(session: Session, node: RunningNode) -> None:
    """Has the nodes seal what is closed; goes on without where that takes too long: a file that is
    written for long is not sealed before."""

    def unsealed(t: Transaction) -> list[int]:
        spaces = caches(t)
        found = t.scan_keys(keys.UNSEALED, keys.after(keys.UNSEALED))
        return [keys.unpack_u64(key, 1) for key in found if key[1:3] not in spaces]

    end = now() + _SEAL_S
    for some in contents.batches(session.read_as_it_is(unsealed), _SEALED_AT_ONCE):
        with contextlib.suppress(NotFound, Unavailable):
            while not node.seal(some) and now() < end:
                time.sleep(_PAUSE_S)


def _source_of(session: Session) -> str:
    member = which_node(session.store)
    return session.store.identity.store if member is None else member.cluster


def _secret_key(session: Session) -> str:
    key = (session.store.root / KEY_NAME).read_bytes()[:KEY_SIZE]
    return base64.b64encode(key).decode()


def _delete_older(repository: Repository, keep: int) -> list[str]:
    """Deletes all backups but the newest ones, and what none of those names. Nothing is deleted
    while one of those is damaged: what it names is not known."""
    found = manifest.listed(repository)
    gone = [each.name for each in found[:-keep]]
    kept = [each.manifest for each in found[-keep:]]
    if not gone or None in kept:
        return []
    manifest.delete(repository, gone)
    delete_unnamed(repository, [each for each in kept if each is not None])
    return gone


def delete_unnamed(repository: Repository, kept: Sequence[Manifest]) -> None:
    """Deletes the objects that none of these backups names."""
    pages = {page for each in kept for page in each.records.pages + each.contents.pages}
    packs = {pack for each in kept for pack in each.packs}
    for name in list(repository.names("pages")):
        if name.rpartition("/")[2] not in pages:
            repository.delete(name)
    for name in list(repository.names("packs")):
        if name.rpartition("/")[2] not in packs:
            repository.delete(name)
    large = {
        contents.large_object(contents.content_at(key, stored))
        for each in kept
        for key, stored in contents.stored(rows(repository, each.contents))
        if not stored.pack
    }
    for name in list(repository.names("large")):
        if name not in large:
            repository.delete(name)
