"""Clients of one store in several processes, threads and after a fork, and nodes that come and
go."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio

import kvfs
from kvfs.base.config import Config
from kvfs.base.errors import Busy, Conflict, NoSpace, ReadOnly, Unavailable
from kvfs.client.writer import FileDraft, FileDrafts
from kvfs.meta.engine import Transaction
from kvfs.node import open_node
from kvfs.session import session
from kvfs.tree import namespaces, reserved_inodes
from kvfs.vfs import control_port
from kvfs.vfs.post_commit import Changed, Finisher
from tests.cluster.waiting import wait_until
from tests.contract import client_store

_RESTART = """
import sys
from pathlib import Path
from tests.contract import client_store
client_store.restart(Path(sys.argv[1]))
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    with client_store.sound(tmp_path / "store") as root:
        yield root


def test_another_process_sees_it_at_once(store: Path) -> None:
    program = """
import sys, kvfs
with kvfs.Client(sys.argv[1]) as client:
    for line in sys.stdin:
        client.put("/cache/pong", client.get("/cache/ping") + b" pong")
        print("done", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(client_store.ROOT)}
    arguments = [sys.executable, "-c", program, str(store)]
    with (
        subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        ) as other,
        kvfs.Client(store) as client,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        for number in range(20):
            client.put("/cache/ping", b"ping %d" % number)
            other.stdin.write(b"\n")
            other.stdin.flush()
            assert other.stdout.readline() == b"done\n"
            assert client.get("/cache/pong") == b"ping %d pong" % number
        other.stdin.close()


def test_writers_in_processes_and_threads_do_not_disturb_each_other(store: Path) -> None:
    program = """
import sys, kvfs
with kvfs.Client(sys.argv[1]) as client:
    for number in range(50):
        client.put(f"/cache/{sys.argv[2]}-{number}", b"x" * 10_000)
        client.put("/cache/contended", sys.argv[2].encode() * 1_000)
