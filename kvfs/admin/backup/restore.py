"""Makes a store, and for a cluster its engine's metadata, of a backup.

| step | after a kill |
|---|---|
| 1 the store made, with the mark of an unfinished copy | a store that no node opens; done again |
| 2 (cluster) the store is the first node of a new one | done again |
| 3 metadata read | done again |
| 4 contents put in their places, each compared with its checksum | those that are there are kept |
| 4b (cluster) the engine has the metadata, without files that have no content | done again |
| 5 on disk; the mark removed | a whole store |

Invariants
- Nothing is written where there is a store already, but for one that this was doing.
- A file is restored with the content that its record names, or not at all.
- A store has a cold tier of its own, by its id. A new store has none of the former one's objects:
  files that only these have are dropped, unless the new store takes the id over too.
- The metadata of a cluster are made in a temporary directory, and copied as a whole, compared.
"""

import base64
import contextlib
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from kvfs.admin.backup import contents, manifest
from kvfs.admin.backup.contents import StoredContent
from kvfs.admin.backup.manifest import Manifest
from kvfs.admin.backup.pages import Pair, digest, rows
from kvfs.admin.backup.repository import Repository
from kvfs.admin.backup.restored_records import BATCH, regular_files, settle
from kvfs.admin.backup.selection import WantedContent, belongs
from kvfs.base.descriptors import closing
from kvfs.base.encryption import KEY_NAME, SecretKey, replace_key
from kvfs.base.errors import UNDECODABLE, Corrupt, Exists, NotFound, NotSupported
from kvfs.cluster import node_identity
from kvfs.cluster.node_identity import Kept
from kvfs.cluster.secrets import generate, is_cluster_id
from kvfs.datastore import layout, places
from kvfs.datastore.checksum import checksum
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import NAME, Index, Sealed
from kvfs.datastore.kernel.filesystem_sync import sync_filesystem
from kvfs.datastore.layout import Store
from kvfs.datastore.tiered_files import data_files
from kvfs.meta import keys, schema
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Flag, Inode
from kvfs.meta.redis.calling import locate
from kvfs.meta.redis.restoring import Restoring
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.tree import lifecycle, tree
from kvfs.tree.inodes import read_inodes
from kvfs.tree.metadata_copy import copy_all

Progress = Callable[[int], None]
_MARK: Final = keys.copying(0)
_SMALL_AT_ONCE: Final = 256
_FIRST_NODE: Final = 1
_FIRST_INCARNATION: Final = 1
_DEADLINE_S: Final = 10.0


class Restored(msgspec.Struct):
    """The result of a restore."""

    name: str
    files: int = 0
    bytes: int = 0
    dropped: int = 0
    """Files of the backup that had no content in it."""
    in_cold_tier: int = 0
    """Files whose content the former store's cold tier alone has: dropped, or taken over."""
    damaged: list[str] = []
    """Objects of the place that are damaged or missing."""
    damaged_files: int = 0
    """Files that were dropped because of that."""
    has_secret_key: bool = False


def restore(
    repository: Repository,
    at: str,
    root: Path,
    engine_url: str,
    progress: Progress,
    *,
    skips_damaged: bool = False,
    takes_over: bool = False,
) -> Restored:
    """Restores a backup (`manifest.chosen`) into a new store; with `engine_url`, as the first node
    of a new cluster with that engine. `skips_damaged`: files whose content is damaged are dropped.
    `takes_over`: the former store, or cluster, is gone, and its id and cold tier are the new one's.

    Raises NotFound, Invalid, Exists (a store is there), Conflict (the engine is another cluster's),
    NotSupported (a lone store's id is none of a cluster; a later version made it), Corrupt (the
    backup is damaged), NoSpace, Unavailable."""
    chosen = manifest.chosen(repository, at)
    schema.require(chosen.schema.encode())
    if takes_over and engine_url and not is_cluster_id(chosen.source):
        raise NotSupported(
            "the backup is of a lone store, and a cluster cannot take over its cold tier: restore"
            " it without --engine, or without --take-over"
        )
    store = _new_store(root, chosen.source if takes_over else "")
    store.lock()
    try:
        with contextlib.closing(EmbeddedEngine(store.meta)) as local:
            _begin(store, local)
            turn = _Restore(repository, chosen, store, local, progress)
            turn.skips_damaged, turn.takes_over = skips_damaged, takes_over
            return layout.guarded(root, lambda: turn.run(engine_url))
    except (*UNDECODABLE, struct.error) as error:
        raise Corrupt(f"the backup {chosen.name} is damaged: a record in it is none") from error
    finally:
        store.unlock()


def _new_store(root: Path, store_id: str) -> Store:
    """Raises Exists if there is anything else than an unfinished restore, NoSpace, Invalid."""
    if (root / node_identity.SECRETS).exists() and not (root / "meta").exists():
        raise _in_the_way(root)
    return layout.create_store(root, store_id)


