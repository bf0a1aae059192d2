"""Small pieces of a file: past the page cache where the disk's blocks are smaller than pages, else
through it, and the same bytes either way."""

import ctypes
import errno
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import gds
from gds.io import co_readers, direct_io, native_aio
from gds.io import source as sources
from gds.io.direct_io import Alignment
from gds.io.page_cache import cached_bytes
from gds.io.small_pieces import ROOM_BYTES
from gds.io.source import SourceFile
from kvfs.base.errors import Corrupt
from tests.fault.disks import cut, disk
from tests.gds import children
from tests.gds.checkpoints import llama, meant, raw, write
from tests.gds.cold import disk_bytes, make_cold

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch
KIB: Final = 1 << 10
SIZE: Final = 5 * ROOM_BYTES + 1234
"""No multiple of what O_DIRECT asks for."""
LINE: Final = 22 * KIB
PIECE: Final = 5 * KIB + KIB // 2
SPANS: Final = [(begin, PIECE) for begin in range(100, SIZE - PIECE, LINE)]
"""Of columns, as a rank of four has them."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(random.Random(1).randbytes(SIZE))
    return made


@pytest.fixture
def blocks(tmp_path: Path) -> None:
    """Only where pieces are read past the page cache."""
    found = direct_io.alignment_in(tmp_path)
    if found is None or found.block is None:
        pytest.skip(f"{tmp_path} has no O_DIRECT in less than a page: {found}")
    if native_aio.why_not():
        pytest.skip(f"native AIO: {native_aio.why_not()}")


def read(source: SourceFile, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    found = [bytearray(size) for _, size in spans]
    source.read_pieces(
        [(memoryview(into), begin) for into, (begin, _) in zip(found, spans, strict=True)]
    )
    return list(map(bytes, found))


def cold(path: Path) -> SourceFile:
    return SourceFile(make_cold(path), str(path))


def assert_read(source: SourceFile, data: bytes, spans: Sequence[tuple[int, int]]) -> None:
    try:
        found = read(source, spans)
    finally:
        source.close()
    assert found == [data[begin : begin + size] for begin, size in spans]


def shapes(seed: int) -> Iterator[list[tuple[int, int]]]:
    """Spans in the order of the file, and not; to its end, and longer than what is read at once."""
    chosen = random.Random(seed)
    small = [(begin, chosen.randrange(1, 9000)) for begin in range(7, SIZE - 9000, 30_000)]
    yield small
    yield small[::-1]
    yield [(SIZE - size, size) for size in (4000, 1234, 513, 512, 511, 1)]
    yield [(0, 1), (3, ROOM_BYTES - 3), (5, ROOM_BYTES), (1, 2 * ROOM_BYTES), (9, 10)]
    yield [(0, SIZE)]
    yield []


def test_pieces_anywhere_come_as_they_are(path: Path, seed: int) -> None:
    data = path.read_bytes()
    for spans in shapes(seed):
        assert_read(cold(path), data, spans)


@pytest.mark.usefixtures("blocks")
def test_the_disk_moves_little_more_than_pieces_and_the_page_cache_nothing(path: Path) -> None:
    source = cold(path)
    before = disk_bytes()
    read(source, SPANS)
    moved = disk_bytes() - before
    held = cached_bytes(source.fd, 0, 0)
    source.close()
    assert moved <= len(SPANS) * (PIECE + 2 * KIB)
    assert held == 0


@pytest.mark.usefixtures("blocks")
def test_a_rank_reads_its_columns_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {f"{n}.down_proj.weight": meant("BF16", (512, LINE // 2), n) for n in range(3)}
    write(path, tensors)
    gds.load_model(path, rank=0, world_size=4, strategy="strided")  # what is imported
    whole = gds.load_file(path)
    for rank in range(4):
        os.close(make_cold(path))
        before = disk_bytes()
        found = gds.load_model(path, rank=rank, world_size=4, strategy="strided")
        assert disk_bytes() - before <= 0.30 * path.stat().st_size
        for name, tensor in found.items():
            assert raw(tensor) == raw(whole[name].chunk(4, 1)[rank]), name


@pytest.mark.parametrize("padding", [0, 3, 500])
def test_columns_of_every_dtype_come_byte_for_byte(tmp_path: Path, padding: int) -> None:
    path = tmp_path / "a.safetensors"
    kinds = ("U8", "I16", "F16", "BF16", "F32", "I64", "F64", "F8_E4M3", "F4", "C64")
    write(path, {kind: meant(kind, (70, 240), 1) for kind in kinds}, padding)
    plan = dict.fromkeys(kinds, 1)

    def columns(strategy: str, **how: Any) -> "dict[str, torch.Tensor]":
        os.close(make_cold(path))
        return gds.load_model(path, rank=1, world_size=3, plan=plan, strategy=strategy, **how)

    for name, tensor in columns("slice").items():
        assert raw(columns("strided")[name]) == raw(tensor), name


def test_what_the_page_cache_has_comes_from_there(path: Path) -> None:
    data = path.read_bytes()
    source = SourceFile(os.open(path, os.O_RDONLY), str(path))
    before = disk_bytes()
    assert_read(source, data, SPANS)
    assert disk_bytes() - before < len(SPANS) * PIECE / 2


@pytest.mark.parametrize("is_common", [False, True])
def test_what_others_load_too_comes_by_the_page_cache(path: Path, is_common: bool) -> None:
    data = path.read_bytes()
    source = cold(path)
    other = os.open(path, os.O_RDONLY)
    try:
        if not is_common:
            co_readers.join(other)
        source.share(is_rank=True, is_common=is_common)
        before = cached_bytes(other, 0, 0)
        assert_read(source, data, SPANS)
        assert before == 0
        assert (cached_bytes(other, 0, 0) or 0) >= len(SPANS) * PIECE
    finally:
        os.close(other)


def test_a_filesystem_in_memory_has_pieces_too() -> None:
    data = random.Random(2).randbytes(SIZE)
    fd = os.memfd_create("file")
    os.write(fd, data)
    assert_read(SourceFile(fd, "memory"), data, SPANS)


def through_the_page_cache(path: Path) -> None:
    source = cold(path)
    other = os.dup(source.fd)
    try:
        assert_read(source, path.read_bytes(), SPANS)
        assert (cached_bytes(other, 0, 0) or 0) >= len(SPANS) * PIECE
    finally:
        os.close(other)


@pytest.mark.parametrize("asked", [Alignment(4096, 4096), Alignment(4, 65536), None])
def test_blocks_as_large_as_pages_are_no_reason_to_pass_the_page_cache(
    path: Path, asked: Alignment | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "alignment", lambda _fd: asked)
    through_the_page_cache(path)


@pytest.fixture
def _no_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is there from before."""
    monkeypatch.setattr(native_aio, "_idle", [])


