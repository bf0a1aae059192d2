"""What a word of the table of names that went says."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from kvfs.base.errors import NotFound, OtherVersion, Unreached
from kvfs.policy.miss_reasons import REASONS, Lost, Reason, hash_of, reason_in, reason_of, word_of

entries = st.binary(max_size=300)
lost = st.sampled_from(get_args(Lost))


def test_each_reason_is_there_once() -> None:
    assert sorted(REASONS) == sorted(get_args(Reason))
    assert REASONS[0] == "never_stored"
    assert set(get_args(Lost)) < set(REASONS)


@given(entries, lost)
def test_a_name_is_found_by_its_word(entry: bytes, reason: Lost) -> None:
    word = word_of(hash_of(entry), reason)
    assert 0 < word < 1 << 32
    assert reason_in(word, hash_of(entry)) == reason


@given(entries, entries, lost)
def test_another_name_in_the_same_slot_is_not_taken_for_it(
    entry: bytes, other: bytes, reason: Lost
) -> None:
    if entry != other:
        assert reason_in(word_of(hash_of(entry), reason), hash_of(other)) == "never_stored"


@given(st.integers(0, (1 << 32) - 1), entries)
def test_any_word_says_a_reason(word: int, entry: bytes) -> None:
    assert reason_in(word, hash_of(entry)) in REASONS
    assert reason_in(0, hash_of(entry)) == "never_stored"


def test_what_nothing_is_remembered_of() -> None:
    assert reason_of(NotFound("x")) == "never_stored"
    assert reason_of(OtherVersion("x")) == "other_version"
    assert reason_of(Unreached("x")) == "unavailable"
