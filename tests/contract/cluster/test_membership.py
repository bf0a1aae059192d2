"""Nodes join, live, and are refused, on a real server."""

import secrets as randomness
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from kvfs.base.clock import now
from kvfs.base.control import Handler
from kvfs.base.errors import (
    AccessDenied,
    Busy,
    Conflict,
    Invalid,
    NotFound,
    NotSupported,
    Unavailable,
)
from kvfs.base.version import PROTOCOL
from kvfs.cluster import membership, node_identity, secrets
from kvfs.cluster.cluster_requests import ClusterRequests
from kvfs.cluster.job_lease import Claims
from kvfs.cluster.membership import About, Measured, Membership, joined
from kvfs.cluster.node_records import NodeRecord, list_nodes, set_state
from kvfs.datastore import layout
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.node_leases import Fenced, JoinState, Lost
from kvfs.meta.records import Holding, Inode, namespace_root, pack
from kvfs.node.tasks.lease_renewer import Renewal
from kvfs.node.tasks.removed_node_gc import Removal
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.lifecycle import Evicted
from tests.contract.direct import Direct
from tests.contract.redis_servers import RedisServer, killed

PATIENCE_S = 60.0
HOUR_NS = 3600 * 10**9


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


class Site:
    """An engine of its own, and stores beside it."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.prefix = randomness.token_hex(4)
        self.url = f"{server.url}?prefix={self.prefix}"

    def store(self, name: str, *, has_secret_of: str = "") -> layout.Store:
        """With the secret of another store, as its user would bring it."""
        store = layout.create_store(self.directory / name)
        if has_secret_of:
            text = (self.directory / has_secret_of / node_identity.SECRETS).read_text()
            node_identity.keep_secrets(
                store.root / node_identity.SECRETS, secrets.parse(text, "a test")
            )
        return store

    def state(self, field: str) -> str:
        value = self.server.call("HGET", f"{{{self.prefix}:0}}s", field)
        return "" if value is None else value.decode()

    def flush(self) -> None:
        for kind in "hzsl":
            self.server.call("DEL", f"{{{self.prefix}:0}}{kind}")


@pytest.fixture
def site(server: RedisServer, tmp_path: Path) -> Site:
    return Site(server, tmp_path)


async def present_layout() -> bool:
    return False


async def all_followed() -> None:
    """There are no shards of namespaces."""


def nothing() -> Measured:
    return Measured(0, 0)


def about(name: str) -> About:
    return About(name=name, peer=f"{name}:9002", zone="z1", capacity_bytes=1 << 30)


async def start(site: Site, name: str, **more: object) -> tuple[int, int]:
    """Join and leave again: number and incarnation."""
    async with joined(site.store(name), site.url, about(name), **more) as member:  # type: ignore[arg-type]
        return member.node, member.incarnation


def test_a_store_keeps_its_number_and_each_start_is_another_incarnation(site: Site) -> None:
    assert trio.run(start, site, "a") == (1, 1)
    site.store("b", has_secret_of="a")
    assert trio.run(start, site, "b") == (2, 1)
    assert trio.run(start, site, "a") == (1, 2)
    assert (site.directory / "a" / node_identity.SECRETS).stat().st_mode & 0o777 == 0o600


def test_members_see_each_other_live_and_leave(site: Site) -> None:
    engine = Direct(site.url)

    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as a:
            await a.announce(engine, nothing)
            assert a.holds_lease
            b_store = site.store("b", has_secret_of="a")
            async with joined(b_store, site.url, about("b")) as b:
                await b.announce(engine, lambda: Measured(7, 8, 0.5))
                await b.renew()
                await look(a, engine)
                seen = a.roster.get(b.node)
                assert seen is not None
                assert seen.alive
                assert seen.peer == "b:9002"
                assert (seen.free_bytes, seen.capacity_bytes, seen.load) == (7, 8, 0.5)
                assert a.roster.lives(b.node, b.incarnation)
                assert not a.roster.lives(b.node, b.incarnation + 1)
                assert [each.name for each in a.roster.alive()] == ["a", "b"]
            await look(a, engine)
            seen = a.roster.get(b.node)
            assert seen is not None
            assert not seen.alive
            assert seen.left
            assert not b.holds_lease

    trio.run(main)
    engine.close()


def test_members_have_the_server_s_time_whatever_their_own_clock_says(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = time.time_ns

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: right() - 40 * HOUR_NS)
            async with joined(site.store("a"), site.url, about("a")) as member:
                await member.renew()
                assert abs(member.clock() - right()) < HOUR_NS

    trio.run(main)
    told = [each.message for each in caplog.records if "clock" in each.message]
    assert len(told) == 1
    assert "this host's clock is about 40 hours behind the metadata server's" in told[0]


async def look(member: Membership, engine: Direct) -> None:
    await member.renew()
    member.roster.read(await engine.read(list_nodes))


def test_a_second_process_of_a_store_fences_the_first(site: Site) -> None:
    """As when a host that hung for long wakes up: its store runs somewhere else."""

    async def main() -> None:
        first, second = (joined(site.store("a"), site.url, about("a")) for _ in range(2))
        async with first as old, second as new:
            assert (new.node, new.incarnation) == (old.node, old.incarnation + 1)
            with pytest.raises(Fenced, match="must not go on"):
                await old.renew()
            assert not old.holds_lease
            assert new.holds_lease
            engine = await trio.to_thread.run_sync(Direct, site.url)
            with pytest.raises(Fenced):
                await Renewal(old, engine).run()
            engine.close()
            # What it does at its end takes nothing from its successor.
            await old.leave()
            await new.renew()

    trio.run(main)


def test_a_copy_of_a_store_on_another_host_is_refused_while_the_first_runs(site: Site) -> None:
    async def main() -> None:
        first = joined(site.store("a"), site.url, about("a"), boot=1)
        async with first as member, trio.open_nursery() as nursery:
            nursery.start_soon(renew_often, member)
            with pytest.raises(Conflict, match=r"runs elsewhere \(a\)"):
                await start(site, "a", boot=2)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_copy_of_a_store_on_the_same_host_is_refused_while_the_first_runs(site: Site) -> None:
    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as member:
            shutil.copytree(site.directory / "a", site.directory / "copy")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(renew_often, member)
                with pytest.raises(Conflict, match=r"runs elsewhere \(a\).*node join --again"):
                    await start(site, "copy")
                nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.parametrize("moved", [False, True])
def test_a_store_that_is_ours_is_not_waited_for(
    site: Site, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a lease that would never end: who had it was on this host, and has not the lock."""
    monkeypatch.setattr(membership, "TERM_S", 1e9)

    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as before:
            name = "moved" if moved else "a"
            (site.directory / "a").rename(site.directory / name)
            with trio.fail_after(PATIENCE_S):
                assert await start(site, name) == (before.node, before.incarnation + 1)

    trio.run(main)


