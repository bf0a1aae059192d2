"""What inference engines do to a filesystem tier, call by call: one test for each client.

The calls are those of the clients' own code: flags, order, sizes and the errors that they count as
failures. LMCache's connectors run for real in test_lmcache.py.
"""

import concurrent.futures
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.integration.conftest import Place
from tests.integration.posix import (
    AT_FDCWD,
    UTIME_NOW,
    UTIME_OMIT,
    descriptor,
    fallocate,
    libc,
    refused,
    utimensat,
)

PAGE = 4096
MIB = 1 << 20
TIB = 1 << 40


def block_of(size: int, salt: int) -> mmap.mmap:
    """A page-aligned block, different for each salt."""
    block = mmap.mmap(-1, size)
    block[:] = hashlib.sha256(b"%d" % salt).digest() * (size // 32)
    return block


# --- vLLM's filesystem tier ---


class Vllm:
    """`<root>/<model>_<sha>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin`, written whole, unsynced."""

    def __init__(self, root: Path, size: int) -> None:
        self.root = root / f"model_{'0123456789ab'}_r0"
        self.size = size
        self.flags = os.O_DIRECT if self.probe() else 0

    def probe(self) -> bool:
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / f".o_direct_probe_{os.getpid()}_{uuid.uuid4().hex}.tmp"
        page = mmap.mmap(-1, PAGE)
        try:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644)
            try:
                return os.write(fd, page) == PAGE
            finally:
                os.close(fd)
        except OSError:
            return False
        finally:
            path.unlink(missing_ok=True)
            page.close()

    def path(self, key: bytes) -> Path:
        digest = hashlib.sha256(key).hexdigest()
        return self.root / digest[:3] / f"{digest[3:5]}_g0" / f"{digest}.bin"

    def lookup(self, keys: list[bytes]) -> list[bool]:
        """Batched: faccessat for each."""
        return [libc.faccessat(AT_FDCWD, os.fsencode(self.path(k)), os.F_OK, 0) == 0 for k in keys]

    def store(self, key: bytes, block: mmap.mmap) -> None:
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | self.flags
        fd = os.open(temporary, flags, 0o644)
        try:
            assert os.write(fd, block) == self.size, "a short write fails the store"
        finally:
            os.close(fd)
        os.replace(temporary, path)

    def load(self, key: bytes) -> bytes:
        into = mmap.mmap(-1, self.size)
        fd = os.open(self.path(key), os.O_RDONLY | self.flags)
        try:
            assert os.readv(fd, [into]) == self.size, "a short read fails the load"
        finally:
            os.close(fd)
        data = into[:]
        into.close()
        return data


@pytest.mark.parametrize("size", [256 * 1024, 2 * MIB, 16 * MIB])
def test_vllm(here: Path, size: int) -> None:
    tier = Vllm(here, size)
    assert tier.flags == os.O_DIRECT
    count = max(48 * MIB // size, 3)
    keys = [b"block%d" % n for n in range(min(count, 64))]
    assert tier.lookup(keys) == [False] * len(keys)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: tier.store(keys[n], block_of(size, n)), range(len(keys))))
    assert tier.lookup([*keys, b"missing"]) == [True] * len(keys) + [False]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for n, data in enumerate(pool.map(tier.load, keys)):
            assert data == block_of(size, n)[:]
    assert not list(here.rglob("*.tmp"))


