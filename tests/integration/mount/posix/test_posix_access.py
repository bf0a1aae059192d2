"""Who may do what: mode bits, ownership, sticky directories, set-id bits."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Place
from tests.integration.posix import (
    ALICE,
    BOB,
    KINDS,
    STAFF,
    as_user,
    descriptor,
    fallocate,
    folder,
    make_of,
    mode_alone,
    mode_of,
    needs_root,
    opened,
    refused,
    touch,
)

pytestmark = needs_root

WHO = {
    "owner": (ALICE, ALICE, ()),
    "group": (BOB, STAFF, ()),
    "second group": (BOB, BOB, (STAFF,)),
    "other": (BOB, BOB, ()),
}
SHIFT = {"owner": 6, "group": 3, "second group": 3, "other": 0}
FLAGS = {os.O_RDONLY: 4, os.O_WRONLY: 2, os.O_RDWR: 6, os.O_RDONLY | os.O_TRUNC: 6}


@pytest.mark.parametrize("who", WHO)
def test_open_goes_by_the_bits_of_the_right_class(here: Path, who: str) -> None:
    path = touch(here / "f")
    os.chown(path, ALICE, STAFF)
    for bits in range(8):
        # All other classes may do everything: only the right class counts.
        path.chmod((0o777 & ~(7 << SHIFT[who])) | bits << SHIFT[who])
        for flags, needs in FLAGS.items():
            with as_user(*WHO[who]):
                if bits & needs == needs:
                    opened(path, flags)
                else:
                    with refused(errno.EACCES):
                        opened(path, flags)


@pytest.mark.parametrize("who", WHO)
def test_access_says_what_open_would(here: Path, who: str) -> None:
    path = touch(here / "f")
    os.chown(path, ALICE, STAFF)
    for bits in range(8):
        path.chmod(bits << SHIFT[who])
        with as_user(*WHO[who]):
            for wanted in range(1, 8):
                allowed = os.access(path, wanted, effective_ids=True)
                assert allowed == (bits & wanted == wanted), (bits, wanted)


@pytest.mark.parametrize("who", WHO)
def test_directories_go_by_bits_too(here: Path, who: str) -> None:
    target = folder(here / "d")
    touch(target / "f", 0o666)
    os.chown(target, ALICE, STAFF)
    for bits in range(8):
        target.chmod((0o777 & ~(7 << SHIFT[who])) | bits << SHIFT[who])
        with as_user(*WHO[who]):
            try_a_directory(target, bits)


def try_a_directory(target: Path, bits: int) -> None:
    may_list, may_write, may_search = bool(bits & 4), bits & 3 == 3, bool(bits & 1)
    for allowed, call in (
        (may_list, lambda: os.listdir(target)),
        (may_search, lambda: os.stat(target / "f")),
        (may_write, lambda: os.rename(target / "f", target / "g")),
        (may_write, lambda: touch(target / ("f" if may_write else "new"), 0o666)),
        (may_write, lambda: os.unlink(target / ("g" if may_write else "f"))),
    ):
        if allowed:
            call()
        else:
            with refused(errno.EACCES):
                call()


def test_root_may_do_all_but_execute(here: Path) -> None:
    path = touch(here / "f", 0o000, b"#!/bin/sh\n")
    opened(path, os.O_RDWR)
    assert os.access(path, os.R_OK | os.W_OK)
    assert not os.access(path, os.X_OK)
    with refused(errno.EACCES):
        os.execv(path, ["f"])
    path.chmod(0o100)
    assert os.access(path, os.X_OK)


# --- chmod ---


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "symlink"])
def test_chmod_sets_all_twelve_bits(here: Path, kind: str) -> None:
    path = make_of(kind, here / "x")
    for mode in (0o000, 0o111, 0o640, 0o777, 0o1755, 0o2755, 0o4755, 0o7777):
        path.chmod(mode)
        assert mode_of(path) == mode
        (here / "link").symlink_to("x")
        os.chmod(here / "link", 0o421)
        assert mode_of(path) == 0o421
        assert mode_of(here / "link") == 0o777
        (here / "link").unlink()


def test_only_the_owner_changes_the_mode(here: Path) -> None:
    path = touch(here / "f", 0o666)
    os.chown(path, ALICE, STAFF)
    with as_user(ALICE):
        path.chmod(0o600)
    with as_user(BOB, STAFF), refused(errno.EPERM):
        path.chmod(0o666)
    assert mode_of(path) == 0o600


def test_fchmod_works_on_a_read_only_descriptor(here: Path) -> None:
    path = touch(here / "f", 0o644)
    with descriptor(path, os.O_RDONLY) as fd:
        os.fchmod(fd, 0o4711)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o4711
    assert mode_of(path) == 0o4711


def test_setgid_is_dropped_for_a_group_one_is_not_in(here: Path) -> None:
    path = touch(here / "f", 0o755)
    os.chown(path, ALICE, STAFF)
    with as_user(ALICE):
        path.chmod(0o2755)
    assert mode_of(path) == 0o755
    with as_user(ALICE, ALICE, (STAFF,)):
        path.chmod(0o2755)
    assert mode_of(path) == 0o2755


# --- chown ---


@pytest.mark.parametrize("kind", KINDS)
def test_root_gives_files_away(here: Path, kind: str) -> None:
    path = make_of(kind, here / "x")
    os.lchown(path, ALICE, STAFF)
    assert path.lstat()[4:6] == (ALICE, STAFF)
    os.lchown(path, -1, BOB)
    assert path.lstat()[4:6] == (ALICE, BOB)
    os.lchown(path, BOB, -1)
    assert path.lstat()[4:6] == (BOB, BOB)
    os.lchown(path, 0xFFFFFFFE, 0xFFFFFFFE)
    assert path.lstat()[4:6] == (0xFFFFFFFE, 0xFFFFFFFE)


def test_chown_follows_links_and_lchown_does_not(here: Path) -> None:
    path = touch(here / "f")
    (here / "link").symlink_to("f")
    os.chown(here / "link", ALICE, STAFF)
    assert path.stat()[4:6] == (ALICE, STAFF)
    assert (here / "link").lstat()[4:6] == (0, 0)
    os.lchown(here / "link", BOB, BOB)
    assert path.stat()[4:6] == (ALICE, STAFF)
    assert (here / "link").lstat()[4:6] == (BOB, BOB)


def test_an_owner_picks_among_his_own_groups(here: Path) -> None:
    path = touch(here / "f")
    os.chown(path, ALICE, ALICE)
    with as_user(ALICE, ALICE, (STAFF,)):
        os.chown(path, -1, STAFF)
        os.chown(path, ALICE, ALICE)
        with refused(errno.EPERM):
            os.chown(path, -1, BOB)
        with refused(errno.EPERM):
            os.chown(path, BOB, -1)
    with as_user(BOB, BOB, (STAFF,)):
        with refused(errno.EPERM):
            os.chown(path, -1, STAFF)
        with refused(errno.EPERM):
            os.chown(path, BOB, -1)
    assert path.stat()[4:6] == (ALICE, ALICE)


def test_chown_by_the_owner_drops_set_id_bits(here: Path) -> None:
    path = touch(here / "f")
    os.chown(path, ALICE, ALICE)
    path.chmod(0o6755)
    with as_user(ALICE, ALICE, (STAFF,)):
        os.chown(path, -1, STAFF)
    assert mode_of(path) == 0o755


def test_chown_by_root_drops_set_id_bits_of_executables(here: Path) -> None:
    path = touch(here / "f", 0o6755)
    os.chown(path, ALICE, STAFF)
    assert mode_of(path) == 0o755
    target = folder(here / "d", 0o6755)
    os.chown(target, ALICE, STAFF)
    assert mode_of(target) == 0o6755  # a directory's bits mean something else and stay


def test_chown_keeps_mandatory_lock_marking(here: Path) -> None:
    path = touch(here / "f", 0o2644)  # setgid without group execute is no set-id program
    os.chown(path, 0, 0)
    assert mode_of(path) == 0o2644


# --- set-id bits and writing ---


def write_some(path: Path) -> None:
    with descriptor(path, os.O_WRONLY) as fd:
        os.write(fd, b"x")


@pytest.mark.parametrize(
    "change",
    [
        write_some,
        lambda p: os.truncate(p, 0),
        lambda p: os.truncate(p, 99),
        lambda p: opened(p, os.O_WRONLY | os.O_TRUNC),
    ],
    ids=["write", "truncate", "extend", "open O_TRUNC"],
)
def test_writing_by_another_drops_set_id_bits(here: Path, change: object) -> None:
    assert callable(change)
    path = touch(here / "f", 0o6777, b"data")
    with as_user(BOB):
        change(path)
    assert mode_of(path) == 0o777


def test_writing_drops_set_id_bits_of_an_open_file(here: Path) -> None:
    path = touch(here / "f", 0o666, b"data")
    with as_user(BOB), descriptor(path, os.O_RDWR) as fd:
        os.write(fd, b"first")
        with_root(lambda: path.chmod(0o4777))
        os.pwrite(fd, b"second", 0)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o777
    assert mode_of(path) == 0o777


def copy_some(fd: int, source: Path) -> None:
    with descriptor(source, os.O_RDONLY) as other:
        os.copy_file_range(other, fd, 4)


WAYS_TO_WRITE: dict[str, Callable[[int, Path], object]] = {
    "write": lambda fd, _source: os.pwrite(fd, b"x", 1),
    "large write": lambda fd, _source: os.pwrite(fd, bytes(1 << 20), 0),
    "truncate": lambda fd, _source: os.ftruncate(fd, 1),
    "fallocate": lambda fd, _source: fallocate(fd, 0, 0, 20_000),
    "copy_file_range": copy_some,
}


@pytest.mark.parametrize("when", ["before", "meanwhile", "before, and open by a reader"])
@pytest.mark.parametrize("way", WAYS_TO_WRITE)
def test_set_id_bits_are_gone_when_the_write_returns(
    here: Path, place: Place, way: str, when: str
) -> None:
    """For who starts the program right then too: the kernel goes by the mode that it remembers."""
    if way == "fallocate" and place.is_bare:
        return
    path, source = touch(here / "f", 0o777, b"data"), touch(here / "source", 0o644, b"more")
    with contextlib.ExitStack() as closing:
        if when == "meanwhile":
            with as_user(BOB):
                fd = closing.enter_context(descriptor(path, os.O_RDWR))
                os.pwrite(fd, b"first", 0)
        elif when != "before":
            closing.enter_context(descriptor(path, os.O_RDONLY))
        path.chmod(0o6777)
        assert mode_of(path) == 0o6777
        with as_user(BOB):
            if when != "meanwhile":
                fd = closing.enter_context(descriptor(path, os.O_RDWR))
            WAYS_TO_WRITE[way](fd, source)
            assert mode_alone(path) == 0o777
    assert mode_alone(path) == 0o777


def with_root(call: object) -> None:
    assert callable(call)
    uid, gid = os.geteuid(), os.getegid()
    os.seteuid(0)
    try:
        call()
    finally:
        os.setegid(gid)
        os.seteuid(uid)


def test_root_keeps_set_id_bits_when_it_writes(here: Path) -> None:
    path = touch(here / "f", 0o6777)
    write_some(path)
    assert mode_of(path) == 0o6777


# --- creation ---


def test_creation_honours_the_umask(here: Path) -> None:
    for mask, wanted in ((0o000, 0o777), (0o022, 0o755), (0o077, 0o700), (0o777, 0o000)):
        os.umask(mask)
        opened(here / f"f{mask}", os.O_CREAT | os.O_WRONLY, 0o777)
        os.mkdir(here / f"d{mask}", 0o777)
        os.mkfifo(here / f"p{mask}", 0o777)
        os.mknod(here / f"s{mask}", stat.S_IFSOCK | 0o777)
        os.symlink("x", here / f"l{mask}")
        for kind in "fdps":
            assert mode_of(here / f"{kind}{mask}") == wanted
        assert mode_of(here / f"l{mask}") == 0o777


def test_new_files_belong_to_their_maker(here: Path) -> None:
    here.chmod(0o777)
    with as_user(ALICE, STAFF):
        for kind in KINDS[:-1]:
            assert make_of(kind, here / kind).lstat()[4:6] == (ALICE, STAFF)


def test_a_setgid_directory_gives_its_group(here: Path) -> None:
    parent = folder(here / "d", 0o2777, 0, STAFF)
    with as_user(ALICE, BOB):
        for kind in KINDS[:-1]:
            made = make_of(kind, parent / kind)
            assert made.lstat()[4:6] == (ALICE, STAFF), kind
            assert bool(mode_of(made) & stat.S_ISGID) == (kind == "directory")


def test_a_new_file_cannot_be_setgid_to_a_foreign_group(here: Path) -> None:
    parent = folder(here / "d", 0o2777, 0, STAFF)
    with as_user(ALICE, BOB):
        opened(parent / "f", os.O_CREAT | os.O_WRONLY, 0o2775)
    assert mode_of(parent / "f") == 0o755
    with as_user(ALICE, STAFF):
        opened(parent / "g", os.O_CREAT | os.O_WRONLY, 0o2775)
    assert mode_of(parent / "g") == 0o2755


def test_a_file_made_without_write_permission_is_writable_through_its_descriptor(
    here: Path,
) -> None:
    here.chmod(0o777)
    with as_user(ALICE):
        with descriptor(here / "f", os.O_CREAT | os.O_RDWR, 0o400) as fd:
            os.write(fd, b"git does so")
        with refused(errno.EACCES):
            opened(here / "f", os.O_WRONLY)
        assert (here / "f").read_bytes() == b"git does so"


# --- sticky directories ---


PAIRS = [(a, b) for a in (0, ALICE, BOB) for b in (0, ALICE, BOB)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parent_owner", "owner"), PAIRS)
def test_sticky_directories(here: Path, kind: str, parent_owner: int, owner: int) -> None:
    parent = folder(here / "d", 0o1777, parent_owner, parent_owner)
    free = folder(here / "free", 0o777)
    make_of(kind, parent / "x")
    os.lchown(parent / "x", owner, owner)
    if kind == "directory":
        (parent / "x").chmod(0o777)  # moving a directory away rewrites its `..`
    remove = os.rmdir if kind == "directory" else os.unlink
    with as_user(ALICE):
        if ALICE in (parent_owner, owner):
            os.rename(parent / "x", parent / "y")
            os.rename(parent / "y", free / "z")
            os.rename(free / "z", parent / "x")
            remove(parent / "x")
        else:
            with refused(errno.EPERM, errno.EACCES):
                os.rename(parent / "x", parent / "y")
            with refused(errno.EPERM, errno.EACCES):
                os.rename(parent / "x", free / "z")
            with refused(errno.EPERM, errno.EACCES):
                remove(parent / "x")
    assert os.path.lexists(parent / "x") == (ALICE not in (parent_owner, owner))


def test_nobody_renames_over_anothers_file_in_a_sticky_directory(here: Path) -> None:
    parent = folder(here / "d", 0o1777)
    touch(parent / "mine")
    os.chown(parent / "mine", ALICE, ALICE)
    touch(parent / "his", 0o666, b"his")
    os.chown(parent / "his", BOB, BOB)
    with as_user(ALICE), refused(errno.EPERM, errno.EACCES):
        os.rename(parent / "mine", parent / "his")
    assert (parent / "his").read_bytes() == b"his"


# --- what mounts do ---


def test_devices_exist_and_do_not_open(here: Path, place: Place) -> None:
    for kind, number in ((stat.S_IFCHR, os.makedev(1, 3)), (stat.S_IFBLK, os.makedev(7, 4095))):
        path = here / f"device{kind}"
        os.mknod(path, kind | 0o666, number)
        found = path.lstat()
        assert stat.S_IFMT(found.st_mode) == kind
        assert found.st_rdev == number
        if place.node is not None:
            with refused(errno.EACCES):
                opened(path, os.O_RDWR)
    with as_user(ALICE), refused(errno.EPERM, errno.EACCES):
        os.mknod(here / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def test_large_device_numbers(here: Path) -> None:
    number = os.makedev(0xFFF, 0xFFFFF)
    os.mknod(here / "device", stat.S_IFBLK | 0o600, number)
    assert (here / "device").lstat().st_rdev == number


def test_set_uid_programs_do_not_take_effect(here: Path, place: Place) -> None:
    if place.node is None:
        pytest.skip("a plain directory may be mounted suid")
    flags = os.statvfs(here).f_flag
    assert flags & os.ST_NOSUID
    assert flags & getattr(os, "ST_NODEV", 4)
