"""A namespace with files whose names become each node's own (`--coherence peer`): no file is lost
by it, or changed by others afterwards, whatever each node was doing and however late it hears."""

import threading

import pytest

from kvfs.base.errors import Busy, NotSupported
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.local_keys import is_local_key
from kvfs.meta.records import Flag, unpack_inode, unpack_namespace
from kvfs.tree import coherence_change, namespaces, tree
from kvfs.tree.coherence_change import DONE
from kvfs.tree.copies import own_part, placements, siblings
from kvfs.tree.inodes import read_inode, write_inode
from tests.cluster.waiting import wait_until
from tests.contract.hosts import NOW, TOP, Host
from tests.contract.mirrors import in_redis

NS = 1
SPACE = keys.pack_u16(NS)
Hosts = tuple[Host, Host, str]


@pytest.fixture
def cache(hosts: Hosts) -> Hosts:
    one, other, url = hosts
    one.write(lambda t: namespaces.set_policy(t, NS, now=NOW, kind="cache"))
    other.mirror.catch_up()
    other.number(NS)
    return one, other, url


def become_peer(host: Host) -> None:
    host.write(lambda t: namespaces.set_policy(t, NS, now=NOW, coherence="peer"))


def put(host: Host, name: bytes, directory: int = TOP) -> int:
    ino = host.create(directory, name)
    host.close_file(ino, behind=True)
    return ino


def tell(host: Host, other: Host) -> None:
    """Has another node know all that was done on this one."""
    host.mirror.call(host.mirror.engine.sync)
    other.mirror.catch_up()


def names_of(host: Host) -> list[bytes]:
    children = host.mirror.read_now(lambda t: tree.list_children(t, TOP, b"", 1000))
    return [each.name for each in children]


def of_server(url: str) -> list[bytes]:
    """The keys that the server has of what is each node's own."""
    found = [key for key, _ in in_redis(url) if is_local_key(key, (SPACE,))]
    return [key for key in found if key[:1] != keys.USAGE]


def settle(host: Host) -> None:
    """Has a node let go what it does not hold."""
    inos = host.mirror.read_now(lambda t: own_part.files_after(t, NS, 0, 1000))
    host.write(lambda t: own_part.keep_own(t, inos))
    host.write(lambda t: own_part.drop_foreign(t, inos))


def usage(host: Host) -> tuple[int, int]:
    found = host.mirror.read_now(lambda t: namespaces.usage(t, NS))
    return found.bytes, found.inodes


def error_of(host: Host) -> tuple[int, int]:
    found = host.mirror.read_now(lambda t: own_part.usage_error(t, NS))
    return found.bytes, found.inodes


def test_each_node_keeps_what_it_holds(cache: Hosts) -> None:
    one, other, _ = cache
    mine, theirs = put(one, b"mine"), put(other, b"theirs")
    tell(one, other)
    tell(other, one)
    become_peer(one)
    other.mirror.catch_up()
    assert one.mirror.is_local(NS)
    assert other.mirror.is_local(NS)
    for host in (one, other):  # until each has told what it holds, both know all
        assert names_of(host) == [b"mine", b"theirs"]
    settle(one)
    settle(other)
    assert (one.find(TOP, b"mine"), one.find(TOP, b"theirs")) == (mine, None)
    assert (other.find(TOP, b"mine"), other.find(TOP, b"theirs")) == (None, theirs)
    assert usage(one) == usage(other) == (8 * 512, 1)
    assert error_of(one) == error_of(other) == (0, 0)


def test_copies_of_the_same_sealed_content_stay_siblings(cache: Hosts) -> None:
    one, other, _ = cache
    sealed, open_ = put(one, b"sealed"), put(one, b"open")
    tell(one, other)

    def seal(t: Transaction) -> None:
        inode = read_inode(t, sealed)
        inode.flags |= Flag.SEALED
        write_inode(t, sealed, inode)

    one.write(seal)
    other.mirror.catch_up()
    for ino in (sealed, open_):
        other.write(lambda t, ino=ino: placements.hold(t, ino, read_inode(t, ino).version))
        one.write(lambda t, ino=ino: placements.hold(t, ino, read_inode(t, ino).version))
    tell(other, one)
    become_peer(one)
    other.mirror.catch_up()
    for host, sibling in ((one, 2), (other, 1)):
        settle(host)
        (block,) = host.mirror.read_now(lambda t: siblings.look(t, [sealed]))
        assert block.siblings == [sibling]
        (alone,) = host.mirror.read_now(lambda t: placements.holders(t, open_))
        assert alone.node == keys.pack_node(host.mirror.engine.node)


def test_files_that_only_their_node_knows_stay_its_own(cache: Hosts) -> None:
    one, other, url = cache
    one.mirror.engine._shards.top.behind._pace.pause_s = lambda *_: 60.0  # type: ignore[method-assign]
    put(one, b"first")  # it is told, and the next ones wait
    told = put(one, b"told-behind")
    open_ = one.create(TOP, b"open")
    other.mirror.catch_up()
    become_peer(other)
    one.mirror.catch_up()
    assert one.mirror.engine._privates.groups == {}
    one.close_file(open_)
    one.rename(TOP, b"told-behind", TOP, b"moved")
    assert one.find(TOP, b"moved") == told
    assert one.find(TOP, b"open") == open_
    settle(one)
    assert names_of(one) == [b"first", b"moved", b"open"]
    one.restart()
    assert names_of(one) == [b"first", b"moved", b"open"]
    assert one.mirror.engine._privates.groups == {}
    assert keys.inode(open_) not in dict(in_redis(url))


