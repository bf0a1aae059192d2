"""Object lock: retention and legal hold of versions, and the default of a bucket.

A version in COMPLIANCE mode stays until its date, whoever asks; one in GOVERNANCE mode can be
deleted and its retention shortened by callers that may bypass (s3:BypassGovernanceRetention) and
ask for it; a legal hold stands until it is removed. Locks protect versions: a new version or a
delete marker over them is always allowed.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-lock.html
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from s3api.http.s3_errors import S3Error

GOVERNANCE: Final = "GOVERNANCE"
COMPLIANCE: Final = "COMPLIANCE"
_MODES: Final = frozenset({GOVERNANCE, COMPLIANCE})
PARAMS: Final = frozenset(
    ("ObjectLockMode", "ObjectLockRetainUntilDate", "ObjectLockLegalHoldStatus")
)
"""Parameters of requests that name the lock of a new version."""
_MAX_YEARS: Final = 100
_MAX_DAYS: Final = 36500


@dataclass(frozen=True, slots=True)
class Retention:
    """A mode and the time until which it holds."""

    mode: str
    until: datetime


@dataclass(frozen=True, slots=True)
class ObjectLock:
    """The protection of a version."""

    retention: Retention | None = None
    legal_hold: bool = False


def check_delete(lock: ObjectLock, now: datetime, *, may_bypass: bool) -> None:
    """Raises AccessDenied if the version must stay. `may_bypass`: the request asks to bypass
    governance and the caller is allowed to."""
    if lock.legal_hold or _holds(lock.retention, now, may_bypass=may_bypass):
        raise _protected()


def check_change(
    old: Retention | None, new: Retention | None, now: datetime, *, may_bypass: bool
) -> None:
    """Checks that a version's retention may become `new`; None removes it. Extending is free,
    anything else is a bypass, of which COMPLIANCE knows none. Raises AccessDenied."""
    if not _holds(old, now, may_bypass=may_bypass):
        return
    assert old is not None
    if new is None or new.until < old.until or new.mode != old.mode:
        raise _protected()


def parse_configuration(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Validates an ObjectLockConfiguration. Raises MalformedXML, InvalidRetentionPeriod."""
    if configuration.get("ObjectLockEnabled") != "Enabled":
        raise S3Error("MalformedXML")
    if "Rule" in configuration:
        default = configuration["Rule"].get("DefaultRetention") or {}
        if default.get("Mode") not in _MODES or ("Days" in default) == ("Years" in default):
            raise S3Error("MalformedXML")
        _check_period(default.get("Days", 1), _MAX_DAYS)
        _check_period(default.get("Years", 1), _MAX_YEARS)
    return dict(configuration)


def default_retention(configuration: Mapping[str, Any], now: datetime) -> Retention | None:
    """Returns the retention of a version that is put now into a bucket with this configuration."""
    default = configuration.get("Rule", {}).get("DefaultRetention")
    if not default:
        return None
    if "Days" in default:
        return Retention(default["Mode"], now + timedelta(days=default["Days"]))
    return Retention(default["Mode"], _years_later(now, default["Years"]))


def parse_retention(document: Mapping[str, Any], now: datetime) -> Retention | None:
    """Returns the retention of an ObjectLockRetention document; None for an empty one, which
    removes it.

    Raises MalformedXML, InvalidArgument."""
    mode, until = document.get("Mode"), document.get("RetainUntilDate")
    if mode is None and until is None:
        return None
    if mode not in _MODES or until is None:
        raise S3Error("MalformedXML")
    return Retention(mode, _future(until, now))


def new_lock(
    params: Mapping[str, Any], configuration: Mapping[str, Any] | None, now: datetime
) -> ObjectLock:
    """Returns the lock of a new version: the one that its request names (ObjectLockMode,
    ObjectLockRetainUntilDate, ObjectLockLegalHoldStatus), and the bucket's default retention if it
    names none. `configuration` is None in a bucket without object lock. Raises InvalidRequest,
    InvalidArgument."""
    mode = params.get("ObjectLockMode")
    until = params.get("ObjectLockRetainUntilDate")
    hold = params.get("ObjectLockLegalHoldStatus")
    if mode is not None or until is not None or hold is not None:
        check_enabled(enabled=configuration is not None)
    if (mode is None) != (until is None):
        raise _argument(
            "x-amz-object-lock-retain-until-date and x-amz-object-lock-mode must both be supplied"
        )
    if mode is not None and mode not in _MODES:
        raise _argument("Unknown wormMode directive.")
    if hold not in (None, "ON", "OFF"):
        raise _argument("Legal Hold must be either of 'ON' or 'OFF'")
    if mode is not None and until is not None:
        retention: Retention | None = Retention(mode, _future(until, now))
    else:
        retention = default_retention(configuration or {}, now)
    return ObjectLock(retention, legal_hold=hold == "ON")


def parse_legal_hold(document: Mapping[str, Any]) -> bool:
    """Returns whether an ObjectLockLegalHold document sets a hold. Raises MalformedXML."""
    status = document.get("Status")
    if status not in ("ON", "OFF"):
        raise S3Error("MalformedXML")
    return bool(status == "ON")


def check_enabled(*, enabled: bool) -> None:
    """Raises InvalidRequest for a lock in a bucket without object lock."""
    if not enabled:
        raise S3Error("InvalidRequest", "Bucket is missing Object Lock Configuration")


def check_versioning(status: str, *, enabled: bool) -> None:
    """Raises InvalidBucketState if versioning of a bucket with object lock would end."""
    if enabled and status != "Enabled":
        raise S3Error(
            "InvalidBucketState",
            "An Object Lock configuration is present on this bucket, so the versioning state cannot"
            " be changed.",
        )


def _holds(retention: Retention | None, now: datetime, *, may_bypass: bool) -> bool:
    if retention is None or now >= retention.until:
        return False
    return retention.mode == COMPLIANCE or not may_bypass


def _check_period(value: int, limit: int) -> None:
    if value <= 0:
        raise S3Error(
            "InvalidRetentionPeriod", "Default retention period must be a positive integer value."
        )
    if value > limit:
        raise S3Error(
            "InvalidRetentionPeriod",
            f"Default retention period too large: the maximum is {_MAX_DAYS} days or"
            f" {_MAX_YEARS} years",
        )


def _future(until: datetime, now: datetime) -> datetime:
    if until <= now:
        raise _argument("The retain until date must be in the future!")
    return until.astimezone(UTC)


def _years_later(now: datetime, years: int) -> datetime:
    try:
        return now.replace(year=now.year + years)
    except ValueError:  # the 29th of February
        return now.replace(year=now.year + years, month=3, day=1)


def _argument(message: str) -> S3Error:
    return S3Error("InvalidArgument", message)


def _protected() -> S3Error:
    return S3Error("AccessDenied", "Access Denied because object protected by object lock.")
