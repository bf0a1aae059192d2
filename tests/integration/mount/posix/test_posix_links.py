"""Hard links, symbolic links and rename."""

import errno
import os
import stat
from pathlib import Path

import pytest

from tests.integration.conftest import Place
from tests.integration.posix import (
    ALICE,
    BOB,
    KINDS,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    as_user,
    descriptor,
    folder,
    let_clock_pass,
    link_descriptor,
    make_of,
    needs_root,
    refused,
    renameat2,
    touch,
)

IS_ROOT = os.geteuid() == 0
LINKABLE = [k for k in KINDS if k != "directory" and (IS_ROOT or k != "device")]
MOVABLE = [k for k in KINDS if IS_ROOT or k != "device"]

# --- hard links ---


@pytest.mark.parametrize("kind", LINKABLE)
def test_a_link_is_the_same_file(here: Path, kind: str) -> None:
    first = make_of(kind, here / "a")
    os.link(first, here / "b", follow_symlinks=False)
    os.link(here / "b", here / "c", follow_symlinks=False)
    for name in "abc":
        assert (here / name).lstat() == first.lstat()
        assert (here / name).lstat().st_nlink == 3
    first.unlink()
    assert (here / "b").lstat().st_nlink == 2
    os.lchown(here / "b", -1, -1)
    (here / "b").unlink()
    assert (here / "c").lstat().st_nlink == 1
    assert os.listdir(here) == ["c"]


def test_links_share_content_and_attributes(here: Path) -> None:
    path = touch(here / "a", 0o644, b"one")
    sub = folder(here / "sub")
    os.link(path, sub / "b")
    (sub / "b").write_bytes(b"two two")
    (sub / "b").chmod(0o600)
    os.setxattr(sub / "b", "user.k", b"v")
    assert path.read_bytes() == b"two two"
    assert path.stat().st_size == 7
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.getxattr(path, "user.k") == b"v"
    path.unlink()
    assert (sub / "b").read_bytes() == b"two two"


def test_linking_a_directory_is_refused(here: Path) -> None:
    folder(here / "d")
    with refused(errno.EPERM):
        os.link(here / "d", here / "e")


def test_linking_over_a_name_is_eexist(here: Path) -> None:
    path = touch(here / "a")
    for kind in MOVABLE:
        make_of(kind, here / kind)
        with refused(errno.EEXIST):
            os.link(path, here / kind)
    assert path.stat().st_nlink == 1


def test_an_open_unlinked_file_cannot_be_linked_again(here: Path) -> None:
    path = touch(here / "a", 0o644, b"x")
    with descriptor(path) as fd:
        path.unlink()
        with refused(errno.ENOENT):
            link_descriptor(fd, here / "b")


def test_many_links(here: Path) -> None:
    path = touch(here / "0", 0o644, b"content")
    for n in range(1, 500):
        os.link(path, here / str(n))
    assert path.stat().st_nlink == 500
    for n in range(499):
        (here / str(n)).unlink()
    assert (here / "499").read_bytes() == b"content"
    assert (here / "499").stat().st_nlink == 1


def test_across_namespaces_is_another_filesystem(here: Path, place: Place) -> None:
    if place.node is None:
        pytest.skip("a plain directory has no namespaces")
    other = place.node.mount / "other-namespace"
    other.mkdir()
    try:
        path = touch(here / "a")
        folder(here / "d")
        with refused(errno.EXDEV):
            os.link(path, other / "a")
        with refused(errno.EXDEV):
            os.rename(path, other / "a")
        with refused(errno.EXDEV):
            os.rename(here / "d", other / "d")
        assert os.listdir(other) == []
    finally:
        other.rmdir()


# --- symbolic links ---


@pytest.mark.parametrize(
    "target", ["x", "/absolute", "../up", "x" * 255, "y/" * 2047, "\udcff\udcfe"]
)
def test_a_symbolic_link_keeps_its_target(here: Path, target: str) -> None:
    os.symlink(target, here / "l")
    assert os.readlink(here / "l") == target
    found = (here / "l").lstat()
    assert stat.S_ISLNK(found.st_mode)
    assert found.st_size == len(os.fsencode(target))
    assert found.st_nlink == 1


def test_a_target_of_4096_bytes_is_too_long(here: Path) -> None:
    with refused(errno.ENAMETOOLONG):
        os.symlink("x" * 4096, here / "l")
    os.symlink("x" * 4095, here / "l")
    assert len(os.readlink(here / "l")) == 4095


