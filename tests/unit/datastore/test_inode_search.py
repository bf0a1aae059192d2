"""Where data files are made ahead: by what the kernel tells of a filesystem."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.datastore.kernel import filesystem_magic, inode_search


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def sysfs_of(root: Path, directory: int, journal: str) -> Path:
    """The files of sysfs that tell of an ext4 with this journal task."""
    device = os.fstat(directory).st_dev
    block = root / "sys/dev/block"
    block.mkdir(parents=True)
    (block / f"{os.major(device)}:{os.minor(device)}").symlink_to("../../devices/virtual/sdz1")
    of_filesystem = root / "sys/fs/ext4/sdz1"
    of_filesystem.mkdir(parents=True)
    (of_filesystem / "journal_task").write_text(f"{journal}\n")
    return root / "sys"


@pytest.mark.parametrize(("journal", "is_long"), [("<none>", True), ("24932", False)])
def test_ext4_searches_where_it_has_no_journal(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: str, is_long: bool
) -> None:
    monkeypatch.setattr(filesystem_magic, "magic_of", lambda _fd: filesystem_magic.EXT4)
    sysfs = sysfs_of(tmp_path, directory, journal)
    assert inode_search.is_long_after_removals(directory, sysfs) is is_long


def test_ext4_of_which_the_kernel_tells_nothing_counts_as_without_a_journal(
    directory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem_magic, "magic_of", lambda _fd: filesystem_magic.EXT4)
    assert inode_search.is_long_after_removals(directory, tmp_path)


@pytest.mark.parametrize(
    ("kind", "is_long"), [(filesystem_magic.XFS, False), (filesystem_magic.TMPFS, True)]
)
def test_of_others_xfs_alone_is_known_not_to_search(
    directory: int, monkeypatch: pytest.MonkeyPatch, kind: int, is_long: bool
) -> None:
    monkeypatch.setattr(filesystem_magic, "magic_of", lambda _fd: kind)
    assert inode_search.is_long_after_removals(directory) is is_long
