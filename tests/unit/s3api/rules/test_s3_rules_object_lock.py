"""Object lock: who may delete and change what until when."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from s3api.http.s3_errors import S3Error
from s3api.rules.object_lock import (
    COMPLIANCE,
    GOVERNANCE,
    ObjectLock,
    Retention,
    check_change,
    check_delete,
    check_enabled,
    check_versioning,
    default_retention,
    new_lock,
    parse_configuration,
    parse_legal_hold,
    parse_retention,
)

NOW = datetime(2024, 2, 29, 12, tzinfo=UTC)
PAST, SOON, LATER = (NOW + timedelta(days=days) for days in (-1, 1, 2))


def refused(call: Any, *arguments: Any, **named: Any) -> str | None:
    try:
        call(*arguments, **named)
    except S3Error as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("lock", "plain", "bypassed"),
    [
        (ObjectLock(), True, True),
        (ObjectLock(legal_hold=True), False, False),
        (ObjectLock(Retention(GOVERNANCE, SOON)), False, True),
        (ObjectLock(Retention(GOVERNANCE, SOON), legal_hold=True), False, False),
        (ObjectLock(Retention(COMPLIANCE, SOON)), False, False),
        (ObjectLock(Retention(GOVERNANCE, PAST)), True, True),
        (ObjectLock(Retention(COMPLIANCE, NOW)), True, True),
    ],
)
def test_deletes(lock: ObjectLock, plain: bool, bypassed: bool) -> None:
    for may_bypass, allowed in ((False, plain), (True, bypassed)):
        code = refused(check_delete, lock, NOW, may_bypass=may_bypass)
        assert code == (None if allowed else "AccessDenied")


@pytest.mark.parametrize(
    ("old", "new", "plain", "bypassed"),
    [
        (None, Retention(COMPLIANCE, SOON), True, True),
        (Retention(GOVERNANCE, SOON), Retention(GOVERNANCE, LATER), True, True),
        (Retention(GOVERNANCE, LATER), Retention(GOVERNANCE, SOON), False, True),
        (Retention(GOVERNANCE, SOON), Retention(COMPLIANCE, LATER), False, True),
        (Retention(GOVERNANCE, SOON), None, False, True),
        (Retention(COMPLIANCE, SOON), Retention(COMPLIANCE, LATER), True, True),
        (Retention(COMPLIANCE, LATER), Retention(COMPLIANCE, SOON), False, False),
        (Retention(COMPLIANCE, SOON), Retention(GOVERNANCE, LATER), False, False),
        (Retention(COMPLIANCE, SOON), None, False, False),
        (Retention(COMPLIANCE, PAST), None, True, True),
    ],
)
def test_changes(old: Retention | None, new: Retention | None, plain: bool, bypassed: bool) -> None:
    for may_bypass, allowed in ((False, plain), (True, bypassed)):
        code = refused(check_change, old, new, NOW, may_bypass=may_bypass)
        assert code == (None if allowed else "AccessDenied")


def configuration(**default: Any) -> dict[str, Any]:
    return {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": default}}


def test_defaults() -> None:
    plain = {"ObjectLockEnabled": "Enabled"}
    assert default_retention(parse_configuration(plain), NOW) is None
    days = parse_configuration(configuration(Mode=GOVERNANCE, Days=1))
    assert default_retention(days, NOW) == Retention(GOVERNANCE, SOON)
    years = parse_configuration(configuration(Mode=COMPLIANCE, Years=1))
    expected = datetime(2025, 3, 1, 12, tzinfo=UTC)
    assert default_retention(years, NOW) == Retention(COMPLIANCE, expected)


@pytest.mark.parametrize(
    ("document", "code"),
    [
        ({}, "MalformedXML"),
        ({"ObjectLockEnabled": "Disabled"}, "MalformedXML"),
        ({"ObjectLockEnabled": "Enabled", "Rule": {}}, "MalformedXML"),
        (configuration(Mode="governance", Days=1), "MalformedXML"),
        (configuration(Mode=GOVERNANCE), "MalformedXML"),
        (configuration(Mode=GOVERNANCE, Days=1, Years=1), "MalformedXML"),
        (configuration(Mode=GOVERNANCE, Days=0), "InvalidRetentionPeriod"),
        (configuration(Mode=GOVERNANCE, Years=-1), "InvalidRetentionPeriod"),
        (configuration(Mode=GOVERNANCE, Days=36501), "InvalidRetentionPeriod"),
        (configuration(Mode=GOVERNANCE, Years=101), "InvalidRetentionPeriod"),
    ],
)
def test_refused_configurations(document: dict[str, Any], code: str) -> None:
    assert refused(parse_configuration, document) == code


def test_retention_documents() -> None:
    good = {"Mode": GOVERNANCE, "RetainUntilDate": SOON}
    assert parse_retention(good, NOW) == Retention(GOVERNANCE, SOON)
    assert parse_retention({}, NOW) is None
    for change in ({"Mode": "governance"}, {"Mode": None}, {"RetainUntilDate": None}):
        assert refused(parse_retention, good | change, NOW) == "MalformedXML"
    assert refused(parse_retention, good | {"RetainUntilDate": PAST}, NOW) == "InvalidArgument"


def test_locks_of_new_versions() -> None:
    plain = {"ObjectLockEnabled": "Enabled"}
    default = configuration(Mode=GOVERNANCE, Days=2)
    assert new_lock({}, None, NOW) == ObjectLock()
    assert new_lock({}, plain, NOW) == ObjectLock()
    assert new_lock({}, default, NOW) == ObjectLock(Retention(GOVERNANCE, LATER))
    both = {"ObjectLockMode": COMPLIANCE, "ObjectLockRetainUntilDate": SOON}
    assert new_lock(both, default, NOW) == ObjectLock(Retention(COMPLIANCE, SOON))
    hold = {"ObjectLockLegalHoldStatus": "ON"}
    assert new_lock(hold, plain, NOW) == ObjectLock(legal_hold=True)
    assert new_lock(hold, default, NOW) == ObjectLock(Retention(GOVERNANCE, LATER), legal_hold=True)
    assert refused(new_lock, both, None, NOW) == "InvalidRequest"
    for bad in (
        {"ObjectLockMode": COMPLIANCE},
        {"ObjectLockRetainUntilDate": SOON},
        both | {"ObjectLockMode": "x"},
        both | {"ObjectLockRetainUntilDate": PAST},
        {"ObjectLockLegalHoldStatus": "on"},
    ):
        assert refused(new_lock, bad, plain, NOW) == "InvalidArgument"


def test_legal_hold_and_buckets() -> None:
    assert parse_legal_hold({"Status": "ON"})
    assert not parse_legal_hold({"Status": "OFF"})
    for bad in ({}, {"Status": "abc"}):
        assert refused(parse_legal_hold, bad) == "MalformedXML"
    check_enabled(enabled=True)
    assert refused(check_enabled, enabled=False) == "InvalidRequest"
    check_versioning("Suspended", enabled=False)
    check_versioning("Enabled", enabled=True)
    assert refused(check_versioning, "Suspended", enabled=True) == "InvalidBucketState"
