"""Two nodes with a mount each: what one wrote is read on the other, whose data it brings."""

import errno
import mmap
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.cluster.waiting import wait_until
from tests.integration.harness import MODES, Node
from tests.integration.posix import link_descriptor, mapping_alone, refused
from tests.integration.several import Several, has, several

MIB = 1 << 20
LARGE = 72 * MIB


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def data_files(node: Node, ino: int) -> list[str]:
    return [path.name for path in node.store.glob(f"data/???/{ino:016x}.*")]


@pytest.fixture(scope="module", params=MODES)
def nodes(request: pytest.FixtureRequest) -> Iterator[Several]:
    with several(2, mode=request.param) as cluster:
        yield cluster


@pytest.fixture
def a(nodes: Several) -> Path:
    return nodes.nodes[0].mount


@pytest.fixture
def b(nodes: Several) -> Path:
    return nodes.nodes[1].mount


@pytest.mark.parametrize("size", [0, 1, 2 * MIB, 9 * MIB + 17])
def test_what_was_closed_here_is_read_there(a: Path, b: Path, size: int) -> None:
    name = f"models/small{size}"
    (a / name).write_bytes(content(size))
    assert (b / name).read_bytes() == content(size)
    assert (b / name).read_bytes() == content(size)  # its own data file by now
    there, here = (b / name).stat(), (a / name).stat()
    assert (there.st_ino, there.st_size, there.st_mtime_ns) == (
        here.st_ino,
        here.st_size,
        here.st_mtime_ns,
    )


def test_a_block_of_a_cache(a: Path, b: Path) -> None:
    (a / "cache" / "block").write_bytes(content(2 * MIB))
    wait_until((b / "cache" / "block").exists, "the other node shows the name")
    assert (b / "cache" / "block").read_bytes() == content(2 * MIB)


def test_a_large_file_is_read_and_mapped_while_it_comes(a: Path, b: Path) -> None:
    data = content(LARGE)
    (a / "models" / "large").write_bytes(data)
    with open(b / "models" / "large", "rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            for at in (LARGE - 5, 40 * MIB, 3 * MIB + 1):
                assert mapped[at : at + 5] == data[at : at + 5]
        file.seek(LARGE - MIB)
        assert file.read() == data[-MIB:]
        file.seek(0)
        assert file.read() == data
    assert (b / "models" / "large").read_bytes() == data


def test_who_opened_it_while_it_came_sees_what_is_written_then(a: Path, b: Path) -> None:
    data = content(LARGE, seed=2)
    (a / "models" / "edited").write_bytes(data)
    here = b / "models" / "edited"
    with open(here, "rb", buffering=0) as early:
        assert os.pread(early.fileno(), 5, LARGE - 5) == data[-5:]
        with mmap.mmap(early.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:5] == data[:5]
            with open(here, "r+b", buffering=0) as writer, open(here, "rb", buffering=0) as late:
                os.pwrite(writer.fileno(), b"other", 0)
                assert os.pread(early.fileno(), 5, 0) == b"other"
                assert os.pread(late.fileno(), 5, 0) == b"other"
                assert mapped[:5] == b"other"
    assert here.read_bytes() == b"other" + data[5:]


def test_many_readers_of_one_file(a: Path, b: Path) -> None:
    data = content(20 * MIB)
    (a / "models" / "popular").write_bytes(data)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append((b / "models" / "popular").read_bytes()))
        for _ in range(6)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert results == [data] * 6


def test_a_client_on_another_host(nodes: Several, a: Path) -> None:
    data = content(3 * MIB)
    (a / "models" / "for-client").write_bytes(data)
    with Client(nodes.nodes[1].store) as client:
        wait_until(lambda: client.exists(["models/for-client"]) == [True], "it sees the name")
        assert bytes(client.get("models/for-client")) == data


def test_content_that_was_written_in_place_is_read_at_the_next_open(
    nodes: Several, a: Path, b: Path
) -> None:
    is_renewed = nodes.nodes[1].mode == "libfuse"
    here, there = a / "models" / "changed", b / "models" / "changed"
    here.write_bytes(b"first")
    assert there.read_bytes() == b"first"
    with open(there, "rb") as held:
        here.write_bytes(b"second, longer")
        assert there.read_bytes() == b"second, longer"
        with open(here, "r+b") as file:
            file.write(b"SECOND")
        assert there.read_bytes() == b"SECOND, longer"
        held.seek(0)
        assert held.read() == (b"SECOND, longer" if is_renewed else b"first")
    assert there.read_bytes() == b"SECOND, longer"


