"""Files that one node renames over others in a cache: it waits for nobody, and whatever others do
meanwhile, in the end all nodes and the engine have the same, and what was replaced is counted once.

| meanwhile, elsewhere | the name | what was replaced |
|---|---|---|
| nothing | leads to the file | is an orphan |
| it is removed | leads to the file | is an orphan |
| the same, and the name is reserved (O_EXCL) | leads to the file | is an orphan, like the other |
| it is renamed | leads to the file | has its other name |
| a file is renamed over it | leads to the one told last | is an orphan, like the other |
| the same, while this host was cut off | leads to theirs | is an orphan, like the file |
| it gets a second name | leads to the file | has the second name |
| an attribute of it changes | leads to the file | is an orphan with both |
| the directory is removed (this host counts as dead) | is gone | is an orphan, like the file |
"""

from collections.abc import Callable

import pytest

from kvfs.base.clock import now
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import unpack_inode
from kvfs.tree import inodes, tree
from tests.contract.hosts import (
    NOW,
    TOP,
    Host,
    all_the_same,
    being_told,
    is_orphan,
    renamed_untold,
    telling_nobody,
    usage,
)
from tests.contract.redis_servers import RedisServer


@pytest.fixture(params=["not told yet", "told", "exclusive"])
def both(
    request: pytest.FixtureRequest,
    hosts: tuple[Host, Host, str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, int]:
    """A closed file that `one` has renamed from `a.tmp` to `a` and told nobody, and is stopped; and
    the file of the other host that had that name."""
    one, other, _ = hosts
    target = other.create(TOP, b"a")
    other.close_file(target)
    ino = one.create(TOP, b"a.tmp", exclusive=request.param == "exclusive")
    is_told = request.param == "told"
    if is_told:
        one.close_file(ino)
    one.mirror.catch_up()
    with renamed_untold(one, ino, monkeypatch, is_told=is_told) as removed:
        assert removed is not None
        assert removed.ino == target
        assert is_orphan(one, target)
    other.mirror.catch_up()
    assert other.find(TOP, b"a") == target
    return ino, target


Hosts = tuple[Host, Host, str]
Both = tuple[int, int]


def test_nothing_else_happens(hosts: Hosts, both: Both) -> None:
    one, other, url = hosts
    ino, target = both
    one.start()
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, ino)
    assert is_orphan(other, target)
    for host in (one, other):
        host.write(lambda t: tree.reap(t, target))
    all_the_same(one, other, url)
    assert usage(other) == (4096, 1)
    assert one.mirror.engine.unplaced == 0


def test_what_was_replaced_is_known_before_its_data_go(hosts: Hosts, both: Both) -> None:
    one, other, url = hosts
    ino, target = both
    one.start()
    one.mirror.call(lambda: one.mirror.engine.known([target]))
    other.mirror.catch_up()
    assert other.find(TOP, b"a") == ino
    all_the_same(one, other, url)


@pytest.mark.parametrize("reserves", [False, True])
def test_it_is_removed_elsewhere(hosts: Hosts, both: Both, *, reserves: bool) -> None:
    one, other, url = hosts
    ino, target = both
    other.unlink(TOP, b"a")
    theirs = other.create(TOP, b"a", exclusive=True) if reserves else 0
    one.start()
    one.settle()
    other.mirror.catch_up()
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, ino)
    assert is_orphan(other, target)
    if reserves:
        other.close_file(theirs)
        assert is_orphan(other, theirs)
    all_the_same(one, other, url)


def test_it_is_renamed_elsewhere(hosts: Hosts, both: Both) -> None:
    one, other, url = hosts
    ino, target = both
    other.rename(TOP, b"a", TOP, b"b", behind=False)
    one.start()
    all_the_same(one, other, url)
    assert [other.find(TOP, name) for name in (b"a.tmp", b"a", b"b")] == [None, ino, target]
    assert not is_orphan(other, ino)
    assert not is_orphan(other, target)
    assert usage(other) == (2 * 4096, 2)


@pytest.mark.parametrize("is_late", [False, True])
def test_another_file_replaces_it_elsewhere(hosts: Hosts, both: Both, *, is_late: bool) -> None:
    one, other, url = hosts
    ino, target = both
    theirs = other.create(TOP, b"c")
    other.close_file(theirs)
    other.rename(TOP, b"c", TOP, b"a", behind=False)
    if is_late:
        one.clock = lambda: now() + 60.0
    one.start()
    all_the_same(one, other, url)
    first, second = (theirs, ino) if is_late else (ino, theirs)
    assert other.find(TOP, b"a") == first
    assert is_orphan(other, second)
    assert is_orphan(other, target)
    assert one.mirror.engine.unplaced == is_late
    assert second in told_nameless(one)


def told_nameless(host: Host) -> set[int]:
    """The files of which the node's parts were told that they lost their last name."""
    return {
        keys.unpack_u64(each.key, 1)
        for each in host.mirror.told
        if each.key[:1] == keys.INODE and each.old and each.new
        if unpack_inode(each.old).nlink and not unpack_inode(each.new).nlink
    }


def test_it_is_told_late_and_nobody_changed_the_name(hosts: Hosts, both: Both) -> None:
    one, other, url = hosts
    ino, target = both
    one.clock = lambda: now() + 60.0
    one.start()
    all_the_same(one, other, url)
    assert other.find(TOP, b"a") == ino
    assert is_orphan(other, target)


