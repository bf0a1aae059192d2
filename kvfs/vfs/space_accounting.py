"""Used space and total space: the only place that computes them.

Used is the engine's usage (512 x the blocks of all records, changed in the transactions that change
them, so right after a crash) plus the growth of files open for writing since their last publish:
passthrough writes are not seen, so the blocks of their data files are sampled. The engine counts
each file once; a node of a cluster has some of them, so its own index tells what its store holds,
and what is on its way there. Data in quarantine are used space, too.

The store's capacity is its setting, or less if the disk has less left for it: other programs use
the disk too, and a small reserve stays for the metadata, so that a full disk is met by a refused
create and not by a failed commit. The metadata's space counts against that capacity if it is more
than METADATA_BYTES: a user who gives files attributes or names without end fills the store.
"""

import os
from collections.abc import Callable, Set
from typing import Final, NamedTuple

from kvfs.base.media import is_shared
from kvfs.base.units import Capacity
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Usage, namespace_of
from kvfs.tree import namespaces
from kvfs.tree.inodes import BLOCK, read_inodes

_RESERVE_BYTES: Final = 64 << 20
_RESERVE_SHARE: Final = 64
METADATA_BYTES: Final = 128 << 20
"""Bytes that the metadata of 100,000 files and their reserve take."""
_BLOCK: Final = 4096
"""The block size of statvfs: clients choose O_DIRECT by it."""
STORE: Final = 0
"""Stands for the store as a whole in place of a namespace id."""


class Space(NamedTuple):
    """Bytes of the store, or of one namespace."""

    capacity: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.used)


class NamespaceSpace(NamedTuple):
    """A namespace and its space. Without a limit of its own its capacity is that of the store."""

    name: bytes
    kind: str
    limited: bool
    space: Space
    inodes: int
    writers: int
    """Files open for writing."""
    coming: int
    """Bytes that those are expected to grow yet: each to the size of the largest of late."""
    goes_cold: bool = False
    """Whether its files go to the cold tier of this node."""
    is_shared: bool = False
    """Whether its files lie in a store that several nodes share: this one's space is not theirs."""
    here: int = 0
    """Bytes of its data files on this node."""
    yields: bool = False
    """Whether data files may go here of which other nodes have copies."""
    elsewhere: Usage = Usage()
    """The usage of other nodes, where each counts its own: then the space is this node's."""
    capacity_of_all: int = 0
    """The capacity of all nodes, where each counts its own."""

    @property
    def is_cache(self) -> bool:
        return self.kind == "cache"

    @property
    def gives_way(self) -> bool:
        """Whether its files' space can be had for others."""
        return self.is_cache or self.goes_cold


class NodeSpace(NamedTuple):
    """The data files that one of several nodes has."""

    used: dict[int, int]
    """Bytes here, by namespace."""
    coming: int
    """Bytes on their way here."""
    settles: bool
    """Whether files come, or came and are not recorded yet: they may go when they are."""


