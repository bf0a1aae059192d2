"""rename(2) in its corners."""

import pytest

from kvfs.base.errors import (
    CrossNamespace,
    Exists,
    Invalid,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
)
from kvfs.meta.records import ROOT_INODE, namespace_root
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.tree import RENAME_EXCHANGE, RENAME_NOREPLACE
from tests.unit.space import Space


@pytest.fixture
def space() -> Space:
    return Space()


def changed(space: Space, ino: int) -> tuple[int, int]:
    inode = space.inode(ino)
    return inode.mtime_ns, inode.ctime_ns


def test_a_file_moves_with_the_times_that_follow(space: Space) -> None:
    old, new = space.directory(space.root, b"old"), space.directory(space.root, b"new")
    ino = space.add(old, b"f")
    assert space.rename(old, b"f", new, b"g", now=50) is None
    assert space.lookup(new, b"g") == ino
    with pytest.raises(NotFound):
        space.lookup(old, b"f")
    assert changed(space, old) == changed(space, new) == (50, 50)
    assert changed(space, ino) == (10, 50)
    assert space.do(lambda t: tree.path_of(t, ino)) == b"/cache/new/g"


def test_a_directory_moves_with_its_link_to_the_parent(space: Space) -> None:
    old, new = space.directory(space.root, b"old"), space.directory(space.root, b"new")
    ino = space.directory(old, b"d")
    space.rename(old, b"d", new, b"e")
    assert (space.inode(old).nlink, space.inode(new).nlink) == (2, 3)
    assert space.lookup(ino, b"..") == new


def test_a_file_replaces_a_file(space: Space) -> None:
    ino, target = space.add(space.root, b"a"), space.add(space.root, b"b")
    gone = space.rename(space.root, b"a", space.root, b"b")
    assert gone is not None
    assert (gone.ino, gone.dropped) == (target, True)
    assert space.lookup(space.root, b"b") == ino
    assert space.do(lambda t: namespaces.usage(t, space.id)).inodes == 1


def test_a_replaced_file_that_is_held_becomes_an_orphan(space: Space) -> None:
    space.add(space.root, b"a")
    target = space.add(space.root, b"b")
    space.held.add(target)
    gone = space.rename(space.root, b"a", space.root, b"b", now=50)
    assert gone is not None
    assert not gone.dropped
    assert space.inode(target).ctime_ns == 50
    assert space.do(lambda t: lifecycle.orphans(t, 0, 9)) == [target]


def test_a_directory_replaces_an_empty_one_only(space: Space) -> None:
    space.directory(space.root, b"a")
    target = space.directory(space.root, b"b")
    full = space.directory(space.root, b"full")
    space.add(full, b"f")
    with pytest.raises(NotEmpty):
        space.rename(space.root, b"a", space.root, b"full")
    gone = space.rename(space.root, b"a", space.root, b"b")
    assert gone is not None
    assert gone.ino == target
    assert space.inode(space.root).nlink == 4


def test_files_and_directories_do_not_replace_each_other(space: Space) -> None:
    space.add(space.root, b"f")
    space.directory(space.root, b"d")
    with pytest.raises(IsADirectory):
        space.rename(space.root, b"f", space.root, b"d")
    with pytest.raises(NotADirectory):
        space.rename(space.root, b"d", space.root, b"f")


@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
def test_two_links_of_one_file_stay(space: Space, flags: int) -> None:
    ino = space.add(space.root, b"a")
    space.do(lambda t: tree.link(t, ino, space.root, b"b", 20))
    assert space.rename(space.root, b"a", space.root, b"b", flags, now=50) is None
    assert space.names(space.root) == [b"a", b"b"]
    assert changed(space, ino) == (10, 20)
    assert changed(space, space.root) == (20, 20)


def test_a_name_renamed_to_itself_stays(space: Space) -> None:
    ino = space.add(space.root, b"a")
    space.rename(space.root, b"a", space.root, b"a", now=50)
    assert changed(space, ino) == (10, 10)


def test_a_link_that_moves_is_found_by_its_new_name(space: Space) -> None:
    top = space.directory(space.root, b"d")
    ino = space.add(space.root, b"a")
    space.do(lambda t: tree.link(t, ino, space.root, b"b", 20))
    space.rename(space.root, b"a", top, b"moved")
    space.do(lambda t: tree.unlink(t, space.root, b"b", 60, space.keep))
    assert space.do(lambda t: tree.path_of(t, ino)) == b"/cache/d/moved"
    assert space.do(lambda t: tree.links(t, ino, tree.read_inode(t, ino))) == [(top, b"moved")]


