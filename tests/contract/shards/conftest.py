"""What the suites of shards share: a Redis cluster, and a site whose namespace has a shard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.meta.shards import moves
from tests.contract.hosts import two_hosts
from tests.contract.redis_servers import RedisCluster, killed
from tests.contract.shards.gathering import Site, prefix_apart


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        for server in cluster.servers:
            server.call("CONFIG", "SET", "cluster-require-full-coverage", "no")
            server.call("CONFIG", "SET", "hash-max-listpack-entries", "1")  # as a large one is read
        yield cluster


@pytest.fixture
def site(cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(moves, "PATIENCE_S", 0.5)
    monkeypatch.setattr(moves, "LEFT_S", 0.1)
    prefix = prefix_apart(cluster)
    url = f"{cluster.url}?prefix={prefix}"
    with two_hosts(tmp_path, url) as (one, other):
        yield Site(one, other, url, prefix)
