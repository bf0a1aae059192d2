"""A node that works alone in a strict namespace asks the engine nothing before look-ups, and no
other node's change escapes it."""

import contextlib
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvfs.base import detach
from kvfs.base.clock import now
from kvfs.base.errors import Exists, Unavailable
from kvfs.meta import engine_copy, exclusive, exclusive_keeper, keys, schema
from kvfs.meta.exclusive_keeper import QUESTIONS
from kvfs.meta.redis.log import Proposal
from kvfs.meta.replica import replica_engine
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.tree import namespaces
from tests.cluster.waiting import wait_until
from tests.contract.hosts import NOW, TOP, Host, agree
from tests.contract.redis_servers import RedisServer, killed, on_a_port
from tests.fault.impatience import impatient
from tests.fault.proxy import Proxy, proxied

Hosts = tuple[Host, Host]
AT_ONCE = "--repl-diskless-sync-delay", "0"
"""A replica is served as soon as it asks."""


@pytest.fixture
def url(server: RedisServer) -> str:
    return f"{server.url}?prefix={secrets.token_hex(4)}"


@pytest.fixture
def hosts(url: str, tmp_path: Path) -> Iterator[Hosts]:
    with strict(Host(tmp_path / "one", url, 1), Host(tmp_path / "other", url, 2)) as made:
        yield made


@contextlib.contextmanager
def strict(one: Host, other: Host) -> Iterator[Hosts]:
    """Two nodes of a new cluster with a strict namespace, which the first has to itself."""
    try:
        make_strict(one)
        other.mirror.catch_up()
        work_alone(one)
        yield one, other
    finally:
        one.mirror.close()
        other.mirror.close()


def make_strict(host: Host) -> None:
    host.write(lambda t: namespaces.format(t, NOW, 0, 0))
    host.write(lambda t: namespaces.create(t, b"ns", kind="durable", uid=0, gid=0, now=NOW))
    host.write(lambda t: namespaces.set_policy(t, 1, now=0, coherence="strict"))


def look(host: Host, name: bytes = b"") -> int | None:
    host.mirror.call(lambda: host.mirror.engine.fresh(1))
    return host.find(TOP, name)


def look_in_a_step(host: Host, name: bytes) -> int | None:
    """As a look-up on the mount does, which is driven in one step until it goes aside: of one host
    at a time, since a process has one loop that does so."""

    async def fresh() -> None:
        rest = detach.begin(host.mirror.engine.fresh(1))
        if isinstance(rest, detach.Unfinished):
            await rest

    host.mirror.call(fresh)
    return host.find(TOP, name)


def work_alone(host: Host) -> None:
    for _ in range(QUESTIONS):
        look(host)
    make(host, b"mine %d" % host.trips)
    assert is_held(host)


def make(host: Host, name: bytes) -> int:
    ino = host.create(TOP, name)
    host.close_file(ino)
    return ino


def is_held(host: Host) -> bool:
    return host.mirror.read_now(lambda t: exclusive.is_held(t, 1))


def holders(host: Host) -> list[bytes | None]:
    host.mirror.catch_up()
    return [host.mirror.read_now(lambda t: t.get(keys.exclusive(1)))]


