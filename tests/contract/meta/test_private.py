"""Files that one node makes, which others hear of when they are closed: whatever happens in
between, in the end all nodes and the engine have the same."""

import random
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs.base.clock import now
from kvfs.base.errors import Exists, KvfsError
from kvfs.meta import keys
from kvfs.meta.records import Flag, unpack_inode
from kvfs.tree import inodes, tree
from tests.contract.hosts import NOW, TOP, Host, agree, telling_nobody, two_hosts, usage
from tests.contract.mirrors import everything, in_redis
from tests.contract.redis_servers import RedisServer


@pytest.fixture
def hosts(server: RedisServer, tmp_path: Path) -> Iterator[tuple[Host, Host, str]]:
    url = f"{server.url}?prefix={secrets.token_hex(4)}"
    with two_hosts(tmp_path, url) as (one, other):
        yield one, other, url


def close_and_stop(host: Host, inos: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Close files behind, and end the node before anybody else hears of it."""
    host.mirror.close()
    with telling_nobody(host, monkeypatch):
        for ino in inos:
            host.close_file(ino, behind=True)


def test_a_new_file_costs_one_round_trip_when_it_is_closed(hosts: tuple[Host, Host, str]) -> None:
    one, other, url = hosts
    one.number(1)
    asked, before = one.trips, in_redis(url)
    ino = one.create(TOP, b"a")
    assert one.trips == asked
    assert one.find(TOP, b"a") == ino
    assert usage(one) == (0, 1)
    other.mirror.catch_up()
    assert other.find(TOP, b"a") is None
    assert in_redis(url) == before
    one.close_file(ino)
    assert one.trips == asked + 1
    other.mirror.catch_up()
    assert other.find(TOP, b"a") == ino
    assert other.inode(ino).flags & Flag.PUBLISHED
    assert usage(one) == usage(other) == (4096, 1)
    agree(one, other, url)


def test_an_exclusive_file_costs_one_round_trip_when_it_is_made(
    hosts: tuple[Host, Host, str], server: RedisServer
) -> None:
    one, other, url = hosts
    one.number(1)
    asked = one.trips
    ino = one.create(TOP, b"a", exclusive=True)
    assert one.trips == asked + 1
    with pytest.raises(Exists):
        other.create(TOP, b"a", exclusive=True)
    server.signal(signal.SIGSTOP)
    one.close_file(ino, behind=True)  # waits for nobody
    assert one.inode(ino).flags & Flag.PUBLISHED
    server.signal(signal.SIGCONT)
    one.close_file(ino, behind=True)  # a second descriptor's
    agree(one, other, url)
    assert other.inode(ino).flags & Flag.PUBLISHED
    assert usage(one) == usage(other) == (4096, 1)


def test_an_exclusive_file_is_removed_elsewhere_before_its_close_is_known(
    hosts: tuple[Host, Host, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, url = hosts
    gone, moved = (one.create(TOP, name, exclusive=True) for name in (b"a", b"b"))
    close_and_stop(one, [gone, moved], monkeypatch)
    other.mirror.catch_up()
    other.unlink(TOP, b"a")
    other.write(lambda t: tree.rename(t, TOP, b"b", TOP, b"c", now=NOW, keep=lambda _: False))
    one.start()
    agree(one, other, url)
    assert (other.find(TOP, b"a"), other.find(TOP, b"b")) == (None, None)
    assert other.find(TOP, b"c") == moved
    assert [(each.nlink, each.flags, each.size) for each in map(other.inode, (gone, moved))] == [
        (0, Flag.PUBLISHED, 10),
        (1, Flag.PUBLISHED, 10),
    ]
    assert usage(one) == usage(other) == (2 * 4096, 2)


def test_an_exclusive_file_is_dropped_elsewhere_before_its_close_is_known(
    hosts: tuple[Host, Host, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, url = hosts
    ino = one.create(TOP, b"a", exclusive=True)
    close_and_stop(one, [ino], monkeypatch)
    other.mirror.catch_up()
    other.unlink(TOP, b"a")
    other.write(lambda t: inodes.drop_inode(t, ino, inodes.read_inode(t, ino)))
    one.start()
    agree(one, other, url)
    assert usage(one) == usage(other) == (0, 0)


def test_what_is_published_behind_waits_for_nobody_and_arrives(
    hosts: tuple[Host, Host, str],
) -> None:
    one, other, url = hosts
    made = [one.create(TOP, b"%d" % number) for number in range(200)]
    for ino in made:
        one.close_file(ino, behind=True)
    assert usage(one) == (200 * 4096, 200)
    agree(one, other, url)
    assert [other.find(TOP, b"%d" % number) for number in range(200)] == made
    assert usage(other) == (200 * 4096, 200)


def test_of_two_who_make_one_name_the_last_to_close_has_it(hosts: tuple[Host, Host, str]) -> None:
    one, other, url = hosts
    ours, theirs = one.create(TOP, b"a"), other.create(TOP, b"a")
    other.close_file(theirs)
    one.mirror.catch_up()
    assert one.find(TOP, b"a") == theirs
    one.close_file(ours)
    other.mirror.catch_up()
    assert one.find(TOP, b"a") == other.find(TOP, b"a") == ours
    assert other.inode(theirs).nlink == 0
    agree(one, other, url)


def test_of_two_who_did_not_hear_of_each_other_the_last_has_it(
    hosts: tuple[Host, Host, str],
) -> None:
    one, other, url = hosts
    for round_ in range(20):
        name = b"%d" % round_
        ours, theirs = one.create(TOP, name), other.create(TOP, name)

        async def close(host: Host, ino: int) -> None:
            await trio.to_thread.run_sync(host.close_file, ino)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(close, one, ours)  # noqa: B023
                nursery.start_soon(close, other, theirs)  # noqa: B023

        trio.run(main)
        one.mirror.catch_up()
        other.mirror.catch_up()
        assert one.find(TOP, name) == other.find(TOP, name) in (ours, theirs)
    agree(one, other, url)
    links = sum(
        unpack_inode(value).nlink for key, value in everything(one.mirror) if key[0] == ord("i")
    )
    assert links == 2 + 3 + 20  # the top, the root with a namespace, the files


def test_a_host_that_was_cut_off_replaces_nothing_of_others(
    hosts: tuple[Host, Host, str], server: RedisServer
) -> None:
    one, other, url = hosts
    one.number(1)
    names = {b"taken": 0, b"free": 0}
    server.call("CONFIG", "SET", "maxmemory", "1")  # it refuses all that is to be written
    try:
        for name in names:
            names[name] = one.create(TOP, name)
            one.close_file(names[name], behind=True)
        one.mirror.close()
    finally:
        server.call("CONFIG", "SET", "maxmemory", "0")
    theirs = other.create(TOP, b"taken")
    other.close_file(theirs)
    one.clock = lambda: now() + 60.0
    one.start()
    agree(one, other, url)
    for host in (one, other):
        assert host.find(TOP, b"taken") == theirs
        assert host.find(TOP, b"free") == names[b"free"]
        assert host.inode(names[b"taken"]).nlink == 0


def test_a_file_whose_directory_another_removed_is_an_orphan(
    hosts: tuple[Host, Host, str],
) -> None:
    """Which nobody does but to a host that is dead, as far as its lease tells."""
    one, other, url = hosts
    directory = one.mkdir(TOP, b"d")
    other.mirror.catch_up()
    ino = one.create(directory, b"a")
    other.dead = {1}
    other.rmdir(TOP, b"d")
    one.close_file(ino)
    assert one.inode(ino).nlink == 0
    agree(one, other, url)
    assert [key for key, _ in everything(one.mirror) if key[:1] == b"e"] == [
        keys.directory_entry(1, b"ns")
    ]


def test_a_directory_with_a_file_that_is_not_closed_is_not_removed_here(
    hosts: tuple[Host, Host, str],
) -> None:
    one, other, url = hosts
    directory = one.mkdir(TOP, b"d")
    one.create(directory, b"a")
    with pytest.raises(KvfsError, match="not empty"):
        one.rmdir(TOP, b"d")
    one.unlink(directory, b"a")
    one.rmdir(TOP, b"d")
    agree(one, other, url)


def test_names_change_before_the_file_is_closed(hosts: tuple[Host, Host, str]) -> None:
    one, other, url = hosts
    ino = one.create(TOP, b"a.tmp")
    one.write(lambda t: tree.rename(t, TOP, b"a.tmp", TOP, b"a", now=NOW, keep=lambda _: False))
    other.mirror.catch_up()
    assert other.find(TOP, b"a") == ino
    one.close_file(ino)
    gone = one.create(TOP, b"b")
    one.unlink(TOP, b"b")
    one.close_file(gone)
    one.write(lambda t: tree.reap(t, gone))
    agree(one, other, url)
    assert usage(other) == (4096, 1)


def test_a_second_name_and_an_attribute_take_the_file_along(hosts: tuple[Host, Host, str]) -> None:
    one, other, url = hosts
    ino = one.create(TOP, b"a")
    one.write(lambda t: inodes.set_xattr(t, ino, b"user.x", b"1", 0, NOW))
    other.mirror.catch_up()
    assert other.find(TOP, b"a") == ino
    second = one.create(TOP, b"b")
    one.write(lambda t: tree.link(t, second, TOP, b"c", NOW))
    one.close_file(second)
    agree(one, other, url)
    assert other.find(TOP, b"b") == other.find(TOP, b"c") == second


def test_the_times_of_a_directory_follow_here_at_once(hosts: tuple[Host, Host, str]) -> None:
    one, other, url = hosts
    directory = one.mkdir(TOP, b"d")
    before = one.inode(directory).mtime_ns
    ino = one.create(directory, b"a")
    assert one.inode(directory).mtime_ns > before
    # Others' changes beside it take nothing from what is known here alone.
    other.mirror.catch_up()
    other.close_file(other.create(TOP, b"elsewhere"))
    one.mirror.catch_up()
    assert usage(one) == (4096, 3)
    one.close_file(ino)
    agree(one, other, url)
    assert usage(one) == (2 * 4096, 3)


def test_a_start_goes_on_with_what_was_private(
    hosts: tuple[Host, Host, str], server: RedisServer
) -> None:
    one, other, url = hosts
    open_, closed = one.create(TOP, b"open"), one.create(TOP, b"closed")
    taken = one.create(TOP, b"taken", exclusive=True)
    server.signal(signal.SIGSTOP)
    one.close_file(closed, behind=True)
    one.close_file(taken, behind=True)
    one.mirror.close()
    server.signal(signal.SIGCONT)
    one.start()
    assert (one.find(TOP, b"open"), one.find(TOP, b"closed")) == (open_, closed)
    one.settle()
    other.mirror.catch_up()
    assert (other.find(TOP, b"open"), other.find(TOP, b"closed")) == (None, closed)
    assert other.inode(taken).flags & Flag.PUBLISHED
    one.close_file(open_)
    agree(one, other, url)


def test_a_mirror_that_is_read_anew_keeps_what_is_private(
    hosts: tuple[Host, Host, str], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, url = hosts
    ino, mine = one.create(TOP, b"a"), one.create(TOP, b"both")
    taken, gone = (one.create(TOP, name, exclusive=True) for name in (b"taken", b"gone"))
    close_and_stop(one, [taken, gone], monkeypatch)
    other.mirror.catch_up()
    other.unlink(TOP, b"gone")
    other.write(lambda t: inodes.drop_inode(t, gone, inodes.read_inode(t, gone)))
    theirs = other.create(TOP, b"both")
    other.close_file(theirs)
    for number in range(5):
        other.close_file(other.create(TOP, b"n%d" % number))
    prefix = url.partition("prefix=")[2]
    server.call("XTRIM", f"{{{prefix}:0}}x", "MAXLEN", 1)
    one.start()
    assert (one.find(TOP, b"a"), one.find(TOP, b"both")) == (ino, theirs)
    assert one.find(TOP, b"gone") is None
    assert usage(one) == (7 * 4096, 9)
    one.close_file(ino)
    one.close_file(mine)
    agree(one, other, url)
    assert other.inode(taken).flags & Flag.PUBLISHED
    assert usage(one) == (9 * 4096, 9)


def test_whatever_two_hosts_do_they_come_to_the_same(
    hosts: tuple[Host, Host, str], seed: int
) -> None:
    one, other, url = hosts
    chance = random.Random(seed)
    directories = [TOP, one.mkdir(TOP, b"d"), one.mkdir(TOP, b"e")]
    other.mirror.catch_up()
    opened: dict[Host, list[int]] = {one: [], other: []}
    orphans: list[int] = []

    def step(host: Host, turn: int) -> None:
        parent, name = chance.choice(directories), chance.choice([b"a", b"b", b"c", b"a0"])
        what = chance.randrange(8)
        if what < 3:
            exclusive = chance.random() < 0.5
            opened[host].append(host.create(parent, name, exclusive=exclusive))
        elif what < 5 and opened[host]:
            ino = opened[host].pop(chance.randrange(len(opened[host])))
            host.close_file(ino, behind=chance.random() < 0.5)
        elif what == 5:
            orphans.append(host.unlink(parent, name).ino)
        elif what == 6:
            target, new = chance.choice(directories), chance.choice([b"b", b"c", b"n%d" % turn])
            removed = host.rename(parent, name, target, new, behind=chance.random() < 0.8)
            if removed is not None:
                orphans.append(removed.ino)
        elif chance.random() < 0.3:
            host.restart()
        else:
            host.mirror.catch_up()

    for turn in range(250):
        try:
            step(chance.choice([one, other]), turn)
        except KvfsError:
            pass  # the name is taken, or not there: as it happens
    for host, inos in opened.items():
        for ino in inos:
            host.close_file(ino)
    agree(one, other, url)
    found = everything(one.mirror)
    entries = [value for key, value in found if key[:1] == b"e" and key[1:9] != keys.pack_u64(1)]
    records = {key[1:]: unpack_inode(value) for key, value in found if key[:1] == b"i"}
    named = [packed for packed, inode in records.items() if inode.nlink and inode.parent > 1]
    assert sorted(entries) == sorted(named)
    marked = [key[1:] for key, _ in found if key[:1] == keys.ORPHAN]
    assert sorted(marked) == sorted(packed for packed, each in records.items() if not each.nlink)
    files = len(records) - 2  # the top and the root
    assert usage(one)[1] == files
    assert usage(one)[0] == sum(512 * inode.blocks for inode in records.values())
