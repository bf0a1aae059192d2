"""Lifecycle rules: the ones that S3 accepts, and the actions that are due.

A configuration is a list of rules in botocore's names (LifecycleRule), dates being aware datetimes.
An action due in days is due at the first midnight (UTC) after that many days have passed:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/intro-lifecycle-rules.html. `day_s` is the
length of a day in seconds. Another than DAY_S is for trying rules out: it has no midnight, an
action is due when the days have passed. Objects do not move between storage classes here, so rules
that would move them are refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, time
from email.utils import format_datetime
from enum import Enum
from typing import Any, Final
from urllib.parse import quote

from s3api.http.s3_errors import S3Error

_RULES: Final = 1000
_ID_CHARACTERS: Final = 255
_NEWER_VERSIONS: Final = 100
DAY_S: Final = 86_400
_ACTIONS: Final = ("Expiration", "NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload")
_TRANSITIONS: Final = (
    "Transitions",
    "NoncurrentVersionTransitions",
    # In the rules of PutBucketLifecycle, the older operation.
    "Transition",
    "NoncurrentVersionTransition",
)
_CONDITIONS: Final = ("Prefix", "Tag", "ObjectSizeGreaterThan", "ObjectSizeLessThan", "And")

Rule = Mapping[str, Any]
Rules = Sequence[Rule]


class Action(Enum):
    """A worker's action on a version that is due."""

    EXPIRE = "delete the current version as a DELETE without version id does"
    DELETE_VERSION = "delete this noncurrent version"
    DELETE_MARKER = "delete this delete marker, which hides nothing any more"


@dataclass(frozen=True, slots=True)
class Version:
    """A version of an object. `noncurrent_since` is the time at which it was replaced, None for the
    current one; `newer_noncurrent` counts the noncurrent versions newer than it; `alone` says that
    the key has no other version."""

    key: str
    size: int
    modified: datetime
    tags: Mapping[str, str] = field(default_factory=dict)
    is_delete_marker: bool = False
    noncurrent_since: datetime | None = None
    newer_noncurrent: int = 0
    alone: bool = True


@dataclass(frozen=True, slots=True)
class _Filter:
    """The conditions of a rule, all of which must hold."""

    prefixes: tuple[str, ...]
    tags: frozenset[tuple[str, str]]
    over_bytes: int | None
    under_bytes: int | None

    def covers_key(self, key: str) -> bool:
        return all(map(key.startswith, self.prefixes))

    def covers(self, version: Version) -> bool:
        return (
            self.covers_key(version.key)
            and all(version.tags.get(key) == value for key, value in self.tags)
            and (self.over_bytes is None or version.size > self.over_bytes)
            and (self.under_bytes is None or version.size < self.under_bytes)
        )


def due(rules: Rules, version: Version, now: datetime, day_s: int = DAY_S) -> Action | None:
    """Returns the action on a version at `now`; None: none yet."""
    if version.noncurrent_since is not None:
        ended = any(now >= when for when in _version_ends(rules, version, day_s))
        return Action.DELETE_VERSION if ended else None
    if version.is_delete_marker:
        ends = _marker_ends(rules, version, day_s)
        is_left_over = version.alone and any(now >= when for when in ends)
        return Action.DELETE_MARKER if is_left_over else None
    found = expiry(rules, version, day_s)
    return Action.EXPIRE if found is not None and now >= found[0] else None


def is_upload_due(
    rules: Rules, key: str, initiated: datetime, now: datetime, day_s: int = DAY_S
) -> bool:
    """Returns whether an incomplete upload of `key` is to be aborted."""
    found = upload_expiry(rules, key, initiated, day_s)
    return found is not None and now >= found[0]


def upload_expiry(
    rules: Rules, key: str, initiated: datetime, day_s: int = DAY_S
) -> tuple[datetime, str] | None:
    """Returns when an upload of `key` is aborted that is incomplete by then, and the ID of the
    rule."""
    ends: list[tuple[datetime, str]] = []
    for rule in _enabled(rules):
        days = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
        if days is not None and _filter(rule).covers_key(key):
            ends.append((_after(initiated, days, day_s), rule.get("ID", "")))
    return min(ends, default=None)


