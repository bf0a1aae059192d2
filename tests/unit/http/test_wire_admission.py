"""Who is served where connections are short."""

from kvfs.http.full_server import Origins, has_room
from kvfs.http.limits import Limits

LIMITS = Limits(connections=16)


def test_an_origin_is_an_address_or_what_one_subscriber_has() -> None:
    origins = Origins()
    assert origins.of("192.0.2.1") is origins.of("192.0.2.1")
    assert origins.of("192.0.2.1") is not origins.of("192.0.2.2")
    assert origins.of("2001:db8:0:1::1") is origins.of("2001:db8:0:1:ffff::2")
    assert origins.of("2001:db8:0:1::1") is not origins.of("2001:db8:0:2::1")
    assert origins.of("fe80::1%eth0") is origins.of("fe80::1%eth0")


def test_shares() -> None:
    origins = Origins()
    stranger, crowd, proven = (origins.of(f"192.0.2.{number}") for number in range(3))
    crowd.connections, proven.proven = 4, True
    rooms = {
        served: [has_room(LIMITS, served, each) for each in (crowd, stranger, proven)]
        for served in (11, 12, 13, 14, 15, 16)
    }
    assert rooms == {
        11: [True, True, True],
        12: [False, True, True],
        13: [False, True, True],
        14: [False, False, True],
        15: [False, False, True],
        16: [False, False, False],
    }


def test_who_proved_itself_is_remembered_for_a_while() -> None:
    origins = Origins()
    once = origins.of("192.0.2.1")
    once.proven = True
    origins.left(once)
    assert origins.of("192.0.2.1").proven
    for number in range(2000):
        other = origins.of(f"198.51.{number >> 8}.{number & 255}")
        other.proven = True
        origins.left(other)
    assert not origins.of("198.51.0.0").proven
    assert origins.of("198.51.7.207").proven