def test_vllm_writers_and_readers_together(here: Path) -> None:
    """16 + 16 threads on the same keys: a reader gets a whole block of one writer, or a miss."""
    size = 256 * 1024
    tier = Vllm(here, size)
    whole = {hashlib.sha256(b"%d" % n).digest() for n in range(400)}

    def write(n: int) -> None:
        tier.store(b"key%d" % (n % 20), block_of(size, n))

    def read(n: int) -> int:
        try:
            data = tier.load(b"key%d" % (n % 20))
        except FileNotFoundError:
            return 0
        assert data[:32] in whole
        assert data == data[:32] * (size // 32)
        return 1

    with (
        concurrent.futures.ThreadPoolExecutor(16) as writers,
        concurrent.futures.ThreadPoolExecutor(16) as readers,
    ):
        writing = [writers.submit(write, n) for n in range(400)]
        reading = [readers.submit(read, n) for n in range(400)]
        for future in writing:
            future.result()
        for found in reading:
            found.result()
    assert all(tier.lookup([b"key%d" % n for n in range(20)]))


# --- llm-d ---


def test_llm_d(here: Path) -> None:
    path = here / "block"
    temporary = here / f"block_{uuid.uuid4().hex}.tmp"
    data = os.urandom(3 * MIB + 777)
    with open(temporary, "wb", buffering=MIB) as out:  # an ofstream with a 1 MiB buffer
        out.writelines(data[at : at + 100_000] for at in range(0, len(data), 100_000))
    os.rename(temporary, path)
    os.utime(path, ns=(10**18, 10**18))
    utimensat(path, (0, UTIME_NOW), (0, UTIME_OMIT))  # its LRU touch
    touched = path.stat()
    assert touched.st_atime_ns > 10**18
    assert touched.st_mtime_ns == 10**18
    with open(path, "rb") as file:
        file.seek(-1000, os.SEEK_END)
        assert file.read() == data[-1000:]


def test_llm_d_evictor(here: Path) -> None:
    """It watches statvfs, sorts by atime and removes the oldest."""
    for n in range(10):
        (here / f"b{n}").write_bytes(bytes(MIB))
        os.utime(here / f"b{n}", ns=((10 - n) * 10**15, 10**18))
    found = os.statvfs(here)
    assert found.f_blocks * found.f_frsize > found.f_bavail * found.f_frsize > 0
    with os.scandir(here) as entries:
        oldest = sorted(entries, key=lambda e: e.stat().st_atime_ns)
    assert [e.name for e in oldest] == [f"b{n}" for n in reversed(range(10))]
    subprocess.run(["rm", *(e.path for e in oldest[:5])], check=True)
    assert sorted(os.listdir(here)) == [f"b{n}" for n in range(5)]


# --- LMCache's GDS backend without GDS ---


def test_lmcache_gds_backend(here: Path, place: Place) -> None:
    header = json.dumps({"kvcache": {"dtype": "BF16", "shape": [2, 4, 256, 1024]}}).encode()
    keys = [f"model@1@0@{n:016x}" for n in range(40)]
    blocks = {key: os.urandom(300_000 + n) for n, key in enumerate(keys)}

    def path_of(key: str) -> Path:
        digest = hashlib.sha256(key.encode()).hexdigest()
        return here / digest[:2] / digest[2:4] / f"{key}.kvcache.safetensors"

    for key, block in blocks.items():
        path = path_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb+") as out:
            out.truncate(PAGE + len(block))
            with mmap.mmap(out.fileno(), PAGE + len(block), flags=mmap.MAP_SHARED) as view:
                view[: 8 + len(header)] = struct.pack("<Q", len(header)) + header
                view[PAGE:] = block
        os.replace(temporary, path)
        path.with_name(path.name + ".metadata").write_bytes(header.ljust(PAGE))
    found = {}
    for directory, _, files in os.walk(here):  # the scan at start
        for name in files:
            if name.endswith(".metadata"):
                with descriptor(Path(directory, name), os.O_RDONLY | os.O_NOATIME) as fd:
                    found[name.split(".kvcache")[0]] = json.loads(os.read(fd, PAGE))
    assert set(found) == set(keys)
    for key, block in blocks.items():
        with descriptor(path_of(key), os.O_RDONLY) as fd:
            flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
            with mmap.mmap(fd, PAGE + len(block), flags=flags, prot=mmap.PROT_READ) as view:
                assert view[PAGE:] == block
    if place.node is not None:
        assert filesystem_type(place.node.mount).startswith("fuse")


def filesystem_type(mount: Path) -> str:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if point == str(mount):
            return kind
    raise AssertionError("not in /proc/mounts")


# --- SGLang ---


def test_sglang_hicache_file(here: Path) -> None:
    size = 128 * 1024
    blocks = {f"{n:064x}_model_0_1.bin": os.urandom(size) for n in range(300)}
    for name, block in blocks.items():
        temporary = here / f".{uuid.uuid4()}.tmp"
        with open(temporary, "wb") as out:
            out.write(block)
        os.replace(temporary, here / name)
    assert set(os.listdir(here)) == set(blocks)  # at start: list, then stat each
    assert sum(os.stat(here / n).st_size for n in os.listdir(here)) == size * len(blocks)
    into = bytearray(size)
    for name, block in blocks.items():
        with open(here / name, "rb", buffering=0) as file:
            assert file.readinto(into) == size
        assert into == block
    assert not os.path.exists(here / f"{301:064x}_model_0_1.bin")


def test_sglang_through_nixl_in_place(here: Path) -> None:
    """No temporary name: a file is written where it will be read, by direct I/O."""
    size = 2 * MIB
    for n in range(8):
        fd = os.open(here / f"page{n}", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
        block, half = block_of(size, n), size // 2
        assert os.pwrite(fd, memoryview(block)[half:], half) == half
        assert os.stat(here / f"page{n}").st_size == size
        assert os.pwrite(fd, memoryview(block)[:half], 0) == half
        back = mmap.mmap(-1, size)
        assert os.preadv(fd, [back], 0) == size
        assert back[:] == block[:]
        os.close(fd)
    fd = os.open(here / "page3", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
    assert os.pwrite(fd, block_of(size, 99), 0) == size
    os.close(fd)
    assert (here / "page3").read_bytes() == block_of(size, 99)[:]
    assert (here / "page4").read_bytes() == block_of(size, 4)[:]


def test_sglang_hf3fs_style(here: Path) -> None:
    """One sparse file of 1 TiB, cut into pages by the client."""
    path = here / "hicache.bin"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.ftruncate(fd, TIB)
    os.fsync(fd)
    page = 256 * 1024
    places = [0, 1, 17, TIB // page // 2, TIB // page - 1]

    def write(n: int) -> None:
        assert os.pwrite(fd, block_of(page, n), n * page) == page

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(write, places))
        os.fsync(fd)
        for n, data in zip(
            places, pool.map(lambda n: os.pread(fd, page, n * page), places), strict=True
        ):
            assert data == block_of(page, n)[:]
    assert os.fstat(fd).st_size == TIB
    assert os.fstat(fd).st_blocks * 512 < 8 * MIB
    os.close(fd)
    assert path.stat().st_blocks * 512 < 8 * MIB


# --- Dynamo KVBM ---


def test_dynamo_kvbm(here: Path, place: Place) -> None:
    """A nameless disk pool: mkostemp, direct I/O turned on, allocated, unlinked, used."""
    fd, name = tempfile.mkstemp(prefix="dynamo-kvbm-", dir=here)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    size = 16 * MIB
    try:
        fallocate(fd, 0, 0, size)
        assert not place.is_bare
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP
        assert place.is_bare
        os.ftruncate(fd, size)
    assert os.fstat(fd).st_size == size
    os.unlink(name)
    assert os.listdir(here) == []
    block, back = block_of(MIB, 5), mmap.mmap(-1, MIB)
    for at in (0, 7 * MIB, 15 * MIB):
        assert os.pwrite(fd, block, at) == MIB
        assert os.preadv(fd, [back], at) == MIB
        assert back[:] == block[:]
    assert os.preadv(fd, [back], 3 * MIB) == MIB
    assert back[:] == bytes(MIB)
    os.fsync(fd)
    os.close(fd)


# --- NIXL POSIX ---


@pytest.mark.skipif(shutil.which("fio") is None, reason="not installed: fio")
@pytest.mark.parametrize("engine", ["libaio", "io_uring"])
def test_nixl_queue_depth(here: Path, engine: str) -> None:
    """Asynchronous direct I/O, 256 requests deep; one stat to query a file."""
    done = subprocess.run(
        [
            "fio", "--name=nixl", f"--directory={here}", f"--ioengine={engine}", "--direct=1",
            "--iodepth=256", "--rw=randwrite", "--bs=64k", "--size=32m", "--fallocate=none",
            "--verify=crc32c", "--do_verify=1", "--verify_fatal=1",
        ],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )  # fmt: skip
    if "not loadable" in done.stderr or "Unknown" in done.stderr:
        pytest.skip(f"this fio has no {engine}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (here / "nixl.0.0").stat().st_size == 32 * MIB
    with refused(errno.ENOENT):
        os.stat(here / "nixl.0.1")


# --- model loaders ---


def test_runai_streamer(here: Path) -> None:
    """16 threads read one large file in parts of 2 to 16 MiB through descriptors of their own."""
    size = 96 * MIB
    path = here / "model.safetensors"
    piece = os.urandom(MIB)
    with open(path, "wb") as out:
        out.writelines(struct.pack("<Q", n) + piece[8:] for n in range(size // MIB))
    into = mmap.mmap(-1, size)
    spans = []
    at, step = 0, 2
    while at < size:
        length = min(step * MIB, size - at)
        spans.append((at, length))
        at, step = at + length, step % 16 + 2

    def read(span: tuple[int, int]) -> None:
        start, length = span
        with descriptor(path, os.O_RDONLY) as fd, memoryview(into) as view:
            done = 0
            while done < length:
                step = os.preadv(fd, [view[start + done : start + length]], start + done)
                assert step > 0
                done += step

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(read, spans))
    for n in range(size // MIB):
        assert into[n * MIB : n * MIB + 8] == struct.pack("<Q", n)
        assert into[n * MIB + 8 : (n + 1) * MIB] == piece[8:]


def test_mapped_by_many_readers(here: Path) -> None:
    data = os.urandom(8 * MIB)
    path = here / "weights"
    path.write_bytes(data)
    wanted = hashlib.sha256(data).digest()

    def digest(_: int) -> bytes:
        with (
            descriptor(path, os.O_RDONLY) as fd,
            mmap.mmap(fd, 0, prot=mmap.PROT_READ) as view,
        ):
            return hashlib.sha256(view).digest()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(digest, range(24))) == {wanted}


def test_residency_can_be_asked(here: Path) -> None:
    """mincore on a mapping: loaders look whether a file is warm."""
    path = here / "weights"
    path.write_bytes(os.urandom(MIB))
    with descriptor(path, os.O_RDWR) as fd, mmap.mmap(fd, MIB) as view:
        assert len(view[:]) == MIB
        resident = (ctypes.c_ubyte * (MIB // PAGE))()
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(MIB), resident) == 0
        assert sum(x & 1 for x in resident) == MIB // PAGE
