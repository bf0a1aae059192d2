"""Files to which one node gives another name in a cache: it waits for nobody, and whatever others
do meanwhile, in the end all nodes and the engine have the same.

| meanwhile, elsewhere | the new name | the file |
|---|---|---|
| nothing | leads to it | is there |
| a file gets the new name | leads to the one told last | theirs is an orphan |
| the same, while this host was cut off | leads to theirs | is an orphan |
| the old name is removed | is given up | is an orphan |
| the old name is renamed | is given up | has the name that it got there |
| the old name is replaced | is given up | is an orphan |
| the directory is removed (this host counts as dead) | is given up | is an orphan |
| the file gets a second name | is given up | has the old and the second |
| an attribute changes | leads to it | has both |
"""

import pytest

from kvfs.base.clock import now
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag
from kvfs.meta.replica.private_group import MOST_NAMES
from kvfs.tree import inodes, tree
from tests.cluster.waiting import wait_until
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
def moved(
    request: pytest.FixtureRequest,
    hosts: tuple[Host, Host, str],
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """A closed file that `one` has renamed from `a.tmp` to `a` and told nobody, and is stopped."""
    one, other, _ = hosts
    ino = one.create(TOP, b"a.tmp", exclusive=request.param == "exclusive")
    is_told = request.param == "told"
    if is_told:
        one.close_file(ino)
    with renamed_untold(one, ino, monkeypatch, is_told=is_told):
        pass
    other.mirror.catch_up()
    return ino


def test_nothing_else_happens(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    one.start()
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, moved)
    assert other.inode(moved).flags & Flag.PUBLISHED
    assert usage(other) == (4096, 1)


def test_it_is_renamed_again_and_back(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    one.start()
    one.rename(TOP, b"a", TOP, b"b")
    one.rename(TOP, b"b", TOP, b"a.tmp")
    assert [one.find(TOP, name) for name in (b"a", b"b", b"a.tmp")] == [None, None, moved]
    all_the_same(one, other, url)
    assert [other.find(TOP, name) for name in (b"a", b"b", b"a.tmp")] == [None, None, moved]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_file_gets_the_new_name_elsewhere(
    hosts: tuple[Host, Host, str], moved: int, *, is_late: bool
) -> None:
    one, other, url = hosts
    theirs = other.create(TOP, b"a")
    other.close_file(theirs)
    if is_late:
        one.clock = lambda: now() + 60.0
    one.start()
    all_the_same(one, other, url)
    first, second = (theirs, moved) if is_late else (moved, theirs)
    assert other.find(TOP, b"a") == first
    assert is_orphan(other, second)
    assert other.find(TOP, b"a.tmp") is None


@pytest.mark.parametrize("exclusive", [False, True])
def test_the_new_name_is_being_made_elsewhere(
    hosts: tuple[Host, Host, str], moved: int, *, exclusive: bool
) -> None:
    one, other, url = hosts
    theirs = other.create(TOP, b"a", exclusive=exclusive)
    one.start()
    one.settle()
    other.mirror.catch_up()
    assert other.find(TOP, b"a") == moved
    other.close_file(theirs)
    all_the_same(one, other, url)
    first, second = (moved, theirs) if exclusive else (theirs, moved)
    assert other.find(TOP, b"a") == first
    assert is_orphan(other, second)


def test_the_old_name_is_removed_elsewhere(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    if other.find(TOP, b"a.tmp") is None:
        pytest.skip("nobody else knows of the old name")
    other.unlink(TOP, b"a.tmp")
    one.start()
    one.mirror.told.clear()
    all_the_same(one, other, url)
    assert (one.find(TOP, b"a.tmp"), one.find(TOP, b"a")) == (None, None)
    assert is_orphan(one, moved)


def test_the_old_name_is_renamed_elsewhere(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    if other.find(TOP, b"a.tmp") is None:
        pytest.skip("nobody else knows of the old name")
    other.rename(TOP, b"a.tmp", TOP, b"c", behind=False)
    one.start()
    all_the_same(one, other, url)
    assert [one.find(TOP, name) for name in (b"a.tmp", b"a", b"c")] == [None, None, moved]
    entry = keys.file_entry(TOP, b"a")
    assert [each.new for each in one.mirror.told if each.key == entry] == [None]


def test_the_old_name_is_replaced_elsewhere(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    is_known = other.find(TOP, b"a.tmp") is not None
    theirs = other.create(TOP, b"c")
    other.close_file(theirs)
    other.rename(TOP, b"c", TOP, b"a.tmp", behind=False)
    one.start()
    all_the_same(one, other, url)
    assert other.find(TOP, b"a.tmp") == theirs
    assert other.find(TOP, b"a") == (None if is_known else moved)
    assert is_orphan(other, moved) == is_known


def test_the_file_gets_a_second_name_elsewhere(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    if other.find(TOP, b"a.tmp") is None or not other.inode(moved).flags & Flag.PUBLISHED:
        pytest.skip("nobody else knows of the file")
    other.write(lambda t: tree.link(t, moved, TOP, b"c", NOW))
    one.start()
    all_the_same(one, other, url)
    assert [other.find(TOP, name) for name in (b"a.tmp", b"a", b"c")] == [moved, None, moved]
    inode = other.inode(moved)
    names = other.mirror.read_now(lambda t: tree.links(t, moved, inode))
    assert sorted(name for _, name in names) == [b"a.tmp", b"c"]


def test_an_attribute_changes_elsewhere(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    if other.find(TOP, b"a.tmp") is None or not other.inode(moved).flags & Flag.PUBLISHED:
        pytest.skip("nobody else knows of the file")

    def chown(t: Transaction) -> None:
        inode = inodes.read_inode(t, moved)
        inode.uid = 7
        inodes.write_inode(t, moved, inode)

    other.write(chown)
    one.start()
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, moved)
    assert other.inode(moved).uid == 7


def test_an_attribute_changes_here(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    one.start()
    one.write(lambda t: inodes.set_xattr(t, moved, b"user.x", b"1", 0, NOW), private=moved)
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, moved)
    found = other.mirror.read_now(lambda t: inodes.get_xattr(t, moved, b"user.x"))
    assert found == b"1"


def test_it_is_removed_here(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    one.start()
    one.unlink(TOP, b"a")
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, None)
    assert is_orphan(other, moved)


def test_the_old_name_is_used_again_here(hosts: tuple[Host, Host, str], moved: int) -> None:
    one, other, url = hosts
    one.start()
    again = one.create(TOP, b"a.tmp")
    one.close_file(again, behind=True)
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (again, moved)


def test_the_directory_is_removed_elsewhere(
    hosts: tuple[Host, Host, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, url = hosts
    directory = one.mkdir(TOP, b"d")
    ino = one.create(TOP, b"a.tmp")
    one.close_file(ino)
    one.mirror.close()
    with telling_nobody(one, monkeypatch):
        one.rename(TOP, b"a.tmp", directory, b"a")
    other.mirror.catch_up()
    other.dead = {1}
    other.rmdir(TOP, b"d")
    one.start()
    all_the_same(one, other, url)
    assert other.find(TOP, b"a.tmp") is None
    assert is_orphan(other, ino)


def test_a_rename_while_the_close_is_being_told_waits_for_nobody(
    hosts: tuple[Host, Host, str], server: RedisServer
) -> None:
    one, other, url = hosts
    ino = one.create(TOP, b"a.tmp")
    with being_told(server, one, lambda: one.close_file(ino, behind=True)):
        one.rename(TOP, b"a.tmp", TOP, b"b")
        one.rename(TOP, b"b", TOP, b"a")
        assert [one.find(TOP, name) for name in (b"a.tmp", b"b", b"a")] == [None, None, ino]
    all_the_same(one, other, url)
    assert [other.find(TOP, name) for name in (b"a.tmp", b"b", b"a")] == [None, None, ino]
    assert usage(other) == (4096, 1)


def test_it_is_renamed_and_killed_while_the_close_is_being_told(
    hosts: tuple[Host, Host, str], server: RedisServer
) -> None:
    one, other, url = hosts
    ino = one.create(TOP, b"a.tmp")
    with being_told(server, one, lambda: one.close_file(ino, behind=True)):
        one.rename(TOP, b"a.tmp", TOP, b"a")
        one.mirror.close()
    one.start()
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, ino)


def test_it_is_renamed_between_two_names_more_often_than_may_wait(
    hosts: tuple[Host, Host, str], moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, url = hosts
    with telling_nobody(one, monkeypatch):
        names = [b"a.tmp", b"a"]
        for _ in range(2 * MOST_NAMES + 3):
            one.rename(TOP, names[1], TOP, names[0])
            assert [one.find(TOP, name) for name in names] == [moved, None]
            names.reverse()
    one.start()
    all_the_same(one, other, url)
    assert [other.find(TOP, name) for name in names] == [None, moved]


def test_it_takes_its_old_name_again_while_the_rename_is_being_told(
    hosts: tuple[Host, Host, str], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, url = hosts
    ino = one.create(TOP, b"a.tmp")
    one.close_file(ino)
    with being_told(server, one, lambda: one.rename(TOP, b"a.tmp", TOP, b"a")):
        one.rename(TOP, b"a", TOP, b"a.tmp")
        one.mirror.close()
    wait_until(lambda: (other.mirror.catch_up(), other.find(TOP, b"a"))[1] == ino, "it to be told")
    with telling_nobody(one, monkeypatch):
        one.mirror.catch_up()
        assert (one.find(TOP, b"a.tmp"), one.find(TOP, b"a")) == (ino, None)
    one.start()
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (ino, None)


def test_a_mirror_that_is_read_anew_keeps_the_name(
    hosts: tuple[Host, Host, str], server: RedisServer, moved: int
) -> None:
    one, other, url = hosts
    for number in range(5):
        other.close_file(other.create(TOP, b"n%d" % number))
    prefix = url.partition("prefix=")[2]
    server.call("XTRIM", f"{{{prefix}:0}}x", "MAXLEN", 1)
    one.start()
    assert (one.find(TOP, b"a.tmp"), one.find(TOP, b"a")) == (None, moved)
    all_the_same(one, other, url)
    assert (other.find(TOP, b"a.tmp"), other.find(TOP, b"a")) == (None, moved)
