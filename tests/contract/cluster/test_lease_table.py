"""What renewals bring, on a real server: what changed, and no more; all where that is not known."""

import copy
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from kvfs.meta.node_leases import HeardLeases, Joined, LeaseNews
from kvfs.meta.redis.calling import RetryingClient, locate
from kvfs.meta.redis.leasing import LeaseTable
from kvfs.meta.redis.scripts import RAISE
from tests.contract.redis_servers import RedisServer, killed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


class Cluster:
    """Members on an engine of their own."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.prefix = secrets.token_hex(4)
        self.location = locate(f"{server.url}?prefix={self.prefix}")
        self.table = LeaseTable(self.location, 5.0)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async def closing() -> None:
            try:
                await main()
            finally:
                self.table.close()

        trio.run(closing)

    def key(self, kind: str) -> str:
        return f"{{{self.prefix}:0}}{kind}"

    async def member(self, name: str) -> "Member":
        return Member(self, name, await self._join(name))

    async def _join(self, name: str) -> Joined:
        await self.table.found(None)
        token = secrets.token_hex(4)
        return await self.table.join(name, token, name.encode(), [b"digest"], None)

    async def finish_upgrade(self) -> None:
        client = RetryingClient(self.location, 5.0)
        await client.script(RAISE)
        client.close()


class Member:
    def __init__(self, cluster: Cluster, name: str, me: Joined) -> None:
        self.cluster = cluster
        self.me = me
        self.node = me.node
        self.words = name.encode()
        self.heard = HeardLeases()
        self.leases: dict[int, tuple[int, bytes]] = {}
        """What it has heard: incarnations and reports."""

    async def renew(self) -> LeaseNews:
        news = (await self.cluster.table.renew(self.me, self.words, self.heard)).news
        if news.is_whole:
            self.leases = {}
        for node in news.gone:
            self.leases.pop(node, None)
        for node, lease in news.leases.items():
            self.leases[node] = (lease.incarnation, lease.words)
        return news


@pytest.fixture
def cluster(server: RedisServer) -> Cluster:
    return Cluster(server)


def test_a_renewal_brings_who_was_silent_and_what_changed(cluster: Cluster) -> None:
    async def main() -> None:
        a, b, c = [await cluster.member(name) for name in "abc"]
        first = await a.renew()
        assert first.is_whole
        assert set(first.leases) == {1, 2, 3}
        await b.renew()
        news = await a.renew()
        assert (news.is_whole, news.leases, set(news.gone)) == (False, {}, set())
        assert set(news.silent) == {c.node}
        b.words = b"fuller"
        await b.renew()
        await c.renew()
        news = await a.renew()
        assert {node: lease.words for node, lease in news.leases.items()} == {b.node: b"fuller"}
        assert not news.silent
        assert not (await a.renew()).leases

    cluster.run(main)


def test_a_dead_node_is_silent_until_it_is_back(cluster: Cluster) -> None:
    async def main() -> None:
        a, b, c, d = [await cluster.member(name) for name in "abcd"]
        await a.renew()
        for _ in range(4):
            await d.renew()
            assert set((await a.renew()).silent) == {b.node, c.node}
        for _ in range(3):
            assert set((await a.renew()).silent) == {b.node, c.node, d.node}
        await b.renew()
        assert set((await a.renew()).silent) == {c.node, d.node}
        await cluster.table.remove(c.node, "c")
        assert set((await a.renew()).silent) == {b.node, d.node}
        await d.renew()
        assert set((await a.renew()).silent) == {b.node}

    cluster.run(main)


def test_a_node_that_comes_goes_or_starts_again_is_brought_once(cluster: Cluster) -> None:
    async def main() -> None:
        a, b = [await cluster.member(name) for name in "ab"]
        await a.renew()
        c = await cluster.member("c")
        assert set((await a.renew()).leases) == {c.node}
        await cluster.table.leave(c.me)
        await cluster.table.remove(b.node, "b")
        news = await a.renew()
        assert (set(news.gone), news.leases) == ({b.node, c.node}, {})
        again = await cluster.member("c")
        news = await a.renew()
        assert news.leases[c.node].incarnation == again.me.incarnation
        assert not news.gone
        assert not (await a.renew()).leases

    cluster.run(main)


def test_an_answer_that_was_lost_is_made_good_by_all(cluster: Cluster) -> None:
    async def main() -> None:
        a, b = [await cluster.member(name) for name in "ab"]
        await a.renew()
        before = copy.copy(a.heard)
        b.words = b"changed"
        await b.renew()
        await a.renew()
        a.heard = before
        news = await a.renew()
        assert news.is_whole
        assert news.leases[b.node].words == b"changed"
        assert not (await a.renew()).is_whole

    cluster.run(main)


def test_a_server_that_went_back_tells_all_it_has(cluster: Cluster) -> None:
    """Also where its numbers have come as far as they were by then."""

    async def main() -> None:
        a, b, c = [await cluster.member(name) for name in "abc"]
        await a.renew()
        kept = {kind: cluster.server.call("DUMP", cluster.key(kind)) for kind in "zl"}
        b.words = b"lost"
        await b.renew()
        await a.renew()
        for kind, value in kept.items():
            cluster.server.call("RESTORE", cluster.key(kind), "0", value, "REPLACE")
        c.words = b"told meanwhile"
        for _ in range(3):
            await c.renew()
        news = await a.renew()
        assert news.is_whole
        assert a.leases[b.node] == (1, b"b")
        assert a.leases[c.node] == (1, b"told meanwhile")

    cluster.run(main)


def test_beside_nodes_of_the_version_before_all_is_brought(cluster: Cluster) -> None:
    """These renew by the leases alone; from the end of the upgrade on what changed is enough, also
    of those who renewed before it."""

    async def main() -> None:
        cluster.server.call("HSET", cluster.key("s"), "schema", "1")
        a, b, c = [await cluster.member(name) for name in "abc"]
        for _ in range(2):
            news = await a.renew()
            assert news.is_whole
            assert set(news.leases) == {1, 2, 3}
        assert cluster.server.call("EXISTS", cluster.key("z")) == 0
        beats = {node: lease.beat for node, lease in news.leases.items()}
        cluster.server.call("HSET", cluster.key("l"), str(b.node), b"1 99 1 b")
        assert (await a.renew()).leases[b.node].beat != beats[b.node]

        await cluster.finish_upgrade()
        assert (await a.renew()).is_whole
        news = await a.renew()
        assert (news.is_whole, set(news.silent)) == (False, {b.node, c.node})
        await b.renew()
        assert set((await a.renew()).silent) == {c.node}
        await cluster.table.leave(c.me)
        assert list((await a.renew()).gone) == [c.node]

    cluster.run(main)


def test_whoever_hears_what_changed_knows_all(cluster: Cluster, seed: int) -> None:
    """Whatever nodes do in which order: what each has heard is what there is, and it is told of
    just those who renewed nothing between its looks."""
    chance = random.Random(seed)

    async def main() -> None:
        members = [await cluster.member(f"n{number}") for number in range(6)]
        renewed: dict[int, set[int]] = {each.node: set() for each in members}
        for step in range(300):
            at = chance.randrange(len(members))
            each, action = members[at], chance.random()
            if action < 0.1:
                await cluster.table.leave(each.me)
                members[at] = again = await cluster.member(f"n{each.node - 1}")
                assert again.node == each.node
                renewed[again.node] = set()
                for others in renewed.values():
                    others.add(again.node)
                continue
            if action < 0.3:
                each.words = b"%d" % step
            if action > 0.95:
                each.heard.number = b"1"
            news = await each.renew()
            there = cluster.server.call("HGETALL", cluster.key("l"))
            whole = {int(k): v.split(b" ", 3) for k, v in zip(there[::2], there[1::2], strict=True)}
            assert each.leases == {k: (int(v[0]), v[3]) for k, v in whole.items()}
            if not news.is_whole:
                assert set(news.silent) == set(whole) - renewed[each.node] - {each.node}
            renewed[each.node] = set()
            for others in renewed.values():
                others.add(each.node)

    cluster.run(main)


def test_leases_are_renewed_while_the_memory_is_full(tmp_path: Path) -> None:
    with killed(RedisServer(tmp_path / "redis")) as server:
        cluster = Cluster(server)

        async def main() -> None:
            a, b = [await cluster.member(name) for name in "ab"]
            await a.renew()
            server.call("CONFIG", "SET", "maxmemory", "1")
            b.words = b"changed"
            await b.renew()
            assert set((await a.renew()).leases) == {b.node}

        cluster.run(main)
