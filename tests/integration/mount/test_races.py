"""What several processes do to one name at once: replacement is atomic, creation exclusive."""

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.conftest import LONG
from tests.integration.conftest import Place
from tests.integration.harness import Node
from tests.integration.posix import descriptor, folder, touch

REPLACEMENTS = 1_500 if LONG else 250


def together(*jobs: Callable[[], None]) -> None:
    """Run the jobs in processes; every one must succeed."""
    children = []
    for job in jobs:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                job()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * len(jobs)


def test_replace_under_concurrent_opens(here: Path) -> None:
    """A reader between lookup and open must get the old or the new file, whole; never ENOENT."""
    path = here / "block"
    path.write_bytes(b"0" * 10_000)
    stop = here / "stop"

    def write() -> None:
        for n in range(REPLACEMENTS):
            temporary = here / "temporary"
            temporary.write_bytes(b"%d" % (n % 10) * 10_000)
            os.replace(temporary, path)
        stop.touch()

    def read() -> None:
        for _ in range(1_000_000):
            for _ in range(20):
                with open(path, "rb") as file:
                    data = file.read()
                assert len(data) == 10_000
                assert data == data[:1] * 10_000
            if stop.exists():
                return
        raise AssertionError("the writer did not end")

    together(write, read, read, read)


def test_replace_under_concurrent_stats_by_path(here: Path) -> None:
    path = here / "block"
    path.write_bytes(b"x")
    stop = here / "stop"

    def write() -> None:
        for n in range(REPLACEMENTS):
            temporary = here / f"temporary{n % 3}"
            temporary.write_bytes(b"x" * (n % 7 + 1))
            os.replace(temporary, path)
        stop.touch()

    def look() -> None:
        for _ in range(1_000_000):
            for _ in range(20):
                assert 1 <= path.stat().st_size <= 7
                os.utime(path)
                assert os.access(path, os.R_OK)
            if stop.exists():
                return
        raise AssertionError("the writer did not end")

    together(write, look, look)


