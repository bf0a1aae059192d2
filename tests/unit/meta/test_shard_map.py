"""Which shard has a key, and how a transaction is divided among shards."""

import pytest

from kvfs.base.errors import NotSupported
from kvfs.meta import keys
from kvfs.meta.records import namespace_root
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.shards.intention import Steps, forbid
from kvfs.meta.shards.shard_map import CLOSED, GATHERED, OWN, SHUT, WITHDRAWN, ShardMap

INO = namespace_root(7) + 5
NODE = keys.pack_node(3)
OF_THE_NAMESPACE = (
    keys.usage(7),
    keys.counter(7),
    keys.own_counter(7, NODE),
    keys.inode(INO),
    keys.file_entry(INO, b"a"),
    keys.directory_entry(INO, b"a"),
    keys.backlink(INO, INO, b"a"),
    keys.xattr(INO, b"a"),
    keys.unsealed(INO),
    keys.unpublished(INO),
    keys.reserved(INO),
    keys.orphan(INO),
    keys.times(INO),
    keys.placement(INO, NODE),
    keys.held(NODE, INO),
    keys.delegation(7, NODE),
    keys.locks(INO, True),
    keys.append_lease(INO),
    keys.cold_object(INO, 1, b"c"),
    keys.reached(7),
)
OF_ALL = (
    keys.VERSION,
    keys.namespace(7),
    keys.setting(7, b"a"),
    keys.switched(7, NODE),
    keys.node_usage(7, NODE),
    keys.place(7),
    keys.place(0),
    keys.counter(0),
    keys.inode(1),
    keys.directory_entry(1, b"a"),
    keys.times(1),
    keys.node(7),
    keys.claim("\0\7"),
    keys.user("\0\7"),
    keys.access_key("\0\7"),
    keys.copying(7),
    keys.INTENTION,
)


@pytest.fixture
def shards() -> ShardMap:
    found = ShardMap()
    found.note(keys.place(7), OWN)
    return found


@pytest.mark.parametrize("key", OF_THE_NAMESPACE)
def test_a_namespace_with_a_place_has_its_keys_in_its_shard(shards: ShardMap, key: bytes) -> None:
    assert shards.shard_of(key) == 7
    assert ShardMap().shard_of(key) == TOP


@pytest.mark.parametrize("key", OF_ALL)
def test_the_registry_has_all_else(shards: ShardMap, key: bytes) -> None:
    assert shards.shard_of(key) == TOP


def test_a_namespace_that_is_shut_has_no_shard_yet_and_takes_no_changes() -> None:
    shards = ShardMap()
    shards.note(keys.place(7), SHUT + b"mover")
    assert shards.shard_of(keys.inode(INO)) == TOP
    assert shards.is_shut([keys.VERSION, keys.inode(INO)])
    assert not shards.is_shut([keys.inode(1)])
    shards.note(keys.place(7), None)
    assert not shards.is_shut([keys.inode(INO)])


@pytest.mark.parametrize(("kind", "takes"), [(GATHERED, True), (CLOSED, False), (WITHDRAWN, False)])
def test_a_namespace_that_is_gathered_keeps_its_shard_until_its_place_has_gone(
    shards: ShardMap, kind: bytes, takes: bool
) -> None:
    shards.note(keys.place(7), kind + b"mover")
    assert shards.shard_of(keys.inode(INO)) == 7
    assert shards.is_shut([keys.inode(INO)]) != takes
    assert shards.returning == {keys.pack_u16(7)}
    shards.note(keys.place(7), None)
    assert shards.shard_of(keys.inode(INO)) == TOP
    assert not shards.is_shut([keys.inode(INO)])
    assert not shards.returning


def test_each_shard_checks_what_was_read_of_it_where_it_is_written(shards: ShardMap) -> None:
    entries = keys.entries(namespace_root(7))
    ranges = [
        (entries, keys.after(entries), 1, b""),
        (keys.unsealed(0), keys.after(keys.UNSEALED), 1, b""),
        (keys.NODES, keys.after(keys.NODES), 1, b""),
    ]
    reads = {keys.namespace(7): b"record", keys.inode(INO): b"inode"}
    merges = [(keys.usage(7), b"more")]
    given = Proposal(reads, ranges, {keys.orphan(INO): b""}, merges)
    parts = shards.divided(given, TOP)
    assert parts == {
        7: Proposal({keys.inode(INO): b"inode"}, ranges[:2], {keys.orphan(INO): b""}, merges)
    }


def test_what_leans_on_changes_that_go_before_it_is_checked_with_them(shards: ShardMap) -> None:
    reads = {keys.namespace(7): b"record", keys.inode(INO): b"inode"}
    given = Proposal(reads, [], {}, [])
    assert shards.divided(given, 7) == {7: Proposal({keys.inode(INO): b"inode"}, [], {}, [])}


def test_a_change_that_makes_a_namespace_is_told_to_all_with_what_it_begins_with() -> None:
    shards = ShardMap()
    writes = {keys.place(7): OWN, keys.namespace(7): b"record", keys.usage(7): b"none"}
    parts = shards.divided(Proposal({}, [], writes, []), TOP)
    assert set(parts) == {TOP, 7}
    steps = Steps(parts, b"id", None)
    assert steps.intention.writes == writes
    assert set(steps.reach().writes) == {keys.usage(7), keys.reached(7)}


def test_a_change_that_is_over_is_not_forbidden_to_one_that_came_since() -> None:
    writes = {keys.place(7): OWN, keys.usage(7): b"none"}
    parts = ShardMap().divided(Proposal({}, [], writes, []), TOP)
    first = Steps(parts, b"first", None)
    second = Steps(parts, b"second", b"first")
    reached = keys.reached(7)
    late = forbid(first.intention)
    assert set(late.writes) == {reached}
    # It looks for what both the first change and whoever forbids it in time replace.
    assert late.reads == {reached: first.reach().reads[reached]}
    assert second.reach().writes[reached] not in late.reads.values()


def test_two_namespaces_with_shards_are_not_changed_at_once(shards: ShardMap) -> None:
    shards.note(keys.place(8), OWN)
    writes = {keys.usage(7): b"", keys.usage(8): b""}
    for more in ({}, {keys.namespace(7): b""}):
        with pytest.raises(NotSupported, match="remove or rename one of them first"):
            Steps(shards.divided(Proposal({}, [], writes | more, []), TOP), b"id", None)