def test_links_lead_on(here: Path) -> None:
    folder(here / "d")
    (here / "link").symlink_to("d")
    (here / "again").symlink_to("link")
    touch(here / "again" / "f", 0o644, b"through")
    assert (here / "d" / "f").read_bytes() == b"through"
    (here / "d" / "up").symlink_to("../d/f")
    assert (here / "link" / "up").read_bytes() == b"through"
    with refused(errno.EINVAL):
        os.readlink(here / "d")
    with refused(errno.EINVAL):
        os.readlink(here / "d" / "f")


def test_open_refuses_links_with_nofollow(here: Path) -> None:
    touch(here / "f")
    (here / "l").symlink_to("f")
    with refused(errno.ELOOP):
        os.open(here / "l", os.O_RDONLY | os.O_NOFOLLOW)
    (here / "new").symlink_to("made")
    with refused(errno.EEXIST):
        os.open(here / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.close(os.open(here / "new", os.O_CREAT | os.O_WRONLY))
    assert (here / "made").exists()


# --- rename ---


@pytest.mark.parametrize("kind", MOVABLE)
def test_rename_keeps_the_file(here: Path, kind: str) -> None:
    path = make_of(kind, here / "a")
    before = path.lstat()
    sub = folder(here / "sub")
    for new in (here / "b", sub / "c", here / ("n" * 255)):
        path = path.rename(new)
        after = path.lstat()
        assert (after.st_ino, after.st_mode, after.st_size, after.st_nlink, after.st_mtime_ns) == (
            before.st_ino, before.st_mode, before.st_size, before.st_nlink, before.st_mtime_ns
        )  # fmt: skip
    assert set(os.listdir(here)) == {"sub", "n" * 255}


@pytest.mark.parametrize("old", MOVABLE)
@pytest.mark.parametrize("new", MOVABLE)
def test_rename_replaces(here: Path, old: str, new: str) -> None:
    source, target = make_of(old, here / "a"), make_of(new, here / "b")
    number = source.lstat().st_ino
    if (old == "directory") == (new == "directory"):
        os.rename(source, target)
        assert target.lstat().st_ino == number
        assert os.listdir(here) == ["b"]
        return
    with refused(errno.EISDIR if new == "directory" else errno.ENOTDIR):
        os.rename(source, target)
    assert set(os.listdir(here)) == {"a", "b"}


def test_rename_over_a_full_directory(here: Path) -> None:
    folder(here / "a")
    folder(here / "b")
    touch(here / "b" / "f")
    with refused(errno.ENOTEMPTY, errno.EEXIST):
        os.rename(here / "a", here / "b")
    os.rename(here / "b", here / "a")
    assert os.listdir(here / "a") == ["f"]


def test_a_directory_does_not_move_into_itself(here: Path) -> None:
    (here / "a" / "b" / "c").mkdir(parents=True)
    for inside in ("a/x", "a/b/x", "a/b/c", "a/b/c/x"):
        with refused(errno.EINVAL):
            os.rename(here / "a", here / inside)
    with refused(errno.ENOTEMPTY):
        os.rename(here / "a" / "b" / "c", here / "a")


def test_rename_of_two_links_to_one_file_does_nothing(here: Path) -> None:
    path = touch(here / "a")
    os.link(path, here / "b")
    os.rename(path, here / "b")
    assert set(os.listdir(here)) == {"a", "b"}
    assert path.stat().st_nlink == 2
    os.rename(path, path)
    assert path.exists()


def test_directories_count_their_subdirectories(here: Path) -> None:
    a, b = folder(here / "a"), folder(here / "b")
    assert a.stat().st_nlink == 2
    sub = folder(a / "sub")
    assert a.stat().st_nlink == 3
    sub = sub.rename(b / "sub")
    assert (a.stat().st_nlink, b.stat().st_nlink) == (2, 3)
    assert os.path.samefile(sub / "..", b)
    folder(a / "over")
    os.rename(a / "over", sub)
    assert (a.stat().st_nlink, b.stat().st_nlink) == (2, 3)
    sub.rmdir()
    assert b.stat().st_nlink == 2


def test_rename_updates_a_replaced_links_count(here: Path) -> None:
    old = touch(here / "old", 0o644, b"old")
    os.link(old, here / "kept")
    touch(here / "new")
    let_clock_pass(old)
    before = old.stat()
    os.rename(here / "new", old)
    after = (here / "kept").stat()
    assert after.st_nlink == 1
    assert after.st_ctime_ns > before.st_ctime_ns
    assert (here / "kept").read_bytes() == b"old"


def test_an_open_file_survives_being_replaced(here: Path) -> None:
    path = touch(here / "a", 0o644, b"old content")
    with descriptor(path) as fd:
        (here / "b").write_bytes(b"new")
        os.replace(here / "b", path)
        assert os.fstat(fd).st_nlink == 0
        assert os.fstat(fd).st_size == 11
        assert os.pread(fd, 100, 0) == b"old content"
        os.pwrite(fd, b"OLD", 0)
        assert path.read_bytes() == b"new"
        assert os.pread(fd, 100, 0) == b"OLD content"


def test_noreplace(here: Path) -> None:
    a, b = touch(here / "a", 0o644, b"a"), touch(here / "b", 0o644, b"b")
    with refused(errno.EEXIST):
        renameat2(a, b, RENAME_NOREPLACE)
    assert (a.read_bytes(), b.read_bytes()) == (b"a", b"b")
    renameat2(a, here / "c", RENAME_NOREPLACE)
    assert set(os.listdir(here)) == {"b", "c"}
    with refused(errno.ENOENT):
        renameat2(a, here / "d", RENAME_NOREPLACE)


def test_exchange(here: Path) -> None:
    a = touch(here / "a", 0o644, b"a")
    sub = folder(here / "sub")
    folder(sub / "inner")
    touch(sub / "inner" / "f")
    numbers = a.stat().st_ino, (sub / "inner").stat().st_ino
    renameat2(a, sub / "inner", RENAME_EXCHANGE)
    assert ((sub / "inner").stat().st_ino, a.stat().st_ino) == numbers
    assert os.listdir(a) == ["f"]
    assert (here.stat().st_nlink, sub.stat().st_nlink) == (4, 2)
    assert os.path.samefile(a / "..", here)
    with refused(errno.ENOENT):
        renameat2(a, here / "missing", RENAME_EXCHANGE)
    with refused(errno.EINVAL):
        renameat2(a, a / "f", RENAME_EXCHANGE)
    with refused(errno.EINVAL):
        renameat2(a, sub, RENAME_EXCHANGE | RENAME_NOREPLACE)


@needs_root
@pytest.mark.parametrize("kind", ["regular", "directory"])
def test_whiteout(here: Path, kind: str) -> None:
    """What overlayfs puts in place of a name that it removes."""
    sub = folder(here / "sub")
    path = make_of(kind, here / "f")
    number = path.stat().st_ino
    renameat2(path, sub / "g", RENAME_WHITEOUT)
    assert (sub / "g").stat().st_ino == number
    left = path.lstat()
    assert stat.S_ISCHR(left.st_mode)
    assert (left.st_rdev, left.st_mode & 0o777, left.st_nlink) == (0, 0, 1)
    assert sorted(os.listdir(here)) == ["f", "sub"]
    replaced = touch(here / "replaced")
    renameat2(sub / "g" if kind == "regular" else touch(sub / "h"), replaced, RENAME_WHITEOUT)
    assert stat.S_ISREG(replaced.stat().st_mode)
    with refused(errno.EEXIST):
        renameat2(replaced, path, RENAME_WHITEOUT | RENAME_NOREPLACE)
    with refused(errno.EINVAL):
        renameat2(replaced, path, RENAME_WHITEOUT | RENAME_EXCHANGE)
    assert stat.S_ISREG(replaced.stat().st_mode)
    path.unlink()
    assert not path.exists()


@needs_root
def test_rename_needs_both_directories(here: Path) -> None:
    a, b = folder(here / "a", 0o755, ALICE, ALICE), folder(here / "b", 0o755, BOB, BOB)
    touch(a / "f")
    with as_user(ALICE), refused(errno.EACCES):
        os.rename(a / "f", b / "f")
    with as_user(BOB), refused(errno.EACCES):
        os.rename(a / "f", b / "f")
    assert os.listdir(a) == ["f"]


@needs_root
def test_moving_a_directory_needs_it_writable(here: Path) -> None:
    a, b = folder(here / "a", 0o777), folder(here / "b", 0o777)
    folder(a / "d", 0o555, ALICE, ALICE)
    with as_user(ALICE), refused(errno.EACCES):
        os.rename(a / "d", b / "d")  # its `..` would change
    with as_user(ALICE):
        os.rename(a / "d", a / "e")
