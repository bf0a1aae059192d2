"""URLs of engines: what they say, and that no mistake in one shows a password."""

import pytest

from kvfs.base.errors import Invalid
from kvfs.meta.redis.location import Kind, ServerAddress, parse


def test_a_server() -> None:
    found = parse("redis://us%40er:p%2Fw@host:7000/3?prefix=mine")
    assert found.kind is Kind.SERVER
    assert found.addresses == (ServerAddress("host", 7000),)
    assert (found.username, found.password) == ("us@er", "p/w")
    assert (found.db, found.prefix, found.tls) == (3, "mine", False)
    assert found.shown == "redis://host:7000/3"
    plain = parse("redis://host")
    assert plain.addresses == (ServerAddress("host", 6379),)
    assert (plain.username, plain.password, plain.db, plain.prefix) == (None, None, 0, "kvfs")
    assert parse("redis://[::1]:7").addresses == (ServerAddress("::1", 7),)
    assert parse("redis://:only@host").password == "only"


def test_tls_and_sockets() -> None:
    found = parse("rediss://host?ca=/etc/ca.pem")
    assert (found.tls, found.ca) == (True, "/etc/ca.pem")
    local = parse("unix://u:p@/run/redis.sock?db=2")
    assert local.addresses == (ServerAddress("", 0, "/run/redis.sock"),)
    assert (local.db, local.username, local.password) == (2, "u", "p")
    assert local.shown == "unix:///run/redis.sock"


def test_sentinels_and_clusters() -> None:
    found = parse("redis+sentinel://:p@a,b:7/master/4")
    assert found.kind is Kind.SENTINEL
    assert found.addresses == (ServerAddress("a", 26379), ServerAddress("b", 7))
    assert (found.name, found.db) == ("master", 4)
    several = parse("redis+cluster://a:1,b:2,[::1]:3")
    assert several.kind is Kind.CLUSTER
    assert several.addresses == (
        ServerAddress("a", 1),
        ServerAddress("b", 2),
        ServerAddress("::1", 3),
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://u:hidden@host",
        "redis://u:hidden@",
        "redis://u:hidden@host:0",
        "redis://u:hidden@host:70000",
        "redis://u:hidden@host:x",
        "redis://u:hidden@host/x",
        "redis://u:hidden@host/1/2",
        "redis://u:hidden@a,b",
        "redis://u:hidden@host?ca=file",
        "redis://u:hidden@host?what=hidden",
        "redis://u:hidden@host?password-file=/f",
        "redis://u:hidden@host?prefix=",
        "redis://u:hidden@host?prefix={x}",
        "redis://u:hidden@[::1",
        "redis://u:hidden@[::1]7",
        "unix://u:hidden@",
        "unix://u:hidden@host/path",
        "redis+sentinel://u:hidden@host",
        "redis+cluster://u:hidden@host/1",
        "redis+cluster://u:hidden@host,",
        "hidden",
    ],
)
def test_mistakes_name_the_forms_and_hide_passwords(url: str) -> None:
    with pytest.raises(Invalid, match=r"redis\+cluster://") as refused:
        parse(url)
    assert "hidden" not in str(refused.value)


def test_a_password_is_not_in_its_repr() -> None:
    assert "hidden" not in repr(parse("redis://u:hidden@host"))