def _begin(store: Store, local: EmbeddedEngine) -> None:
    def fn(t: Transaction) -> bool:
        if t.get(_MARK) is not None and t.get(keys.VERSION) is None:
            return True
        if next(t.scan(b"", b"\xff"), None) is not None:
            return False
        t.put(_MARK, b"")
        return True

    if not local.transact_now(fn):
        raise _in_the_way(store.root)
    store.take_clean()


def _in_the_way(root: Path) -> Exists:
    return Exists(
        f"there is a store in {root}: a restore makes a new one; name another directory by --store,"
        " or stop its node and move it away"
    )


class _Restore:
    """One restore. The store is locked, and `local` the engine in it."""

    def __init__(
        self,
        repository: Repository,
        chosen: Manifest,
        store: Store,
        local: EmbeddedEngine,
        progress: Progress,
    ) -> None:
        self._repository = repository
        self._chosen = chosen
        self._store = store
        self._local = local
        self._progress = progress
        self.skips_damaged = False
        self.takes_over = False
        self._index = Index(local.database(NAME))
        self._held_pack = "", b""
        """The pack that was read last: it has the contents of many batches."""
        self.result = Restored(chosen.name, has_secret_key=bool(chosen.secret_key))

    def run(self, engine_url: str) -> Restored:
        """Raises what `restore` raises."""
        if self._chosen.secret_key:
            key = SecretKey(base64.b64decode(self._chosen.secret_key))
            replace_key(self._store.root / KEY_NAME, key)
        with contextlib.closing(data_files(self._store)) as files:
            if engine_url:
                self._found_cluster(engine_url)
                with (
                    tempfile.TemporaryDirectory(prefix="kvfs-restore-") as directory,
                    contextlib.closing(EmbeddedEngine(directory)) as records,
                ):
                    self._fill(records, files, keys.pack_node(_FIRST_NODE))
                    self._give_to_engine(records, engine_url)
            else:
                self._fill(self._local, files, b"")
            self._settle()
        self._store.mark_recovered(places.boot_of(self._store))
        self._local.transact_now(partial(self._finish, is_lone=not engine_url))
        trio.run(self._local.sync)
        return self.result

    def _fill(self, records: EmbeddedEngine, files: DataFiles, node: bytes) -> None:
        for batch in contents.batches(self._records(), BATCH):
            records.transact_now(lambda t, batch=batch: t.put_all(batch))  # type: ignore[misc]
        stored = contents.stored(rows(self._repository, self._chosen.contents))
        for some in contents.batches(stored, _SMALL_AT_ONCE):
            wanted = [(contents.content_at(key, where), where) for key, where in some]
            here = [each for each in self._put(files, records, wanted) if each is not None]
            self._index.store(here)
            records.transact_now(partial(settle, here=here, node=node, tier=self.takes_over))
        self._drop_rest(records)

    def _records(self) -> Iterator[Pair]:
        """Yields the metadata. Raises Corrupt at a key that no backup has: it would be taken for a
        node's own, or for the mark of this restore."""
        for key, value in rows(self._repository, self._chosen.records):
            if not belongs(key):
                raise Corrupt(f"the backup is damaged: it has the key {key[:64].hex()}")
            yield key, value

    def _put(
        self,
        files: DataFiles,
        records: EmbeddedEngine,
        wanted: list[tuple[WantedContent, StoredContent]],
    ) -> Iterator[Sealed | None]:
        """Puts contents in their places, and yields them; None: it is damaged, and left out."""
        inodes = records.read_now(lambda t: read_inodes(t, [each.ino for each, _ in wanted]))
        for (each, where), inode in zip(wanted, inodes, strict=True):
            if inode is None:
                continue
            try:
                sealed = _there(files, each)
                if sealed is None:
                    data = self._pack(where.pack) if where.pack else b""
                    sealed = self._put_one(files, each, where, inode, data)
            except Corrupt as error:
                self._damaged(error)
                yield None
                continue
            self.result.files += 1
            self.result.bytes += each.size
            self._progress(self.result.bytes)
            yield sealed

    def _pack(self, pack: str) -> bytes:
        """Returns a pack; what is damaged in it shows by the checksums of its files."""
        if self._held_pack[0] == pack:
            return self._held_pack[1]
        name = contents.pack_object(pack)
        try:
            data = self._repository.get(name)
        except NotFound:
            data = b""
        if digest(data) != pack:
            where = f"{self._repository.shown}/{name}"
            if where not in self.result.damaged:
                self.result.damaged.append(where)
        self._held_pack = pack, data
        return data

    def _put_one(
        self,
        files: DataFiles,
        each: WantedContent,
        where: StoredContent,
        inode: Inode,
        data: bytes,
    ) -> Sealed:
        """Makes the data file under its name: a kill leaves one that differs from its checksum.
        Raises Corrupt."""
        name = contents.pack_object(where.pack) if where.pack else contents.large_object(each)
        with closing(files.create(each.ino, each.version)) as fd:
            try:
                os.ftruncate(fd, each.size)
                if where.pack:
                    _write(fd, data[where.offset : where.offset + each.size])
                else:
                    self._repository.get_file(name, each.size, fd)
            except (NotFound, Corrupt):
                pass  # it is not there, or not all: its checksum differs
            sums = checksum(fd, each.size)
            if sums is None or sums.combined != each.checksum:
                files.unlink(each.ino, each.version)
                raise Corrupt(f"{self._repository.shown}/{name}")
            os.utime(fd, ns=(inode.atime_ns, inode.mtime_ns))
            return Sealed(each.ino, each.version, sums.chunks, os.fstat(fd).st_blocks)

    def _damaged(self, error: Corrupt) -> None:
        """Notes an object that is damaged. Raises Corrupt, unless such files are dropped."""
        if not self.skips_damaged:
            raise Corrupt(
                f"the backup {self._chosen.name} is damaged: {error} is missing or not what it was;"
                " restore another one (--at), or add --skip-damaged to go on without the files in"
                " it"
            )
        self.result.damaged_files += 1
        if str(error) not in self.result.damaged:
            self.result.damaged.append(str(error))

    def _drop_rest(self, records: EmbeddedEngine) -> None:
        """Drops the files that have no content here: they were written, or have no name."""
        now, after = time.time_ns(), 0
        while inos := records.read_now(partial(regular_files, after=after)):
            after = inos[-1]
            entries = self._index.get_many(inos)

            def fn(t: Transaction, inos: list[int] = inos) -> tuple[int, int]:
                dropped = cold = 0
                inodes = read_inodes(t, inos)
                for ino, inode, entry in zip(inos, inodes, entries, strict=True):  # noqa: B023
                    if inode is None or (entry is not None and entry.version == inode.version):
                        continue
                    is_cold = bool(inode.nlink and inode.flags & Flag.COLD)
                    cold += is_cold
                    if is_cold and self.takes_over:
                        continue
                    dropped += bool(inode.nlink and inode.flags & Flag.PUBLISHED and not is_cold)
                    lifecycle.evict(t, ino, now, "damaged")
                    tree.reap(t, ino)
                    t.delete(keys.unsealed(ino))
                    t.delete(keys.unpublished(ino))
                return dropped, cold

            dropped, cold = records.transact_now(fn)
            self.result.dropped += dropped
            self.result.in_cold_tier += cold

    def _found_cluster(self, url: str) -> None:
        """Makes the store the first node of a new cluster with this engine. Raises Conflict if it
        is another cluster's."""
        path = self._store.root / node_identity.SECRETS
        cluster = self._chosen.source if self.takes_over else os.urandom(8).hex()
        secrets, _ = node_identity.make_secret(path, generate(cluster))
        location, identity = locate(url), self._store.identity
        kept = Kept(secrets.cluster, _FIRST_NODE, _FIRST_INCARNATION)

        async def enrol() -> None:
            with contextlib.closing(Restoring(location, _DEADLINE_S)) as restoring:
                await restoring.enrol(
                    *(kept.cluster, identity.node, kept.node, kept.incarnation, secrets.digests, 0),
                    replace=False,
                )
                await restoring.restart()

        trio.run(enrol)
        node_identity.keep_node(self._store, kept)

    def _give_to_engine(self, records: EmbeddedEngine, url: str) -> None:
        """Copies the metadata to the engine, unless an earlier run did that."""
        records.transact_now(lambda t: t.put(keys.VERSION, self._chosen.schema.encode()))
        with contextlib.closing(DirectEngine(url)) as engine:
            if engine.read_now(lambda t: t.get(keys.VERSION)) is None:
                copy_all(records, engine, replace=False, progress=lambda _: None)
            trio.run(engine.sync)

    def _settle(self) -> None:
        """Returns when all data files are on disk."""
        with closing(os.open(self._store.data, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            if not sync_filesystem(fd):
                os.sync()

    def _finish(self, t: Transaction, *, is_lone: bool) -> None:
        if is_lone:
            t.put(keys.VERSION, self._chosen.schema.encode())
        t.delete(_MARK)


def _there(files: DataFiles, each: WantedContent) -> Sealed | None:
    """Returns the data file of a content that an earlier run put in its place."""
    try:
        fd = files.open_unseen(each.ino, each.version)
    except FileNotFoundError:
        return None
    with closing(fd):
        sums = checksum(fd, each.size)
        if sums is None or sums.combined != each.checksum:
            files.unlink(each.ino, each.version)
            return None
        return Sealed(each.ino, each.version, sums.chunks, os.fstat(fd).st_blocks)


def _write(fd: int, data: bytes) -> None:
    view, at = memoryview(data), 0
    while view:
        count = os.pwrite(fd, view, at)
        at, view = at + count, view[count:]