"""
    others = [client_store.python(program, str(store), str(each)) for each in range(2)]
    with kvfs.Client(store) as client:

        def write(name: str) -> None:
            for number in range(50):
                client.put(f"/cache/{name}-{number}", b"x" * 10_000)
                client.put("/cache/contended", name.encode() * 1_000)

        threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for other in others:
            output, _ = other.communicate(timeout=120)
            assert other.returncode == 0, output
        keys = [f"/cache/{name}-{number}" for name in "01ab" for number in range(50)]
        assert client.exists(keys) == [True] * 200
        assert client.get("/cache/contended") in [name * 1_000 for name in (b"0", b"1", b"a", b"b")]


def test_a_child_of_a_fork_opens_the_store_itself(store: Path) -> None:
    with kvfs.Client(store) as client:
        client.put("/cache/before", b"1")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                client.put("/cache/in-the-child", client.get("/cache/before"))
                client.close()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert client.get("/cache/in-the-child") == b"1"
        client.put("/cache/after", b"2")
        assert client.get("/cache/after") == b"2"


def test_forks_while_another_thread_reads_and_writes(store: Path) -> None:
    with kvfs.Client(store) as client:
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                client.put("/cache/a", b"1")
                client.stat("/cache/a")

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
        over.set()
        thread.join()


def test_a_node_in_this_very_process_is_named(store: Path) -> None:
    async def main() -> None:
        async with open_node(Config(store=store)):
            with kvfs.Client(store) as client, pytest.raises(Busy, match="in this process already"):
                client.get("/cache/a")

    trio.run(main)


def test_reading_leaves_the_store_as_it_is(store: Path) -> None:
    with kvfs.Client(store) as client:
        client.put("/cache/a", b"1")
    before = {path: path.stat().st_mtime_ns for path in (store / "meta").iterdir()}
    with kvfs.Client(store) as client:
        assert client.get("/cache/a") == b"1"
        assert client.exists(["/cache/a"]) == [True]
        assert [entry.name for entry in client.list("/cache")] == [b"a"]
    after = {path: path.stat().st_mtime_ns for path in (store / "meta").iterdir()}
    after.pop(store / "meta" / "lock.mdb"), before.pop(store / "meta" / "lock.mdb")
    assert after == before


def test_a_store_that_was_never_started(tmp_path: Path) -> None:
    from kvfs.datastore.layout import create_store

    create_store(tmp_path / "store")
    with kvfs.Client(tmp_path / "store") as client:
        with pytest.raises(Unavailable, match="never started"):
            client.get("/cache/a")
        with pytest.raises(Unavailable, match="never started"):
            client.put("/cache/a", b"")


def test_a_read_only_store_is_read(store: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a read-only mount of the store needs root")
    with kvfs.Client(store) as client:
        client.put("/cache/a", b"1")
    place = tmp_path / "read-only"
    place.mkdir()
    subprocess.run(["mount", "--bind", store, place], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
        with kvfs.Client(place) as client:
            assert client.get("/cache/a") == b"1"
            for _ in range(2):
                with pytest.raises(ReadOnly, match=r"check (its )?permissions"):
                    client.put("/cache/b", b"2")
            assert client.exists(["/cache/a", "/cache/b"]) == [True, False]
            assert client.get("/cache/a") == b"1"
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_node_that_starts_meanwhile_does_not_take_a_draft_away(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FileDrafts.publish
    dropped = []

    def publish(self: FileDrafts, made: Sequence[FileDraft]) -> None:
        monkeypatch.setattr(FileDrafts, "publish", real)
        dropped.append(made[0].body.ino)
        client_store.run(_RESTART, str(store))
        real(self, made)

    with kvfs.Client(store) as client:
        client.put("/cache/a", b"old")
        monkeypatch.setattr(FileDrafts, "publish", publish)
        client.put("/cache/a", b"new" * 100_000)
        assert client.get("/cache/a") == b"new" * 100_000
        monkeypatch.setattr(FileDrafts, "publish", publish)
        with client.open("/cache/b", "wb") as file:
            file.write(b"written in ")
            file.write(b"two parts")
        assert client.get("/cache/b") == b"written in two parts"
        made = [client.stat(path).ino for path in ("/cache/a", "/cache/b")]
    assert not set(made) & set(dropped)


def test_nodes_that_start_again_and_again_end_in_an_error(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Finisher.commit

    def commit(self: Finisher, fn: Callable[[Transaction, Changed], object]) -> object:
        client_store.run(_RESTART, str(store))
        return real(self, fn)

    with kvfs.Client(store) as client:
        client.put("/cache/a", b"old")
        monkeypatch.setattr(Finisher, "commit", commit)
        with pytest.raises(Conflict, match="again"):
            client.put("/cache/a", b"new")
        assert client.get("/cache/a") == b"old"


def test_a_small_put_is_one_commit_and_a_closed_client_leaves_no_number_reserved(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserved(t: Transaction) -> list[int]:
        return reserved_inodes.reserved(t, 0, 1000)

    opened = session.acquire(store)
    try:
        with kvfs.Client(store) as client:
            for name in "ab":
                client.put(f"/cache/{name}", b"1")
            assert opened.read(reserved) != []
            commits = []
            write = opened.write
            monkeypatch.setattr(opened, "write", lambda fn: (commits.append(fn), write(fn))[1])
            client.put("/cache/c", b"3")
            assert len(commits) == 1
        assert opened.read(reserved) == []
    finally:
        session.release(opened)


def test_numbers_that_the_node_may_release_by_now_are_used_no_more(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = session.acquire(store)
    try:
        with kvfs.Client(store) as client:
            for name in "abc":
                client.put(f"/cache/{name}", b"1")
            old = set(opened.read(lambda t: reserved_inodes.reserved(t, 0, 1000)))
            assert old
            later = time.monotonic() + 1801
            monkeypatch.setattr(time, "monotonic", lambda: later)
            client.put("/cache/d", b"1")
            now = set(opened.read(lambda t: reserved_inodes.reserved(t, 0, 1000)))
            assert now
            assert not now & old
            assert client.get("/cache/d") == b"1"
    finally:
        session.release(opened)


def test_the_child_of_a_fork_puts_though_a_thread_of_the_parent_was_staging(store: Path) -> None:
    with kvfs.Client(store) as client:
        client.put("/cache/a", b"1")
        with client._core._stage._lock:
            child = os.fork()
            if not child:
                signal.alarm(60)
                try:
                    client.put("/cache/b", b"2")
                    os._exit(0)
                finally:
                    os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        client.put("/cache/c", b"3")
        assert client.get_many(["/cache/a", "/cache/b", "/cache/c"]) == [b"1", b"2", b"3"]


def test_what_nobody_reads_any_more_goes_with_the_running_node(store: Path) -> None:
    with client_store.running_node(store), kvfs.Client(store) as client:
        client.put("/cache/a", b"1" * 10_000)
        client.put("/cache/a", b"2" * 10_000)
        client.put("/cache/b", b"3")
        client.remove("/cache/b")
        wait_until(lambda: client_store.data_files(store) == 1, "one data file is left")


def test_a_node_that_does_not_answer_and_has_no_mount_holds_nothing_up_for_long(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_port, "_DEADLINE_S", 0.3)
    with client_store.running_node(store) as pid, kvfs.Client(store) as client:
        client.put("/cache/a", b"old")
        os.kill(pid, signal.SIGSTOP)
        try:
            client.put("/cache/a", b"new")
            assert client.get("/cache/a") == b"new"
            client.mkdir("/new")  # every mount knows its root
            assert [entry.name for entry in client.list("/new")] == []
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_full_namespace_is_refused_without_a_node(store: Path) -> None:
    limit(store, b"models", 1 << 20)
    with kvfs.Client(store) as client:
        client.put("/models/a", bytes(900_000))
        for _ in range(2):
            with pytest.raises(NoSpace, match=r"/models/b: .*namespace models is full \(1.0 MiB\)"):
                client.put("/models/b", bytes(200_000))
        several = [(f"/models/{name}", bytes(100_000)) for name in "bcd"]
        with pytest.raises(NoSpace, match="/models/b and 2 more: "):
            client.put_many(several)
        with pytest.raises(NoSpace, match="/models/c: "), client.open("/models/c", "wb") as file:
            file.write(bytes(200_000))
        client.remove("/models/a")
        client.put("/models/b", bytes(200_000))
        assert [entry.name for entry in client.list("/models")] == [b"b"]


def test_a_full_cache_makes_room_where_a_node_runs(store: Path) -> None:
    limit(store, b"cache", 8 << 20)
    with client_store.running_node(store), kvfs.Client(store) as client:
        for number in range(24):
            client.put(f"/cache/{number:02}", bytes(1 << 20))
        names = [entry.name for entry in client.list("/cache")]
        assert b"23" in names
        assert 0 < len(names) <= 8
        with pytest.raises(NoSpace, match="cache is full"):
            client.put("/cache/too-large", bytes(9 << 20))


def test_the_store_as_a_whole_is_limited_by_the_running_node(store: Path) -> None:
    with client_store.running_node(store, "4MiB"), kvfs.Client(store) as client:
        client.put("/models/a", bytes(3 << 20))
        with pytest.raises(NoSpace, match="store is full"):
            client.put("/models/b", bytes(2 << 20))
        assert [entry.name for entry in client.list("/models")] == [b"a"]


def test_reading_counts_for_the_order_of_eviction(store: Path) -> None:
    limit(store, b"cache", 8 << 20)
    with client_store.running_node(store), kvfs.Client(store) as client:
        client.put("/cache/warm", bytes(1 << 20))
        with kvfs.Client(store) as reader:
            for number in range(20):
                client.put(f"/cache/{number:02}", bytes(1 << 20))
                assert len(reader.get("/cache/warm")) == 1 << 20
                reader._core._touches.flush()
        assert client.exists(["/cache/warm", "/cache/00"]) == [True, False]


def limit(store: Path, name: bytes, capacity: int) -> None:
    """Set a namespace's capacity, as `kvfs namespace set` does."""
    opened = session.acquire(store)
    try:

        def fn(t: Transaction) -> None:
            number, _ = namespaces.by_name(t, name)
            namespaces.set_policy(t, number, now=0, capacity=capacity)

        opened.write(fn)
    finally:
        session.release(opened)


def test_processes_of_two_containers_with_one_number_do_not_read_as_one(store: Path) -> None:
    """LMDB takes them for one reader, whose end would free pages that the other still reads."""
    if os.geteuid():
        pytest.skip("needs root to make a PID namespace")
    program = """
import sys, kvfs
from kvfs.base.errors import Busy
with kvfs.Client(sys.argv[1]) as client:
    try:
        list(client.list("/"))
        print("reads", flush=True)
    except Busy as error:
        print(error, flush=True)
    sys.stdin.read()
"""
    contained = ["unshare", "--pid", "--fork", "--kill-child"]
    arguments = [*contained, sys.executable, "-c", program, str(store)]
    environment = {**os.environ, "PYTHONPATH": str(client_store.ROOT)}
    told = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            stack.enter_context(process)
            assert process.stdout is not None
            told.append(process.stdout.readline().strip())
    assert told[0] == "reads"
    assert "another container's process whose number is 1 too" in told[1]
