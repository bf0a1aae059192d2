"""Questions to homes and their answers, on the wire."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.base.errors import Invalid
from kvfs.holdings.fingerprints import BITS
from kvfs.node.homes.home_protocol import (
    MOST_ASKED,
    AskedHolders,
    HolderNews,
    ToldHolders,
    pack_asked,
    pack_told,
    parse_asked,
    parse_told,
)

fingerprints = st.lists(st.integers(0, (1 << BITS) - 1), max_size=50)
told = st.builds(HolderNews, st.lists(st.integers(0, (1 << 16) - 1), max_size=9), st.booleans())


def sent(message: Any) -> Any:
    return msgspec.to_builtins(message, builtin_types=(bytes,))


@given(fingerprints, st.integers(1, 1000))
def test_a_question_comes_as_it_was_sent(asked: list[int], most: int) -> None:
    assert parse_asked(sent(pack_asked(asked, most))) == (asked, most)


@given(st.lists(told, max_size=50), st.lists(st.integers(1, 9)))
def test_an_answer_comes_as_it_was_sent(found: list[HolderNews], lagging: list[int]) -> None:
    assert parse_told(sent(pack_told(found, lagging)), len(found)) == (found, lagging)


@pytest.mark.parametrize(
    "params",
    [
        None,
        [8],
        [8, b"1234567"],
        [0, b""],
        [1 << 15, b""],
        [8, b"\xff" * 8],
        [8, bytes(8 * MOST_ASKED + 8)],
    ],
)
def test_what_is_no_question_is_refused(params: Any) -> None:
    with pytest.raises(Invalid):
        parse_asked(params)


@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_are_an_answer_or_refused(packed: bytes, count: int) -> None:
    try:
        found, _ = parse_told(sent(ToldHolders([], packed)), count)
    except Invalid:
        return
    assert len(found) == count
    assert sum(1 + len(each.holders) for each in found) * 2 == len(packed)


def test_an_empty_question_is_one() -> None:
    assert parse_asked(sent(AskedHolders(8, b""))) == ([], 8)
