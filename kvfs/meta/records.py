"""The records that the metadata engine holds, and how they are packed: msgpack arrays.

A tagged record (Inode, Namespace, User, and the record of a node) ends with a map of tags, by
number, and takes no further fields: what is added to it is a tag. A program that does not know a
tag keeps it, byte for byte, when it rewrites the record; a further field it would drop. Of the
others fields are only ever appended: no program of another version rewrites them.
"""

from typing import Final

import msgspec

NAMESPACE_SHIFT: Final = 48
ROOT_INODE: Final = 1
"""The root of the mount. Its namespace id is 0; its children are namespaces."""
BLOCK_BYTES: Final = 64 << 20
"""The unit of placement of large files."""


def namespace_of(ino: int) -> int:
    """Returns the namespace id held in the high 16 bits of an inode number (0: the root itself)."""
    return ino >> NAMESPACE_SHIFT


def namespace_root(namespace_id: int) -> int:
    """Returns the inode number of a namespace's top directory."""
    return namespace_id << NAMESPACE_SHIFT | ROOT_INODE


class Flag:
    """State of a regular file's record. Directories and special files are PUBLISHED from the start.

    Plain numbers: arithmetic on enum.IntFlag costs a microsecond a time on the hot path.
    """

    PUBLISHED: Final = 1
    """Closed (or synced) at least once: visible outside the mount that made it."""
    SEALED: Final = 2
    """Unchanged since its checksums and size were recorded; size, blocks and times in the record
    are the truth. Without it the data file's own stat is the truth."""
    IMPLIED: Final = 4
    """A directory made because an object's key needs it: it goes with the last object below it."""
    ASSEMBLY: Final = 8
    """Parts of an upload are still received into it: it is not sealed."""
    COLD: Final = 16
    """Sealed, and the cold tier has its content (`tree.copies.cold_copies`): the data file may
    go."""
    RESERVED: Final = 32
    """Not published yet, but its name is taken all the same: made with O_EXCL in a cluster, or to
    be appended to. On a lone node it was made over NFS, and a start after a kill publishes it."""
    EVICTED: Final = 64
    EXPIRED: Final = 128
    UNAVAILABLE: Final = 256
    DAMAGED: Final = 512
    """The reason why the last name of an orphan went; none of these: its users removed it."""
    LOST: Final = EVICTED | EXPIRED | UNAVAILABLE | DAMAGED


class Tag:
    """Numbers of tags, of all records together; a number never changes its meaning. A writer of one
    asks `schema.has_tags` first."""

    PARENT_BLOCK: Final = 1
    """The block that a block continues: the one before it in a chain of prefixes."""
    EXPIRY: Final = 2
    """The time from which on it may go."""
    QUOTA_OWNER: Final = 3
    """The owner whose quota it counts for."""
    ETAG: Final = 4
    """The ETag that S3 gives it."""
    SWITCHES_TO: Final = 5
    """The coherence to which a namespace is being changed (`kvfs.tree.coherence_change`)."""
    ENDS_PEER: Final = 6
    """The coherence that a namespace gets when it ends being `peer`, or `peer` when that is asked
    back; a blank, and when it began (`kvfs.tree.copies.peer_end`)."""
    WITHOUT_ENGINE: Final = 7
    """The behaviour of a namespace while the engine is away (`kvfs.meta.engine_absence`)."""


Tags = dict[int, bytes]
"""Values by number, each packed as its tag alone knows."""


class Inode(msgspec.Struct, array_like=True, kw_only=True):
    """One inode. Times are nanoseconds since the epoch, `blocks` are of 512 bytes."""

    mode: int
    uid: int
    gid: int
    nlink: int
    size: int = 0
    blocks: int = 0
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    parent: int
    """The parent directory; for a file with several links, that of one of them (0: orphan)."""
    name: bytes
    """The name under `parent`."""
    flags: int = 0
    version: int = 0
    """The version of the data file; grows when a file's data are replaced as a whole under the same
    number."""
    boot: int = 0
    """0 when the data are known to be on disk, else the id of the boot in which they were written:
    after a power cut such a record is dropped, never served."""
    rdev: int = 0
    target: bytes = b""
    """The target of a symbolic link."""
    checksum: bytes = b""
    """xxh3-128 over the checksums of all chunks; empty until sealed."""
    btime_ns: int = 0
    """The time when it was made; 0: not known, an earlier version or a rebuild made it."""
    tags: Tags | None = None


