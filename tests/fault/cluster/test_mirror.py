"""What befalls the engine under mirrors: nothing acknowledged is lost or done twice, nobody hangs,
nothing is built on an engine that is not what it was."""

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.base.errors import Conflict, NoSpace, Unavailable
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Namespace, pack
from kvfs.meta.replica.direct_engine import DirectEngine
from tests.cluster.waiting import wait_until
from tests.contract.mirrors import Mirror, everything, in_redis
from tests.contract.redis_servers import RedisServer, ask, killed
from tests.fault.counters import increment, number
from tests.fault.impatience import impatient
from tests.fault.proxy import proxied

PATIENCE_S = 60.0
KEPT = ("--appendonly", "yes", "--appendfsync", "always")
VICTIM = Path(__file__).parent.parent / "mirror_victim.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path / "redis")) as server:
        yield server


@contextlib.contextmanager
def mirroring(path: Path, url: str, **options: Any) -> Iterator[Mirror]:
    mirror = Mirror(path, url, **options)
    try:
        yield mirror
    finally:
        mirror.close()


def until_committed(mirror: Mirror, key: bytes) -> None:
    """The engine is heard again: something can be committed."""

    def is_done() -> bool:
        try:
            mirror.transact_now(increment(key))
        except Unavailable:
            return False
        return True

    wait_until(is_done, "the engine is heard")


class Counter:
    """Counts in a thread until it is told to stop, or has counted `most`: what was acknowledged,
    and of what nobody knows whether it was done."""

    def __init__(self, mirror: Mirror, *keys: bytes, most: int = 1 << 30) -> None:
        self.counted = 0
        self.unknown = 0
        self._stop = threading.Event()
        self._arguments = mirror, keys, most
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def wait_for(self, more: int) -> None:
        goal = self.counted + more
        wait_until(lambda: self.counted >= goal or self._error is not None, "it counts further")

    def stop(self) -> None:
        self._stop.set()
        self.join()

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _count(self) -> None:
        mirror, keys, most = self._arguments

        def count(t: Transaction) -> None:
            for key in keys:
                increment(key)(t)

        try:
            while self.counted < most and not self._stop.is_set():
                try:
                    mirror.transact_now(count)
                    self.counted += 1
                except Unavailable:
                    self.unknown += 1
                    time.sleep(0.05)
        except BaseException as error:
            self._error = error


# ---- connections


