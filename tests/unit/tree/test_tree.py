"""Names: what a lookup finds, what each change touches, and what is refused."""

import stat

import pytest

from kvfs.base.errors import (
    CrossNamespace,
    Exists,
    Invalid,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    Stale,
)
from kvfs.meta import keys
from kvfs.meta.records import ROOT_INODE, Flag, namespace_root
from kvfs.tree import lifecycle, namespaces, tree
from tests.unit.space import Space, new_inode

LONG = b"n" * 255


@pytest.fixture
def space() -> Space:
    return Space()


def times(space: Space, ino: int) -> tuple[int, int]:
    inode = space.inode(ino)
    return inode.mtime_ns, inode.ctime_ns


def test_lookup_finds_names_of_any_bytes(space: Space) -> None:
    for name in (b"plain", b"\xff\xfe not utf-8", LONG, b" ", b"a\nb"):
        ino = space.add(space.root, name)
        assert space.lookup(space.root, name) == ino
    with pytest.raises(NotFound):
        space.lookup(space.root, b"missing")


@pytest.mark.parametrize("size", [256, 300, 502, 600, 4000])
def test_a_name_over_255_bytes_is_too_long_for_everything(space: Space, size: int) -> None:
    name = b"n" * size
    space.add(space.root, b"a")
    with pytest.raises(NameTooLong):
        space.lookup(space.root, name)
    with pytest.raises(NameTooLong):
        space.add(space.root, name)
    with pytest.raises(NameTooLong):
        space.rename(space.root, b"a", space.root, name)
    with pytest.raises(NameTooLong):
        space.rename(space.root, name, space.root, b"a")


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0b"])
def test_what_cannot_be_a_name_is_refused(space: Space, name: bytes) -> None:
    with pytest.raises(Invalid):
        space.add(space.root, name)


def test_dots_lead_to_the_directory_and_its_parent(space: Space) -> None:
    top = space.directory(space.root, b"d")
    assert space.lookup(top, b".") == top
    assert space.lookup(top, b"..") == space.root
    assert space.lookup(space.root, b"..") == ROOT_INODE
    assert space.lookup(ROOT_INODE, b"..") == ROOT_INODE


def test_exist_answers_for_files_and_directories(space: Space) -> None:
    space.add(space.root, b"file")
    space.directory(space.root, b"directory")
    names = [b"missing", b"file", b"directory", b"n" * 300]
    found = space.do(lambda t: tree.exist(t, space.root, names))
    assert found == [False, True, True, False]


def test_adding_a_file_touches_the_parent(space: Space) -> None:
    ino = space.add(space.root, b"f", now=33)
    assert times(space, space.root) == (33, 33)
    assert space.inode(space.root).nlink == 2
    inode = space.inode(ino)
    assert (inode.nlink, inode.parent, inode.name) == (1, space.root, b"f")


def test_adding_and_removing_a_directory_counts_in_the_parent(space: Space) -> None:
    ino = space.directory(space.root, b"d", now=33)
    assert space.inode(ino).nlink == 2
    assert space.inode(space.root).nlink == 3
    assert times(space, space.root) == (33, 33)
    space.do(lambda t: tree.rmdir(t, space.root, b"d", 44, space.keep))
    assert space.inode(space.root).nlink == 2
    assert times(space, space.root) == (44, 44)


def test_a_taken_name_is_refused_whatever_has_it(space: Space) -> None:
    space.add(space.root, b"f")
    space.directory(space.root, b"d")
    for name in (b"f", b"d"):
        for kind in (stat.S_IFREG, stat.S_IFDIR):
            with pytest.raises(Exists):
                space.add(space.root, name, kind)


def test_a_set_group_id_directory_gives_its_group(space: Space) -> None:
    top = space.add(space.root, b"d", stat.S_IFDIR, 0o2775)
    inode = space.inode(top)
    inode.gid = 77
    space.do(lambda t: tree.write_inode(t, top, inode))
    assert space.inode(space.add(top, b"f")).gid == 77
    below = space.inode(space.directory(top, b"d"))
    assert below.gid == 77
    assert below.mode & stat.S_ISGID
    assert not space.inode(space.lookup(top, b"f")).mode & stat.S_ISGID


def test_nothing_enters_a_removed_directory(space: Space) -> None:
    top = space.directory(space.root, b"d")
    space.add(space.root, b"f")
    space.held.add(top)
    gone = space.do(lambda t: tree.rmdir(t, space.root, b"d", 20, space.keep))
    assert not gone.dropped
    assert space.inode(top).nlink == 0
    with pytest.raises(NotFound):
        space.add(top, b"x")
    with pytest.raises(NotFound):
        space.do(lambda t: tree.link(t, space.lookup(space.root, b"f"), top, b"x", 21))
    with pytest.raises(NotFound):
        space.rename(space.root, b"f", top, b"x")
    space.do(lambda t: tree.reap(t, top))
    with pytest.raises(NotFound):
        space.add(top, b"x")
    with pytest.raises(Stale):
        space.inode(top)


