"""A file while who made it still writes it: what others see of it meanwhile and afterwards.

In relay mode its creator may write past the mount's page cache, readers go through it."""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.disks import Disk, disk
from tests.integration.conftest import Place
from tests.integration.harness import Node, kvfs
from tests.integration.mount.test_races import together
from tests.integration.posix import descriptor, refused

PAGE = mmap.PAGESIZE
MIB = 1 << 20
MAKE = os.O_CREAT | os.O_EXCL | os.O_WRONLY
NUMBER = struct.Struct("<Q")
NewNode = Callable[..., Node]


def readers_see_no_old_bytes(path: Path, size: int, seconds: float) -> None:
    """A writer fills the file with 1, 2, 3 ... and says each time what it has written; readers of
    every kind must find at least that. It goes on until each has looked often."""
    end = time.monotonic() + seconds
    said = mmap.mmap(-1, PAGE)

    def write() -> None:
        number = 0
        while time.monotonic() < end or sum(said[8:11]) < 3:
            number += 1
            assert os.pwrite(maker, NUMBER.pack(number) * (size // 8), 0) == size
            said[:8] = NUMBER.pack(number)

    def reading(reader: int, look: Callable[[int, mmap.mmap, int], bytes]) -> Callable[[], None]:
        def run() -> None:
            at = looks = 0
            fd = os.open(path, os.O_RDONLY)
            try:
                with mmap.mmap(fd, size, prot=mmap.PROT_READ) as view:
                    while time.monotonic() < end or looks <= 50:
                        at = (at + 7 * PAGE) % size
                        least = NUMBER.unpack(said[:8])[0]
                        assert NUMBER.unpack(look(fd, view, at))[0] >= least
                        looks += 1
            finally:
                os.close(fd)
                said[8 + reader] = 1

        return run

    def reopen(_: int, __: mmap.mmap, at: int) -> bytes:
        with descriptor(path, os.O_RDONLY) as fd:
            return os.pread(fd, 8, at)

    maker = os.open(path, MAKE, 0o644)
    try:
        os.write(maker, bytes(size))
        together(
            write,
            reading(0, lambda fd, _, at: os.pread(fd, 8, at)),
            reading(1, lambda _, view, at: view[at : at + 8]),
            reading(2, reopen),
        )
    finally:
        os.close(maker)
    assert path.read_bytes() == said[:8] * (size // 8)


@pytest.mark.parametrize("size", [PAGE, 64 << 10, 2 * MIB])
def test_readers_see_no_old_bytes(place: Place, here: Path, size: int) -> None:
    if place.is_bare:
        pytest.skip("libfuse: a page may be dropped and read again before it is written")
    readers_see_no_old_bytes(here / "f", size, 3)


@pytest.mark.parametrize("append", [0, os.O_APPEND], ids=["anywhere", "appending"])
def test_each_write_is_there_at_once(here: Path, seed: int, append: int) -> None:
    """Odd sizes, offsets and buffers, holes, cuts: the file is what a byte string would be."""
    chance = random.Random(seed)
    path, data = here / "f", bytearray()
    source = memoryview(chance.randbytes(4 * MIB + PAGE))
    with descriptor(path, MAKE | append) as fd, descriptor(path, os.O_RDONLY) as reader:
        for _ in range(60):
            begin = chance.randrange(PAGE)
            part = source[begin : begin + chance.choice((1, 511, 4097, 70_001, MIB, 3 * MIB + 17))]
            at = len(data) if append else chance.randrange(len(data) + 2 * PAGE)
            if chance.randrange(6) == 0:
                cut = chance.randrange(len(data) + PAGE)
                os.ftruncate(fd, cut)
                data[cut:] = bytes(max(0, cut - len(data)))
                at = len(data) if append else at
            data.extend(bytes(max(0, at + len(part) - len(data))))
            data[at : at + len(part)] = part
            assert os.pwrite(fd, part, at) == len(part)
            look = chance.randrange(len(data))
            assert os.pread(reader, MIB, look) == data[look : look + MIB]
            assert os.fstat(reader).st_size == len(data)
    assert path.read_bytes() == data


def test_a_second_writer_of_a_new_file(here: Path) -> None:
    """Two descriptors, each writing every other run of bytes, in the same pages."""
    path, run, count = here / "f", 1000, 3000

    def write(fd: int, mine: int) -> None:
        for n in range(mine, count, 2):
            assert os.pwrite(fd, bytes([65 + mine]) * run, n * run) == run

    def second() -> None:
        with descriptor(path, os.O_WRONLY) as fd:
            write(fd, 1)

    def read() -> None:
        for _ in range(200):
            assert set(path.read_bytes()) <= set(b"\0AB")

    with descriptor(path, MAKE) as maker:
        os.ftruncate(maker, run * count)
        together(lambda: write(maker, 0), second, read)
    assert path.read_bytes() == (b"A" * run + b"B" * run) * (count // 2)


def test_a_new_file_is_written_from_a_mapping_of_another(here: Path) -> None:
    """What is written is not in memory yet and comes from this mount itself."""
    data = os.urandom(3 * MIB + 5)
    (here / "source").write_bytes(data)
    with descriptor(here / "source", os.O_RDONLY) as source, descriptor(here / "f", MAKE) as fd:
        os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(source, len(data), prot=mmap.PROT_READ) as view:
            assert os.write(fd, view) == len(data)
    assert (here / "f").read_bytes() == data


# ---- what goes wrong meanwhile


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with disk(tmp_path, "ext4", 128 * MIB) as made:
        monkeypatch.setenv("KVFS_TEST_BASE", str(made.mountpoint))
        yield made


def fill(foreign: Path) -> None:
    with foreign.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def test_a_disk_that_fills_up_in_the_middle_of_a_write(small_disk: Disk, new_node: NewNode) -> None:
    path = new_node().mount / "models" / "block"
    spare, foreign = small_disk.mountpoint / "spare", small_disk.mountpoint / "foreign"
    data = os.urandom(8 * MIB)
    with descriptor(path, MAKE) as fd:
        spare.write_bytes(bytes(5 * MIB // 2))
        os.sync()
        fill(foreign)
        spare.unlink()
        written = 0
        with refused(errno.ENOSPC):
            while written < len(data):
                written += os.write(fd, memoryview(data)[written:])
        assert 0 < written < len(data)
        assert os.fstat(fd).st_size == written
        assert path.read_bytes() == data[:written]
        foreign.unlink()
        while written < len(data):
            written += os.write(fd, memoryview(data)[written:])
    assert path.read_bytes() == data


WRITER = """
import os, sys
top, size = sys.argv[1], int(sys.argv[2])
n = 0
while True:
    fd = os.open(f"{top}/draft", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.write(fd, bytes([n % 251]) * size)
    os.close(fd)
    os.rename(f"{top}/draft", f"{top}/block{n % 8}")
    print(n, flush=True)
    n += 1
"""
READER = """
import mmap, os, sys
while True:
    try:
        fd = os.open(sys.argv[1], os.O_RDONLY)
    except FileNotFoundError:
        os.statvfs(os.path.dirname(sys.argv[1]))  # the kernel remembers absence, also of the dead
        continue
    size = os.fstat(fd).st_size
    os.pread(fd, 65536, size // 2)
    if size:
        mmap.mmap(fd, size, prot=mmap.PROT_READ)[size // 3]
    os.close(fd)
"""


def test_a_kill_in_the_middle_of_a_write_that_others_read(new_node: NewNode) -> None:
    node = new_node()
    top, size = node.mount / "cache", 8 * MIB
    for _ in range(3):
        with running(WRITER, top, size) as writer, running(READER, top / "draft") as reader:
            assert writer.stdout is not None
            for _ in range(12):
                writer.stdout.readline()
            node.kill()
            for process in (writer, reader):
                assert process.wait(30) != 0  # the mount is gone under it
            last = int((writer.stdout.read().split() or [b"11"])[-1])
        node.up()
        for n in range(last - 6, last + 1):
            assert (top / f"block{n % 8}").read_bytes() == bytes([n % 251]) * size


@contextlib.contextmanager
def running(program: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


# ---- the fallback


UNAME26 = 0x0020000
"""A personality in which uname(2) tells of Linux 2.6."""


@contextlib.contextmanager
def old_kernel() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    before = libc.personality(0xFFFFFFFF)
    if libc.personality(before | UNAME26) < 0:
        pytest.skip("no personality of an old kernel here")
    try:
        if subprocess.run([sys.executable, "-c", ""], check=False, capture_output=True).returncode:
            pytest.skip("the C library refuses to start on an old kernel")
        yield
    finally:
        libc.personality(before)


def direct_writes(node: Node) -> dict[str, object]:
    done = kvfs("doctor", "--json", "--store", str(node.store))
    return next(x for x in json.loads(done.stdout)["paths"] if x["name"] == "direct writes")


def pages_in_memory(path: Path) -> int:
    """Of the mount's own page cache."""
    size = path.stat().st_size
    with descriptor(path, os.O_RDWR) as fd, mmap.mmap(fd, size) as view:
        there = (ctypes.c_ubyte * (-(-size // PAGE)))()
        begin = ctypes.c_char.from_buffer(view)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        result = mincore(ctypes.byref(begin), ctypes.c_size_t(size), there)
        del begin
    assert result == 0
    return sum(each & 1 for each in there)


def test_what_relay_mode_writes_past_the_page_cache(place: Place, here: Path) -> None:
    """Only what goes to a new file through the descriptor that made it, and cannot read."""
    if place.mode != "relay" or place.node is None:
        pytest.skip("relay mode")
    if not direct_writes(place.node)["active"]:
        pytest.skip("this kernel keeps old pages")
    path = here / "f"
    for flags, pages in ((MAKE, 0), (MAKE ^ os.O_WRONLY ^ os.O_RDWR, 16), (os.O_WRONLY, 16)):
        if flags & os.O_CREAT:
            path.unlink(missing_ok=True)
        with descriptor(path, flags) as fd:
            os.write(fd, bytes(16 * PAGE))
        assert pages_in_memory(path) == pages


def test_a_kernel_that_could_keep_old_pages(mode: str, new_node: NewNode) -> None:
    if mode != "relay":
        pytest.skip("relay mode")
    with old_kernel():
        node = new_node()
        found = direct_writes(node)
    assert not found["available"]
    assert not found["active"]
    assert "6.19" in str(found["remedy"])
    path = node.mount / "cache" / "f"
    path.write_bytes(bytes(16 * PAGE))
    assert pages_in_memory(path) == 16
    readers_see_no_old_bytes(node.mount / "cache" / "g", 64 << 10, 1)
