"""The keys of the metadata schema. Numbers are big-endian, so that byte order is numeric order.

A directory's entry is its name followed by '/', every other entry its bare name: a depth-first scan
is S3's byte order, and a file `a` and a directory `a` can stand in one parent.

| key | value |
|---|---|
| `V` | schema version (`kvfs.meta.schema`) |
| `n` namespace id (2) | Namespace |
| `s` namespace id (2) | Usage |
| `c` namespace id (2) | next free inode number (8) |
| `i` inode (8) | Inode |
| `e` parent (8) name or name/ | inode (8) |
| `b` inode (8) parent (8) name | empty: one for each link of a file that has more than one |
| `x` inode (8) name | value of an extended attribute |
| `u` inode (8) | node: the file is not sealed (just made, or opened for writing there since) |
| `w` inode (8) | node: the file is not published yet |
| `r` inode (8) | node: a process may be making a data file of this number, which has no record |
| `o` inode (8) | empty: no link is left, but it may still be held |
| `g` namespace id (2) name | a setting of the namespace as a bucket, interpreted by its reader |
| `a` user name | User |
| `k` access key | AccessKey |
| `C` namespace id (2), 0: all | empty: a copy into this engine is not finished |
| `z` inode (8) version (8) checksum | an object of the cold tier that no record names |
| `t` time (8) any (8) | names that another process changed, until the mount has forgotten them |

A cluster has these too. A node is its number (2); a lone node has none, and stands as nothing in
the values above.

| key | value |
|---|---|
| `m` inode (8) | mtime (8) ctime (8) of a directory, if later than its record's |
| `c` namespace id (2) node | its ranges of inode numbers (8, 8 each), kept by the node alone |
| `p` inode (8) node | Holding: the node's part of the file's data |
| `h` node inode (8) | empty: the same, by node |
| `q` namespace id (2) node | NodeUsage: what the node has of a namespace kept by its nodes |
| `y` namespace id (2) node | how far the node is with a change of the namespace's coherence |
| `v` namespace id (2) digest of a path | a removal, while the namespace ends being kept by nodes |
| `d` namespace id (2) node | whether the node may make files there that nobody else knows of |
| `d` namespace id (2) | the node that alone changes names there (`kvfs.meta.exclusive`) |
| `N` node | Node |
| `K` inode (8) `f` or `r` | the locks on a file, of flock or on ranges, that reach all nodes |
| `K` inode (8) `a` | Holder: the run of a node that may append to the file |
| `L` name | Claim: the node that does a job which only one at a time may do |
| `G` | the nodes that know who holds which name of namespaces kept by their nodes |
| `P` namespace id (2), 0: those made from now on | empty: its keys are in a shard of its own |
| `I` | Intention: a change of a namespace that is under way over two shards |
| `I` namespace id (2) | the last such change that reached this namespace, or may not |
"""

import struct
from typing import Final

SCHEMA: Final = 2
VERSION: Final = b"V"
OF_NAMESPACES: Final = tuple(bytes([kind]) for kind in b"Kbdegcimnopqrsuvwxyz")
"""Classes whose keys begin with a namespace's id, by itself or as the high bits of a number."""
OF_REGISTRY: Final = frozenset(b"gnqvy")
"""Classes among them that are about a namespace as a whole: their keys lie together."""
NAMESPACE: Final = b"n"
USAGE: Final = b"s"
COUNTER: Final = b"c"
INODE: Final = b"i"
ENTRY: Final = b"e"
XATTR: Final = b"x"
RESERVED: Final = b"r"
ORPHAN: Final = b"o"
UNSEALED: Final = b"u"
UNPUBLISHED: Final = b"w"
TIMES: Final = b"m"
PLACEMENT: Final = b"p"
HELD: Final = b"h"
LOCKS: Final = b"K"
NOTICE: Final = b"t"
NODES: Final = b"N"
PLACE: Final = b"P"
NODE_USAGE: Final = b"q"
HOMES: Final = b"G"
INTENTION: Final = b"I"
"""The classes, by which keys begin; hot paths put keys together themselves."""
DELEGATIONS: Final = (b"d", b"e")
"""The range of delegations."""
COPYING: Final = (b"C", b"D")
"""The range of marks of unfinished copies."""
_u16 = struct.Struct(">H")
_u64 = struct.Struct(">Q")
pack_u16 = _u16.pack
pack_u64 = _u64.pack


pack_node = _u16.pack
"""A node's number, as it stands in keys and values."""


def unpack_node(value: bytes) -> int:
    """Returns a node's number; 0: a lone node's."""
    return int(_u16.unpack(value)[0]) if value else 0


def unpack_u64(value: bytes, offset: int = 0) -> int:
    """Returns the number at `offset`."""
    return int(_u64.unpack_from(value, offset)[0])


def namespace(namespace_id: int) -> bytes:
    return NAMESPACE + _u16.pack(namespace_id)


def setting(namespace_id: int, name: bytes) -> bytes:
    return b"g" + _u16.pack(namespace_id) + name


