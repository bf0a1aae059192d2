"""A disk that refuses some data once: what it lost is never said to be on it, though it takes
everything again later."""

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio

from kvfs.client import Client
from kvfs.datastore import file_sync
from kvfs.datastore.kernel import filesystem_sync
from kvfs.meta.records import Flag
from kvfs.vfs import seal
from tests.cluster.waiting import wait_until
from tests.contract.small_node import small_node
from tests.fault.disks import disk
from tests.fault.machine import Machine, write
from tests.integration.harness import kvfs

_MIB = 1 << 20
FIRST, SECOND = b"1" * _MIB, b"2" * _MIB


@contextmanager
def thin_machine(directory: Path) -> Iterator[Machine]:
    """Its disk is a file in a memory of 160 MiB, so that a full memory is a disk that refuses what
    needs new space there."""
    thin, home = directory / "thin", directory / "home"
    thin.mkdir()
    (home / "mnt").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", thin], check=True)
    try:
        with disk(thin, "ext4", 128 * _MIB, mountpoint=home / "store") as store:
            with store.image.open("r+b") as image:  # all of it is there, so only holes can fail
                os.posix_fallocate(image.fileno(), 0, 128 * _MIB)
            made = Machine(home, store, None)
            try:
                yield made
            finally:
                made.end()
                subprocess.run(["chattr", "-i", home / "mnt"], check=False, capture_output=True)
    finally:
        subprocess.run(["umount", thin], check=True)


def refuse(made: Machine, *files: Path) -> Path:
    """From now on the disk refuses the data of these files alone; the file that is to be removed
    for it to take them again."""
    image = made.disks[0].image
    filler = image.with_name("filler")
    for data in files:
        subprocess.run(["sync", "--file-system", data], check=True)
        shown = subprocess.check_output(["filefrag", "-v", "-b4096", data], text=True)
        row = r"^ *\d+: +\d+\.\. +\d+: +(\d+)\.\. +\d+: +(\d+):"
        extents = re.findall(row, shown, re.MULTILINE)
        assert extents, shown
        for start, length in extents:
            place = ["--offset", str(int(start) * 4096), "--length", str(int(length) * 4096)]
            subprocess.run(["fallocate", "--punch-hole", *place, image], check=True)
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


def data_of(made: Machine, name: str) -> Path:
    ino = (made.models / name).stat().st_ino
    [found] = (made.node.store / "data").glob(f"???/{ino:016x}.*")
    return found


def refused(fd: int) -> None:
    """With whatever the disk says of it."""
    with pytest.raises(OSError, match=r"Input/output error|No space left"):
        os.fsync(fd)


def test_a_sync_that_failed_is_not_taken_back_by_a_later_one(tmp_path: Path) -> None:
    with thin_machine(tmp_path) as made:
        made.node.up()
        for name in ("target", "lost"):
            write(made.models / name, FIRST)
        wait_until(lambda: made.node.status()["counters"]["sealed_files"] == 2, "sealed", 60)
        filler = refuse(made, data_of(made, "lost"))
        with (made.models / "lost").open("r+b", buffering=0) as file:
            file.write(SECOND)
            refused(file.fileno())
            filler.unlink()
            refused(file.fileno())
        with (made.models / "lost").open("r+b", buffering=0) as file:
            refused(file.fileno())
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.rename(made.models / "lost", made.models / "target")
        with Client(made.node.store) as client, pytest.raises(OSError, match="refused"):
            client.rename("/models/lost", "/models/target")
        assert (made.models / "target").read_bytes() == FIRST
        assert made.node.status()["counters"]["failed_syncs"] == 1

        write(made.models / "copy", (made.models / "lost").read_bytes())
        os.rename(made.models / "copy", made.models / "lost")
        made.node.down()
        checked = kvfs("fsck", "--checksums", "--store", str(made.node.store))
        assert checked.returncode == 0, checked.stdout


def test_of_many_files_only_those_that_the_disk_refused_stay_unsealed(tmp_path: Path) -> None:
    """Files that are sealed together are synced together."""
    names = [f"block{number}" for number in range(12)]
    with thin_machine(tmp_path) as made:
        made.node.up()
        for name in names:
            write(made.models / name, FIRST[:8192])

        def count(what: str) -> int:
            return int(made.node.status()["counters"][what])

        wait_until(lambda: count("sealed_files") == 12, "sealed", 60)
        refuse(made, data_of(made, names[5]))
        for name in names:
            with (made.models / name).open("r+b", buffering=0) as file:
                file.write(SECOND[:8192])
        wait_until(lambda: count("sealed_files") == 12 + 11, "sealed anew", 60)
        assert count("failed_syncs") == 1
        with (made.models / names[5]).open("r+b", buffering=0) as file:
            refused(file.fileno())


def test_many_files_are_synced_by_one_sync_of_their_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fds = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(20)]
    file_sync.mark_lost(fds[0])
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(filesystem_sync, "MOST_BYTES", 1 << 62)
    for fd in fds:
        os.write(fd, FIRST[:4096])
    assert list(file_sync.sync_many(fds)) == [fds[0]]
    assert synced == [fds[1]], "the disk's cache is flushed once"
    monkeypatch.setattr(filesystem_sync, "MOST_BYTES", -1)  # others have much to write
    assert list(file_sync.sync_many(fds)) == [fds[0]]
    assert synced == [fds[1], *fds[1:]]
    for fd in fds:
        os.close(fd)


def test_a_file_that_is_cut_to_nothing_is_synced_again(tmp_path: Path) -> None:
    with thin_machine(tmp_path) as made:
        made.node.up()
        names = ("opened", "truncated", "shortened")
        for name in names:
            write(made.models / name, FIRST)
        wait_until(lambda: made.node.status()["counters"]["sealed_files"] == 3, "sealed", 60)
        filler = refuse(made, *(data_of(made, name) for name in names))
        for name in names:
            with (made.models / name).open("r+b", buffering=0) as file:
                file.write(SECOND)
                refused(file.fileno())
        filler.unlink()
        write(made.models / "opened", FIRST + b"opened")
        for name, size in (("truncated", 0), ("shortened", 4096)):
            os.truncate(made.models / name, size)
        with (made.models / "truncated").open("r+b", buffering=0) as file:
            file.write(FIRST + b"truncated")
            os.fsync(file.fileno())
        with (made.models / "shortened").open("r+b", buffering=0) as file:
            refused(file.fileno())  # what is left of it is what the disk does not have
        made.lose_power()
        made.node.up()
        for name in ("opened", "truncated"):
            assert (made.models / name).read_bytes() == FIRST + name.encode()


def test_a_sync_that_fails_while_a_file_is_cut_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written while the disk takes the new length is not that length."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    file_sync.mark_lost(fd)
    fsync = os.fsync

    def fail_beside(beside: int) -> None:
        fsync(beside)
        file_sync.mark_lost(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail_beside)
        file_sync.truncate(fd, 0)
    assert file_sync.is_lost(fd)
    file_sync.truncate(fd, 0)
    assert not file_sync.is_lost(fd)
    file_sync.sync(fd)
    os.close(fd)


def test_what_the_sealer_could_not_sync_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_node(tmp_path / "store") as node:
        ino = node.write(node.namespace("models", kind="durable"), "lost", FIRST)

        def fail(_fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            trio.run(node.sealer.settle)
        for _ in range(2):
            inode = node.record(ino)
            assert inode is not None
            assert not inode.flags & Flag.SEALED
            assert inode.boot, "it does not count as synced"
            trio.run(node.sealer.settle)
        assert seal.synced(node.files, [(ino, 0)], lambda *_: None) == []
