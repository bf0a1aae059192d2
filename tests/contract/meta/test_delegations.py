"""A directory stays while any host has a file in it that nobody else knows of, and goes at once
when none has."""

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import Busy, Exists, NotADirectory, NotEmpty, NotFound
from kvfs.meta import delegations, keys
from kvfs.meta.records import Flag, namespace_of
from kvfs.meta.replica.async_publisher import AsyncPublisher
from kvfs.meta.replica.recalls import Recalls
from kvfs.tree import namespaces, tree
from tests.cluster.waiting import wait_until
from tests.contract.hosts import NOW, TOP, Host, agree
from tests.contract.redis_servers import RedisServer

Hosts = tuple[Host, Host]


@pytest.fixture
def url(server: RedisServer) -> str:
    return f"{server.url}?prefix={secrets.token_hex(4)}"


@pytest.fixture
def hosts(url: str, tmp_path: Path) -> Iterator[Hosts]:
    """The second one has a delegation of the namespace, which has a directory `d`."""
    one = Host(tmp_path / "one", url, 1)
    one.write(lambda t: namespaces.format(t, NOW, 0, 0))
    one.write(lambda t: namespaces.create(t, b"ns", kind="cache", uid=0, gid=0, now=NOW))
    one.mkdir(TOP, b"d")
    other = Host(tmp_path / "other", url, 2)
    other.create(TOP, b"first")
    one.mirror.catch_up()
    yield one, other
    one.mirror.close()
    other.mirror.close()


def directory(host: Host) -> int:
    found = host.find(TOP, b"d")
    assert found is not None
    return found


def delegated(host: Host) -> dict[int, bytes]:
    """By node."""
    host.mirror.catch_up()
    pairs = host.mirror.read_now(lambda t: list(t.scan(*keys.DELEGATIONS)))
    return {keys.parse_delegation(key)[1]: value for key, value in pairs}


def remove(host: Host) -> None:
    host.rmdir(TOP, b"d")


def replace(host: Host) -> None:
    """By a rename of another one."""
    if host.find(TOP, b"e") is None:
        host.mkdir(TOP, b"e")
    host.write(lambda t: tree.rename(t, TOP, b"e", TOP, b"d", now=NOW, keep=lambda _: False))


REMOVALS = pytest.mark.parametrize("go", [remove, replace])


def test_the_first_file_takes_a_delegation_and_those_after_it_cost_nothing(hosts: Hosts) -> None:
    one, other = hosts
    assert delegated(one) == {2: delegations.HELD}
    asked = other.trips
    made = [other.create(directory(other), b"%d" % number) for number in range(5)]
    assert other.trips == asked
    for ino in made:
        other.close_file(ino)
    assert other.trips == asked + 5


@REMOVALS
def test_a_directory_with_a_new_file_of_another_host_stays(
    hosts: Hosts, url: str, go: Callable[[Host], None]
) -> None:
    one, other = hosts
    ino = other.create(directory(other), b"a")
    with pytest.raises(NotEmpty):
        go(one)
    assert delegated(one) == {}
    other.close_file(ino, behind=True)
    agree(one, other, url)
    assert one.find(directory(one), b"a") == ino
    assert one.inode(ino).flags & Flag.PUBLISHED
    other.unlink(directory(other), b"a")
    one.mirror.catch_up()
    go(one)
    agree(one, other, url)


