"""Extended attributes: namespaces, sizes, flags, errno."""

import errno
import os
import struct
from pathlib import Path

import pytest

from tests.integration.conftest import Place
from tests.integration.posix import ALICE, BOB, as_user, descriptor, needs_root, refused, touch


@pytest.fixture
def path(here: Path) -> Path:
    return touch(here / "f", 0o644, b"data")


def test_set_get_list_remove(path: Path) -> None:
    assert names(path) == set()
    os.setxattr(path, "user.a", b"1")
    os.setxattr(path, "user.b", bytes(range(256)))
    os.setxattr(path, "user.empty", b"")
    assert names(path) == {"user.a", "user.b", "user.empty"}
    assert os.getxattr(path, "user.a") == b"1"
    assert os.getxattr(path, "user.b") == bytes(range(256))
    assert os.getxattr(path, "user.empty") == b""
    os.setxattr(path, "user.a", b"a longer value")
    assert os.getxattr(path, "user.a") == b"a longer value"
    os.removexattr(path, "user.b")
    assert names(path) == {"user.a", "user.empty"}
    with refused(errno.ENODATA):
        os.getxattr(path, "user.b")
    with refused(errno.ENODATA):
        os.removexattr(path, "user.b")


def names(path: Path) -> set[str]:
    """Without what a security module may add."""
    return {n for n in os.listxattr(path, follow_symlinks=False) if not n.startswith("security.")}