class Namespace(msgspec.Struct, array_like=True, kw_only=True):
    """A top-level directory with its policy."""

    name: bytes
    kind: str = "durable"
    """'durable': nothing in it is ever dropped. 'cache': least recently used files are evicted."""
    capacity: int = 0
    """Bytes; 0: the store's own limit."""
    eviction: str = "lru"
    created_ns: int = 0
    """Time of its making, since the epoch; 0: not known, an earlier version made it."""
    coherence: str = ""
    """Coherence between hosts: 'strict', 'cache' or 'peer'; empty: strict if it is durable."""
    replicas: int = 0
    """Copies of each file beside its writer's."""
    acknowledge: str = "async"
    """When a close is acknowledged: 'async' with the writer's copy, 'sync' with its replicas."""
    media: list[str] = []
    """The media of its data, the preferred first: ram, ssd, or shared:NAME alone; empty: ssd."""
    cold: bool = False
    """Whether its files are kept in the cold tier before they are evicted."""
    locks: str = "host"
    """The reach of locks: 'host', or 'cluster'."""
    etag: str = "md5"
    """ETags of S3: 'md5' of the content for bodies that come by S3, 'md5-all' for files of the
    mount too, or 'fast' ones of another form (`tree.etags`)."""
    tags: Tags | None = None

    @property
    def is_strict(self) -> bool:
        """Whether an open sees every close before it, of any host."""
        return self.coherence == "strict" if self.coherence else self.kind != "cache"

    @property
    def is_peer(self) -> bool:
        """Whether its names and files are each node's own."""
        return self.coherence == "peer"

    @property
    def without_engine(self) -> str:
        """Its behaviour while the engine is away: 'read', 'wait' or 'refuse'
        (`kvfs.meta.engine_absence`)."""
        return (self.tags or {}).get(Tag.WITHOUT_ENGINE, b"read").decode()

    @property
    def switches_to(self) -> str:
        """The coherence to which it is being changed, while nodes have still to do their part of
        that; else empty."""
        tags = self.tags or {}
        value = tags.get(Tag.SWITCHES_TO) or tags.get(Tag.ENDS_PEER, b"")
        return value.partition(b" ")[0].decode()

    @property
    def ends_peer(self) -> bool:
        """Whether its names are becoming everybody's, until all nodes have done their part."""
        return Tag.ENDS_PEER in (self.tags or {})

    @property
    def is_asked_back(self) -> bool:
        """Whether it was to end being `peer`, and stays so."""
        return self.ends_peer and self.switches_to == "peer"

    @property
    def may_lag(self) -> bool:
        """Whether other nodes may hear of a new file after its close: not if an open sees every
        close before it, nor if others are to have copies."""
        return not self.is_strict and not self.replicas


class Usage(msgspec.Struct, array_like=True, kw_only=True):
    """The contents of a namespace in numbers, kept in the transaction that changes it."""

    bytes: int = 0
    """512 x the blocks of all its records, orphans included until they are reaped."""
    inodes: int = 0


class NodeUsage(msgspec.Struct, array_like=True, kw_only=True):
    """A node's part of a namespace whose files are each node's own, as it told others last."""

    bytes: int = 0
    inodes: int = 0
    has_files: bool = False
    """Whether it has any file."""
    granted: int = 0
    """Bytes of the namespace's capacity that no other node may fill."""
    keeps: int = 0
    """Bytes that it fills at most: fewer than it was granted while it gives some back."""
    lacks: bool = False
    """Whether others should give some of theirs back."""


class Holding(msgspec.Struct, array_like=True, kw_only=True):
    """One node's share of a file's data."""

    version: int
    """The version of the data file."""
    blocks: bytes = b""
    """A bit for each block of BLOCK_BYTES, the first lowest; empty: the whole file."""


class User(msgspec.Struct, array_like=True, kw_only=True):
    """A user who may sign requests."""

    access_keys: list[str]
    created_ns: int
    enabled: bool = True
    policy: str = ""
    """A policy document in JSON; empty: none, only what buckets allow."""
    tags: Tags | None = None


class AccessKey(msgspec.Struct, array_like=True, kw_only=True):
    """A key that requests are signed with."""

    user: str
    secret: bytes
    """Encrypted with the store's key (`kvfs.base.encryption`)."""
    created_ns: int


_encoder = msgspec.msgpack.Encoder()
pack = _encoder.encode
unpack_inode = msgspec.msgpack.Decoder(Inode).decode
unpack_namespace = msgspec.msgpack.Decoder(Namespace).decode
unpack_usage = msgspec.msgpack.Decoder(Usage).decode
unpack_node_usage = msgspec.msgpack.Decoder(NodeUsage).decode
unpack_holding = msgspec.msgpack.Decoder(Holding).decode
unpack_user = msgspec.msgpack.Decoder(User).decode
unpack_access_key = msgspec.msgpack.Decoder(AccessKey).decode
