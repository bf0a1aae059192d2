"""What nodes say to each other."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.base import errors
from kvfs.base.errors import Invalid, KvfsError, Unavailable
from kvfs.cluster import peer_protocol
from kvfs.cluster.peer_protocol import CHUNK_BYTES, MOST_CHUNKS, Ask, Lent, PeerAddress
from kvfs.datastore import checksum

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, KvfsError) and kind is not KvfsError
]


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    size = draw(st.integers(1, 1 << 50))
    first = draw(st.integers(0, peer_protocol.chunks_of(size) - 1))
    chunks = draw(st.integers(1, min(MOST_CHUNKS, peer_protocol.chunks_of(size) - first)))
    number = st.integers(0, (1 << 64) - 1)
    return Ask(
        *(draw(number), draw(number), size, first, chunks),
        sealed=draw(st.booleans()),
        insist=draw(st.booleans()),
    )


def test_chunks_are_those_of_the_store() -> None:
    assert peer_protocol.CHUNK_BYTES == checksum.CHUNK_BYTES
    assert peer_protocol.DIGEST_BYTES == checksum.DIGEST_BYTES


@given(asks())
def test_what_is_asked_is_understood(ask: Ask) -> None:
    assert peer_protocol.parse_data_target(peer_protocol.data_target(ask)) == ask


ASK = Ask(0xABC, 0x1F, 3 * CHUNK_BYTES + 1, 1, 2, sealed=True)


@pytest.mark.parametrize(
    "ask",
    [
        ASK._replace(first=3),
        ASK._replace(first=4, chunks=1),
        ASK._replace(chunks=0),
        ASK._replace(size=0, first=0, chunks=1),
        Ask(1, 1, 1 << 40, 0, MOST_CHUNKS + 1, sealed=True),
    ],
)
def test_what_is_no_part_of_the_file_is_refused(ask: Ask) -> None:
    with pytest.raises(Invalid):
        peer_protocol.parse_data_target(peer_protocol.data_target(ask))


@given(st.binary(max_size=100))
def test_what_makes_no_sense_is_refused(data: bytes) -> None:
    for parse in (
        lambda: peer_protocol.parse_data_target(peer_protocol.DATA + data),
        lambda: peer_protocol.parse_method_target(b"/v1/done" + data),
        lambda: peer_protocol.parse_sums(b"x" + data, ASK, 100),
        lambda: peer_protocol.parse_addresses(b"\xc1" + data),
    ):
        with pytest.raises(Invalid):
            parse()
    assert isinstance(peer_protocol.parse_error(b"\xc1" + data), Unavailable)


def test_checksums_of_the_answer_and_of_all() -> None:
    sums = bytes(range(64))
    told = peer_protocol.render_sums(sums)
    assert peer_protocol.parse_sums(told, ASK, 2 * CHUNK_BYTES) == (sums[16:48], sums)
    assert peer_protocol.parse_sums(told, ASK, CHUNK_BYTES) == (sums[16:32], sums)
    unsealed = ASK._replace(sealed=False)
    told = peer_protocol.render_sums(sums[:32])
    assert peer_protocol.parse_sums(told, unsealed, 2 * CHUNK_BYTES) == (sums[:32], b"")


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES - 1, 2 * CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_a_lie_about_the_length_is_found(length: int) -> None:
    with pytest.raises(Invalid):
        peer_protocol.parse_sums(peer_protocol.render_sums(bytes(64)), ASK, length)


@pytest.mark.parametrize("sums", [b"", bytes(48), bytes(63), bytes(80)])
def test_other_than_the_checksums_of_all_are_refused(sums: bytes) -> None:
    with pytest.raises(Invalid):
        peer_protocol.parse_sums(peer_protocol.render_sums(sums), ASK, CHUNK_BYTES)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_travel(kind: type[KvfsError]) -> None:
    status, body = peer_protocol.render_error(kind("why"))
    assert 400 <= status < 600
    error = peer_protocol.parse_error(body)
    assert type(error) is kind
    assert str(error) == "why"


def test_addresses_travel() -> None:
    addresses = [PeerAddress(node, f"host-{node}", 9000 + node) for node in range(20)]
    told = peer_protocol.parse_addresses(peer_protocol.render_addresses(addresses))
    assert told == addresses[: peer_protocol.MOST_PEERS]
    for address in addresses:
        at = peer_protocol.render_at(address)
        assert peer_protocol.parse_at(address.node, at) == address


@pytest.mark.parametrize(
    "value", [None, b"", b"host", b"host 0", b"host 70000", b"a b 1", b"\xff 1"]
)
def test_an_address_that_is_none_is_not_told_on(value: bytes | None) -> None:
    assert peer_protocol.parse_at(1, value) is None


@given(st.integers(1, 65535), st.integers(0, 1 << 60), st.lists(st.integers(0, (1 << 64) - 1)))
def test_where_lent_chunks_lie_is_understood(port: int, ticket: int, at: list[int]) -> None:
    lent = Lent(port, ticket, tuple(at))
    value = peer_protocol.render_lent(lent)
    if 1 <= len(at) <= ASK.chunks:
        assert peer_protocol.parse_lent(value, ASK) == lent
    else:
        with pytest.raises(Invalid):
            peer_protocol.parse_lent(value, ASK)


@pytest.mark.parametrize("value", [b"", b"0 1 a", b"70000 1 a", b"9 1", b"9 x a", b"9 1 zz"])
def test_lent_nowhere_is_refused(value: bytes) -> None:
    with pytest.raises(Invalid):
        peer_protocol.parse_lent(value, ASK)
