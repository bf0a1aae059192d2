"""What the suites of engines share: a server, and two hosts of a cluster."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.hosts import Host, two_hosts
from tests.contract.redis_servers import RedisServer, killed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def hosts(server: RedisServer, tmp_path: Path) -> Iterator[tuple[Host, Host, str]]:
    url = f"{server.url}?prefix={secrets.token_hex(4)}"
    with two_hosts(tmp_path, url) as (one, other):
        one.number(1)
        yield one, other, url