def tells_nothing_behind(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts it anew, so that the engine hears of no close by itself."""
    host.mirror.close()
    with monkeypatch.context() as patch:
        patch.setattr(AsyncPublisher, "run", lambda _: trio.sleep_forever())
        host.start()


def test_what_was_closed_behind_keeps_its_directory(
    hosts: Hosts, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = hosts
    tells_nothing_behind(other, monkeypatch)
    many = 3 * 64 + 5
    made = [other.create(directory(other), b"%d" % number) for number in range(many)]
    for ino in made:
        other.close_file(ino, behind=True)
    with pytest.raises(NotEmpty):
        remove(one)
    assert [one.find(directory(one), b"%d" % number) for number in range(many)] == made
    agree(one, other, url)


def make(host: Host, name: bytes) -> None:
    host.mkdir(TOP, name)


def move(host: Host, name: bytes) -> None:
    host.write(lambda t: tree.rename(t, TOP, b"d", TOP, name, now=NOW, keep=lambda _: False))


@pytest.mark.parametrize("take", [make, move])
def test_what_was_closed_behind_keeps_its_name_from_directories(
    hosts: Hosts, url: str, monkeypatch: pytest.MonkeyPatch, take: Callable[[Host, bytes], None]
) -> None:
    one, other = hosts
    tells_nothing_behind(other, monkeypatch)
    ino = other.create(TOP, b"f")
    other.close_file(ino, behind=True)
    with pytest.raises((Exists, NotADirectory)):
        take(one, b"f")
    assert one.find(TOP, b"f") == ino
    agree(one, other, url)
    take(one, b"e")


def test_directories_ask_nobody_where_a_close_is_known_when_it_returns(hosts: Hosts) -> None:
    one, _ = hosts
    one.write(lambda t: namespaces.set_policy(t, namespace_of(TOP), now=0, coherence="strict"))
    asked = one.trips
    one.mkdir(TOP, b"e")
    assert one.trips == asked + 1
    assert delegated(one) == {2: delegations.HELD}


def test_an_empty_directory_goes_though_another_host_makes_files_elsewhere(
    hosts: Hosts, url: str
) -> None:
    one, other = hosts
    ino, gone = other.create(TOP, b"a"), directory(other)
    remove(one)
    with pytest.raises(NotFound):
        other.create(gone, b"late")
    other.close_file(ino)
    agree(one, other, url)
    assert one.find(TOP, b"a") == ino


def test_once_given_back_a_removal_asks_nobody(hosts: Hosts) -> None:
    one, other = hosts
    for number in range(5):
        one.mkdir(TOP, b"d%d" % number)
    remove(one)
    asked = one.trips
    for number in range(5):
        one.rmdir(TOP, b"d%d" % number)
    assert one.trips == asked + 5
    assert other.find(TOP, b"first") is not None


def test_a_recall_costs_one_request_of_each_host(hosts: Hosts) -> None:
    one, other = hosts
    other.create(TOP, b"open")
    asked, there = one.trips, other.trips
    remove(one)
    assert (one.trips, other.trips) == (asked + 2, there + 1)


def test_a_file_whose_name_was_taken_takes_it_back_when_it_is_closed_not_before(
    hosts: Hosts, url: str
) -> None:
    one, other = hosts
    ours = other.create(TOP, b"name")
    theirs = one.create(TOP, b"name")
    one.close_file(theirs)
    other.mirror.catch_up()
    remove(one)
    assert one.find(TOP, b"name") == theirs
    other.close_file(ours, behind=True)
    agree(one, other, url)
    assert one.find(TOP, b"name") == ours


def test_who_was_recalled_closes_nothing_behind_without_a_place(hosts: Hosts, url: str) -> None:
    """Its file's name was taken, so it did not keep the directory."""
    one, other = hosts
    ours = other.create(directory(other), b"name")
    theirs = one.create(directory(one), b"name")
    one.close_file(theirs)
    other.mirror.catch_up()
    one.mkdir(TOP, b"e")
    one.rmdir(TOP, b"e")
    one.unlink(directory(one), b"name")
    remove(one)
    asked = other.trips
    other.close_file(ours, behind=True)
    assert other.trips > asked
    assert other.inode(ours).nlink == 0
    agree(one, other, url)


def test_a_removal_waits_for_a_host_that_starts_again(hosts: Hosts, url: str) -> None:
    one, other = hosts
    ino = other.create(directory(other), b"a")
    other.mirror.close()
    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(remove, one)
        wait_until(lambda: delegated(one) == {2: delegations.RECALLED}, "it is recalled")
        other.start()
        assert isinstance(removal.exception(), NotEmpty)
    agree(one, other, url)
    assert one.find(directory(one), b"a") == ino


def test_a_removal_does_not_wait_for_the_dead(hosts: Hosts, url: str) -> None:
    one, other = hosts
    other.create(TOP, b"open")
    other.mirror.close()
    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(remove, one)
        wait_until(lambda: delegated(one) == {2: delegations.RECALLED}, "it is recalled")
        one.dead = {2}
        removal.result()
    assert delegated(one) == {}
    other.start()
    agree(one, other, url)


def test_a_removal_ends_where_nobody_answers(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = hosts
    other.mirror.close()
    with monkeypatch.context() as patch:
        patch.setattr("kvfs.meta.replica.replica_engine.PATIENCE_S", 0.2)
        with pytest.raises(Busy, match="does not answer"):
            remove(one)
    other.start()
    remove(one)


def test_a_recall_is_heard_by_a_mirror_that_is_read_anew(
    hosts: Hosts, url: str, server: RedisServer
) -> None:
    one, other = hosts
    other.mirror.close()
    with ThreadPoolExecutor(1) as pool:
        removal = pool.submit(remove, one)
        wait_until(lambda: delegated(one) == {2: delegations.RECALLED}, "it is recalled")
        prefix = url.partition("prefix=")[2]
        server.call("XTRIM", f"{{{prefix}:0}}x", "MAXLEN", 0)
        other.start()
        removal.result()
    agree(one, other, url)


def test_a_recall_that_nobody_waits_for_any_more_is_answered(
    hosts: Hosts, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = hosts
    other.mirror.close()
    with monkeypatch.context() as patch:
        patch.setattr(Recalls, "run", lambda _: trio.sleep_forever())
        other.start()
        patch.setattr("kvfs.meta.replica.replica_engine.PATIENCE_S", 0.2)
        with pytest.raises(Busy):
            remove(one)
    one.restart()
    other.restart()
    wait_until(lambda: delegated(one) == {}, "it is given back")
    agree(one, other, url)


def test_two_hosts_that_remove_at_a_time_do_not_wait_for_each_other(hosts: Hosts, url: str) -> None:
    one, other = hosts
    for number in range(20):
        (one if number % 2 else other).mkdir(TOP, b"e%d" % number)
        one.create(TOP, b"one%d" % number)
        other.create(TOP, b"other%d" % number)
    one.mirror.catch_up()
    other.mirror.catch_up()

    def work(host: Host, names: range) -> None:
        for number in names:
            host.rmdir(TOP, b"e%d" % number)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (one, other), (range(10), range(10, 20))))
    agree(one, other, url)
    assert all(one.find(TOP, b"e%d" % number) is None for number in range(20))


def test_a_full_server_lets_directories_go(hosts: Hosts, server: RedisServer) -> None:
    one, other = hosts
    server.call("CONFIG", "SET", "maxmemory", "1")
    try:
        remove(one)
    finally:
        server.call("CONFIG", "SET", "maxmemory", "0")
    assert one.find(TOP, b"d") is None
    assert other.find(TOP, b"first") is not None


def test_a_namespace_stays_while_another_host_makes_a_file_in_it(hosts: Hosts, url: str) -> None:
    one, other = hosts
    one.write(lambda t: namespaces.create(t, b"second", kind="cache", uid=0, gid=0, now=NOW))
    top = one.find(1, b"second")
    assert top is not None
    one.rmdir(1, b"second")  # nobody has made anything there
    one.write(lambda t: namespaces.create(t, b"third", kind="cache", uid=0, gid=0, now=NOW))
    top = one.find(1, b"third")
    assert top is not None
    other.mirror.catch_up()
    assert other.create(top, b"a")
    with pytest.raises(NotEmpty):
        one.rmdir(1, b"third")
    other.mirror.catch_up()
    other.unlink(top, b"a")
    one.mirror.catch_up()
    one.rmdir(1, b"third")
    agree(one, other, url)
