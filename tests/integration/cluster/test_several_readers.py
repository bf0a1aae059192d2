"""One host reads what another rewrites: an open descriptor keeps the content that it was opened
with, whole, and each open that comes after a close gives what was closed."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.several import Several, has, several

_MIB = 1 << 20
SHORT, LONG, LONGER = b"s" * (2 * _MIB + 17), b"l" * (4 * _MIB + 5), b"L" * (6 * _MIB)


@pytest.fixture(scope="module", params=["passthrough", "relay"])
def nodes(request: pytest.FixtureRequest) -> Iterator[Several]:
    with several(2, mode=request.param) as cluster:
        yield cluster


@pytest.fixture
def a(nodes: Several) -> Path:
    return nodes.nodes[0].mount


@pytest.fixture
def b(nodes: Several) -> Path:
    return nodes.nodes[1].mount


def whole(fd: int) -> bytes:
    """By one call, as far as the file goes."""
    return os.pread(fd, 2 * len(LONGER), 0)


@pytest.mark.parametrize(("before", "after"), [(LONG, SHORT), (SHORT, LONG)], ids=["cut", "grown"])
@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read"])
def test_an_open_descriptor_keeps_its_content(
    a: Path, b: Path, before: bytes, after: bytes, is_read: bool
) -> None:
    path = Path("models", f"kept {len(before)} {is_read}")
    (b / path).write_bytes(before)
    fd = os.open(a / path, os.O_RDONLY)
    try:
        if is_read:
            assert whole(fd) == before
        (b / path).write_bytes(after)
        assert (a / path).stat().st_size == len(after)
        assert os.fstat(fd).st_size == len(before)
        assert whole(fd) == before
        assert (a / path).read_bytes() == after
        assert whole(fd) == before
        assert os.fstat(fd).st_size == len(before)
        assert os.fstat(fd).st_ino == (a / path).stat().st_ino
    finally:
        os.close(fd)
    assert (a / path).read_bytes() == after
    assert (b / path).read_bytes() == after


def test_it_does_so_in_a_cache(a: Path, b: Path) -> None:
    path = Path("cache", "kept")
    (b / path).write_bytes(LONG)
    wait_until((a / path).exists, "the other host sees it")
    fd = os.open(a / path, os.O_RDONLY)
    try:
        for content in (SHORT, LONGER):
            (b / path).write_bytes(content)
            wait_until(lambda c=content: has(a / path, c), "the other host has it")
            assert whole(fd) == LONG
            assert os.fstat(fd).st_size == len(LONG)
    finally:
        os.close(fd)


_MAPPED = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(flush=True)
sys.stdin.readline()
sys.exit(mapped[:] != mapped[:1] * int(sys.argv[2]))
"""
"""A store that was cut under a mapping kills who reads it."""