def test_what_is_cut_is_counted_once_on_all_hosts(
    server: RedisServer, tmp_path: Path, seed: int
) -> None:
    """Two hosts contend for one counter, over lines that break at any byte."""
    path = tmp_path / "p"
    with (
        proxied(path, server.socket, seed=seed, most_bytes=30_000) as proxy,
        mirroring(tmp_path / "a", f"unix://{path}", node=1) as a,
        mirroring(tmp_path / "b", f"unix://{path}", node=2) as b,
    ):
        own = [b"%d %d" % (host, thread) for host in range(2) for thread in range(3)]
        counters = [
            Counter((a, b)[place // 3], b"all", key, most=40) for place, key in enumerate(own)
        ]
        for each in counters:
            each.join()
        assert proxy.cuts >= 1
        proxy.most_bytes = 0
        proxy.cut()
        for mirror in (a, b):
            until_committed(mirror, b"other")
            mirror.catch_up()
        unknown = sum(each.unknown for each in counters)
        assert 240 <= number(a, b"all") <= 240 + unknown
        assert sum(number(b, key) for key in own) == number(b, b"all")
        a.catch_up()
        assert everything(a) == everything(b) == in_redis(server.url)


def test_a_partition_holds_nobody_for_ever_and_ends(server: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "p"
    with (
        proxied(path, server.socket) as proxy,
        mirroring(tmp_path / "a", f"unix://{path}") as cut_off,
        mirroring(tmp_path / "b", server.url, node=2) as other,
    ):
        cut_off.transact_now(increment(b"n"))
        proxy.held = "both"
        proxy.is_refusing = True
        with impatient(cut_off):
            with pytest.raises(Unavailable, match="did not answer"):
                cut_off.transact_now(increment(b"n"))
            with pytest.raises(Unavailable, match="did not answer"):
                cut_off.catch_up()
        heard_at = cut_off.engine.heard_at()
        # What it has is read on; how old that is, it says itself.
        assert number(cut_off, b"n") == 1
        other.catch_up()
        other.transact_now(increment(b"n"))
        assert cut_off.engine.heard_at() == heard_at
        proxy.is_refusing = False
        proxy.held = None
        until_committed(cut_off, b"m")
        wait_until(lambda: cut_off.engine.heard_at() > heard_at, "it hears again")
        other.catch_up()
        # What was on its way when the line was cut is done or not, but once.
        assert number(other, b"n") == number(cut_off, b"n")
        assert number(other, b"n") in (2, 3)


# ---- the server


def test_a_server_that_hangs_holds_nobody_for_ever(server: RedisServer, tmp_path: Path) -> None:
    with mirroring(tmp_path / "a", server.url) as mirror:
        mirror.transact_now(increment(b"n"))
        server.signal(signal.SIGSTOP)
        with impatient(mirror):
            with pytest.raises(Unavailable, match="did not answer"):
                mirror.transact_now(increment(b"n"))
            with pytest.raises(Unavailable, match="did not answer"):
                mirror.catch_up()
        assert number(mirror, b"n") == 1
        server.signal(signal.SIGCONT)
        until_committed(mirror, b"m")
        assert number(mirror, b"n") in (1, 2)
        mirror.catch_up()
        assert everything(mirror) == in_redis(server.url)


def test_a_killed_server_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with (
        killed(RedisServer(tmp_path / "r", *KEPT)) as server,
        mirroring(tmp_path / "a", server.url) as one,
        mirroring(tmp_path / "b", server.url, node=2) as other,
    ):
        counters = [Counter(mirror, b"n") for mirror in (one, other)]
        for _ in range(3):
            for each in counters:
                each.wait_for(10)
            server.kill()
            server.start()
        for each in counters:
            each.wait_for(10)
            each.stop()
        one.catch_up()
        counted = sum(each.counted for each in counters)
        unknown = sum(each.unknown for each in counters)
        assert counted <= number(one, b"n") <= counted + unknown
        assert everything(one) == in_redis(server.url)


def test_a_server_that_is_loading_is_waited_for(tmp_path: Path) -> None:
    with (
        killed(RedisServer(tmp_path / "r", *KEPT)) as server,
        mirroring(tmp_path / "a", server.url, deadline_s=PATIENCE_S) as mirror,
    ):
        mirror.transact_now(increment(b"n"))
        for each in range(20):
            server.call("SET", f"other {each}", "x" * 5000)
        server.call("BGREWRITEAOF")
        server.wait_for("aof_rewrite_scheduled", "0")
        server.wait_for("aof_rewrite_in_progress", "0")
        server.kill()
        slowly = ("--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024")
        with killed(RedisServer(server.directory, *KEPT, *slowly)) as slow:
            assert slow.info("loading") == "1"
            mirror.transact_now(increment(b"n"))
            assert number(mirror, b"n") == 2


def test_a_full_server_is_told_and_reads_go_on(server: RedisServer, tmp_path: Path) -> None:
    with mirroring(tmp_path / "a", server.url) as mirror:
        mirror.transact_now(increment(b"n"))
        mirror.transact_now(increment(b"o"))
        record = keys.namespace(7), pack(Namespace(name=b"gone", created_ns=1))
        mirror.transact_now(lambda t: t.put(*record))

        def remove(t: Transaction) -> bool:
            t.put(b"n", t.get(b"n") or b"")
            return t.delete(record[0])

        server.call("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(NoSpace, match="memory of the engine"):
            mirror.transact_now(increment(b"n"))
        assert number(mirror, b"n") == 1
        assert mirror.transact_now(lambda t: t.get(b"o") is not None and t.delete(b"o"))
        assert mirror.read_now(lambda t: t.get(b"o")) is None
        assert mirror.transact_now(remove), "a namespace goes, and a record beside it changes"
        server.call("CONFIG", "SET", "maxmemory", 0)
        until_committed(mirror, b"m")
        assert number(mirror, b"n") == 1


def test_a_mirror_starts_while_the_memory_of_the_server_is_full(
    server: RedisServer, tmp_path: Path
) -> None:
    with mirroring(tmp_path / "a", server.url) as mirror:
        mirror.transact_now(increment(b"n"))
    server.call("CONFIG", "SET", "maxmemory", 1)
    for directory in ("a", "b"):
        with mirroring(tmp_path / directory, server.url) as mirror:
            assert number(mirror, b"n") == 1
            if directory == "b":
                assert mirror.transact_now(lambda t: t.delete(b"n"))


def test_rights_that_are_taken_away_are_told_and_back_they_serve(
    server: RedisServer, tmp_path: Path
) -> None:
    with mirroring(tmp_path / "a", server.url) as mirror:
        mirror.transact_now(increment(b"n"))
        server.call("ACL", "SETUSER", "default", "-evalsha", "-eval")
        with pytest.raises(Unavailable, match="refuses us"):
            mirror.transact_now(increment(b"n"))
        server.call("ACL", "SETUSER", "default", "+@all")
        until_committed(mirror, b"m")
        assert number(mirror, b"n") == 1


def test_a_password_that_comes_later_is_told(server: RedisServer, tmp_path: Path) -> None:
    with mirroring(tmp_path / "a", server.url) as mirror:
        mirror.transact_now(increment(b"n"))
        with server.connected() as connection:
            assert ask(connection, "CONFIG", "SET", "requirepass", "other") == "OK"
            ask(connection, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            with pytest.raises(Unavailable, match="refuses us"):
                mirror.transact_now(increment(b"n"))
            assert number(mirror, b"n") == 1
            assert ask(connection, "CONFIG", "SET", "requirepass", "") == "OK"
        until_committed(mirror, b"m")
        assert number(mirror, b"n") == 1


# ---- an engine that is not what it was


def test_an_engine_that_lost_all_is_left_empty(server: RedisServer, tmp_path: Path) -> None:
    with mirroring(tmp_path / "a", server.url) as mirror:
        mirror.transact_now(increment(b"n"))
        server.call("FLUSHALL")
        with pytest.raises(Unavailable, match="kvfs rebuild"):
            mirror.transact_now(increment(b"n"))
        with pytest.raises(Unavailable, match="kvfs rebuild"):
            mirror.catch_up()
        assert server.call("DBSIZE") == 0
        assert number(mirror, b"n") == 1


def test_a_node_does_not_wait_for_an_engine_that_lost_all(
    server: RedisServer, tmp_path: Path
) -> None:
    """As where `kvfs rebuild` enrolled it and was not finished."""
    with mirroring(tmp_path / "a", server.url) as mirror:
        mirror.transact_now(increment(b"n"))
        cluster = mirror.engine._applier.mark.cluster
    server.call("FLUSHALL")
    with pytest.raises(Unavailable, match="kvfs rebuild"):
        Mirror(tmp_path / "a", server.url, cluster=cluster)


def test_an_engine_that_was_put_back_is_not_built_on(server: RedisServer, tmp_path: Path) -> None:
    """As a backup that somebody restores, or a fail-over to a replica that lagged behind."""
    with (
        mirroring(tmp_path / "a", server.url) as mirror,
        mirroring(tmp_path / "b", server.url, node=2) as other,
    ):
        mirror.transact_now(increment(b"n"))
        assert server.call("SAVE") == "OK"
        mirror.transact_now(increment(b"n"))
        other.catch_up()
        server.kill()
        server.start()
        for each in (mirror, other):
            with pytest.raises(Unavailable, match="kvfs rebuild"):
                until_committed_or_refused(each)
            assert number(each, b"n") == 2
        assert dict(in_redis(server.url))[b"n"] == b"1"

        # Nor when it has gone on without them, past where they are.
        engine = DirectEngine(server.url)
        for _ in range(5):
            engine.transact_now(increment(b"other"))
        engine.close()
        for each in (mirror, other):
            with pytest.raises(Unavailable, match="kvfs rebuild"):
                until_committed_or_refused(each)
            assert number(each, b"other") == 0
        assert dict(in_redis(server.url))[b"n"] == b"1"


def until_committed_or_refused(mirror: Mirror) -> None:
    """While the server starts it does not answer; then it does, and what comes is told."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            mirror.transact_now(increment(b"n"))
            return
        except Unavailable as error:
            if "did not answer" not in str(error) or time.monotonic() > end:
                raise
        time.sleep(0.05)


def test_a_mirror_whose_cluster_has_gone_on_without_it_in_another_engine_is_refused(
    server: RedisServer, tmp_path: Path
) -> None:
    with mirroring(tmp_path / "a", server.url) as mirror:
        mirror.transact_now(increment(b"n"))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    elsewhere = f"{server.url}?prefix=other"
    DirectEngine(elsewhere).close()
    with pytest.raises(Conflict, match="give the node another store"):
        Mirror(tmp_path / "copy", elsewhere).close()


# ---- the process


def test_a_killed_process_goes_on_where_it_was(server: RedisServer, tmp_path: Path) -> None:
    """While it commits and applies what others commit; its mirror is right when it starts again."""
    with mirroring(tmp_path / "other", server.url, node=2) as other:
        counter = Counter(other, b"n")
        try:
            acknowledged = 0
            for round_ in range(4):
                acknowledged = count_and_kill(server, tmp_path / "victim", 5 + 7 * round_)
                with mirroring(tmp_path / "victim", server.url, node=1) as again:
                    again.catch_up()
                    assert number(again, b"victim 1") in (acknowledged, acknowledged + 1)
        finally:
            counter.stop()
        with mirroring(tmp_path / "victim", server.url, node=1) as again:
            again.catch_up()
            assert everything(again) == in_redis(server.url)
            assert number(again, b"n") == counter.counted


def count_and_kill(server: RedisServer, directory: Path, commits: int) -> int:
    """Have a process count so far, and kill it; what was acknowledged to it last."""
    process = subprocess.Popen(
        [sys.executable, str(VICTIM), str(directory), server.url, "1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    last = 0
    try:
        assert process.stdout is not None
        for _ in range(commits):
            last = int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
    rest = process.stdout.read().splitlines()
    process.stdout.close()
    return int(rest[-1]) if rest and rest[-1].isdecimal() else last
