"""How paths resolve, and what each call answers where they do not."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.posix import (
    ALICE,
    KINDS,
    as_user,
    folder,
    make_of,
    needs_root,
    opened,
    refused,
    touch,
)

Call = Callable[[Path], Any]

# Calls on a name that must exist.
ON_EXISTING: dict[str, Call] = {
    "stat": os.stat,
    "lstat": os.lstat,
    "access": lambda p: os.stat(p) and os.access(p, os.R_OK),
    "statvfs": os.statvfs,
    "chmod": lambda p: os.chmod(p, 0o644),
    "chown": lambda p: os.chown(p, -1, -1),
    "lchown": lambda p: os.lchown(p, -1, -1),
    "utime": os.utime,
    "truncate": lambda p: os.truncate(p, 0),
    "open": lambda p: opened(p, os.O_RDONLY),
    "open-write": lambda p: opened(p, os.O_WRONLY),
    "opendir": os.listdir,
    "readlink": os.readlink,
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "rename": lambda p: os.rename(p, p.parent / "other"),
    "link-from": lambda p: os.link(p, p.parent / "other"),
    "getxattr": lambda p: os.getxattr(p, "user.a"),
    "setxattr": lambda p: os.setxattr(p, "user.a", b""),
    "listxattr": os.listxattr,
    "removexattr": lambda p: os.removexattr(p, "user.a"),
}
# Calls that make a name.
CREATING: dict[str, Call] = {
    "mkdir": os.mkdir,
    "mkfifo": os.mkfifo,
    "mknod": lambda p: os.mknod(p, stat.S_IFSOCK | 0o644),
    "symlink": lambda p: os.symlink("target", p),
    "create": lambda p: opened(p, os.O_WRONLY | os.O_CREAT),
    "create-excl": lambda p: opened(p, os.O_WRONLY | os.O_CREAT | os.O_EXCL),
}
# Calls that follow a symbolic link in the last component.
FOLLOWING = [
    "stat",
    "access",
    "statvfs",
    "chmod",
    "chown",
    "utime",
    "truncate",
    "open",
    "open-write",
    "opendir",
    "getxattr",
    "setxattr",
    "listxattr",
    "removexattr",
]
EVERY = {**ON_EXISTING, **CREATING}

every = pytest.mark.parametrize("name", EVERY)
existing = pytest.mark.parametrize("name", ON_EXISTING)
creating = pytest.mark.parametrize("name", CREATING)


@every
def test_a_name_of_256_bytes_is_too_long(here: Path, name: str) -> None:
    with refused(errno.ENAMETOOLONG):
        EVERY[name](here / ("x" * 256))
    with refused(errno.ENAMETOOLONG):
        EVERY[name](here / ("x" * 256) / "y")


@creating
def test_a_name_of_255_bytes_is_fine(here: Path, name: str) -> None:
    longest = here / ("x" * 255)
    CREATING[name](longest)
    assert os.listdir(here) == [longest.name]
    longest.rename(here / ("y" * 255))
    assert os.listdir(here) == ["y" * 255]


@every
def test_a_path_of_4096_bytes_is_too_long(here: Path, name: str) -> None:
    path = str(here) + "/." * ((4096 - len(str(here))) // 2) + "/xx"
    assert len(path) >= 4096
    with refused(errno.ENAMETOOLONG):
        EVERY[name](RawPath(path))  # type: ignore[arg-type]


class RawPath(str):
    """A path as it is: Path() would drop the `/.`."""

    __slots__ = ()

    @property
    def parent(self) -> Path:
        return Path("/nonexistent")


def test_a_path_of_4095_bytes_is_fine(here: Path) -> None:
    touch(here / "f")
    room = 4095 - len(str(here)) - len("/f")
    path = str(here) + "/." * (room // 2) + ("/" if room % 2 else "") + "/f"
    assert len(path) == 4095
    assert os.stat(path).st_size == 0


@every
def test_a_file_is_no_directory(here: Path, name: str) -> None:
    touch(here / "file")
    with refused(errno.ENOTDIR):
        EVERY[name](here / "file" / "x")


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("directory", "symlink", "regular")])
def test_nothing_but_a_directory_has_entries(here: Path, kind: str) -> None:
    if kind == "device" and os.geteuid():
        pytest.skip("needs root")
    make_of(kind, here / "file")
    with refused(errno.ENOTDIR):
        os.stat(here / "file" / "x")


@every
def test_a_missing_directory_is_enoent(here: Path, name: str) -> None:
    with refused(errno.ENOENT):
        EVERY[name](here / "missing" / "x")


@existing
def test_a_missing_name_is_enoent(here: Path, name: str) -> None:
    with refused(errno.ENOENT):
        ON_EXISTING[name](here / "missing")


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_dangling_link_is_enoent(here: Path, name: str) -> None:
    (here / "link").symlink_to("missing")
    with refused(errno.ENOENT):
        EVERY[name](here / "link")


@every
def test_a_loop_of_links_is_eloop(here: Path, name: str) -> None:
    (here / "a").symlink_to("b")
    (here / "b").symlink_to("a")
    with refused(errno.ELOOP):
        EVERY[name](here / "a" / "x")


@pytest.mark.parametrize("name", [*FOLLOWING, "create"])
def test_a_loop_in_the_last_component_is_eloop(here: Path, name: str) -> None:
    (here / "a").symlink_to("b")
    (here / "b").symlink_to("a")
    with refused(errno.ELOOP):
        EVERY[name](here / "a")


@needs_root
@every
def test_a_directory_must_be_searchable(here: Path, name: str) -> None:
    closed = folder(here / "closed", 0o777, ALICE)
    touch(closed / "x", 0o777)
    for mode in (0o666, 0o066, 0o000):
        closed.chmod(mode)
        with as_user(ALICE), refused(errno.EACCES):
            EVERY[name](closed / "x")


@needs_root
@creating
def test_making_a_name_needs_a_writable_directory(here: Path, name: str) -> None:
    target = folder(here / "d", 0o555, ALICE)
    with as_user(ALICE), refused(errno.EACCES):
        CREATING[name](target / "x")
    target.chmod(0o755)
    with as_user(ALICE):
        CREATING[name](target / "x")
    assert (target / "x").lstat().st_uid == ALICE


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_removing_a_name_needs_a_writable_directory(here: Path, kind: str) -> None:
    target = folder(here / "d", 0o555)
    make_of(kind, target / "x")
    remove = os.rmdir if kind == "directory" else os.unlink
    with as_user(ALICE), refused(errno.EACCES):
        remove(target / "x")
    with as_user(ALICE), refused(errno.EACCES):
        os.rename(target / "x", target / "y")
    target.chmod(0o777)
    with as_user(ALICE):
        os.rename(target / "x", target / "y")
        remove(target / "y")
    assert os.listdir(target) == []


@pytest.mark.parametrize("kind", KINDS)
@creating
def test_a_taken_name_is_eexist(here: Path, name: str, kind: str) -> None:
    if kind == "device" and os.geteuid():
        pytest.skip("needs root")
    taken = make_of(kind, here / "taken")
    before = taken.lstat()
    if name == "create":
        return  # without O_EXCL it opens what is there
    with refused(errno.EEXIST):
        CREATING[name](taken)
    assert taken.lstat().st_ino == before.st_ino


@pytest.mark.parametrize("kind", KINDS)
def test_unlink_refuses_directories_and_rmdir_the_rest(here: Path, kind: str) -> None:
    if kind == "device" and os.geteuid():
        pytest.skip("needs root")
    path = make_of(kind, here / "x")
    if kind == "directory":
        with refused(errno.EISDIR):
            os.unlink(path)
        os.rmdir(path)
    else:
        with refused(errno.ENOTDIR):
            os.rmdir(path)
        os.unlink(path)
    with refused(errno.ENOENT):
        os.lstat(path)


def test_rmdir_refuses_what_is_not_empty(here: Path) -> None:
    target = folder(here / "d")
    for kind in KINDS if os.geteuid() == 0 else KINDS[:-1]:
        make_of(kind, target / kind)
        with refused(errno.ENOTEMPTY, errno.EEXIST):
            target.rmdir()
        (target / "directory").rmdir() if kind == "directory" else (target / kind).unlink()
    target.rmdir()


def test_dot_and_dotdot_are_never_removed(here: Path) -> None:
    folder(here / "d")
    with refused(errno.EINVAL):
        os.rmdir(f"{here}/d/.")
    with refused(errno.ENOTEMPTY, errno.EEXIST):
        os.rmdir(f"{here}/d/..")
    with refused(errno.EBUSY, errno.EINVAL):
        os.rename(f"{here}/d/.", here / "e")


def test_a_trailing_slash_means_a_directory(here: Path) -> None:
    touch(here / "file")
    with refused(errno.ENOTDIR):
        os.stat(f"{here}/file/")
    with refused(errno.ENOTDIR):
        os.rename(here / "file", f"{here}/new/")
    with refused(errno.EISDIR):
        os.open(f"{here}/new/", os.O_CREAT | os.O_WRONLY)
    os.mkdir(f"{here}/new/")
    assert (here / "new").is_dir()


def test_the_mount_point_is_busy(place: Any) -> None:
    if place.node is None:
        pytest.skip("a plain directory is no mount point")
    with refused(errno.EBUSY, errno.EPERM):  # the directory below may be closed to writers
        os.rmdir(place.node.mount)


NAMES = {
    "not UTF-8": b"\xff\xfe\x80abc",
    "every byte": bytes(b for b in range(1, 256) if b != ord("/")),
    "newline": b"a\nb",
    "backslash": rb"a\040b",
    "dots": b"...",
    "space": b" ",
    "decomposed": "e\u0301".encode(),
    "composed": "\u00e9".encode(),
    "surrogates": b"\xed\xa0\x80",
    "emoji": "\U0001f600".encode() * 63,
}


@pytest.mark.parametrize("raw", NAMES.values(), ids=NAMES)
def test_names_are_bytes(here: Path, raw: bytes) -> None:
    base = os.fsencode(here)
    path = os.path.join(base, raw)
    with open(path, "wb") as out:
        out.write(raw)
    assert os.listdir(base) == [raw]
    with open(path, "rb") as back:
        assert back.read() == raw
    os.rename(path, path[:-1] + b"Z")
    os.symlink(raw, path)
    assert os.readlink(path) == raw
    os.unlink(path)
    os.mkdir(path)
    assert set(os.listdir(base)) == {raw, raw[:-1] + b"Z"}


def test_names_differ_by_case_and_by_normal_form(here: Path) -> None:
    names = {"a", "A", "\u00e9", "e\u0301"}
    for name in names:
        touch(here / name)
    assert set(os.listdir(here)) == names


def test_deep_trees(here: Path) -> None:
    depth = 120
    at = os.open(here, os.O_RDONLY)
    for level in range(depth):
        os.mkdir(f"level{level}", dir_fd=at)
        deeper = os.open(f"level{level}", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = deeper
    with open(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at), "w") as out:
        out.write("deep")
    os.close(at)
    path = here.joinpath(*(f"level{n}" for n in range(depth)), "file")
    assert path.read_text() == "deep"
    assert os.path.samefile(path.parent / ".." / "..", path.parent.parent.parent)