def test_a_commit_of_a_node_that_has_not_heard_is_its_own(cache: Hosts) -> None:
    one, other, url = cache
    kept = put(other, b"kept")
    tell(other, one)
    stop = threading.Event()
    made: list[bytes] = []

    def write() -> None:
        while not stop.is_set() or len(made) < 50:
            name = b"f%d" % len(made)
            ino = other.create(TOP, name, exclusive=True)  # a request to the server, or none
            other.close_file(ino)
            made.append(name)

    writer = threading.Thread(target=write)
    writer.start()
    wait_until(lambda: len(made) >= 20, "it writes")
    become_peer(one)
    stop.set()
    writer.join()
    other.mirror.catch_up()
    one.mirror.catch_up()
    assert set(names_of(other)) == {b"kept", *made}
    inos = {other.find(TOP, each) for each in made} | {kept}
    for key, value in in_redis(url):
        if key[:1] == keys.INODE and key[1:3] == SPACE and keys.unpack_u64(key, 1) in inos:
            assert unpack_inode(value).nlink == 1
    # What the server has of it is what the first node has: nothing came after the change.
    shared = {key for key in of_server(url) if key[:1] == keys.ENTRY}
    assert shared == {keys.file_entry(TOP, name) for name in names_of(one)}


def test_a_node_that_was_away_takes_what_it_held(cache: Hosts) -> None:
    one, other, _ = cache
    kept = put(other, b"kept")
    put(other, b"removed")
    tell(other, one)
    other.mirror.close()
    one.unlink(TOP, b"removed")
    put(one, b"mine")
    one.mirror.call(one.mirror.engine.sync)
    become_peer(one)
    put(one, b"later")
    other.start()
    other.mirror.catch_up()
    assert other.mirror.is_local(NS)
    assert names_of(other) == [b"kept", b"mine"]
    settle(other)
    assert other.find(TOP, b"kept") == kept
    assert names_of(other) == [b"kept"]


def test_one_that_reads_all_anew_takes_it_too(cache: Hosts, server: object) -> None:
    one, other, url = cache
    kept = put(other, b"kept")
    put(other, b"removed")
    tell(other, one)
    other.mirror.close()
    one.unlink(TOP, b"removed")
    become_peer(one)
    put(one, b"later")
    prefix = url.partition("prefix=")[2]
    server.call("XTRIM", f"{{{prefix}:0}}x", "MAXLEN", 1)  # type: ignore[attr-defined]
    other.start()
    other.mirror.catch_up()
    assert other.mirror.is_local(NS)
    settle(other)
    assert names_of(other) == [b"kept"]
    assert other.find(TOP, b"kept") == kept


def test_the_servers_records_go_when_all_are_done(cache: Hosts) -> None:
    one, other, url = cache
    put(one, b"mine")
    put(other, b"theirs")
    tell(one, other)
    tell(other, one)
    become_peer(one)
    other.mirror.catch_up()
    for host in (one, other):
        settle(host)
        host.write(lambda t: coherence_change.report(t, NS, DONE))
    assert of_server(url)
    with pytest.raises(Busy, match="still becoming peer"):
        one.write(lambda t: namespaces.set_policy(t, NS, now=NOW, coherence="cache"))
    one.mirror.call(lambda: one.mirror.engine.drop_shared(NS))
    one.write(lambda t: coherence_change.finish(t, NS))
    assert of_server(url) == []
    assert not [key for key, _ in in_redis(url) if key[:1] == b"y"]
    other.mirror.catch_up()
    record = unpack_namespace(other.mirror.read_now(lambda t: t.get(keys.namespace(NS))) or b"")
    assert record.is_peer
    assert not record.switches_to
    other.restart()
    assert names_of(other) == [b"theirs"]
    assert names_of(one) == [b"mine"]


def test_a_file_with_two_names_keeps_it_from_changing(cache: Hosts) -> None:
    one, _, _ = cache
    ino = put(one, b"a")
    one.write(lambda t: tree.link(t, ino, TOP, b"b", NOW))
    with pytest.raises(NotSupported, match="hard links"):
        become_peer(one)
    assert not one.mirror.is_local(NS)


def test_copies_are_each_nodes_alone(cache: Hosts) -> None:
    one, other, _ = cache
    ino = put(one, b"both")
    tell(one, other)
    other.write(lambda t: placements.hold(t, ino, 0))
    one.mirror.catch_up()
    become_peer(one)
    other.mirror.catch_up()
    for host in (one, other):
        settle(host)
        found = host.mirror.read_now(lambda t: placements.holders(t, ino))
        assert [keys.unpack_node(each.node) for each in found] == [host.mirror.engine.node]
        assert host.mirror.read_now(lambda t: t.get(keys.unsealed(ino))) in (
            keys.pack_node(host.mirror.engine.node),
            None,
        )
        assert error_of(host) == (0, 0)