@pytest.mark.parametrize("joining_s", [0.0, 8.0])
def test_a_lease_that_ends_while_its_node_joins_again_is_broken(
    site: Site, joining_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was young when the node looked; others may have gone past what it had since."""
    find, passed = Membership._find_secrets, [0.0]

    async def find_slowly(member: Membership, state: JoinState) -> bool:
        passed[0] += joining_s
        return await find(member, state)

    monkeypatch.setattr(membership, "now", lambda: now() + passed[0])
    monkeypatch.setattr(Membership, "_find_secrets", find_slowly)

    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as before:
            before.is_handed_over = True
        async with joined(site.store("a"), site.url, about("a"), goes_on=True) as member:
            assert member.since == before.incarnation
            assert member.is_unbroken == (not joining_s)

    trio.run(main)


async def renew_often(member: Membership) -> None:
    while True:
        await member.renew()
        await trio.sleep(0.2)


def test_whoever_has_not_the_secret_does_not_join(site: Site) -> None:
    trio.run(start, site, "a")
    with pytest.raises(AccessDenied, match="kvfs node join"):
        trio.run(start, site, "b")
    assert not (site.directory / "b" / node_identity.SECRETS).exists()
    cluster = site.state("cluster")
    wrong = secrets.Secrets([secrets.generate(cluster)])
    node_identity.keep_secrets(site.store("b").root / node_identity.SECRETS, wrong)
    with pytest.raises(AccessDenied, match="is not that of the cluster"):
        trio.run(start, site, "b")
    assert site.state("nodes") == "1"


def test_several_that_share_a_file_found_a_cluster_at_once(site: Site) -> None:
    shared = site.directory / "shared.key"
    found: list[tuple[int, int]] = []

    async def one(name: str) -> None:
        found.append(await start(site, name, secret_file=shared))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, f"n{number}")

    trio.run(main)
    assert sorted(found) == [(number, 1) for number in range(1, 9)]


def test_of_several_founders_with_secrets_of_their_own_one_wins(site: Site) -> None:
    outcomes: list[str] = []

    async def one(name: str) -> None:
        try:
            await start(site, name)
            outcomes.append("joined")
        except (AccessDenied, Conflict):
            outcomes.append("refused")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(one, f"n{number}")

    trio.run(main)
    assert sorted(outcomes) == ["joined", "refused", "refused", "refused"]
    assert len(list(site.directory.glob(f"*/{node_identity.SECRETS}"))) == 1


def test_a_store_of_another_cluster_is_refused(site: Site, server: RedisServer) -> None:
    trio.run(start, site, "a")
    other = Site(server, site.directory)
    with pytest.raises(Lost, match="holds no cluster"):
        trio.run(start, other, "a")
    trio.run(start, other, "b")
    with pytest.raises(Conflict, match="is of the cluster"):
        trio.run(start, other, "a")
    store = site.store("c", has_secret_of="a")
    with pytest.raises(Conflict, match="belongs to the cluster"):
        trio.run(start, other, "c")
    assert node_identity.which_node(store) is None


def test_an_engine_that_lost_what_the_store_remembers_is_not_built_on(site: Site) -> None:
    trio.run(start, site, "a")
    trio.run(start, site, "a")
    site.flush()
    with pytest.raises(Lost, match="kvfs rebuild"):
        trio.run(start, site, "a")
    assert site.state("cluster") == ""


def test_an_engine_that_was_put_back_is_not_built_on(site: Site) -> None:
    trio.run(start, site, "a")
    site.server.call("HSET", f"{{{site.prefix}:0}}s", "n:1", "0")
    with pytest.raises(Lost, match="older state"):
        trio.run(start, site, "a")


def test_an_engine_that_loses_its_data_under_a_node_ends_its_lease(site: Site) -> None:
    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as member:
            site.flush()
            with pytest.raises(Lost):
                await member.renew()
            assert not member.holds_lease

    trio.run(main)


def test_a_node_of_a_protocol_too_far_apart_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")):
            site.store("b", has_secret_of="a")
            with monkeypatch.context() as newer:
                newer.setattr("kvfs.cluster.version_range.PROTOCOL", PROTOCOL + 2)
                with pytest.raises(NotSupported, match=rf"node 1 \(a\).*protocol {PROTOCOL}"):
                    await start(site, "b")
                newer.setattr("kvfs.cluster.version_range.PROTOCOL", PROTOCOL + 1)
                await start(site, "b")

    trio.run(main)


def test_a_removed_node_is_out_and_stays_out(site: Site) -> None:
    engine = Direct(site.url)

    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as a:
            await a.announce(engine, nothing)
            b_store = site.store("b", has_secret_of="a")
            async with joined(b_store, site.url, about("b")) as b:
                await b.announce(engine, nothing)
                await engine.transact(lambda t: set_state(t, b.node, lambda _: True, "removed"))
                await a.fence(b.node, b_store.identity.node)
                with pytest.raises(Fenced):
                    await b.renew()
                await look(a, engine)
                assert [each.name for each in a.roster.all()] == ["a"]
            with pytest.raises(Fenced, match="was removed"):
                await start(site, "b")

    trio.run(main)
    engine.close()


def test_a_job_is_done_by_one_node_until_that_is_gone(site: Site) -> None:
    engine = Direct(site.url)

    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as a:
            b_store = site.store("b", has_secret_of="a")
            async with joined(b_store, site.url, about("b")) as b:
                await look(a, engine)
                ours, theirs = Claims(a, engine), Claims(b, engine)
                assert await theirs.take("job")
                assert await theirs.take("job")
                assert not await ours.take("job")
                assert await ours.take("other job")
            await look(a, engine)
            # b has gone: what it wants to write for the job now comes too late.
            assert await ours.take("job")
            with pytest.raises(Conflict, match="another node does 'job'"):
                await engine.transact(lambda t: theirs.check(t, "job"))
            await engine.transact(lambda t: ours.check(t, "job"))
            await ours.drop("job")
            assert await ours.take("job")

    trio.run(main)
    engine.close()


def test_a_node_without_its_lease_takes_no_job(site: Site) -> None:
    engine = Direct(site.url)

    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as a:
            await a.leave()
            assert not await Claims(a, engine).take("job")

    trio.run(main)
    engine.close()


def test_people_ask_for_nodes_to_be_emptied_and_removed(site: Site) -> None:
    engine = Direct(site.url)
    forgotten: list[int] = []

    async def forget(evicted: Sequence[Evicted]) -> None:
        forgotten.extend(each.ino for each in evicted)

    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as a:
            await a.announce(engine, nothing)

            async def fence(removed: Sequence[NodeRecord]) -> None:
                for each in removed:
                    await a.fence(each.number, each.store)

            asked = ClusterRequests(a, engine, present_layout, fence, all_followed).handlers()
            b_store = site.store("b", has_secret_of="a")
            async with joined(b_store, site.url, about("b")) as b:
                await b.announce(engine, nothing)
                made = await engine.transact(lambda t: make_files(t, b.number))
                assert await asked["drain"]({"node": "b"}) == "b"
                await look(a, engine)
                assert await shown(asked, "state") == ["active", "draining"]
                assert await asked["drain"]({"node": "2", "stop": True}) == "b"
                with pytest.raises(Busy, match="lives"):
                    await asked["remove"]({"node": "b"})
            await look(a, engine)
            assert await shown(asked, "lease") == ["held", "left"]
            with pytest.raises(Busy, match="has 1 files of durable namespaces"):
                await asked["remove"]({"node": "b"})
            with pytest.raises(Invalid, match="does not remove itself"):
                await asked["remove"]({"node": "a", "force": True})
            with pytest.raises(NotFound):
                await asked["drain"]({"node": "nobody"})
            assert await asked["remove"]({"node": "b", "force": True}) == "b"
            removal = Removal(engine, Claims(a, engine), forget, fence)
            await removal.clear()
            assert removal.lost_files == 1
            assert forgotten == made[1:]
            await look(a, engine)
            assert await shown(asked, "name") == ["a"]
            with pytest.raises(Fenced):
                await start(site, "b")

    trio.run(main)
    engine.close()


async def shown(asked: dict[str, Handler], field: str) -> list[str]:
    """What `kvfs node list` says of each node."""
    report: Any = await asked["nodes"]({})
    return [each[field] for each in report["nodes"]]


def make_files(t: Transaction, node: bytes) -> list[int]:
    """One in a durable namespace and one in a cache, which a node alone has."""
    namespaces.format(t, 1, 0, 0)
    made = []
    for kind in ("durable", "cache"):
        space = namespaces.create(t, kind.encode(), kind=kind, uid=0, gid=0, now=1)
        ino = namespaces.allocate_inodes(t, space, 1)
        mode = stat.S_IFREG
        inode = Inode(
            mode=mode, uid=0, gid=0, nlink=1, parent=0, name=b"", atime_ns=5, mtime_ns=5, ctime_ns=5
        )
        tree.add(t, namespace_root(space), b"x", ino, inode)
        lifecycle.publish(t, ino, size=9, blocks=8, mtime_ns=6, ctime_ns=6, boot=0)
        t.put(keys.placement(ino, node), pack(Holding(version=0)))
        t.put(keys.held(node, ino), b"")
        made.append(ino)
    return made


def test_a_draining_node_that_starts_again_goes_on_draining(site: Site) -> None:
    engine = Direct(site.url)

    async def main() -> None:
        for _ in range(2):
            async with joined(site.store("a"), site.url, about("a")) as a:
                await a.announce(engine, nothing)
                await engine.transact(lambda t: set_state(t, 1, lambda _: True, "draining"))
        (record,) = await engine.read(list_nodes)
        assert (record.state, record.incarnation) == ("draining", 2)

    trio.run(main)
    engine.close()


def test_a_secret_is_replaced_while_nodes_run(site: Site) -> None:
    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as a:
            b_store = site.store("b", has_secret_of="a")
            async with joined(b_store, site.url, about("b")) as b:
                (old,) = a.secrets
                new = await a.rotate_secret()
                assert a.secrets == (new, old)
                await b.renew()
                assert b.secrets == (old,)
                # Its user brings it what `kvfs node secret` prints on a.
                text = (a.store.root / node_identity.SECRETS).read_text()
                node_identity.keep_secrets(b.secret_file, secrets.parse(text, "a test"))
                await b.renew()
                assert b.secrets == (new, old)
                await a.retire_secrets()
                await b.renew()
                assert a.secrets == b.secrets == (new,)
                assert node_identity.read_secrets(b.secret_file) == (new,)
            node_identity.keep_secrets(b_store.root / node_identity.SECRETS, secrets.Secrets([old]))
            with pytest.raises(AccessDenied):
                await start(site, "b")

    trio.run(main)


def test_a_node_that_missed_a_new_secret_is_told_so(site: Site) -> None:
    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as a:
            b_store = site.store("b", has_secret_of="a")
            async with joined(b_store, site.url, about("b")) as b:
                await a.rotate_secret()
                await a.retire_secrets()
                with pytest.raises(AccessDenied, match="only older ones"):
                    await b.renew()
                assert b.holds_lease

    trio.run(main)


def test_others_may_not_read_the_secret(site: Site) -> None:
    trio.run(start, site, "a")
    (site.directory / "a" / node_identity.SECRETS).chmod(0o644)
    with pytest.raises(Invalid, match="chmod 600"):
        trio.run(start, site, "a")


def test_a_server_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "DEADLINE_S", 0.5)
    store = layout.create_store(tmp_path / "a")

    async def main() -> None:
        async with joined(store, f"unix://{tmp_path}/nobody", about("a")):
            raise AssertionError("joined nothing")

    with pytest.raises(Unavailable, match="did not answer"):
        trio.run(main)


def test_errors_of_the_block_pass(site: Site) -> None:
    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trio.run(main)


def test_what_a_newer_version_says_of_itself_stops_nobody(site: Site) -> None:
    """Words that cannot be read cost their reader nothing but their meaning."""
    engine = Direct(site.url)

    async def main() -> None:
        async with joined(site.store("a"), site.url, about("a")) as a:
            await a.announce(engine, nothing)
            words = msgspec.msgpack.encode({"of": "another world"})
            key = f"{{{site.prefix}:0}}l"
            site.server.call("HSET", key, "1", b"1 99 1 " + words)
            await a.renew()
            site.server.call("HSET", key, "7", b"1 99 1 " + words)
            await look(a, engine)
            assert a.roster.get(1) is not None
            assert a.roster.get(7) is None

    trio.run(main)
    engine.close()