def test_rmdir_refuses_what_it_must(space: Space) -> None:
    top = space.directory(space.root, b"d")
    space.add(top, b"f")

    def rmdir(name: bytes) -> object:
        return space.do(lambda t: tree.rmdir(t, space.root, name, 20, space.keep))

    with pytest.raises(NotEmpty):
        rmdir(b"d")
    with pytest.raises(NotFound):
        rmdir(b"missing")
    space.add(space.root, b"f")
    with pytest.raises(NotADirectory):
        rmdir(b"f")
    with pytest.raises(Invalid):
        rmdir(b".")
    with pytest.raises(NotEmpty):
        rmdir(b"..")


def test_unlink_refuses_directories_and_what_is_not_there(space: Space) -> None:
    space.directory(space.root, b"d")
    with pytest.raises(IsADirectory):
        space.do(lambda t: tree.unlink(t, space.root, b"d", 20, space.keep))
    with pytest.raises(NotFound):
        space.do(lambda t: tree.unlink(t, space.root, b"x", 20, space.keep))


def test_a_link_changes_count_and_ctime_and_unlink_takes_them_back(space: Space) -> None:
    ino = space.add(space.root, b"a")
    top = space.directory(space.root, b"d")
    space.do(lambda t: tree.link(t, ino, top, b"b", 30))
    assert (space.inode(ino).nlink, space.inode(ino).ctime_ns) == (2, 30)
    assert space.inode(ino).mtime_ns == 10
    assert times(space, top) == (30, 30)
    assert space.lookup(top, b"b") == ino
    gone = space.do(lambda t: tree.unlink(t, space.root, b"a", 40, space.keep))
    assert (gone.ino, gone.dropped, gone.inode.nlink) == (ino, False, 1)
    assert (space.inode(ino).nlink, space.inode(ino).ctime_ns) == (1, 40)
    assert space.do(lambda t: tree.path_of(t, ino)) == b"/cache/d/b"


def test_links_that_cannot_be(space: Space) -> None:
    ino = space.add(space.root, b"a")
    top = space.directory(space.root, b"d")
    other = space.do(lambda t: namespaces.create(t, b"other", uid=0, gid=0, now=3))

    def link(which: int, parent: int, name: bytes) -> object:
        return space.do(lambda t: tree.link(t, which, parent, name, 30))

    with pytest.raises(NotPermitted):
        link(top, space.root, b"x")
    with pytest.raises(NotPermitted):
        link(ino, ROOT_INODE, b"x")
    with pytest.raises(CrossNamespace):
        link(ino, namespace_root(other), b"x")
    with pytest.raises(Exists):
        link(ino, space.root, b"d")
    with pytest.raises(Stale):
        link(ino + 100, space.root, b"x")


def test_a_removed_file_that_is_held_stays_until_it_is_reaped(space: Space) -> None:
    ino = space.add(space.root, b"f")
    space.held.add(ino)
    gone = space.do(lambda t: tree.unlink(t, space.root, b"f", 20, space.keep))
    assert not gone.dropped
    assert (space.inode(ino).nlink, space.inode(ino).ctime_ns) == (0, 20)
    assert space.do(lambda t: lifecycle.orphans(t, 0, 9)) == [ino]
    assert space.do(lambda t: namespaces.usage(t, space.id)).inodes == 1
    space.do(lambda t: tree.reap(t, ino))
    assert space.do(lambda t: namespaces.usage(t, space.id)).inodes == 0
    with pytest.raises(Stale):
        space.inode(ino)
    space.do(lambda t: tree.reap(t, ino))


def test_reap_leaves_what_has_a_name(space: Space) -> None:
    ino = space.add(space.root, b"f")
    space.do(lambda t: tree.reap(t, ino))
    assert space.lookup(space.root, b"f") == ino


def test_an_unnamed_file_can_be_linked(space: Space) -> None:
    ino = space.do(lambda t: namespaces.allocate_inodes(t, space.id, 1))
    space.do(lambda t: tree.add_unlinked(t, space.root, ino, new_inode()))
    assert space.do(lambda t: lifecycle.orphans(t, 0, 9)) == [ino]
    assert space.names(space.root) == []
    space.do(lambda t: tree.link(t, ino, space.root, b"f", 30))
    assert space.inode(ino).nlink == 1
    assert space.do(lambda t: lifecycle.orphans(t, 0, 9)) == []
    assert space.do(lambda t: tree.path_of(t, ino)) == b"/cache/f"