def expiry(rules: Rules, version: Version, day_s: int = DAY_S) -> tuple[datetime, str] | None:
    """Returns when the current version expires, and the ID of the rule."""
    ends: list[tuple[datetime, str]] = []
    for rule in _enabled(rules):
        when = _expires(rule.get("Expiration", {}), version.modified, day_s)
        if when is not None and _filter(rule).covers(version):
            ends.append((when, rule.get("ID", "")))
    return min(ends, default=None)


def expiration_header(rules: Rules, version: Version) -> str | None:
    """Returns the `x-amz-expiration` header of the current version."""
    found = expiry(rules, version)
    if found is None:
        return None
    when, name = found
    return f'expiry-date="{format_datetime(when, usegmt=True)}", rule-id="{quote(name, safe="")}"'


def validate(rules: Rules, make_id: Iterator[str]) -> list[dict[str, Any]]:
    """Returns the rules as they are kept: those without an ID get the next of `make_id`.

    Raises MalformedXML, InvalidArgument, InvalidRequest, NotImplemented."""
    if not 0 < len(rules) <= _RULES:
        raise S3Error("MalformedXML")
    kept: list[dict[str, Any]] = []
    seen: set[str] = set()
    for rule in rules:
        _validate_rule(rule)
        name = rule.get("ID") or next(make_id)
        if name in seen:
            raise _argument("Rule ID must be unique. Found same ID for more than one rule")
        seen.add(name)
        kept.append({**rule, "ID": name})
    return kept


def _enabled(rules: Rules) -> Iterable[Rule]:
    return (rule for rule in rules if rule["Status"] == "Enabled")


def _filter(rule: Rule) -> _Filter:
    """Returns the filter of a rule: its own, that of its Filter, and the conditions beside an And:
    S3 takes no more than one condition there, other servers all."""
    chosen = rule.get("Filter") or {}
    parts = (rule, chosen, chosen.get("And") or {})
    tags = [*(chosen.get("And") or {}).get("Tags", ())]
    if chosen.get("Tag"):
        tags.append(chosen["Tag"])
    over = [each["ObjectSizeGreaterThan"] for each in parts if "ObjectSizeGreaterThan" in each]
    under = [each["ObjectSizeLessThan"] for each in parts if "ObjectSizeLessThan" in each]
    return _Filter(
        tuple(each["Prefix"] for each in parts if each.get("Prefix")),
        frozenset((tag["Key"], tag["Value"]) for tag in tags),
        max(over, default=None),
        min(under, default=None),
    )


def _version_ends(rules: Rules, version: Version, day_s: int) -> Iterator[datetime]:
    assert version.noncurrent_since is not None
    for rule in _enabled(rules):
        end = rule.get("NoncurrentVersionExpiration", {})
        days = end.get("NoncurrentDays")
        kept = end.get("NewerNoncurrentVersions", 0)
        if days is not None and version.newer_noncurrent >= kept and _filter(rule).covers(version):
            yield _after(version.noncurrent_since, days, day_s)


def _marker_ends(rules: Rules, version: Version, day_s: int) -> Iterator[datetime]:
    """Yields when a delete marker without other versions ends: at once if a rule says so, else as
    an object would."""
    for rule in _enabled(rules):
        end = rule.get("Expiration", {})
        if not _filter(rule).covers(version):
            continue
        if end.get("ExpiredObjectDeleteMarker"):
            yield version.modified
        elif (when := _expires(end, version.modified, day_s)) is not None:
            yield when


def _expires(end: Mapping[str, Any], modified: datetime, day_s: int) -> datetime | None:
    if end.get("Days") is not None:
        return _after(modified, end["Days"], day_s)
    date: datetime | None = end.get("Date")
    return date