def test_exclusive_creation_has_one_winner(here: Path) -> None:
    def race(worker: int) -> Callable[[], None]:
        def run() -> None:
            for n in range(200):
                try:
                    with descriptor(here / f"f{n}", os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
                        os.write(fd, b"%d" % worker)
                except FileExistsError:
                    pass

        return run

    together(*(race(n) for n in range(4)))
    assert len(os.listdir(here)) == 200
    assert all(len((here / f"f{n}").read_bytes()) == 1 for n in range(200))


def test_a_rename_has_one_winner(here: Path) -> None:
    for n in range(200):
        touch(here / f"f{n}")

    def race(worker: int) -> Callable[[], None]:
        def run() -> None:
            won = 0
            for n in range(200):
                try:
                    os.rename(here / f"f{n}", here / f"w{worker}-{n}")
                    won += 1
                except FileNotFoundError:
                    pass
            assert len([x for x in os.listdir(here) if x.startswith(f"w{worker}-")]) == won

        return run

    together(*(race(n) for n in range(4)))
    names = os.listdir(here)
    assert len(names) == 200
    assert len({x.split("-")[1] for x in names}) == 200


def test_opposite_directory_renames_make_no_loop(here: Path) -> None:
    folder(here / "a")
    folder(here / "b")

    def into(old: str, new: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(300):
                try:
                    os.rename(here / old, here / new / old)
                    os.rename(here / new / old, here / old)
                except OSError as error:
                    assert error.errno in (errno.ENOENT, errno.EINVAL, errno.ENOTEMPTY), error

        return run

    together(into("a", "b"), into("b", "a"))
    assert len(list(here.rglob("*"))) == 2


def test_creating_and_listing_and_removing_together(here: Path) -> None:
    def churn(worker: int) -> Callable[[], None]:
        def run() -> None:
            for n in range(300):
                path = touch(here / f"{worker}-{n}", 0o644, b"content")
                if n % 2:
                    path.unlink()

        return run

    def listing() -> None:
        for _ in range(100):
            for name in os.listdir(here):
                try:
                    found = (here / name).stat()
                except FileNotFoundError:
                    continue
                assert found.st_size in (0, 7)

    together(churn(0), churn(1), churn(2), listing)
    assert len(os.listdir(here)) == 450


def test_makedirs_by_many(here: Path) -> None:
    def make() -> None:
        for n in range(60):
            (here / f"{n % 8}" / f"{n % 16}" / f"{n}").mkdir(parents=True, exist_ok=True)

    together(make, make, make, make)
    assert len(os.listdir(here)) == 8


def test_two_writers_of_one_temporary_name(here: Path) -> None:
    """Clients with a fixed temporary name race: each published file must be one writer's, whole."""
    size = 256 * 1024

    def write(worker: int) -> Callable[[], None]:
        def run() -> None:
            for n in range(100):
                temporary = here / "key.tmp"
                try:
                    temporary.write_bytes(bytes([worker]) * size)
                    os.replace(temporary, here / f"key-{n}.data")
                except FileNotFoundError:
                    pass  # the other one has renamed it: natively so too

        return run

    together(write(1), write(2))
    for path in here.glob("*.data"):
        assert path.stat().st_size == size


def test_a_truncation_does_not_fall_into_a_write(place: Place, here: Path) -> None:
    """One write() of a whole block, another's O_TRUNC: the block or nothing, no hole before its
    end."""
    if place.is_bare:
        pytest.skip("libfuse: O_TRUNC and the parts of a write are requests without a common lock")
    block, aside, stop = here / "block", here / "aside", here / "stop"
    size = 4 << 20
    truncations = mmap.mmap(-1, 8)  # how many; shared by the processes

    def write() -> None:
        try:
            for _ in range(150 if LONG else 60):
                with descriptor(block, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) as fd:
                    assert os.write(fd, b"w" * size) == size
                # It is read when nobody can truncate it any more.
                block.replace(aside)
                another_has_begun(truncations)
                data = aside.read_bytes()
                assert data == b"w" * len(data)
        finally:
            stop.touch()

    def truncate() -> None:
        for number in range(10_000_000):
            with descriptor(block, os.O_CREAT | os.O_WRONLY | os.O_TRUNC):
                pass
            truncations[:] = number.to_bytes(8, "little")
            if stop.exists():
                return

    together(write, truncate)


def another_has_begun(count: mmap.mmap) -> None:
    """Whatever was under way has ended: two more have been counted."""
    goal = int.from_bytes(count[:], "little") + 2
    wait_until(lambda: int.from_bytes(count[:], "little") >= goal, "two more truncations")


def test_threads_of_one_process(here: Path) -> None:
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for n in range(60 if LONG else 25):
                path = here / f"{worker}-{n}"
                path.write_bytes(bytes([worker]) * 70_000)
                os.replace(path, here / f"{worker}-done")
                assert (here / f"{worker}-done").read_bytes() == bytes([worker]) * 70_000
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(os.listdir(here)) == 16


def test_readers_of_a_full_cache_meet_whole_blocks_or_none(
    new_node: Callable[..., Node],
) -> None:
    """Eviction between a reader's lookup and its open, or its open and its read, is a miss or a
    whole block; never an error, never other bytes."""
    size = 256 << 10
    cache = new_node("--capacity", str(32 << 20)).mount / "cache"
    stop = cache.parent / "models" / "stop"

    def write() -> None:
        try:
            for n in range(REPLACEMENTS):
                (cache / "draft").write_bytes(bytes([n % 251]) * size)
                (cache / "draft").replace(cache / f"b{n % 300}")
        finally:
            touch(stop)

    def read() -> None:
        hits = 0
        while not stop.exists():
            for n in range(300):
                try:
                    data = (cache / f"b{n}").read_bytes()
                except FileNotFoundError:
                    continue
                assert data == data[:1] * size
                hits += 1
        assert hits

    together(write, read, read)