def test_a_dropped_file_leaves_nothing(space: Space) -> None:
    before = space.do(lambda t: [key for key, _ in t.scan(b"", b"\xff")])
    ino = space.add(space.root, b"f")
    space.do(lambda t: t.put(keys.xattr(ino, b"user.a"), b"1"))
    space.do(lambda t: tree.unlink(t, space.root, b"f", 20, space.keep))
    assert space.do(lambda t: [key for key, _ in t.scan(b"", b"\xff")]) == before


def test_replace_takes_the_place_of_a_file_only(space: Space) -> None:
    old = space.add(space.root, b"f")
    new = space.do(lambda t: namespaces.allocate_inodes(t, space.id, 1))

    def replace(name: bytes) -> tree.Removed | None:
        inode = new_inode()
        return space.do(lambda t: tree.replace(t, space.root, name, new, inode, 20, space.keep))

    space.directory(space.root, b"d")
    with pytest.raises(IsADirectory):
        replace(b"d")
    gone = replace(b"f")
    assert gone is not None
    assert (gone.ino, gone.dropped) == (old, True)
    assert space.lookup(space.root, b"f") == new


def test_a_directory_lists_in_pages(space: Space) -> None:
    names = sorted(b"%03d" % number for number in range(50))
    for name in names:
        space.add(space.root, name, stat.S_IFDIR if int(name) % 3 else stat.S_IFREG)
    listed: list[bytes] = []
    after = b""
    for _ in range(20):
        page = space.do(lambda t, key=after: tree.list_children(t, space.root, key, 7))
        if not page:
            break
        listed += [child.name for child in page]
        after = page[-1].key
    assert sorted(listed) == names


def test_a_listing_goes_on_where_its_last_name_was_removed(space: Space) -> None:
    for name in (b"a", b"b", b"c"):
        space.add(space.root, name)
    (first,) = space.do(lambda t: tree.list_children(t, space.root, b"", 1))
    space.do(lambda t: tree.unlink(t, space.root, first.name, 20, space.keep))
    rest = space.do(lambda t: tree.list_children(t, space.root, first.key, 9))
    assert [child.name for child in rest] == [b"b", b"c"]


def test_a_directory_beside_a_file_of_its_name_is_shown_with_a_percent_sign(space: Space) -> None:
    """An object store may make both `a` and `a/b`."""
    top = space.directory(space.root, b"a")
    ino = space.do(lambda t: namespaces.allocate_inodes(t, space.id, 1))
    space.do(lambda t: t.put(keys.file_entry(space.root, b"a"), keys.pack_u64(ino)))
    inode = new_inode()
    inode.parent, inode.name, inode.nlink = space.root, b"a", 1
    space.do(lambda t: tree.write_inode(t, ino, inode))
    assert space.lookup(space.root, b"a") == ino
    assert space.lookup(space.root, b"a%") == top
    assert space.names(space.root) == [b"a", b"a%"]
    space.do(lambda t: tree.unlink(t, space.root, b"a", 20, space.keep))
    assert space.lookup(space.root, b"a") == top
    assert space.names(space.root) == [b"a"]


def test_paths_are_walked(space: Space) -> None:
    top = space.directory(space.root, b"d")
    ino = space.add(top, b"f")
    for path in (b"/cache/d/f", b"cache/d/f", b"//cache/./d//f"):
        assert space.do(lambda t, path=path: tree.resolve(t, path))[0] == ino
    assert space.do(lambda t: tree.resolve(t, b"/cache/d/.."))[0] == space.root
    assert space.do(lambda t: tree.resolve(t, b"/"))[0] == ROOT_INODE
    with pytest.raises(NotFound, match="/cache/x/y"):
        space.do(lambda t: tree.resolve(t, b"/cache/x/y"))
    with pytest.raises(NotADirectory, match="/cache/d/f/g"):
        space.do(lambda t: tree.resolve(t, b"/cache/d/f/g"))


def test_the_top_level_takes_namespaces_only(space: Space) -> None:
    for kind in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO):
        with pytest.raises(NotPermitted):
            space.add(ROOT_INODE, b"f", kind)
    ino = space.directory(ROOT_INODE, b"models")
    namespace_id, namespace = space.do(lambda t: namespaces.by_name(t, b"models"))
    assert ino == namespace_root(namespace_id)
    assert namespace.kind == "durable"
    with pytest.raises(Exists):
        space.directory(ROOT_INODE, b"models")


def test_special_files_are_published_from_the_start(space: Space) -> None:
    for number, kind in enumerate((stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFDIR)):
        ino = space.add(space.root, b"%d" % number, kind)
        assert space.inode(ino).flags & Flag.PUBLISHED
    assert space.do(lambda t: lifecycle.unpublished(t, 0, 9)) == []
    assert space.do(lambda t: lifecycle.unsealed(t, 0, 9)) == []
