"""What a cluster's servers say of who has what."""

import pytest

from kvfs.meta.redis.location import ServerAddress
from kvfs.meta.redis.slots import Range, Redirect, ranges, redirect, slot_of

ASKED = ServerAddress("10.0.0.1", 7)


def test_the_slot_is_that_of_the_hash_tag() -> None:
    # As CLUSTER KEYSLOT says of {kvfs:0}s and {kvfs:3}h.
    assert (slot_of("kvfs", 0), slot_of("kvfs", 3)) == (12199, 8132)


def test_ranges_with_their_replicas() -> None:
    answer = [
        [0, 99, [b"10.0.0.2", 1, b"id", []], [b"10.0.0.3", 2, b"id", []]],
        [100, 16383, [b"host", 3]],
    ]
    first, second = ranges(answer, ASKED)
    assert first == Range(0, 99, ServerAddress("10.0.0.2", 1), (ServerAddress("10.0.0.3", 2),))
    assert second == Range(100, 16383, ServerAddress("host", 3), ())


@pytest.mark.parametrize("host", [None, b"", b"?"])
def test_a_server_that_does_not_know_its_name_is_where_it_was_asked(host: bytes | None) -> None:
    (found,) = ranges([[0, 1, [host, 5]]], ASKED)
    assert found.master == ServerAddress("10.0.0.1", 5)


@pytest.mark.parametrize("answer", [[1], [[0]], [[0, 1, 2]], [[0, 1, ["text", 5]]], [[0, 1, []]]])
def test_what_is_no_answer_is_told(answer: list[object]) -> None:
    with pytest.raises(ValueError):
        list(ranges(answer, ASKED))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("MOVED 3999 10.0.0.2:6381", Redirect(ServerAddress("10.0.0.2", 6381), True)),
        ("ASK 3999 10.0.0.2:6381", Redirect(ServerAddress("10.0.0.2", 6381), False)),
        ("MOVED 3999 ::1:6381", Redirect(ServerAddress("::1", 6381), True)),
        ("MOVED 3999 :6381", Redirect(ServerAddress("10.0.0.1", 6381), True)),
        ("MOVED 3999 ?:6381", Redirect(ServerAddress("10.0.0.1", 6381), True)),
        ("MOVED 3999", None),
        ("MOVED 3999 host:port", None),
        ("MOVED 3999 host:0", None),
        ("MOVEDX 3999 host:1", None),
        ("ERR MOVED 1 host:1", None),
        ("", None),
    ],
)
def test_who_is_said_to_be_right(said: str, meant: Redirect | None) -> None:
    assert redirect(said, ASKED) == meant