def test_what_grows_elsewhere_has_its_new_size_while_the_old_is_open(a: Path, b: Path) -> None:
    here, there = a / "models" / "growing", b / "models" / "growing"
    here.write_bytes(b"")
    for number in range(1, 50):
        with open(there, "rb"):
            here.write_bytes(b"x" * number)
            assert there.stat().st_size == number
            assert there.read_bytes() == b"x" * number


def test_what_is_written_in_place_is_not_read_before_it_is_closed(a: Path, b: Path) -> None:
    here, there = a / "models" / "torn", b / "models" / "torn"
    here.write_bytes(b"old content")
    with open(here, "r+b", buffering=0) as file:
        file.write(b"NEW CONTENT, half")
        with refused(errno.EBUSY):
            there.read_bytes()
        file.write(b" and half")
    assert there.read_bytes() == b"NEW CONTENT, half and half"


@pytest.mark.parametrize("namespace", ["models", "cache"])
def test_what_is_stored_through_a_mapping_after_the_close_is_read_there(
    a: Path, b: Path, namespace: str
) -> None:
    here, there = a / namespace / "mapped", b / namespace / "mapped"
    first, second = content(3 * mmap.PAGESIZE, 1), content(3 * mmap.PAGESIZE, 2)
    with mapping_alone(here, first) as view:
        wait_until(lambda: has(there, first), "it is there")
        view[: len(second)] = second  # into pages that are dirty still
    wait_until(lambda: has(there, second), "what came after the close is there too")
    assert here.read_bytes() == second


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND, os.O_WRONLY])
def test_stores_through_a_mapping_beside_another_writer_are_read_there(
    a: Path, b: Path, flags: int
) -> None:
    here, there = a / "models" / f"beside {flags}", b / "models" / f"beside {flags}"
    first = content(3 * mmap.PAGESIZE, 3)
    with mapping_alone(here, first) as view:
        assert there.read_bytes() == first
        fd = os.open(here, flags)
        os.lseek(fd, 0, os.SEEK_END)
        os.write(fd, b"more")
        os.fsync(fd)
        assert there.read_bytes() == first + b"more"
        view[:5] = b"early"
        assert there.read_bytes()[5:] == first[5:] + b"more"
        os.close(fd)
        assert there.read_bytes() == b"early" + first[5:] + b"more"
        view[:5] = b"later"
    after = b"later" + first[5:] + b"more"
    wait_until(lambda: has(there, after), "what was stored after the last close")
    assert here.read_bytes() == after


def test_who_has_a_copy_of_what_was_closed_last_reads_that(a: Path, b: Path) -> None:
    here, there = a / "models" / "copy", b / "models" / "copy"
    here.write_bytes(b"old content")
    assert there.read_bytes() == b"old content"
    with open(here, "r+b", buffering=0) as file:
        file.write(b"NEW CONTENT, longer")
        assert there.read_bytes() == b"old content"
    assert there.read_bytes() == b"NEW CONTENT, longer"


@pytest.mark.parametrize("namespace", ["models", "cache"])
@pytest.mark.parametrize("synced", [True, False])
def test_a_nameless_file_that_got_a_name_is_read_there(
    a: Path, b: Path, namespace: str, *, synced: bool
) -> None:
    try:
        fd = os.open(a / namespace, os.O_TMPFILE | os.O_RDWR)
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP  # libfuse
        return
    os.write(fd, b"nameless")
    if synced:
        os.fsync(fd)
    name = f"named{synced}"
    link_descriptor(fd, a / namespace / name)
    os.close(fd)
    there = b / namespace / name
    wait_until(lambda: has(there, b"nameless"), "it is there")


def test_what_is_held_open_unchanged_is_read(a: Path, b: Path) -> None:
    (a / "models" / "held").write_bytes(b"content")
    with open(a / "models" / "held", "r+b"):
        assert (b / "models" / "held").read_bytes() == b"content"


def test_what_is_appended_to_is_read_as_far_as_it_was_synced(a: Path, b: Path) -> None:
    here, there = a / "models" / "log", b / "models" / "log"
    here.write_bytes(b"0\n")
    with open(here, "ab", buffering=0) as file:
        file.write(b"1\n")
        assert there.read_bytes() == b"0\n"
        os.fsync(file.fileno())
        file.write(b"2\n")
        assert there.read_bytes() == b"0\n1\n"
    assert there.read_bytes() == b"0\n1\n2\n"