def test_a_directory_does_not_move_into_itself(space: Space) -> None:
    top = space.directory(space.root, b"a")
    below = space.directory(space.directory(top, b"b"), b"c")
    for parent in (top, below):
        with pytest.raises(Invalid):
            space.rename(space.root, b"a", parent, b"x")
        with pytest.raises((Invalid, NotFound)):
            space.rename(space.root, b"a", parent, b"x", RENAME_EXCHANGE)
    with pytest.raises(Invalid):
        space.rename(top, b"b", space.root, b"a", RENAME_EXCHANGE)
    with pytest.raises(NotEmpty):
        space.rename(top, b"b", space.root, b"a")


def test_noreplace_refuses_a_taken_name(space: Space) -> None:
    ino = space.add(space.root, b"a")
    space.add(space.root, b"b")
    with pytest.raises(Exists):
        space.rename(space.root, b"a", space.root, b"b", RENAME_NOREPLACE)
    space.rename(space.root, b"a", space.root, b"c", RENAME_NOREPLACE)
    assert space.lookup(space.root, b"c") == ino


def test_unknown_flags_and_missing_names_are_refused(space: Space) -> None:
    space.add(space.root, b"a")
    for flags in (RENAME_NOREPLACE | RENAME_EXCHANGE, 4, 8):
        with pytest.raises(Invalid):
            space.rename(space.root, b"a", space.root, b"b", flags)
    with pytest.raises(NotFound):
        space.rename(space.root, b"x", space.root, b"a")
    with pytest.raises(NotFound):
        space.rename(space.root, b"a", space.root, b"x", RENAME_EXCHANGE)


def test_exchange_of_a_file_and_a_directory(space: Space) -> None:
    one, two = space.directory(space.root, b"one"), space.directory(space.root, b"two")
    file, directory = space.add(one, b"f"), space.directory(two, b"d")
    inside = space.add(directory, b"inside")
    space.rename(one, b"f", two, b"d", RENAME_EXCHANGE, now=50)
    assert (space.lookup(two, b"d"), space.lookup(one, b"f")) == (file, directory)
    assert (space.inode(one).nlink, space.inode(two).nlink) == (3, 2)
    assert changed(space, one) == changed(space, two) == (50, 50)
    assert space.inode(file).ctime_ns == space.inode(directory).ctime_ns == 50
    assert space.do(lambda t: tree.path_of(t, inside)) == b"/cache/one/f/inside"


def test_nothing_moves_between_namespaces(space: Space) -> None:
    other = namespace_root(space.do(lambda t: namespaces.create(t, b"other", uid=0, gid=0, now=3)))
    space.add(space.root, b"f")
    space.directory(space.root, b"d")
    with pytest.raises(CrossNamespace):
        space.rename(space.root, b"f", other, b"f")
    with pytest.raises(CrossNamespace):
        space.rename(space.root, b"d", ROOT_INODE, b"d")
    with pytest.raises(NotPermitted):
        space.rename(space.root, b"f", ROOT_INODE, b"f")
    with pytest.raises(CrossNamespace):
        space.rename(ROOT_INODE, b"other", space.root, b"x")
    with pytest.raises(Invalid):
        space.rename(ROOT_INODE, b"cache", space.root, b"x")


def test_a_namespace_is_renamed_with_its_policy(space: Space) -> None:
    ino = space.add(space.root, b"f")
    space.rename(ROOT_INODE, b"cache", ROOT_INODE, b"blocks", now=50)
    namespace_id, namespace = space.do(lambda t: namespaces.by_name(t, b"blocks"))
    assert (namespace_id, namespace.kind, namespace.name) == (space.id, "cache", b"blocks")
    assert space.do(lambda t: tree.path_of(t, ino)) == b"/blocks/f"
    assert changed(space, ROOT_INODE) == (50, 50)
    with pytest.raises(NotFound):
        space.do(lambda t: namespaces.by_name(t, b"cache"))


def test_a_namespace_replaces_an_empty_one(space: Space) -> None:
    space.do(lambda t: namespaces.create(t, b"empty", uid=0, gid=0, now=3))
    space.add(space.root, b"f")
    with pytest.raises(NotEmpty):
        space.rename(ROOT_INODE, b"empty", ROOT_INODE, b"cache")
    space.rename(ROOT_INODE, b"cache", ROOT_INODE, b"empty")
    (only,) = space.do(namespaces.list_all)
    assert (only.id, only.namespace.name, only.usage.inodes) == (space.id, b"empty", 1)
    assert space.inode(ROOT_INODE).nlink == 3


def test_namespaces_exchange_their_names(space: Space) -> None:
    other = space.do(lambda t: namespaces.create(t, b"other", uid=0, gid=0, now=3))
    space.rename(ROOT_INODE, b"cache", ROOT_INODE, b"other", RENAME_EXCHANGE)
    assert space.do(lambda t: namespaces.by_name(t, b"other"))[0] == space.id
    assert space.do(lambda t: namespaces.by_name(t, b"cache"))[0] == other
