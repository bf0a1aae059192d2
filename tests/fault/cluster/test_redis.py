"""What befalls servers and connections of an engine without a mirror: nothing that was acknowledged
is lost, nothing is done twice, nobody hangs."""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import Conflict, Invalid, NoSpace, NotSupported, Unavailable
from kvfs.meta.redis.about import check_server, sync_means
from kvfs.meta.redis.leasing import LeaseTable
from kvfs.meta.redis.location import parse
from kvfs.meta.redis.log import BEGIN, PROPOSE, LogReply, Proposal, proposed, read_answer
from kvfs.meta.redis.scripts import TOP, keys_of
from kvfs.meta.redis.slots import slot_of
from kvfs.meta.replica.direct_engine import DEADLINE_S, DirectEngine
from tests.cluster.waiting import wait_until
from tests.contract.redis_servers import RedisCluster, RedisServer, killed, on_a_port
from tests.fault.counters import increment, number
from tests.fault.impatience import SHORT_S, impatient
from tests.fault.proxy import proxied

KEPT = ("--appendonly", "yes", "--appendfsync", "always")
"""A server that has on disk what it acknowledged: with everysec it answers while a sync hangs."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path / "redis")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster


@contextlib.contextmanager
def opened(url: str, *, deadline_s: float = DEADLINE_S) -> Iterator[DirectEngine]:
    engine = DirectEngine(url, deadline_s=deadline_s)
    try:
        yield engine
    finally:
        engine.close()


def count_up(engine: DirectEngine, tasks: int, rounds: int) -> None:
    """Many threads count in counters of their own, and all in one."""

    def work(mine: bytes) -> None:
        for _ in range(rounds):
            engine.transact_now(lambda t: (increment(mine)(t), increment(b"all")(t)))

    with ThreadPoolExecutor(tasks) as threads:
        list(threads.map(work, [b"%d" % task for task in range(tasks)]))


def check_counted(engine: DirectEngine, tasks: int, rounds: int) -> None:
    assert [number(engine, b"%d" % task) for task in range(tasks)] == [rounds] * tasks
    assert number(engine, b"all") == tasks * rounds


class Background:
    """Counts in a thread until it is told to stop; what it counted is what it was told."""

    def __init__(self, engine: DirectEngine, key: bytes) -> None:
        self.counted = 0
        self.error: Exception | None = None
        self._engine = engine
        self._key = key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def _count(self) -> None:
        try:
            while not self._stop.is_set():
                self._engine.transact_now(increment(self._key))
                self.counted += 1
        except Exception as error:
            self.error = error

    def wait_for(self, more: int) -> None:
        """Until it has counted so many more."""
        goal = self.counted + more
        wait_until(lambda: self.counted >= goal or self.error is not None, "it counts further")

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.counted


# ---- connections


def test_cut_connections_count_once(server: RedisServer, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "p"
    with proxied(path, server.socket, seed=seed, most_bytes=8_000) as proxy:
        with opened(f"unix://{path}") as engine:
            count_up(engine, tasks=8, rounds=60)
            proxy.most_bytes = 0
            check_counted(engine, tasks=8, rounds=60)
        assert proxy.cuts >= 3


def test_a_commit_that_comes_late_is_not_done_again(server: RedisServer) -> None:
    """One whose connection hung while it was sent again by another, and others followed."""
    names = keys_of("kvfs", TOP)

    def commit(value: bytes, of_number: int) -> LogReply:
        head = [b"", b"", b"engine", of_number, *mark, b"before", b""]
        items = proposed(Proposal({}, [], {b"k": value}, [])).items
        found = server.call("EVAL", PROPOSE.text, len(names), *names, *head, *items)
        return read_answer(found)

    mark = server.call("EVAL", BEGIN.text, len(names), *names)
    assert commit(b"old", 1).own == b"engine:1"
    again = commit(b"old", 1)
    assert (again.results, len(again.entries)) == (b"1", 1)
    assert commit(b"new", 2).results == b"1"
    assert commit(b"old", 1).results == b""
    with opened(server.url) as engine:
        assert engine.read_now(lambda t: t.get(b"k")) == b"new"


def test_what_engines_leave_of_themselves_goes_after_a_day(server: RedisServer) -> None:
    state = "{kvfs:0}s"
    with opened(server.url) as engine:
        engine.transact_now(increment(b"n"))
    now_ms = time.time_ns() // 1_000_000
    server.call("HSET", state, "e:gone", f"7 {now_ms - 86_500_000}")
    server.call("HSET", state, "e:lately", f"7 {now_ms - 1000}")
    with opened(server.url) as engine:
        engine.transact_now(increment(b"n"))
    left = {name for name in server.call("HKEYS", state) if name[1:2] == b":"}
    assert len(left) == 3
    assert b"e:lately" in left


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"unix:///.*/nobody .*see that it runs"):
        DirectEngine(f"unix://{tmp_path}/nobody", deadline_s=SHORT_S)


def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    with (
        killed(RedisServer(tmp_path / "r", *KEPT)) as server,
        opened(server.url) as engine,
    ):
        engine.transact_now(increment(b"n"))
        server.kill()
        with impatient(engine):
            with pytest.raises(Unavailable, match="did not answer within"):
                engine.transact_now(increment(b"n"))
            with pytest.raises(Unavailable, match="did not answer within"):
                number(engine, b"n")
        server.start()
        server.wait_for("loading", "0")
        engine.transact_now(increment(b"n"))
        assert number(engine, b"n") == 2


def test_a_killed_server_loses_and_doubles_nothing_it_acknowledged(tmp_path: Path) -> None:
    with (
        killed(RedisServer(tmp_path / "r", *KEPT)) as server,
        opened(server.url) as engine,
    ):
        background = Background(engine, b"n")
        for _ in range(3):
            background.wait_for(20)
            server.kill()
            server.start()
        background.wait_for(20)
        counted = background.stop()
        assert number(engine, b"n") == counted


def test_a_server_that_is_loading_is_waited_for(tmp_path: Path) -> None:
    with (
        killed(RedisServer(tmp_path / "r", *KEPT)) as server,
        opened(server.url) as engine,
    ):
        engine.transact_now(increment(b"n"))
        for each in range(20):
            server.call("SET", f"other {each}", "x" * 5000)
        server.call("BGREWRITEAOF")
        server.wait_for("aof_rewrite_scheduled", "0")
        server.wait_for("aof_rewrite_in_progress", "0")
        server.kill()
        slowly = ("--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024")
        with killed(RedisServer(server.directory, *KEPT, *slowly)) as slow:
            assert slow.info("loading") == "1"
            engine.transact_now(increment(b"n"))
            assert number(engine, b"n") == 2


def test_a_server_that_hangs_holds_nobody_for_ever(server: RedisServer) -> None:
    with opened(server.url) as engine:
        engine.transact_now(increment(b"n"))
        server.signal(signal.SIGSTOP)
        with impatient(engine):
            with pytest.raises(Unavailable, match="did not answer within"):
                engine.transact_now(increment(b"n"))
            with pytest.raises(Unavailable, match="did not answer within"):
                number(engine, b"n")
        server.signal(signal.SIGCONT)
        # What was sent may be done or not, but once.
        before = number(engine, b"n")
        assert before in (1, 2)
        engine.transact_now(increment(b"n"))
        assert number(engine, b"n") == before + 1


def test_a_closed_engine_says_so(server: RedisServer) -> None:
    engine = DirectEngine(server.url)
    engine.close()
    with pytest.raises(Unavailable, match="closed"):
        engine.transact_now(increment(b"n"))
    with pytest.raises(Unavailable, match="closed"):
        number(engine, b"n")


# ---- what a server refuses


def test_a_full_server_is_named_and_then_goes_on(server: RedisServer) -> None:
    with opened(server.url) as engine:
        engine.transact_now(increment(b"n"))
        server.call("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(NoSpace, match="raise its maxmemory"):
            engine.transact_now(increment(b"n"))
        assert number(engine, b"n") == 1
        server.call("CONFIG", "SET", "maxmemory", 0)
        engine.transact_now(increment(b"n"))
        assert number(engine, b"n") == 2


def test_a_busy_server_is_waited_for(server: RedisServer) -> None:
    server.call("CONFIG", "SET", "busy-reply-threshold", 10)
    with opened(server.url) as engine:
        hog = threading.Thread(target=server.call, args=("EVAL", "while true do end", 0))
        hog.start()
        while not server.call("PING").startswith("BUSY"):
            time.sleep(0.005)
        background = Background(engine, b"n")
        while server.call("SCRIPT", "KILL") != "OK":
            time.sleep(0.005)
        hog.join()
        background.wait_for(1)
        counted = background.stop()
        assert number(engine, b"n") == counted


def test_scripts_that_the_server_forgot_are_sent_again(server: RedisServer) -> None:
    with opened(server.url) as engine:
        engine.transact_now(increment(b"n"))
        server.call("SCRIPT", "FLUSH")
        assert number(engine, b"n") == 1
        engine.transact_now(increment(b"n"))
        assert number(engine, b"n") == 2


def test_a_wrong_password_is_not_shown(tmp_path: Path) -> None:
    with killed(on_a_port(tmp_path)) as server:
        server.call("CONFIG", "SET", "requirepass", "right")
        for user in ("", "kvfs:wrong-secret@", ":wrong-secret@"):
            with pytest.raises(Invalid, match="name a user and password") as refused:
                DirectEngine(f"redis://{user}127.0.0.1:{server.port}")
            assert "wrong-secret" not in str(refused.value)
        with opened(f"redis://:right@127.0.0.1:{server.port}") as engine:
            engine.transact_now(increment(b"n"))


def test_a_server_that_would_drop_metadata_is_refused(server: RedisServer) -> None:
    server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(NotSupported, match=r"allkeys-lru.*set it to noeviction"):
        DirectEngine(server.url)
    server.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    DirectEngine(server.url).close()


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"redis_version": "6.0.16"}, "6.0.16: 6.2 or newer"),
        ({"redis_version": "5.0"}, "5.0: 6.2 or newer"),
        ({}, "6.2 or newer"),
        ({"redis_version": "7.2.4", "maxmemory_policy": "allkeys-lfu"}, "noeviction"),
    ],
)
def test_a_server_that_will_not_do_is_told_why(about: dict[str, str], words: str) -> None:
    with pytest.raises(NotSupported, match=words):
        check_server(about, parse("redis://host"))


def test_another_clusters_prefix_is_refused(server: RedisServer) -> None:
    async def found(cluster: str | None, prefix: str = "kvfs") -> str:
        table = LeaseTable(parse(f"{server.url}?prefix={prefix}"), DEADLINE_S)
        try:
            return await table.found(cluster)
        finally:
            table.close()

    assert trio.run(found, "mine") == "mine"
    with pytest.raises(Conflict, match=r"belongs to the cluster mine, not to theirs.*prefix="):
        trio.run(found, "theirs")
    assert trio.run(found, "theirs", "other") == "theirs"
    with opened(server.url):
        assert trio.run(found, None) == "mine"


def test_a_newer_layout_is_refused(server: RedisServer) -> None:
    DirectEngine(server.url).close()
    server.call("HSET", "{kvfs:0}s", "schema", "3")
    with pytest.raises(NotSupported, match="version 3, this KVFS knows 1 and 2"):
        DirectEngine(server.url)


def test_a_server_of_a_cluster_is_told_by_its_url(cluster: RedisCluster, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"redis\+cluster://"):
        DirectEngine(cluster.servers[0].url)
    with (
        killed(on_a_port(tmp_path)) as alone,
        pytest.raises(Invalid, match=r"is not a server of a cluster: its URL .* redis://"),
    ):
        DirectEngine(f"redis+cluster://127.0.0.1:{alone.port}")


# ---- fail-over


def test_a_master_that_becomes_a_replica_is_left(tmp_path: Path) -> None:
    """Sentinels name another: commits go there, none is lost that was replicated, none is
    doubled."""
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(killed(on_a_port(tmp_path / "a")))
        replica = stack.enter_context(
            killed(on_a_port(tmp_path / "b", "--replicaof", "127.0.0.1", str(master.port)))
        )
        replica.wait_for("master_link_status", "up")
        sentinel = stack.enter_context(killed(start_sentinel(tmp_path / "c", master)))
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/kvfs"
        engine = stack.enter_context(opened(url, deadline_s=60))
        background = Background(engine, b"n")
        background.wait_for(20)
        kept = background.counted
        assert engine.promise() == "it is in the memory of a replica as well"
        fail_over(sentinel)
        replica.wait_for("role", "master")
        background.wait_for(20)
        counted = background.stop()
        assert kept <= number(engine, b"n") <= counted
        assert replica.info("role") == "master"


def fail_over(sentinel: RedisServer) -> None:
    """It has to have seen the replica; where the machine stood still it believes nobody for half a
    minute."""
    wait_until(
        lambda: sentinel.call("SENTINEL", "FAILOVER", "kvfs") == "OK", "the sentinel does it", 90
    )


def start_sentinel(directory: Path, master: RedisServer) -> RedisServer:
    directory.mkdir(parents=True)
    file = directory / "sentinel.conf"
    file.write_text(
        f"sentinel monitor kvfs 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds kvfs 1000\nsentinel failover-timeout kvfs 5000\n"
    )
    return on_a_port(directory, config=file)


def test_a_master_that_dies_is_replaced(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(killed(on_a_port(tmp_path / "a")))
        replica = stack.enter_context(
            killed(on_a_port(tmp_path / "b", "--replicaof", "127.0.0.1", str(master.port)))
        )
        replica.wait_for("master_link_status", "up")
        sentinel = stack.enter_context(killed(start_sentinel(tmp_path / "c", master)))
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/kvfs"
        with opened(url, deadline_s=60) as engine:
            count_up(engine, tasks=2, rounds=5)
            assert engine.promise() == "it is in the memory of a replica as well"
            wait_until(lambda: sentinel.call("SENTINEL", "REPLICAS", "kvfs"), "it is seen")
            master.kill()
            count_up(engine, tasks=2, rounds=5)
            assert replica.info("role") == "master"
            check_counted(engine, tasks=2, rounds=10)


# ---- what survives a server


def test_what_a_server_promises_is_told(tmp_path: Path) -> None:
    with killed(RedisServer(tmp_path / "r")) as server, opened(server.url) as engine:
        assert engine.promise().startswith("it is in the server's memory")
        server.call("CONFIG", "SET", "appendonly", "yes")
        assert engine.promise().endswith("within two seconds (appendfsync everysec)")
        server.call("CONFIG", "SET", "appendfsync", "always")
        assert engine.promise().startswith("each commit is on the server's disk")


@pytest.mark.parametrize(
    ("about", "appendfsync", "command"),
    [
        ({"redis_version": "7.2.0", "aof_enabled": "1"}, "everysec", (b"WAITAOF", 1, 0, 9)),
        ({"redis_version": "7.0.15", "aof_enabled": "1"}, "everysec", ()),
        ({"redis_version": "7.2.0", "aof_enabled": "1"}, "always", ()),
        ({"redis_version": "7.2.0", "aof_enabled": "0"}, "everysec", ()),
        ({"redis_version": "6.2.0", "connected_slaves": "1"}, "no", (b"WAIT", 1, 9)),
        (
            {"redis_version": "7.2.4", "valkey_version": "8.0.1", "aof_enabled": "1"},
            "unknown",
            (b"WAITAOF", 1, 0, 9),
        ),
    ],
)
def test_what_a_server_is_asked_for(
    about: dict[str, str], appendfsync: str, command: tuple[object, ...]
) -> None:
    assert sync_means(about, appendfsync, 9).command == command


# ---- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    for name in ("mine", "other"):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-keyout", directory / f"{name}.key", "-out", directory / f"{name}.crt"),
                *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            ],
            check=True,
            capture_output=True,
        )
    return directory


def test_tls_with_a_ca_of_ones_own(tmp_path: Path, certificates: Path) -> None:
    tls = (
        *("--tls-auth-clients", "no", "--tls-cert-file", str(certificates / "mine.crt")),
        *("--tls-key-file", str(certificates / "mine.key")),
    )
    with killed(on_a_port(tmp_path, tls=tls)) as server:
        url = f"rediss://127.0.0.1:{server.port}"
        with opened(f"{url}?ca={certificates}/mine.crt") as engine:
            count_up(engine, tasks=2, rounds=5)
            check_counted(engine, tasks=2, rounds=5)
        for ca in (f"?ca={certificates}/other.crt", ""):
            with pytest.raises(Invalid, match=r"certificate.*\?ca=FILE"):
                DirectEngine(url + ca)
        with pytest.raises(Invalid, match=r"nowhere\.crt.*No such file"):
            DirectEngine(f"{url}?ca=/nowhere.crt")


# ---- clusters


def test_counts_while_slots_move(cluster: RedisCluster, seed: int) -> None:
    prefix = f"moving-{seed}"
    with opened(f"{cluster.url}?prefix={prefix}") as engine:
        background = Background(engine, b"n")
        slot = slot_of(prefix, TOP)
        for _ in range(4):
            background.wait_for(10)
            home = cluster.servers.index(cluster.owner(slot))
            cluster.move(slot, cluster.servers[(home + 1) % 3])
        background.wait_for(10)
        counted = background.stop()
        assert number(engine, b"n") == counted