def test_create_and_replace(path: Path) -> None:
    with refused(errno.ENODATA):
        os.setxattr(path, "user.a", b"1", os.XATTR_REPLACE)
    os.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    with refused(errno.EEXIST):
        os.setxattr(path, "user.a", b"2", os.XATTR_CREATE)
    assert os.getxattr(path, "user.a") == b"1"
    os.setxattr(path, "user.a", b"3", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.a") == b"3"


def test_directories_and_descriptors(here: Path, path: Path) -> None:
    os.setxattr(here, "user.dir", b"d")
    assert os.getxattr(here, "user.dir") == b"d"
    with descriptor(path, os.O_RDONLY) as fd:
        os.setxattr(fd, "user.fd", b"v")
        assert os.listxattr(fd) == os.listxattr(path)
    assert os.getxattr(path, "user.fd") == b"v"


def test_links_and_special_files_have_none(here: Path, path: Path) -> None:
    (here / "l").symlink_to("f")
    os.mkfifo(here / "p")
    with refused(errno.EPERM):
        os.setxattr(here / "l", "user.a", b"1", follow_symlinks=False)
    with refused(errno.EPERM):
        os.setxattr(here / "p", "user.a", b"1")
    os.setxattr(here / "l", "user.a", b"1")
    assert os.getxattr(path, "user.a") == b"1"
    assert os.listxattr(here / "p") == []


def test_sizes(path: Path) -> None:
    os.setxattr(path, "user." + "n" * 250, b"v")
    assert os.getxattr(path, "user." + "n" * 250) == b"v"
    with refused(errno.ERANGE):
        os.setxattr(path, "user." + "n" * 251, b"v")
    os.setxattr(path, "user.a", b"v" * 3000)
    assert len(os.getxattr(path, "user.a")) == 3000
    with refused(errno.E2BIG, errno.ENOSPC):
        os.setxattr(path, "user.a", bytes(65537))
    assert len(os.getxattr(path, "user.a")) == 3000


def test_all_of_a_file_have_a_limit_of_bytes(place: Place, path: Path) -> None:
    """Whatever it is: ext4 has 4 KiB, KVFS 64."""
    with refused(errno.ENOSPC, errno.E2BIG):
        for number in range(70):
            os.setxattr(path, f"user.{number}", bytes(1000))
    if place.node is not None:
        kept = [name for name in os.listxattr(path) if name.startswith("user.")]
        assert len(kept) == 65  # 65 x (7 + 1 + 1,000) bytes are the last that are not over 65,536
        os.setxattr(path, "user.0", b"")
        os.setxattr(path, "user.69", bytes(900))
        with refused(errno.ENOSPC):
            os.setxattr(path, "user.0", bytes(1000))
    assert os.getxattr(path, "user.1") == bytes(1000)


def test_a_short_buffer_is_erange(path: Path) -> None:
    import ctypes

    from tests.integration.posix import check, libc

    os.setxattr(path, "user.a", b"12345")
    buffer = ctypes.create_string_buffer(4)
    with refused(errno.ERANGE):
        check(libc.getxattr(os.fsencode(path), b"user.a", buffer, 4))
    with refused(errno.ERANGE):
        check(libc.listxattr(os.fsencode(path), buffer, 4))
    assert check(libc.getxattr(os.fsencode(path), b"user.a", None, 0)) == 5


def test_names_without_a_known_prefix(path: Path) -> None:
    for name in ("noprefix", "unknown.a", "user."):
        with refused(errno.EOPNOTSUPP, errno.EINVAL):
            os.setxattr(path, name, b"")
    assert names(path) == set()


def test_they_follow_the_file(here: Path, path: Path) -> None:
    os.setxattr(path, "user.a", b"1")
    os.link(path, here / "g")
    path.rename(here / "h")
    assert os.getxattr(here / "g", "user.a") == b"1"
    assert os.getxattr(here / "h", "user.a") == b"1"
    (here / "h").write_bytes(b"new content")
    assert os.getxattr(here / "h", "user.a") == b"1"
    (here / "h").unlink()
    (here / "g").unlink()
    touch(path)
    assert names(path) == set()


@needs_root
def test_user_attributes_go_by_mode_bits(path: Path) -> None:
    os.setxattr(path, "user.a", b"1")
    os.chown(path, ALICE, ALICE)
    path.chmod(0o604)
    with as_user(BOB):
        assert os.getxattr(path, "user.a") == b"1"
        with refused(errno.EACCES):
            os.setxattr(path, "user.a", b"2")
        with refused(errno.EACCES):
            os.removexattr(path, "user.a")
    path.chmod(0o602)
    with as_user(BOB), refused(errno.EACCES):
        os.getxattr(path, "user.a")
    with as_user(ALICE):
        os.setxattr(path, "user.a", b"2")


@needs_root
def test_trusted_attributes_are_for_root(path: Path) -> None:
    """Kept as native filesystems keep them, or refused in plain words: never lost in silence."""
    os.chown(path, ALICE, ALICE)
    try:
        os.setxattr(path, "trusted.a", b"1")
    except OSError as error:
        assert error.errno in (errno.EOPNOTSUPP, errno.EPERM)
        return
    assert os.getxattr(path, "trusted.a") == b"1"
    assert "trusted.a" in os.listxattr(path)
    with as_user(ALICE):
        with refused(errno.EPERM):
            os.setxattr(path, "trusted.a", b"2")
        with refused(errno.ENODATA, errno.EPERM):
            os.getxattr(path, "trusted.a")
        assert "trusted.a" not in os.listxattr(path)


@needs_root
def test_access_lists_are_kept_or_refused(path: Path) -> None:
    """An access list that is stored but not enforced would be worse than none."""
    minimal = bytes.fromhex("02000000 01000600ffffffff 04000400ffffffff 20000400ffffffff")
    try:
        os.setxattr(path, "system.posix_acl_access", minimal)
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP
        return
    assert path.stat().st_mode & 0o777 == 0o644


NET_RAW = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
"""What `setcap cap_net_raw+ep` sets."""


@needs_root
def test_capabilities_are_kept_until_the_file_is_written(path: Path) -> None:
    with as_user(ALICE), refused(errno.EPERM):
        os.setxattr(path, "security.capability", NET_RAW)
    for write in (
        lambda fd: os.write(fd, b"other content"),
        lambda fd: os.ftruncate(fd, 3),
        lambda _fd: os.chown(path, BOB, BOB),
    ):
        os.setxattr(path, "security.capability", NET_RAW)
        assert os.getxattr(path, "security.capability") == NET_RAW
        assert "security.capability" in os.listxattr(path)
        with descriptor(path, os.O_RDWR) as fd:
            write(fd)
            with refused(errno.ENODATA):
                os.getxattr(path, "security.capability")


@needs_root
def test_labels_are_kept(path: Path) -> None:
    os.setxattr(path, "security.label", b"any")
    assert os.getxattr(path, "security.label") == b"any"
    os.removexattr(path, "security.label")
    with refused(errno.ENODATA):
        os.getxattr(path, "security.label")
