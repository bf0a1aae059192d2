"""Lifecycle rules: validation, and what is due when."""

import itertools
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.rules.lifecycle import (
    Action,
    Version,
    due,
    expiration_header,
    expiry,
    is_upload_due,
    validate,
)

# The example of the documentation: 3 days from 10:30 on the 15th are over at midnight of the 19th.
PUT = datetime(2014, 1, 15, 10, 30, tzinfo=UTC)
OVER = datetime(2014, 1, 19, tzinfo=UTC)
TICK = timedelta(seconds=1)


def rule(**members: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"ID": "r", "Status": "Enabled", "Filter": {}}
    usual |= {"Expiration": {"Days": 3}}
    usual |= members
    return {name: value for name, value in usual.items() if value is not None}


def version(**facts: Any) -> Version:
    usual: dict[str, Any] = {"key": "logs/x", "size": 100, "modified": PUT}
    return Version(**(usual | facts))


def test_days_end_at_midnight() -> None:
    assert due([rule()], version(), OVER - TICK) is None
    assert due([rule()], version(), OVER) is Action.EXPIRE
    assert expiry([rule()], version()) == (OVER, "r")


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)), st.integers(1, 4000))
def test_days_are_never_cut_short(modified: datetime, days: int) -> None:
    put = modified.replace(tzinfo=UTC)
    found = expiry([rule(Expiration={"Days": days})], version(modified=put))
    assert found is not None
    assert timedelta(days) < found[0] - put <= timedelta(days + 1)
    assert (found[0].hour, found[0].minute, found[0].second) == (0, 0, 0)


def test_short_days_have_no_midnight() -> None:
    """Rules that are tried out take as long as they say, whatever the time of the day."""
    for started in (PUT, PUT + timedelta(seconds=9)):
        asked = [rule()], version(modified=started)
        assert due(*asked, started + timedelta(seconds=29), 10) is None
        assert due(*asked, started + timedelta(seconds=30), 10) is Action.EXPIRE


def test_the_earliest_rule_counts() -> None:
    rules = [rule(ID="late", Expiration={"Days": 9}), rule(ID="a b"), rule(Status="Disabled")]
    expected = 'expiry-date="Sun, 19 Jan 2014 00:00:00 GMT", rule-id="a%20b"'
    assert expiration_header(rules, version()) == expected
    assert expiration_header([rule(Status="Disabled")], version()) is None
    assert due([rule(Status="Disabled")], version(), OVER) is None


def test_dates_and_far_ends() -> None:
    day = datetime(2020, 1, 1, tzinfo=UTC)
    dated = [rule(Expiration={"Date": day})]
    assert due(dated, version(), day - TICK) is None
    assert due(dated, version(), day) is Action.EXPIRE
    assert due([rule(Expiration={"Days": 2**31 - 1})], version(), day) is None


@pytest.mark.parametrize(
    ("filters", "covered"),
    [
        ({"Filter": {}}, True),
        ({"Filter": {"Prefix": "logs/"}}, True),
        ({"Filter": {"Prefix": "tmp/"}}, False),
        ({"Filter": None, "Prefix": "logs/"}, True),
        ({"Filter": None, "Prefix": "tmp/"}, False),
        ({"Filter": None, "Prefix": ""}, True),
        ({"Filter": {"Tag": {"Key": "a", "Value": "1"}}}, True),
        ({"Filter": {"Tag": {"Key": "a", "Value": "2"}}}, False),
        ({"Filter": {"ObjectSizeGreaterThan": 99}}, True),
        ({"Filter": {"ObjectSizeGreaterThan": 100}}, False),
        ({"Filter": {"ObjectSizeLessThan": 100}}, False),
        ({"Filter": {"And": {"Prefix": "logs/", "Tags": [{"Key": "a", "Value": "1"}]}}}, True),
        ({"Filter": {"And": {"Prefix": "x", "Tags": [{"Key": "a", "Value": "1"}]}}}, False),
        ({"Filter": {"And": {"ObjectSizeGreaterThan": 9, "ObjectSizeLessThan": 101}}}, True),
        # Side by side, as S3 does not take them: all must hold.
        ({"Filter": {"Prefix": "logs/", "Tag": {"Key": "a", "Value": "1"}}}, True),
        ({"Filter": {"Prefix": "x", "Tag": {"Key": "a", "Value": "1"}}}, False),
        ({"Filter": {"Prefix": "logs/", "Tag": {"Key": "a", "Value": "2"}}}, False),
        (
            {
                "Filter": {
                    "Tag": {"Key": "a", "Value": "1"},
                    "And": {"Prefix": "logs", "Tags": [{"Key": "b", "Value": "2"}]},
                }
            },
            True,
        ),
        (
            {
                "Filter": {
                    "Tag": {"Key": "a", "Value": "1"},
                    "And": {"Prefix": "logs", "Tags": [{"Key": "c", "Value": "2"}]},
                }
            },
            False,
        ),
    ],
)
def test_filters(filters: dict[str, Any], covered: bool) -> None:
    rules = [rule(**filters)]
    validate(rules, itertools.repeat("id"))
    found = due(rules, version(tags={"a": "1", "b": "2"}), OVER)
    assert (found is Action.EXPIRE) is covered