def _after(moment: datetime, days: int, day_s: int) -> datetime:
    """Returns when `days` days are over; the far end of time if that is beyond it."""
    over = moment.timestamp() + days * day_s
    if day_s == DAY_S:
        over = (int(over) // DAY_S + 1) * DAY_S
    try:
        return datetime.fromtimestamp(over, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.max.replace(tzinfo=UTC)


def _validate_rule(rule: Rule) -> None:
    if len(rule.get("ID", "")) > _ID_CHARACTERS:
        raise _argument("ID length should not exceed allowed limit of 255")
    if rule.get("Status") not in ("Enabled", "Disabled"):
        raise S3Error("MalformedXML")
    if any(rule.get(each) for each in _TRANSITIONS):
        for transition in rule.get("Transitions", ()):
            _check_date(transition)
        raise S3Error(
            "NotImplemented", "This server has one storage class: transitions are not implemented"
        )
    if not any(each in rule for each in _ACTIONS):
        raise _request("At least one action needs to be specified in a rule")
    _validate_filter(rule)
    _validate_expiration(rule)
    _validate_noncurrent(rule)
    _validate_abort(rule)


def _validate_filter(rule: Rule) -> None:
    chosen = rule.get("Filter")
    if (chosen is None) == ("Prefix" not in rule):
        raise S3Error("MalformedXML")
    if not chosen:
        return
    both = chosen.get("And")
    if (
        both is not None
        and sum(each in both for each in _CONDITIONS) + len(both.get("Tags", ())) < 2
    ):
        raise S3Error("MalformedXML")
    tags = (both or {}).get("Tags", ())
    if len({tag["Key"] for tag in tags}) != len(tags):
        raise _request("Duplicate Tag Keys are not allowed.")
    found = _filter(rule)
    if found.over_bytes is None or found.under_bytes is None:
        return
    if found.under_bytes <= found.over_bytes + 1:
        raise _request(
            "'ObjectSizeLessThan' has to be a value greater than 'ObjectSizeGreaterThan' by more"
            " than 1"
        )


def _validate_expiration(rule: Rule) -> None:
    if "Expiration" not in rule:
        return
    end = rule["Expiration"]
    if len([each for each in ("Days", "Date", "ExpiredObjectDeleteMarker") if each in end]) != 1:
        raise S3Error("MalformedXML")
    if end.get("Days", 1) <= 0:
        raise _argument("'Days' for Expiration action must be a positive integer")
    _check_date(end)
    if "ExpiredObjectDeleteMarker" in end and _filter(rule).tags:
        raise _request("ExpiredObjectDeleteMarker cannot be specified with Tags.")


def _check_date(action: Mapping[str, Any]) -> None:
    date = action.get("Date")
    if date is not None and date.astimezone(UTC).time() != time():
        raise _argument("'Date' must be at midnight GMT")


def _validate_noncurrent(rule: Rule) -> None:
    if "NoncurrentVersionExpiration" not in rule:
        return
    end = rule["NoncurrentVersionExpiration"]
    if "NoncurrentDays" not in end:
        raise S3Error("MalformedXML")
    if end["NoncurrentDays"] <= 0:
        raise _argument(
            "'NoncurrentDays' for NoncurrentVersionExpiration action must be a positive integer"
        )
    if not 0 < end.get("NewerNoncurrentVersions", 1) <= _NEWER_VERSIONS:
        raise _argument(
            "'NewerNoncurrentVersions' for NoncurrentVersionExpiration action must be an integer"
            f" between 1 and {_NEWER_VERSIONS}"
        )


def _validate_abort(rule: Rule) -> None:
    if "AbortIncompleteMultipartUpload" not in rule:
        return
    days = rule["AbortIncompleteMultipartUpload"].get("DaysAfterInitiation")
    if days is None:
        raise S3Error("MalformedXML")
    if days <= 0:
        raise _argument(
            "'DaysAfterInitiation' for AbortIncompleteMultipartUpload action must be a positive"
            " integer"
        )
    found = _filter(rule)
    if found.tags or found.over_bytes is not None or found.under_bytes is not None:
        raise _request(
            "AbortIncompleteMultipartUpload cannot be specified with Tags or object sizes."
        )


def _argument(message: str) -> S3Error:
    return S3Error("InvalidArgument", message)


def _request(message: str) -> S3Error:
    return S3Error("InvalidRequest", message)
