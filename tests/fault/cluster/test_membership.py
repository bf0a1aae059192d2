"""What befalls the engine under members of a cluster: nobody loses its number, is taken for another
or for dead without reason, or writes what it may not."""

import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import Invalid, Unavailable
from kvfs.cluster import failure_detector, membership, node_identity
from kvfs.cluster.membership import About, Measured, Membership, joined
from kvfs.datastore import layout
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.node_leases import Lost
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.tasks.lease_renewer import Renewal
from tests.cluster.waiting import until
from tests.contract.redis_servers import RedisServer, ask, killed, on_a_port
from tests.fault.cluster.test_redis import fail_over, start_sentinel
from tests.fault.proxy import proxied

PATIENCE_S = 60.0
KEPT = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path / "redis")) as server:
        yield server


@pytest.fixture
def short_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that end soon: what is asserted then is only what comes to be in the end."""
    monkeypatch.setattr(failure_detector, "TERM_S", 2.0)
    monkeypatch.setattr(failure_detector, "_MARGIN_S", 0.1)
    monkeypatch.setattr(failure_detector, "_LOOKED_S", 0.5)
    monkeypatch.setattr("kvfs.node.tasks.lease_renewer.RENEWAL_S", 0.1)
    monkeypatch.setattr(membership, "DEADLINE_S", 0.3)


@asynccontextmanager
async def member_of(
    url: str, root: Path, secret_of: Path | None = None, *, renewing: bool = True
) -> AsyncIterator[tuple[Membership, ReplicaEngine]]:
    """A member with its engine; `renewing`: its lease is kept."""
    store = layout.create_store(root)
    about = About(name=root.name)
    async with joined(
        store, url, about, secret_file=secret_of and secret_of / node_identity.SECRETS
    ) as me:
        local = EmbeddedEngine(store.meta)
        engine = ReplicaEngine(
            local, url, node=me.node, incarnation=me.incarnation, cluster=me.cluster
        )
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.run)
                await me.announce(engine, lambda: Measured(0, 0))
                if renewing:
                    nursery.start_soon(Renewal(me, engine).run)
                yield me, engine
                nursery.cancel_scope.cancel()
        finally:
            engine.close()
            local.close()


async def put(engine: ReplicaEngine, value: bytes) -> None:
    await engine.transact(lambda t: t.put(b"k", value))


def test_joining_over_lines_that_are_cut_counts_each_start_once(
    server: RedisServer, tmp_path: Path, seed: int
) -> None:
    """An answer that was lost is asked for again, and what comes late fences nobody."""
    path = tmp_path / "p"
    store = layout.create_store(tmp_path / "a")

    async def start() -> tuple[int, int]:
        async with joined(store, f"unix://{path}", About(name="a")) as member:
            await member.renew()
            return member.node, member.incarnation

    with proxied(path, server.socket, seed=seed, most_bytes=12_000) as proxy:
        found = [trio.run(start) for _ in range(12)]
        assert proxy.cuts >= 1
    assert found == [(1, number) for number in range(1, 13)]


@pytest.mark.usefixtures("short_terms")
def test_who_is_cut_off_loses_its_lease_and_has_it_again(
    server: RedisServer, tmp_path: Path
) -> None:
    path = tmp_path / "p"

    async def main() -> None:
        async with member_of(server.url, tmp_path / "a") as (a, _):
            with proxied(path, server.socket) as proxy:
                async with member_of(f"unix://{path}", tmp_path / "b", tmp_path / "a") as (b, _):
                    await until(lambda: a.roster.lives(b.node), "a sees b")
                    proxy.held = "both"
                    proxy.is_refusing = True
                    await until(lambda: not b.holds_lease, "b has lost its lease")
                    await until(lambda: not a.roster.lives(b.node), "a takes b for dead")
                    seen = a.roster.get(b.node)
                    assert seen is not None
                    assert not seen.left
                    proxy.is_refusing = False
                    proxy.held = None
                    await until(lambda: b.holds_lease, "b has its lease again")
                    await until(lambda: a.roster.lives(b.node, b.incarnation), "a sees b again")

    trio.run(main)


@pytest.mark.usefixtures("short_terms")
def test_an_engine_that_hangs_makes_nobody_look_dead_afterwards(
    server: RedisServer, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            member_of(server.url, tmp_path / "a") as (a, _),
            member_of(server.url, tmp_path / "b", tmp_path / "a") as (b, _),
        ):
            await until(lambda: a.roster.lives(b.node), "a sees b")
            server.signal(signal.SIGSTOP)
            await until(lambda: not a.holds_lease and not b.holds_lease, "both lost their leases")
            seen_dead = False
            server.signal(signal.SIGCONT)
            while not (a.holds_lease and b.holds_lease):
                seen_dead |= not a.roster.lives(b.node) or not b.roster.lives(a.node)
                await trio.sleep(0.005)
            assert not seen_dead

    trio.run(main)


def test_what_a_fenced_node_wants_to_write_is_refused(server: RedisServer, tmp_path: Path) -> None:
    """It hung, was started again elsewhere, and wakes up: before it has heard of it."""

    async def main() -> None:
        async with member_of(server.url, tmp_path / "a", renewing=False) as (_, engine):
            await put(engine, b"first")
            store = layout.create_store(tmp_path / "a")
            async with joined(store, server.url, About(name="a")):
                with pytest.raises(Unavailable, match="may not write any more"):
                    await put(engine, b"second")

    trio.run(main)
    assert server.call("HGET", "{kvfs:0}h", "k") == b"first"


def test_an_engine_that_lost_everything_is_left_as_it_is(tmp_path: Path) -> None:
    with killed(RedisServer(tmp_path / "redis")) as server:

        async def main() -> None:
            async with member_of(server.url, tmp_path / "a") as (member, engine):
                await put(engine, b"first")
                server.kill()
                server.start()
                await until(lambda: not member.holds_lease, "the lease is void")
                with pytest.raises(Unavailable):
                    await put(engine, b"second")
                with pytest.raises(Lost, match="kvfs rebuild"):
                    await member.renew()

        trio.run(main)
        assert server.call("DBSIZE") == 0


def test_an_engine_that_is_killed_and_comes_back_is_gone_on_with(tmp_path: Path) -> None:
    with killed(RedisServer(tmp_path / "redis", *KEPT)) as server:

        async def main() -> None:
            async with member_of(server.url, tmp_path / "a") as (member, engine):
                for value in (b"first", b"second"):
                    await put(engine, value)
                    server.kill()
                    server.start()
                await put(engine, b"third")
                await member.renew()
                assert member.incarnation == 1

        trio.run(main)
        assert server.call("HGET", "{kvfs:0}h", "k") == b"third"


@pytest.mark.usefixtures("short_terms")
def test_a_password_that_is_changed_is_told_and_costs_no_node(
    server: RedisServer, tmp_path: Path
) -> None:
    async def main() -> None:
        async with member_of(server.url, tmp_path / "a") as (member, engine):
            with server.connected() as connection:
                assert ask(connection, "CONFIG", "SET", "requirepass", "other") == "OK"
                assert ask(connection, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await until(lambda: not member.holds_lease, "the lease is lost")
                with pytest.raises(Invalid, match="refuses us"):
                    await member.renew()
                assert ask(connection, "CONFIG", "SET", "requirepass", "") == "OK"
            await until(lambda: member.holds_lease, "the lease is back")
            await until(lambda: engine.heard_at() > 0, "the engine is heard")

    trio.run(main)


def test_a_replica_that_takes_over_finds_the_same_members(tmp_path: Path) -> None:
    async def main(master: RedisServer, replica: RedisServer, sentinel: RedisServer) -> None:
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/kvfs"
        async with member_of(url, tmp_path / "m") as (member, engine):
            await put(engine, b"first")
            await trio.to_thread.run_sync(fail_over, sentinel)
            await trio.to_thread.run_sync(replica.wait_for, "role", "master")
            # Until it is told so, the old master takes commits that nobody will ever see.
            await trio.to_thread.run_sync(master.wait_for, "role", "slave")
            with trio.fail_after(PATIENCE_S):
                while True:
                    with contextlib.suppress(Unavailable):
                        await put(engine, b"second")
                        await member.renew()
                        break
                    await trio.sleep(0.05)
            assert member.holds_lease
            assert engine.read_now(lambda t: t.get(b"k")) == b"second"
        assert replica.call("HGET", "{kvfs:0}h", "k") == b"second"

    with contextlib.ExitStack() as stack:
        master = stack.enter_context(killed(on_a_port(tmp_path / "a")))
        follow = ("--replicaof", "127.0.0.1", str(master.port))
        replica = stack.enter_context(killed(on_a_port(tmp_path / "b", *follow)))
        replica.wait_for("master_link_status", "up")
        sentinel = stack.enter_context(killed(start_sentinel(tmp_path / "c", master)))
        trio.run(main, master, replica, sentinel)