@pytest.fixture
def lasting_belief(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node was told stays true however long this process is held up."""
    for module in (exclusive_keeper, replica_engine):
        monkeypatch.setattr(module, "BELIEVED_S", 3600.0)


@pytest.mark.usefixtures("lasting_belief")
def test_a_node_that_works_alone_asks_nothing(hosts: Hosts) -> None:
    one, _ = hosts
    asked = one.trips
    for number in range(20):
        assert look(one, b"f%d" % number) is None
        made = one.create(TOP, b"f%d" % number)
        assert look(one, b"f%d" % number) == made
    assert one.trips == asked


def test_questions_of_long_ago_take_nothing(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    _, other = hosts
    for _ in range(QUESTIONS):
        look(other)
    monkeypatch.setattr(exclusive_keeper, "WITHIN_S", 0.0)
    make(other, b"theirs")
    assert holders(other) == [None]


def test_one_that_looks_alone_takes_nothing(hosts: Hosts) -> None:
    _, other = hosts
    look(other)
    asked = other.trips
    for _ in range(2 * QUESTIONS):
        look(other)
    assert other.trips == asked + 2 * QUESTIONS


def test_each_change_is_seen_by_the_next_look_anywhere(hosts: Hosts, url: str) -> None:
    one, other = hosts
    for number in range(3):
        ours = make(one, b"ours %d" % number)
        assert look(other, b"ours %d" % number) == ours
    for number in range(3):
        theirs = make(other, b"theirs %d" % number)
        assert look(one, b"theirs %d" % number) == theirs
        other.rename(TOP, b"theirs %d" % number, TOP, b"moved %d" % number, behind=False)
        assert look(one, b"theirs %d" % number) is None
        assert look(one, b"moved %d" % number) == theirs
    assert not is_held(one)
    agree(one, other, url)


def test_a_rename_over_anothers_file_is_seen(hosts: Hosts, url: str) -> None:
    one, other = hosts
    old, new = make(one, b"name"), make(one, b"new")
    other.mirror.catch_up()
    assert other.find(TOP, b"name") == old
    other.rename(TOP, b"new", TOP, b"name", behind=False)
    assert look(one, b"name") == new
    assert look(one, b"new") is None
    agree(one, other, url)


def test_once_given_back_the_other_node_waits_for_nobody(hosts: Hosts) -> None:
    one, other = hosts
    make(other, b"a")
    ino = other.create(TOP, b"b")
    asked = other.trips
    other.close_file(ino)
    assert other.trips == asked + 1
    assert holders(one) == [None]


def test_of_two_nodes_that_make_a_name_alone_one_does(hosts: Hosts, url: str) -> None:
    one, other = hosts
    rounds = 30

    def work(host: Host) -> set[int]:
        made = set()
        for number in range(rounds):
            look(host)
            with contextlib.suppress(Exists):
                host.close_file(host.create(TOP, b"lock %d" % number, exclusive=True))
                made.add(number)
        return made

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, hosts)
    assert first | second == set(range(rounds))
    assert not first & second
    agree(one, other, url)


def test_two_that_both_work_there_take_it_from_each_other_seldom(hosts: Hosts) -> None:
    one, other = hosts
    make(other, b"a")
    for _ in range(2 * QUESTIONS):
        look(one)
    make(one, b"b")  # other nodes change something there too
    assert holders(one) == [None]


def test_a_holder_that_ended_keeps_nobody_for_long(hosts: Hosts, url: str) -> None:
    one, other = hosts
    one.mirror.close()
    began = now()
    theirs = make(other, b"theirs")
    assert now() - began >= exclusive.BELIEVED_S
    one.start()
    assert look(one, b"theirs") == theirs
    assert holders(one) == [None]
    agree(one, other, url)


@pytest.mark.usefixtures("lasting_belief")
def test_a_node_that_leaves_in_order_keeps_nobody(hosts: Hosts) -> None:
    one, other = hosts
    one.mirror.call(one.mirror.engine.leave)
    assert holders(other) == [None]
    for _ in range(QUESTIONS):
        look(one)
    make(one, b"last")
    assert holders(other) == [None]


@pytest.mark.usefixtures("lasting_belief")
def test_it_is_held_after_a_restart_in_which_nobody_asked(hosts: Hosts) -> None:
    one, other = hosts
    one.restart()
    look(one)
    asked = one.trips
    look(one)
    assert one.trips == asked
    theirs = make(other, b"theirs")
    assert look(one, b"theirs") == theirs


def test_it_is_given_back_at_the_start_where_somebody_asked(hosts: Hosts) -> None:
    one, other = hosts
    one.mirror.close()
    other.mirror.catch_up()
    which = other.mirror.read_now(lambda t: exclusive.of_other(t, 1))
    assert which is not None
    other.write(lambda t: exclusive.ask_back(t, 1, which))
    one.start()
    wait_until(lambda: holders(other) == [None], "it to be given back")


@contextlib.contextmanager
def through_proxy(directory: Path, server: RedisServer, url: str) -> Iterator[tuple[Hosts, Proxy]]:
    """The first node has a way of its own to the engine."""
    path = directory / "p"
    with proxied(path, server.socket) as proxy:
        own = f"unix://{path}?{url.partition('?')[2]}"
        one = Host(directory / "one", own, 1)
        with strict(one, Host(directory / "other", url, 2)) as hosts:
            yield hosts, proxy


def test_a_holder_that_is_cut_off_believes_nothing_once_others_changed_it(
    server: RedisServer, url: str, tmp_path: Path
) -> None:
    with through_proxy(tmp_path, server, url) as ((one, other), proxy):
        proxy.held = "both"
        theirs = make(other, b"theirs")
        with impatient(one.mirror):
            assert look(one, b"theirs") is None
        assert one.mirror.engine.is_away, "it has asked"
        proxy.held = None
        proxy.cut()
        wait_until(lambda: not one.mirror.engine.is_away, "the engine to be heard")
        assert look(one, b"theirs") == theirs


def test_a_holder_asks_the_server_that_took_over_and_has_not_heard_of_it(tmp_path: Path) -> None:
    """A replica takes the master's place without its last commits: there another node changes what
    the holder has to itself at the master."""
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(killed(on_a_port(tmp_path / "a", *AT_ONCE)))
        follows = "--replicaof", "127.0.0.1", str(master.port)
        replica = stack.enter_context(killed(on_a_port(tmp_path / "b", *follows)))
        replica.wait_for("master_link_status", "up")
        address = tmp_path / "engine"
        proxy = stack.enter_context(proxied(address, master.socket))
        one = Host(tmp_path / "one", f"unix://{address}", 1)
        stack.callback(lambda: one.mirror.close())
        make_strict(one)
        one.write(lambda t: namespaces.set_policy(t, 1, now=0, without_engine="refuse"))
        written = int(master.info("master_repl_offset"))
        wait_until(
            lambda: int(replica.info("slave_repl_offset")) >= written, "the replica has it", 60
        )
        replica.call("REPLICAOF", "NO", "ONE")
        work_alone(one)
        other = Host(tmp_path / "other", replica.url, 2)
        stack.callback(lambda: other.mirror.close())
        look(one)
        proxy.go_over(replica.socket)
        make(other, b"theirs")
        with pytest.raises(Unavailable):
            look(one, b"theirs")


def test_what_another_node_has_seen_of_the_holder_it_sees_itself(
    server: RedisServer, url: str, tmp_path: Path
) -> None:
    """While the answer to its change is on its way."""
    with (
        through_proxy(tmp_path, server, url) as ((one, other), proxy),
        ThreadPoolExecutor(2) as pool,
    ):
        ino = make(one, b"old")
        proxy.held = "out"
        renamed = pool.submit(lambda: one.rename(TOP, b"old", TOP, b"new", behind=False))
        wait_until(lambda: look(other, b"new") == ino, "the server to have it")
        looked = pool.submit(lambda: look_in_a_step(one, b"new"))
        with pytest.raises(TimeoutError):
            looked.result(0.2)
        proxy.held = None
        assert looked.result() == ino
        renamed.result()


def test_a_change_of_a_process_beside_another_node_waits_too(hosts: Hosts) -> None:
    one, other = hosts
    ino = make(one, b"name")
    other.mirror.catch_up()
    key = keys.inode(ino)
    record = other.mirror.read_now(lambda t: t.get(key))
    given = Proposal({key: record}, [], {key: record}, [])
    engine = other.mirror.engine
    assert not other.mirror.call(lambda: engine.propose(given))  # the holder gave it back first
    assert other.mirror.call(lambda: engine.propose(given))
    assert holders(one) == [None]


def test_a_command_waits_too(hosts: Hosts, url: str) -> None:
    one, _ = hosts
    ino = make(one, b"name")
    engine = DirectEngine(url)
    try:
        engine.transact_now(lambda t: t.put(keys.xattr(ino, b"user.a"), b"1"))
    finally:
        engine.close()
    one.mirror.catch_up()
    assert not is_held(one)
    assert one.mirror.read_now(lambda t: t.get(keys.xattr(ino, b"user.a"))) == b"1"


def test_what_a_process_takes_along_of_its_node_waits_too(hosts: Hosts, url: str) -> None:
    one, other = hosts
    make(other, b"theirs")
    opened = other.create(TOP, b"open")  # that only its node knows of
    one.mirror.catch_up()
    one.write(lambda t: exclusive.take(t, 1, 7))
    other.mirror.catch_up()
    key = keys.unsealed(opened)
    given = Proposal(
        {key: other.mirror.read_now(lambda t: t.get(key))}, [], {keys.claim("any"): b""}, []
    )
    engine = other.mirror.engine
    assert not other.mirror.call(lambda: engine.propose(given))
    assert holders(one) == [None]
    assert other.mirror.call(lambda: engine.propose(given))
    agree(one, other, url)


def test_a_copy_of_the_metadata_has_none(hosts: Hosts, url: str) -> None:
    one, _ = hosts
    ino = make(one, b"name")
    source, target = DirectEngine(url), DirectEngine(f"{url}copy")
    try:
        part = engine_copy.whole()
        target.transact_now(lambda t: t.put(part.mark, b""))
        engine_copy.copy(source, target, part, lambda _: None)
        assert target.read_now(lambda t: t.get(keys.inode(ino)))
        assert target.read_now(lambda t: t.get(keys.exclusive(1))) is None
    finally:
        source.close()
        target.close()


def test_a_process_changes_a_namespace_that_became_its_nodes_own(hosts: Hosts) -> None:
    one, other = hosts
    one.write(lambda t: namespaces.set_policy(t, 1, now=0, kind="cache", coherence="peer"))
    other.mirror.catch_up()
    key = keys.inode(TOP)  # at the server, where the node that had it to itself still stands
    record = other.mirror.read_now(lambda t: t.get(key))
    given = Proposal({key: record}, [], {key: record}, [])
    assert other.mirror.call(lambda: other.mirror.engine.propose(given))


def test_copies_and_usage_of_other_nodes_end_nothing(hosts: Hosts) -> None:
    one, other = hosts
    ino = make(one, b"name")
    other.mirror.catch_up()
    other.write(lambda t: t.put(keys.held(t.node, ino), b""))
    one.mirror.catch_up()
    assert is_held(one)


def test_a_version_before_that_may_be_there_reads_no_such_key(hosts: Hosts) -> None:
    one, other = hosts
    make(other, b"theirs")
    one.write(lambda t: t.put(keys.VERSION, schema.BEFORE))
    for _ in range(QUESTIONS):
        look(other)
    make(other, b"more")
    assert holders(one) == [None]


def test_a_namespace_that_is_removed_leaves_none(hosts: Hosts, url: str) -> None:
    one, other = hosts
    top = keys.entries(TOP)
    for key in one.mirror.read_now(lambda t: list(t.scan_keys(top, keys.after(top)))):
        one.unlink(TOP, key[len(top) :])
    assert is_held(one)
    other.mirror.catch_up()
    other.rmdir(1, b"ns")
    assert holders(one) == [None]
    agree(one, other, url)
