"""Conditional requests, as RFC 9110 and S3's documentation have them."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.rules.conditions import (
    Conditions,
    ConditionTarget,
    check_copy_source,
    check_delete,
    check_write,
    http_date,
    is_not_modified,
)

WHEN = datetime(2024, 5, 1, 12, 0, 0, 700_000, tzinfo=UTC)
BEFORE, AFTER = WHEN - timedelta(hours=1), WHEN + timedelta(hours=1)
SAME = WHEN.replace(microsecond=0)
TARGET = ConditionTarget("abc", WHEN, 10)


def refused(call: Callable[[], object]) -> tuple[str, str | None]:
    with pytest.raises(S3Error) as caught:
        call()
    return caught.value.code, caught.value.extra.get("Condition")


@pytest.mark.parametrize(
    ("conditions", "outcome"),
    [
        (Conditions(), 200),
        (Conditions(if_match='"abc"'), 200),
        (Conditions(if_match="abc"), 200),
        (Conditions(if_match="*"), 200),
        (Conditions(if_match='"x", "abc"'), 200),
        (Conditions(if_match="x,abc"), 200),
        (Conditions(if_match='abc"'), 200),
        (Conditions(if_match='"abc'), 200),
        (Conditions(if_match='"x,abc"'), 412),
        (Conditions(if_match='W/"abc"'), 412),
        (Conditions(if_match='"x"'), 412),
        (Conditions(if_match=""), 412),
        (Conditions(if_none_match='"abc"'), 304),
        (Conditions(if_none_match='W/"abc"'), 304),
        (Conditions(if_none_match="*"), 304),
        (Conditions(if_none_match="x"), 200),
        (Conditions(if_modified_since=BEFORE), 200),
        (Conditions(if_modified_since=SAME), 304),
        (Conditions(if_modified_since=AFTER), 304),
        (Conditions(if_unmodified_since=BEFORE), 412),
        (Conditions(if_unmodified_since=SAME), 200),
        (Conditions(if_unmodified_since=AFTER), 200),
        # The two combinations that S3's documentation names, then their reverses.
        (Conditions(if_match="abc", if_unmodified_since=BEFORE), 200),
        (Conditions(if_none_match="abc", if_modified_since=BEFORE), 304),
        (Conditions(if_match="x", if_unmodified_since=AFTER), 412),
        (Conditions(if_none_match="x", if_modified_since=AFTER), 200),
        (Conditions(if_match="abc", if_none_match="abc"), 304),
        (Conditions(if_match="x", if_none_match="abc"), 412),
        (Conditions(if_unmodified_since=BEFORE, if_modified_since=AFTER), 412),
        (Conditions(if_unmodified_since=AFTER, if_modified_since=AFTER), 304),
    ],
)
def test_reads_and_copy_sources(conditions: Conditions, outcome: int) -> None:
    if outcome == 412:
        code, condition = refused(lambda: is_not_modified(conditions, TARGET))
        assert code == "PreconditionFailed"
        assert condition in ("If-Match", "If-Unmodified-Since")
    else:
        assert is_not_modified(conditions, TARGET) is (outcome == 304)
    if outcome == 200:
        check_copy_source(conditions, TARGET)
    else:
        code, condition = refused(lambda: check_copy_source(conditions, TARGET))
        assert code == "PreconditionFailed"
        assert condition is not None
        assert condition.startswith("x-amz-copy-source-If-")


@pytest.mark.parametrize(
    ("conditions", "current", "code"),
    [
        (Conditions(), None, None),
        (Conditions(if_none_match="*"), None, None),
        (Conditions(if_none_match="*"), TARGET, "PreconditionFailed"),
        (Conditions(if_none_match="x"), TARGET, None),
        (Conditions(if_none_match="abc"), TARGET, "PreconditionFailed"),
        (Conditions(if_match="abc"), TARGET, None),
        (Conditions(if_match='"abc"'), TARGET, None),
        (Conditions(if_match="*"), TARGET, None),
        (Conditions(if_match="x"), TARGET, "PreconditionFailed"),
        (Conditions(if_match="abc"), None, "NoSuchKey"),
        (Conditions(if_match="*"), None, "NoSuchKey"),
    ],
)
def test_writes(conditions: Conditions, current: ConditionTarget | None, code: str | None) -> None:
    if code is None:
        check_write(conditions, current)
    else:
        assert refused(lambda: check_write(conditions, current))[0] == code


def test_deletes() -> None:
    check_delete(None, if_match="x", if_size=3)
    check_delete(TARGET)
    check_delete(TARGET, if_match='"abc"', if_modified=SAME, if_size=10)
    assert refused(lambda: check_delete(TARGET, if_match="x"))[1] == "If-Match"
    assert refused(lambda: check_delete(TARGET, if_size=11))[1] == "x-amz-if-match-size"
    code, condition = refused(lambda: check_delete(TARGET, if_modified=BEFORE))
    assert (code, condition) == ("PreconditionFailed", "x-amz-if-match-last-modified-time")


@given(st.text(max_size=40))
def test_any_text_is_a_list_of_tags_and_perhaps_a_date(text: str) -> None:
    assert is_not_modified(Conditions(if_none_match=text), TARGET) in (True, False)
    found = http_date(text)
    assert found is None or found.tzinfo is UTC


@given(st.lists(st.text("abc,", max_size=4), max_size=4), st.text("abc,", max_size=4))
def test_lists_of_quoted_tags(tags: list[str], etag: str) -> None:
    header = ", ".join(f'"{tag}"' for tag in tags)
    found = is_not_modified(Conditions(if_none_match=header), ConditionTarget(etag, WHEN, 0))
    assert found is (etag in tags)


def test_conditions_from_parameters() -> None:
    assert not Conditions.of({"Bucket": "b"})
    assert Conditions.of({"IfMatch": "a"}) == Conditions(if_match="a")
    source = Conditions.of({"IfMatch": "a", "CopySourceIfNoneMatch": "b"}, "CopySource")
    assert source == Conditions(if_none_match="b")


def test_http_dates() -> None:
    expected = datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC)
    assert http_date("Sun, 06 Nov 1994 08:49:37 GMT") == expected
    assert http_date("Sunday, 06-Nov-94 08:49:37 GMT") == expected
    assert http_date("Sun Nov  6 08:49:37 1994") == expected
    for text in ("", "yesterday", "Sun, 99 Nov 1994 08:49:37 GMT", "0"):
        assert http_date(text) is None