def usage(namespace_id: int) -> bytes:
    return USAGE + _u16.pack(namespace_id)


def counter(namespace_id: int) -> bytes:
    return COUNTER + _u16.pack(namespace_id)


def own_counter(namespace_id: int, node: bytes) -> bytes:
    return COUNTER + _u16.pack(namespace_id) + node


def inode(ino: int) -> bytes:
    return INODE + pack_u64(ino)


def file_entry(parent: int, name: bytes) -> bytes:
    return ENTRY + pack_u64(parent) + name


def directory_entry(parent: int, name: bytes) -> bytes:
    return ENTRY + pack_u64(parent) + name + b"/"


def entries(parent: int) -> bytes:
    """Returns the prefix of all entries of a directory."""
    return ENTRY + pack_u64(parent)


def is_entry(key: bytes) -> bool:
    """Returns whether the key is a name in a directory."""
    return key.startswith(ENTRY)


def backlink(ino: int, parent: int, name: bytes) -> bytes:
    return b"b" + pack_u64(ino) + pack_u64(parent) + name


def backlinks(ino: int) -> bytes:
    return b"b" + pack_u64(ino)


def xattr(ino: int, name: bytes) -> bytes:
    return XATTR + pack_u64(ino) + name


def xattrs(ino: int) -> bytes:
    return XATTR + pack_u64(ino)


def unsealed(ino: int) -> bytes:
    return UNSEALED + pack_u64(ino)


def unpublished(ino: int) -> bytes:
    return UNPUBLISHED + pack_u64(ino)


def reserved(ino: int) -> bytes:
    return RESERVED + pack_u64(ino)


def orphan(ino: int) -> bytes:
    return ORPHAN + pack_u64(ino)


def times(ino: int) -> bytes:
    return TIMES + pack_u64(ino)


def placement(ino: int, node: bytes) -> bytes:
    return PLACEMENT + pack_u64(ino) + node


def placements(ino: int) -> bytes:
    return PLACEMENT + pack_u64(ino)


def held(node: bytes, ino: int) -> bytes:
    return HELD + node + pack_u64(ino)


def delegation(namespace_id: int, node: bytes) -> bytes:
    return b"d" + _u16.pack(namespace_id) + node


def delegations(namespace_id: int) -> bytes:
    return b"d" + _u16.pack(namespace_id)


exclusive = delegations
"""The key of the delegation that at most one node holds."""
_EXCLUSIVE: Final = len(exclusive(0))
_DELEGATION: Final = exclusive(0)[0]


def node_usage(namespace_id: int, node: bytes) -> bytes:
    return NODE_USAGE + _u16.pack(namespace_id) + node


def switched(namespace_id: int, node: bytes) -> bytes:
    return b"y" + _u16.pack(namespace_id) + node


def removed(namespace_id: int, digest: bytes) -> bytes:
    return b"v" + _u16.pack(namespace_id) + digest


def is_delegation(key: bytes) -> bool:
    return key.startswith(b"d")


def is_exclusive(key: bytes) -> bool:
    """Returns whether it is the key of an exclusive delegation."""
    return len(key) == _EXCLUSIVE and key[0] == _DELEGATION


def parse_delegation(key: bytes) -> tuple[int, int]:
    """Returns namespace and node; 0: it is the exclusive one."""
    return int(_u16.unpack_from(key, 1)[0]), unpack_node(key[3:])


def node(number: int) -> bytes:
    return NODES + pack_node(number)


def locks(ino: int, whole: bool) -> bytes:
    return LOCKS + pack_u64(ino) + (b"f" if whole else b"r")


def append_lease(ino: int) -> bytes:
    return LOCKS + pack_u64(ino) + b"a"


def is_append_lease(key: bytes) -> bool:
    return key[:1] == LOCKS and key[9:] == b"a"


def claim(name: str) -> bytes:
    return b"L" + name.encode()


def cold_object(ino: int, version: int, checksum: bytes) -> bytes:
    return b"z" + pack_u64(ino) + pack_u64(version) + checksum


def place(namespace_id: int) -> bytes:
    return PLACE + _u16.pack(namespace_id)


def reached(namespace_id: int) -> bytes:
    """Returns the key, in a namespace's own shard, of the last change over two shards there."""
    return INTENTION + _u16.pack(namespace_id)


def user(name: str) -> bytes:
    return b"a" + name.encode()


def access_key(name: str) -> bytes:
    return b"k" + name.encode()


def notice(time_ns: int, unique: bytes) -> bytes:
    return NOTICE + pack_u64(time_ns) + unique


def copying(namespace_id: int) -> bytes:
    return b"C" + _u16.pack(namespace_id)


def parse_copying(key: bytes) -> int:
    """Returns the namespace."""
    return int(_u16.unpack_from(key, 1)[0])


def after(prefix: bytes) -> bytes:
    """Returns the least key greater than every key that starts with `prefix` (which must not end in
    0xff bytes only)."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1])