def test_it_gets_a_second_name_elsewhere(hosts: Hosts, both: Both) -> None:
    one, other, url = hosts
    ino, target = both
    other.write(lambda t: tree.link(t, target, TOP, b"b", NOW))
    one.start()
    all_the_same(one, other, url)
    assert [other.find(TOP, name) for name in (b"a.tmp", b"a", b"b")] == [None, ino, target]
    assert other.inode(target).nlink == 1
    assert other.inode(target).name == b"b"


def test_an_attribute_of_it_changes_elsewhere(hosts: Hosts, both: Both) -> None:
    one, other, url = hosts
    ino, target = both

    def chown(t: Transaction) -> None:
        inode = inodes.read_inode(t, target)
        inode.uid = 7
        inodes.write_inode(t, target, inode)

    other.write(chown)
    one.start()
    all_the_same(one, other, url)
    assert other.find(TOP, b"a") == ino
    assert is_orphan(other, target)
    assert other.inode(target).uid == 7


def test_an_attribute_of_it_changes_here(hosts: Hosts, both: Both) -> None:
    one, other, url = hosts
    ino, target = both
    one.start()
    one.write(lambda t: inodes.set_xattr(t, target, b"user.x", b"1", 0, NOW), private=target)
    all_the_same(one, other, url)
    assert other.find(TOP, b"a") == ino
    assert is_orphan(other, target)


def test_it_moves_on_here(hosts: Hosts, both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, url = hosts
    ino, target = both
    with telling_nobody(one, monkeypatch):
        one.rename(TOP, b"a", TOP, b"b")
        assert [one.find(TOP, name) for name in (b"a.tmp", b"a", b"b")] == [None, None, ino]
    one.start()
    all_the_same(one, other, url)
    assert [other.find(TOP, name) for name in (b"a.tmp", b"a", b"b")] == [None, None, ino]
    assert is_orphan(other, target)


def test_the_file_is_removed_here(hosts: Hosts, both: Both) -> None:
    one, other, url = hosts
    ino, target = both
    one.start()
    one.unlink(TOP, b"a")
    all_the_same(one, other, url)
    assert other.find(TOP, b"a") is None
    assert is_orphan(other, ino)
    assert is_orphan(other, target)


def test_the_directory_is_removed_elsewhere(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, url = hosts
    directory = one.mkdir(TOP, b"d")
    other.mirror.catch_up()
    target = other.create(directory, b"a")
    other.close_file(target)
    one.mirror.catch_up()
    ino = one.create(TOP, b"a.tmp")
    one.mirror.close()
    with telling_nobody(one, monkeypatch):
        one.close_file(ino, behind=True)
        one.rename(TOP, b"a.tmp", directory, b"a")
    other.dead = {1}
    other.unlink(directory, b"a")
    other.rmdir(TOP, b"d")
    one.start()
    all_the_same(one, other, url)
    assert is_orphan(other, ino)
    assert is_orphan(other, target)
    assert one.mirror.engine.unplaced == 1


def test_it_is_killed_while_the_close_is_being_told(hosts: Hosts, server: RedisServer) -> None:
    one, other, url = hosts
    target = other.create(TOP, b"a")
    other.close_file(target)
    one.mirror.catch_up()
    ino = one.create(TOP, b"a.tmp")
    with being_told(server, one, lambda: one.close_file(ino, behind=True)):
        one.rename(TOP, b"a.tmp", TOP, b"a")
        assert one.find(TOP, b"a") == ino
        one.mirror.close()
    one.start()
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, ino)
    assert is_orphan(other, target)


def test_it_is_killed_while_the_rename_is_being_told(hosts: Hosts, server: RedisServer) -> None:
    one, other, url = hosts
    target = other.create(TOP, b"a")
    other.close_file(target)
    one.mirror.catch_up()
    ino = one.create(TOP, b"a.tmp")
    one.close_file(ino)
    with being_told(server, one, lambda: one.rename(TOP, b"a.tmp", TOP, b"a")):
        one.mirror.close()
    one.start()
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, ino)
    assert is_orphan(other, target)


def test_a_mirror_that_is_read_anew_keeps_the_name(
    hosts: Hosts, server: RedisServer, both: Both
) -> None:
    one, other, url = hosts
    ino, target = both
    for number in range(5):
        other.close_file(other.create(TOP, b"n%d" % number))
    prefix = url.partition("prefix=")[2]
    server.call("XTRIM", f"{{{prefix}:0}}x", "MAXLEN", 1)
    one.start()
    assert (one.find(TOP, b"a.tmp"), one.find(TOP, b"a")) == (None, ino)
    all_the_same(one, other, url)
    assert other.find(TOP, b"a") == ino
    assert is_orphan(other, target)


def a_link(one: Host, target: int) -> None:
    one.write(lambda t: tree.link(t, target, TOP, b"l", NOW))


def locked(one: Host, target: int) -> None:
    one.write(lambda t: t.put(keys.locks(target, True), b"x"))


def leased(one: Host, target: int) -> None:
    one.write(lambda t: t.put(keys.append_lease(target), b"x"))


@pytest.mark.parametrize("make", [a_link, locked, leased])
def test_others_hear_of_it_at_once(hosts: Hosts, make: Callable[[Host, int], None]) -> None:
    one, _, _ = hosts
    target = one.create(TOP, b"a")
    one.close_file(target)
    make(one, target)
    ino = one.create(TOP, b"a.tmp")
    one.close_file(ino)
    asked = one.trips
    one.rename(TOP, b"a.tmp", TOP, b"a")
    assert one.trips == asked + 1
    assert one.find(TOP, b"a") == ino