def test_so_do_mappings(a: Path, b: Path) -> None:
    path = Path("models", "mapped")
    (b / path).write_bytes(LONG)
    command = [sys.executable, "-c", _MAPPED, str(a / path), str(len(LONG))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline()
        (b / path).write_bytes(SHORT)
        assert (a / path).read_bytes() == SHORT
        reader.stdin.write(b"\n")
    assert reader.returncode == 0
    assert (a / path).read_bytes() == SHORT


def test_each_of_several_descriptors_keeps_its_own(a: Path, b: Path) -> None:
    path = Path("models", "several")
    contents = [bytes([number]) * (_MIB + number) for number in range(1, 9)]
    held = []
    for content in contents:
        (b / path).write_bytes(content)
        held.append(os.open(a / path, os.O_RDONLY))
    try:
        for fd, content in zip(held, contents, strict=True):
            assert whole(fd) == content
            assert os.fstat(fd).st_size == len(content)
    finally:
        for fd in held[::2] + held[1::2]:
            os.close(fd)
    assert (a / path).read_bytes() == contents[-1]
    (a / path).write_bytes(SHORT)
    assert (b / path).read_bytes() == SHORT


def test_a_read_beside_opens_is_of_one_content(a: Path, b: Path) -> None:
    """Whoever opens the file meanwhile brings the new content here."""
    path = Path("models", "beside")
    (b / path).write_bytes(LONG)
    fd = os.open(a / path, os.O_RDONLY)
    done = threading.Event()
    torn: list[int] = []

    def read() -> None:
        while not done.is_set():
            found = whole(fd)
            if found != LONG:
                torn.append(len(found))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for content in (SHORT, LONGER) * 3:
            (b / path).write_bytes(content)
            assert (a / path).read_bytes() == content
    finally:
        done.set()
        reader.join()
        os.close(fd)
    assert not torn


def test_what_is_opened_anew_by_its_descriptor_has_the_newest(a: Path, b: Path) -> None:
    path = Path("models", "again")
    (b / path).write_bytes(LONG)
    fd = os.open(a / path, os.O_RDONLY)
    for content in (SHORT, LONGER):
        (b / path).write_bytes(content)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        assert whole(again) == content
        os.close(again)
        assert (a / path).read_bytes() == content
    os.close(fd)


@pytest.mark.parametrize("way", ["name", "descriptor"])
def test_what_is_written_where_a_former_content_was_renewed_is_published(
    a: Path, b: Path, way: str
) -> None:
    path = Path("models", f"renewed {way}")
    (b / path).write_bytes(LONG)
    fd = os.open(a / path, os.O_RDONLY)
    (b / path).write_bytes(SHORT)

    def renew() -> None:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        assert whole(again) == SHORT
        os.close(again)

    with (a / path).open("rb"):
        renew()
    renew()  # while nobody has it open by its name
    target = f"/proc/self/fd/{fd}" if way == "descriptor" else a / path
    writer = os.open(target, os.O_RDWR)
    os.pwrite(writer, b"written", 0)
    os.close(writer)
    for mount in (a, b):
        assert (mount / path).read_bytes() == b"written" + SHORT[7:]
    os.close(fd)
    for mount in (a, b):
        assert (mount / path).read_bytes() == b"written" + SHORT[7:]


def test_of_former_contents_only_those_that_are_open_take_room(
    nodes: Several, a: Path, b: Path
) -> None:
    path = Path("models", "room")

    def data_files() -> int:
        found = nodes.nodes[0].store.rglob(f"{ino:016x}.*")
        return sum(each.is_file() for each in found)

    (b / path).write_bytes(LONG)
    fd = os.open(a / path, os.O_RDONLY)
    ino = os.fstat(fd).st_ino
    for number in range(8):
        (b / path).write_bytes(SHORT + b"%d" % number)
        assert (a / path).read_bytes().endswith(b"%d" % number)
    wait_until(lambda: data_files() == 2, "what nobody has open has gone")
    assert whole(fd) == LONG
    os.close(fd)
    wait_until(lambda: data_files() == 1, "the former content has gone")
    assert (a / path).read_bytes() == SHORT + b"7"


def test_a_former_content_has_the_attributes_that_the_file_gets_here(a: Path, b: Path) -> None:
    path, other = Path("models", "attributes"), Path("models", "other name")
    (b / path).write_bytes(LONG)
    fd = os.open(a / path, os.O_RDONLY)
    try:
        (b / path).write_bytes(SHORT)
        assert (a / path).stat().st_size == len(SHORT)
        assert os.fstat(fd).st_mode & 0o777 == 0o644
        os.chmod(a / path, 0o600)
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        os.fchmod(fd, 0o640)
        assert (a / path).stat().st_mode & 0o777 == 0o640
        os.link(a / path, a / other)
        assert os.fstat(fd).st_nlink == 2
        os.unlink(a / path)
        assert os.fstat(fd).st_nlink == 1
        os.unlink(a / other)
        assert os.fstat(fd).st_nlink == 0
        assert whole(fd) == LONG
    finally:
        os.close(fd)


def test_a_file_of_which_a_former_content_is_open_is_written_here(a: Path, b: Path) -> None:
    path = Path("models", "written")
    (b / path).write_bytes(LONG)
    fd = os.open(a / path, os.O_RDONLY)
    try:
        (b / path).write_bytes(SHORT)
        with (a / path).open("ab") as file:
            file.write(b"end")
        assert whole(fd) == LONG
        assert (b / path).read_bytes() == SHORT + b"end"
        os.truncate(a / path, 5)
        os.chmod(a / path, 0o640)
        assert whole(fd) == LONG
        assert os.fstat(fd).st_mode & 0o777 == 0o640
        assert (b / path).read_bytes() == SHORT[:5]
        os.unlink(a / path)
        assert whole(fd) == LONG
        assert not (b / path).exists()
    finally:
        os.close(fd)


def test_a_file_of_a_cache_that_is_replaced_all_the_time_is_there_or_a_miss(
    a: Path, b: Path
) -> None:
    """Faster than its data come."""
    drafts = [b / "cache" / f"draft {number}" for number in range(100)]
    for draft in drafts:
        draft.touch()
        os.truncate(draft, 16 * _MIB)
    name = Path("cache", "replaced")

    def replace() -> None:
        for draft in drafts:
            draft.replace(b / name)

    replacing = threading.Thread(target=replace)
    replacing.start()
    failed: set[int | None] = set()
    while replacing.is_alive():
        try:
            with (a / name).open("rb") as file:
                assert os.fstat(file.fileno()).st_size == 16 * _MIB
        except OSError as error:
            failed.add(error.errno)
    replacing.join()
    assert failed <= {errno.ENOENT}
    wait_until(lambda: (a / name).exists(), "it is there")
    assert (a / name).stat().st_size == 16 * _MIB
