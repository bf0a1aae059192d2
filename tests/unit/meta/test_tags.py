"""Records keep tags that this program does not know, through everything that rewrites them."""

from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest

from kvfs.cluster.node_records import NodeRecord, get_node, put_node, set_state
from kvfs.meta import keys, schema
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, Namespace, Tag, Tags, User, pack, unpack_inode
from kvfs.tree import identities, lifecycle, namespaces, tree
from kvfs.tree.inodes import AttributeChanges, set_attributes, write_inode
from kvfs.tree.rename import rename
from tests.unit.space import Space, new_inode

TAGS: Final[Tags] = {Tag.EXPIRY: bytes(8), 4711: b"\xffof a later version\0"}
SIZE: Final = 9


@pytest.fixture
def space() -> Space:
    return Space()


def _publish(t: Transaction, ino: int, version: int) -> object:
    return lifecycle.publish(
        t, ino, size=SIZE, blocks=8, mtime_ns=6, ctime_ns=6, boot=0, version=version
    )


def _seal(t: Transaction, ino: int) -> None:
    _publish(t, ino, 1)
    assert lifecycle.seal(
        t,
        ino,
        tree.read_inode(t, ino),
        version=1,
        size=SIZE,
        blocks=8,
        mtime_ns=6,
        ctime_ns=6,
        checksum=bytes(16),
    )
    lifecycle.reopen(t, ino)


STEPS: Final[dict[str, Callable[[Transaction, Space, int], object]]] = {
    "chmod": lambda t, _, ino: set_attributes(t, ino, AttributeChanges(mode=0o600), 20),
    "rename": lambda t, space, _: rename(
        t, space.root, b"a", space.root, b"b", now=20, keep=space.keep
    ),
    "link and unlink": lambda t, space, ino: (
        tree.link(t, ino, space.root, b"b", 20),
        tree.unlink(t, space.root, b"a", 21, space.keep),
    ),
    "publish": lambda t, _, ino: _publish(t, ino, 1),
    "seal and reopen": lambda t, _, ino: _seal(t, ino),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_an_inode_keeps_its_tags(
    space: Space, step: Callable[[Transaction, Space, int], object]
) -> None:
    ino = space.add(space.root, b"a")
    space.do(lambda t: write_inode(t, ino, _tagged(space.inode(ino))))
    before = space.do(lambda t: t.get(keys.inode(ino)))
    space.do(lambda t: step(t, space, ino))
    assert space.do(lambda t: t.get(keys.inode(ino))) != before, "the step rewrites nothing"
    assert space.inode(ino).tags == TAGS


def test_a_namespace_keeps_its_tags(space: Space) -> None:
    record = space.do(lambda t: namespaces.get(t, space.id))
    space.do(lambda t: t.put(keys.namespace(space.id), pack(_tagged(record))))
    space.do(lambda t: namespaces.set_policy(t, space.id, now=0, capacity=1 << 20))
    space.do(lambda t: namespaces.rename(t, space.id, b"other"))
    found = space.do(lambda t: namespaces.get(t, space.id))
    assert (found.capacity, found.name, found.tags) == (1 << 20, b"other", TAGS)


def test_a_user_keeps_its_tags(space: Space) -> None:
    space.do(lambda t: identities.create(t, "main", "AK" * 8, b"secret", now=1))
    user = space.do(lambda t: identities.get(t, "main"))
    space.do(lambda t: t.put(keys.user("main"), pack(_tagged(user))))
    space.do(lambda t: identities.set_enabled(t, "main", False))
    space.do(lambda t: identities.rotate(t, "main", "BK" * 8, b"secret", now=2))
    assert space.do(lambda t: identities.get(t, "main")).tags == TAGS


def test_a_node_s_record_keeps_its_tags(space: Space) -> None:
    record = NodeRecord(number=7, name="n7", store="s", incarnation=1)
    space.do(lambda t: put_node(t, _tagged(record)))
    space.do(lambda t: set_state(t, 7, lambda _old: True, "draining"))
    found = space.do(lambda t: get_node(t, 7))
    assert (found.state, found.tags) == ("draining", TAGS)


@pytest.mark.parametrize("record", [Inode, Namespace, User, NodeRecord])
def test_tags_come_last(record: type[msgspec.Struct]) -> None:
    """What is before them is read by its place."""
    assert record.__struct_fields__[-1] == "tags"


def test_a_record_of_the_version_before_is_read_and_one_without_tags_is_read_by_it() -> None:
    packed = msgspec.msgpack.decode(pack(new_inode()))
    assert packed[-1] is None
    former = msgspec.msgpack.encode(packed[:-1])
    assert unpack_inode(former) == new_inode()


@pytest.mark.parametrize(
    ("version", "schema_found", "has_tags"),
    [(b"1", 1, False), (b"1>2", 1, False), (b"2", 2, True)],
)
def test_metadata_of_neighbouring_schemas(
    space: Space, version: bytes, schema_found: int, has_tags: bool
) -> None:
    space.do(lambda t: t.put(keys.VERSION, version))
    space.do(schema.check)
    assert space.do(schema.found) == schema_found
    assert space.do(schema.has_tags) is has_tags
    assert space.do(schema.upgrade) is not has_tags
    assert space.do(lambda t: t.get(keys.VERSION)) == b"2"


def _tagged(record: Any) -> Any:
    return msgspec.structs.replace(record, tags=dict(TAGS))
