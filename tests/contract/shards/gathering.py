"""A namespace in a shard of its own on a real Redis cluster, of which two nodes are."""

import secrets

import pytest
import trio

from kvfs.base.errors import Conflict
from kvfs.meta import keys
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.slots import slot_of
from kvfs.meta.shards import moves
from tests.contract.hosts import TOP, Host, agree
from tests.contract.redis_servers import RedisCluster

SPACE = keys.pack_u16(1)


class Site:
    """Two nodes and a namespace of files in a shard on another server than the registry's."""

    def __init__(self, one: Host, other: Host, url: str, prefix: str) -> None:
        self.one, self.other, self.url, self.prefix = one, other, url, prefix
        self.files = {b"f%d" % number: 0 for number in range(20)}
        for name in self.files:
            self.make(one, name)
        assert one.mirror.call(one.mirror.engine.spread) == [1]
        self.make(other, b"apart")

    def make(self, host: Host, name: bytes, *, behind: bool = False) -> None:
        self.files[name] = host.create(TOP, name)
        host.close_file(self.files[name], behind=behind)

    def gather(self, host: Host, number: int | None = None) -> list[int]:
        """Gathers all, or one; no node loses its patience with it, however slow the machine is."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moves, "PATIENCE_S", 60.0)
            found: list[int] = host.mirror.call(lambda: host.mirror.engine.gather(number))
        return found

    def gather_in_the_end(self, host: Host) -> list[int]:
        """Gathers what may have been left closed, which is reopened first."""

        async def run() -> list[int]:
            while True:
                try:
                    return await host.mirror.engine.gather()
                except Conflict:
                    await trio.sleep(0.1)

        found: list[int] = host.mirror.call(run)
        return found

    def check(self) -> None:
        """Both nodes, and the server, have all files, together."""
        for host in (self.one, self.other):
            host.settle()
        for host in (self.one, self.other):
            catch_up(host)
            for name, ino in self.files.items():
                assert host.find(TOP, name) == ino, name
            assert host.mirror.shard(1) == 0
            assert not host.mirror.engine._shards.others
        agree(self.one, self.other, self.url)


def catch_up(host: Host) -> None:
    host.mirror.call(lambda: host.mirror.engine.catch_up(1))


def prefix_apart(cluster: RedisCluster) -> str:
    while True:
        prefix = secrets.token_hex(4)
        if len({cluster.owner(slot_of(prefix, shard)).port for shard in (0, 1)}) == 2:
            return prefix


def shard_of(client: RetryingClient) -> int:
    return int(client.values.partition(b":")[2].partition(b"}")[0])