class Census(NamedTuple):
    """One reading of everything."""

    store: Space
    namespaces: dict[int, NamespaceSpace]
    coming: int = 0
    """Bytes on their way here (`NodeSpace.coming`)."""
    settles: bool = False
    """Whether the node itself keeps files from going, for a while: they come, are not recorded yet,
    or are being sealed."""
    quarantined: int = 0
    """Bytes in quarantine that no namespace's usage counts."""

    @property
    def others(self) -> int:
        """Bytes that the engine's usage counts beyond those that this node has."""
        own = (each for each in self.namespaces.values() if not each.is_shared)
        return sum(each.space.used - each.here for each in own) - self.quarantined

    def space(self, namespace_id: int) -> Space:
        """Returns the space of a writer in the namespace: the tighter of its own limit and the
        store's (statvfs)."""
        holding = self.namespaces.get(namespace_id)
        if holding is None or not holding.limited:
            return self.store
        own = holding.space
        free = min(own.free, self.store.free)
        return Space(own.used + free, own.used)

    def attainable(self, namespace_id: int) -> int:
        """Returns the bytes that would be free in the namespace if all cache namespaces were empty,
        and files that other nodes have too were not here."""
        here = sum(each.here for each in self.namespaces.values() if each.gives_way or each.yields)
        attainable = self.store.free + self.coming + here
        holding = self.namespaces.get(namespace_id)
        if holding is None or not holding.limited:
            return attainable
        own = holding.space.capacity if holding.gives_way else holding.space.free
        return min(own, attainable)

    def statvfs(self, namespace_id: int, disk: os.statvfs_result) -> os.statvfs_result:
        """Returns the answer of statvfs(2) in a namespace (0: at the root): the truth within the
        limit there.

        The size is what is used and what is free: space that others on the disk took is neither.
        """
        space = self.space(namespace_id)
        holding = self.namespaces.get(namespace_id)
        within = self.namespaces.values() if holding is None else (holding,)
        used, free = space.used, space.free
        if holding is not None:
            used += holding.elsewhere.bytes
            if holding.limited:
                free = min(self.store.free, max(0, holding.capacity_of_all - used))
        used, free = -(-used // _BLOCK), free // _BLOCK
        sizes = (_BLOCK, _BLOCK, used + free, free, free)
        inodes = sum(each.inodes + each.elsewhere.inodes for each in within) + disk.f_favail
        return os.statvfs_result(
            (*sizes, inodes, disk.f_favail, disk.f_favail, 0, namespaces.MAX_NAME)
        )


def _nothing() -> tuple[int, int]:
    return 0, 0


class Accounting:
    """Takes the census of a store."""

    def __init__(
        self,
        root: str,
        limit: Capacity,
        writers: Callable[[], list[tuple[int, int]]],
        *,
        metadata: Callable[[], int] = int,
        quarantined: Callable[[], int] = int,
        sealing: Callable[[], Set[int]] = frozenset,
        local: Callable[[], NodeSpace] | None = None,
        elsewhere: Callable[[], tuple[int, int]] = _nothing,
        has_cold_tier: bool = False,
    ) -> None:
        """`writers` gives (inode, descriptor) of each file open for writing, `metadata` the bytes
        that the metadata take of the store's disk, `quarantined` the bytes in quarantine that no
        namespace's usage counts, `sealing` the namespaces of files that are being sealed, `local`
        in a cluster the local data files, `elsewhere` the bytes of data files on other media than
        the store's own, and the capacity of those."""
        self._root = root
        self._limit = limit
        self._writers = writers
        self._metadata = metadata
        self._quarantined = quarantined
        self._sealing = sealing
        self._usual: dict[int, int] = {}
        self._has_cold_tier = has_cold_tier
        self._local = local
        self._elsewhere = elsewhere
        self.others = 0
        """`Census.others`, as a client's node told it."""
        self.own_free = 0
        """Bytes that the last census found free in the store's own directory."""

    def census(self, t: Transaction) -> Census:
        """Reads everything: a few microseconds for each namespace and file open for writing."""
        open_files = self._open_files(t)
        listed = namespaces.list_all(t)
        growth = {number: sum(grown for _, grown in each) for number, each in open_files.items()}
        used = {each.id: each.usage.bytes + growth.get(each.id, 0) for each in listed}
        here, coming, settles = used, 0, False
        if self._local is not None:
            own, coming, settles = self._local()
            here = {each.id: own.get(each.id, 0) + growth.get(each.id, 0) for each in listed}
        shared = {each.id for each in listed if is_shared(each.namespace.media)}
        quarantined = self._quarantined()
        store = self._store(
            sum(size for number, size in here.items() if number not in shared)
            + coming
            + quarantined
            - self.others
        )
        sealing = self._sealing()
        holdings = {
            each.id: NamespaceSpace(
                each.namespace.name,
                each.namespace.kind,
                each.namespace.capacity > 0,
                Space(each.limit if each.namespace.capacity else store.capacity, used[each.id]),
                each.usage.inodes,
                len(open_files.get(each.id, ())),
                self._coming(each.id, [size for size, _ in open_files.get(each.id, ())]),
                each.namespace.cold and self._has_cold_tier,
                each.id in shared,
                here[each.id],
                self._local is not None,
                each.elsewhere,
                each.namespace.capacity,
            )
            for each in listed
        }
        settles |= any(
            each.gives_way or each.yields for number, each in holdings.items() if number in sealing
        )
        return Census(store, holdings, coming, settles, quarantined)

    def _store(self, used: int) -> Space:
        disk = os.statvfs(self._root)
        total, available = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        reserve = min(_RESERVE_BYTES, total // _RESERVE_SHARE)
        beside, capacity = self._elsewhere()
        own = max(0, used - beside)
        own_capacity = min(self._permitted(total), own + max(0, available - reserve))
        self.own_free = max(0, own_capacity - own)
        return Space(own_capacity + capacity, used)

    def _permitted(self, disk_bytes: int) -> int:
        """Returns the bytes of a disk of this size that data files may take, by the setting."""
        return max(0, self._limit.of(disk_bytes) - max(0, self._metadata() - METADATA_BYTES))

    @property
    def capacity(self) -> int:
        """Bytes that data files may take by the setting, on all media of this node."""
        disk = os.statvfs(self._root)
        return self._permitted(disk.f_blocks * disk.f_frsize) + self._elsewhere()[1]

    def _open_files(self, t: Transaction) -> dict[int, list[tuple[int, int]]]:
        """Returns the files open for writing, by namespace: the bytes of each, and those that its
        record does not say."""
        found: dict[int, list[tuple[int, int]]] = {}
        writers = self._writers()
        for (ino, fd), inode in zip(
            writers, read_inodes(t, [ino for ino, _ in writers]), strict=True
        ):
            blocks = os.fstat(fd).st_blocks
            grown = blocks - (inode.blocks if inode else 0)
            found.setdefault(namespace_of(ino), []).append((BLOCK * blocks, BLOCK * grown))
        return found

    def _coming(self, namespace_id: int, sizes: list[int]) -> int:
        """Returns the bytes by which files of these sizes are expected to grow yet. The largest
        size is forgotten gradually, with each census that does not see it."""
        if not sizes:
            return 0
        usual = max(*sizes, self._usual.get(namespace_id, 0) * 15 // 16)
        self._usual[namespace_id] = usual
        return sum(usual - size for size in sizes)
