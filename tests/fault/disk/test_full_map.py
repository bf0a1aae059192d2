"""A mirror whose file reaches its largest size by what other nodes commit."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.base.errors import NoSpace
from kvfs.meta.lmdb import reserve
from tests.cluster.waiting import wait_until
from tests.contract.mirrors import Mirror, everything, in_redis
from tests.contract.redis_servers import RedisServer, killed

_MAP = 4 << 20
_VALUE = 20_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def url(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(reserve, "_REPLICA_MOST", 2 << 20)
    return f"{server.url}?prefix={secrets.token_hex(4)}"


@pytest.fixture
def other(url: str, tmp_path: Path) -> Iterator[Mirror]:
    mirror = Mirror(tmp_path / "other", url)
    yield mirror
    mirror.close()


def small(url: str, tmp_path: Path, map_size: int = _MAP) -> Mirror:
    return Mirror(tmp_path / "small", url, node=2, map_size=map_size)


def put(mirror: Mirror, number: int) -> None:
    mirror.transact_now(lambda t: t.put(b"%d" % number, bytes(_VALUE)))


def remove(mirror: Mirror, numbers: range) -> None:
    for number in numbers:
        mirror.transact_now(lambda t, number=number: t.delete(b"%d" % number))


def fill(other: Mirror, mirror: Mirror) -> int:
    """Have another node commit until the mirror refuses it, and more; returns how many."""
    for number in range(1000):
        put(other, number)
        if mirror.engine.refusal is not None:
            for more in range(number + 1, number + 20):
                put(other, more)
            return number + 20
    pytest.fail("a small file took it all")


def test_a_full_mirror_refuses_changes_and_reads_what_it_has_until_others_remove(
    url: str, other: Mirror, tmp_path: Path
) -> None:
    mirror = small(url, tmp_path)
    count = fill(other, mirror)
    assert "largest size" in (mirror.engine.refusal or "")
    before = in_redis(url)
    with pytest.raises(NoSpace, match="largest size"):
        put(mirror, count)
    with pytest.raises(NoSpace, match="largest size"):
        mirror.transact_now(lambda t: t.delete(b"0"))
    assert in_redis(url) == before
    assert mirror.read_now(lambda t: t.get(b"0")) == bytes(_VALUE)
    remove(other, range(count - 40))
    wait_until(lambda: mirror.engine.refusal is None, "it has space again")
    mirror.catch_up()
    put(mirror, count)
    assert everything(mirror) == in_redis(url)
    mirror.close()


def test_a_full_mirror_starts_with_space_alone(url: str, other: Mirror, tmp_path: Path) -> None:
    mirror = small(url, tmp_path)
    count = fill(other, mirror)
    mirror.close()
    with pytest.raises(NoSpace, match="largest size"):
        small(url, tmp_path)
    remove(other, range(count - 40))
    mirror = small(url, tmp_path)
    assert everything(mirror) == in_redis(url)
    fill(other, mirror)
    mirror.close()
    large = small(url, tmp_path, 4 * _MAP)
    assert everything(large) == in_redis(url)
    large.close()