def test_noncurrent_versions() -> None:
    ends = {"NoncurrentDays": 3, "NewerNoncurrentVersions": 2}
    rules = [rule(Expiration=None, NoncurrentVersionExpiration=ends)]
    validate(rules, itertools.repeat("id"))
    old = version(noncurrent_since=PUT, newer_noncurrent=2, alone=False)
    assert due(rules, old, OVER) is Action.DELETE_VERSION
    assert due(rules, old, OVER - TICK) is None
    kept = version(noncurrent_since=PUT, newer_noncurrent=1, alone=False)
    assert due(rules, kept, OVER) is None
    assert due(rules, version(), OVER) is None
    assert due([rule()], old, OVER) is None


def test_delete_markers() -> None:
    cleanup = [rule(Expiration={"ExpiredObjectDeleteMarker": True})]
    marker = version(is_delete_marker=True, size=0)
    assert due(cleanup, marker, PUT) is Action.DELETE_MARKER
    assert due([rule()], marker, OVER) is Action.DELETE_MARKER
    assert due([rule()], marker, OVER - TICK) is None
    hiding = version(is_delete_marker=True, size=0, alone=False)
    assert due(cleanup, hiding, OVER) is None
    assert due(cleanup, version(), OVER) is None


def test_uploads() -> None:
    abort = {"Expiration": None, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3}}
    rules = [rule(Filter={"Prefix": "logs/"}, **abort)]
    validate(rules, itertools.repeat("id"))
    assert is_upload_due(rules, "logs/x", PUT, OVER)
    assert not is_upload_due(rules, "logs/x", PUT, OVER - TICK)
    assert not is_upload_due(rules, "tmp/x", PUT, OVER)
    assert not is_upload_due([rule()], "logs/x", PUT, OVER)


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({"Status": "enabled"}, "MalformedXML"),
        ({"Status": None}, "MalformedXML"),
        ({"ID": "x" * 256}, "InvalidArgument"),
        ({"Filter": None}, "MalformedXML"),
        ({"Prefix": "x"}, "MalformedXML"),
        ({"Filter": {"And": {"Prefix": "x"}}}, "MalformedXML"),
        ({"Filter": {"And": {"Tags": [{"Key": "a", "Value": ""}] * 2}}}, "InvalidRequest"),
        (
            {"Filter": {"And": {"ObjectSizeGreaterThan": 9, "ObjectSizeLessThan": 10}}},
            "InvalidRequest",
        ),
        ({"Expiration": None}, "InvalidRequest"),
        ({"Expiration": {}}, "MalformedXML"),
        ({"Expiration": {"Days": 0}}, "InvalidArgument"),
        ({"Expiration": {"Days": -1}}, "InvalidArgument"),
        ({"Expiration": {"Days": 1, "ExpiredObjectDeleteMarker": True}}, "MalformedXML"),
        ({"Expiration": {"Date": PUT}}, "InvalidArgument"),
        (
            {"Expiration": {"Date": datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=1)))}},
            "InvalidArgument",
        ),
        (
            {
                "Expiration": {"ExpiredObjectDeleteMarker": True},
                "Filter": {"Tag": {"Key": "a", "Value": ""}},
            },
            "InvalidRequest",
        ),
        ({"NoncurrentVersionExpiration": {}}, "MalformedXML"),
        ({"NoncurrentVersionExpiration": {"NoncurrentDays": 0}}, "InvalidArgument"),
        (
            {"NoncurrentVersionExpiration": {"NoncurrentDays": 1, "NewerNoncurrentVersions": 101}},
            "InvalidArgument",
        ),
        ({"AbortIncompleteMultipartUpload": {}}, "MalformedXML"),
        ({"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 0}}, "InvalidArgument"),
        (
            {
                "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
                "Filter": {"ObjectSizeLessThan": 5},
            },
            "InvalidRequest",
        ),
        ({"Transition": {"Days": 1, "StorageClass": "GLACIER"}}, "NotImplemented"),
        ({"Transitions": [{"Days": 1, "StorageClass": "GLACIER"}]}, "NotImplemented"),
        (
            {"NoncurrentVersionTransitions": [{"NoncurrentDays": 1, "StorageClass": "GLACIER"}]},
            "NotImplemented",
        ),
    ],
)
def test_refused_rules(members: dict[str, Any], code: str) -> None:
    with pytest.raises(S3Error) as caught:
        validate([rule(**members)], itertools.repeat("id"))
    assert caught.value.code == code


def test_rule_ids() -> None:
    names = (f"made-{number}" for number in itertools.count())
    kept = validate([rule(ID=None), rule(), rule(ID="")], names)
    assert [each["ID"] for each in kept] == ["made-0", "r", "made-1"]
    with pytest.raises(S3Error) as caught:
        validate([rule(), rule()], names)
    assert caught.value.code == "InvalidArgument"
    for count in (0, 1001):
        with pytest.raises(S3Error) as caught:
            validate([rule(ID=None)] * count, names)
        assert caught.value.code == "MalformedXML"