@pytest.mark.usefixtures("_no_contexts")
def test_where_native_aio_is_forbidden_the_page_cache_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(native_aio._CALLS, "x86_64", native_aio._Calls(*[100_000] * 4))
    monkeypatch.setattr(f"{native_aio.__name__}.platform.machine", lambda: "x86_64")
    assert "not implemented" in native_aio.why_not()
    through_the_page_cache(path)
    monkeypatch.setattr(f"{native_aio.__name__}.platform.machine", lambda: "abacus")
    assert "abacus" in native_aio.why_not()
    through_the_page_cache(path)


@pytest.mark.usefixtures("_no_contexts", "blocks")
def test_reads_that_are_refused_or_broken_off_come_otherwise(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fourth call is interrupted, or refuses what comes first."""
    call, made = native_aio._call, itertools.count(1)

    def refusing(number: int, *arguments: object) -> int:
        if next(made) % 4 == 0:
            ctypes.set_errno(errno.EINTR)
            return -1
        return call(number, *arguments)

    data = path.read_bytes()
    source = cold(path)
    with native_aio.lend():
        pass  # made before any call fails
    monkeypatch.setattr(native_aio, "_call", refusing)
    other = os.dup(source.fd)
    try:
        assert_read(source, data, SPANS)
        held = cached_bytes(other, 0, 0)
    finally:
        os.close(other)
    assert next(made) > 6
    assert held is not None
    assert 0 < held < len(SPANS) * PIECE / 10, "all but those that were refused went past it"


@pytest.mark.parametrize("size", [0, 1000, SIZE // 2 + 1, SIZE - 2000])
def test_a_file_that_was_cut_is_told_with_its_length(path: Path, size: int) -> None:
    source = cold(path)
    os.truncate(path, size)
    try:
        with pytest.raises(Corrupt, match=rf"file: truncated: it ends at byte {size}$"):
            read(source, [*SPANS, (SIZE - 1500, 1500)])
    finally:
        source.close()


def test_a_disk_that_died_is_told_with_the_place(tmp_path: Path) -> None:
    with disk(tmp_path, "ext4", 64 << 20) as made:
        path = made.mountpoint / "file"
        path.write_bytes(bytes(SIZE))
        source = cold(path)
        try:
            cut(made.mountpoint)
            with pytest.raises(Corrupt, match=r"file: the disk cannot read it at 100$"):
                read(source, SPANS)
        finally:
            source.close()
        made.power_cycle()


_FORKED: Final = """
import os
from gds.io.source import SourceFile

def read():
    into = bytearray(3000)
    source = SourceFile(os.open(sys.argv[1], os.O_RDONLY), "file")
    os.posix_fadvise(source.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    source.read_pieces([(memoryview(into), 1000), (memoryview(into)[:5], 900_001)])
    source.close()
    return bytes(into)

before = read()
child = os.fork()
if not child:
    os._exit(read() != before)
assert os.waitpid(child, 0)[1] == 0
assert read() == before
print(before[5:].hex())
"""


def test_a_process_that_was_forked_reads_pieces(path: Path) -> None:
    os.close(make_cold(path))
    assert children.run(_FORKED, path).strip() == path.read_bytes()[1005:4000].hex()


_INTERRUPTED: Final = """
import os, signal, threading
import gds, torch
from gds.io import native_aio

def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

path, number = sys.argv[1], int(sys.argv[2])
load = lambda: gds.load_model(path, rank=1, world_size=4, strategy="strided")
def make_cold():
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
wanted = load()
make_cold()
load()
before = set(os.listdir("/proc/self/fd"))
read, left = native_aio.NativeAio.read, [None] * number

def reading(*arguments):
    if left:
        left.pop()
        if not left:
            os.kill(os.getpid(), signal.SIGINT)
    return read(*arguments)

native_aio.NativeAio.read = reading
make_cold()
try:
    load()
except KeyboardInterrupt:
    print("interrupted")
assert set(os.listdir("/proc/self/fd")) == before
assert not [each for each in threading.enumerate() if each.name.startswith("kvfs-load")]
make_cold()
found = load()
assert all(bytes_of(each) == bytes_of(wanted[name]) for name, each in found.items())
"""


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("number", [1, 3])
def test_an_interrupt_leaves_nothing_and_spoils_no_later_load(tmp_path: Path, number: int) -> None:
    path = tmp_path / "a.safetensors"
    write(path, llama(2, 1024))
    os.close(make_cold(path))
    assert children.run(_INTERRUPTED, path, number) == "interrupted\n"