def test_both_write_to_one_file_in_turn(a: Path, b: Path) -> None:
    here, there = a / "models" / "turns", b / "models" / "turns"
    here.write_bytes(b"0\n")
    for number in range(1, 6):
        writer, reader = (there, here) if number % 2 else (here, there)
        with open(writer, "ab") as file:
            file.write(b"%d\n" % number)
        assert reader.read_bytes() == b"".join(b"%d\n" % each for each in range(number + 1))
    os.truncate(there, 2)
    assert here.read_bytes() == b"0\n"
    with open(here, "wb") as file:
        file.write(b"anew")
    assert there.read_bytes() == b"anew"


@pytest.mark.parametrize(("namespace", "how"), [("models", "wb"), ("cache", "r+b")])
def test_of_two_writers_at_once_the_last_to_close_wins(
    a: Path, b: Path, namespace: str, how: str
) -> None:
    """In a strict namespace one that builds on nothing that was there."""
    here, there = a / namespace / "both", b / namespace / "both"
    here.write_bytes(b"." * 100)
    wait_until(there.exists, "the other host sees the file")
    assert there.read_bytes() == b"." * 100
    with open(here, how) as first, open(there, how) as last:
        first.write(b"a" * 100)
        last.write(b"b" * 100)
        first.close()
    for path in (here, there):
        wait_until(lambda: has(path, b"b" * 100), "the last content")  # noqa: B023


def test_what_is_written_counts_though_its_data_file_lost_its_name(
    nodes: Several, a: Path, b: Path
) -> None:
    (a / "models" / "nameless").write_bytes(b"old content")
    assert (b / "models" / "nameless").read_bytes() == b"old content"
    ino = (b / "models" / "nameless").stat().st_ino
    with open(b / "models" / "nameless", "r+b") as file:
        for name in data_files(nodes.nodes[1], ino):
            next(nodes.nodes[1].store.glob(f"data/???/{name}")).unlink()
        file.write(b"NEW")
    assert (a / "models" / "nameless").read_bytes() == b"NEW content"
    assert (b / "models" / "nameless").read_bytes() == b"NEW content"


def test_what_is_removed_leaves_no_data_on_either(nodes: Several, a: Path, b: Path) -> None:
    (a / "models" / "removed").write_bytes(b"data")
    ino = (a / "models" / "removed").stat().st_ino
    with open(b / "models" / "removed", "rb") as held:
        assert held.read(1) == b"d"
        (a / "models" / "removed").unlink()
        assert not (b / "models" / "removed").exists()
        assert held.read() == b"ata"
    wait_until(
        lambda: not any(data_files(node, ino) for node in nodes.nodes),
        "both data files have gone",
    )


def test_a_replaced_file_is_the_new_one_there(a: Path, b: Path) -> None:
    (a / "models" / "target").write_bytes(b"old")
    assert (b / "models" / "target").read_bytes() == b"old"
    (a / "models" / "draft").write_bytes(content(MIB))
    os.replace(a / "models" / "draft", a / "models" / "target")
    assert (b / "models" / "target").read_bytes() == content(MIB)


def test_a_holder_that_was_killed_is_missed_until_it_returns(nodes: Several) -> None:
    first, second = nodes.nodes
    for name in ("models/only", "models/copied", "cache/only", "cache/copied"):
        (first.mount / name).write_bytes(content(MIB))
    wait_until((second.mount / "cache" / "copied").exists, "the other node shows the name")
    for name in ("models/copied", "cache/copied"):
        assert (second.mount / name).read_bytes() == content(MIB)
    first.kill()
    with refused(errno.EIO):
        (second.mount / "models" / "only").read_bytes()
    wait_until(lambda: not _can_open(second.mount / "cache" / "only"), "what is lost is a miss")
    for name in ("models/copied", "cache/copied"):
        assert (second.mount / name).read_bytes() == content(MIB)
    first.up()
    wait_until(lambda: _can_open(second.mount / "models" / "only"), "its holder is back")
    assert (second.mount / "models" / "only").read_bytes() == content(MIB)
    assert (first.mount / "cache" / "copied").read_bytes() == content(MIB)


def _can_open(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def test_the_status_tells_what_went_over_the_network(nodes: Several, a: Path, b: Path) -> None:
    (a / "models" / "counted").write_bytes(content(3 * MIB))
    assert len((b / "models" / "counted").read_bytes()) == 3 * MIB
    there, here = (node.status()["counters"] for node in nodes.nodes)
    assert there["peers_sent_bytes"] >= 3 * MIB
    assert here["fetched_bytes"] >= 3 * MIB
