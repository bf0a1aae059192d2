"""Tells whether the S3 front door could have written the value of an attribute.

Attributes are set on the mount too: `user.s3.` ones by anyone who may write the file, `trusted.s3.`
ones by root. Malformed ones are refused there (`attribute_guard`); in an old store that has one all
the same, it counts as absent. Locks are the exception: an unreadable one holds until a user with
the right to do so sets it anew. Pure.
"""

import functools
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final
from urllib.parse import unquote_plus

import msgspec

RETENTION: Final = "retention"
LEGAL_HOLD: Final = "legal-hold"
GOVERNANCE: Final = "GOVERNANCE"
HELD: Final = "ON"
_LATEST_S: Final = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
_MAX_PARTS: Final = 10_000
_MAX_TAGS: Final = 10
_REMEMBERED: Final = 512
"""Remembered names, of at most 240 bytes each."""
_RETENTION: Final = re.compile(r"(?:GOVERNANCE|COMPLIANCE) (0|[1-9][0-9]{0,11})", re.ASCII)
_ETAG: Final = re.compile(r"[0-9A-Za-z-]+ [0-9]+ -?[0-9]+", re.ASCII)
_RUN: Final = re.compile(r"([0-9]{1,15})(?:\*([0-9]{1,5}))?", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9A-Za-z+/]+={0,2}(?:-[0-9]+)?", re.ASCII)
_META_NAME: Final = re.compile(r"[^\0- :\x7f]+")
_LINE_BREAKING: Final = re.compile(r"[\r\n\0]")


class _Owner(msgspec.Struct):
    ID: str
    DisplayName: str


class _Grantee(msgspec.Struct):
    Type: str
    ID: str = ""
    DisplayName: str = ""
    URI: str = ""


class _Grant(msgspec.Struct):
    Grantee: _Grantee
    Permission: str


class _Acl(msgspec.Struct):
    Owner: _Owner
    Grants: list[_Grant]


def is_sound(name: str, value: str) -> bool:
    """Returns whether the value of an attribute is valid, by its caller's name
    (`object_attributes`), decoded with surrogateescape."""
    return (value.isascii() or _is_text(value)) and _check_of(name)(value)


@functools.lru_cache(_REMEMBERED)
def _check_of(name: str) -> Callable[[str], bool]:
    """Returns the check for the values of an attribute."""
    kind, _, rest = name.partition(".")
    if not _is_text(name) or (kind == "meta" and not _META_NAME.fullmatch(rest)):
        return lambda _: False
    if kind == "meta":  # encoded where a header could not hold it
        return lambda _: True
    check = _CHECKS.get(kind)
    if check is not None:
        return functools.partial(check, rest)
    return lambda value: _LINE_BREAKING.search(value) is None


def believed(name: str, value: str) -> str | None:
    """Returns the value that counts; None: the attribute does not."""
    if is_sound(name, value):
        return value
    return _UNREADABLE.get(name)


def is_etag(packed: str) -> bool:
    """Returns whether a value is that of `user.s3.etag`: ETag, size, mtime."""
    return _ETAG.fullmatch(packed) is not None


def is_retained(retention: str | None, now_s: float, *, bypass: bool = False) -> bool:
    """Returns whether a version may not go now; `bypass`: the caller may pass over GOVERNANCE."""
    if retention is None:
        return False
    mode, until_s = _retention(retention)
    return until_s > now_s and not (bypass and mode == GOVERNANCE)


def weakens(old: str, new: str | None, now_s: float) -> bool:
    """Returns whether a retention in force would end sooner, or hold less, by becoming `new`."""
    if not is_retained(old, now_s):
        return False
    mode, until_s = _retention(old)
    return new is None or _retention(new)[0] != mode or _retention(new)[1] < until_s


def _retention(value: str) -> tuple[str, int]:
    mode, _, until_s = (believed(RETENTION, value) or "").partition(" ")
    return mode, int(until_s)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a surrogate stands for a byte that is not UTF-8
        return False
    return True


def _is_retention(rest: str, value: str) -> bool:
    found = _RETENTION.fullmatch(value)
    return not rest and found is not None and int(found[1]) <= _LATEST_S


def _is_legal_hold(rest: str, value: str) -> bool:
    return not rest and value in (HELD, "OFF")


def _is_owner(rest: str, value: str) -> bool:
    return not rest and bool(value) and value.isprintable()


def _is_acl(rest: str, value: str) -> bool:
    try:
        msgspec.json.decode(value, type=_Acl)
    except msgspec.MsgspecError:
        return False
    return not rest


def _are_parts(rest: str, value: str) -> bool:
    runs = [_RUN.fullmatch(run) for run in value.split(",")]
    count = sum(_MAX_PARTS + 1 if run is None else int(run[2] or 1) for run in runs)
    return _is_number(rest) and count <= _MAX_PARTS


def _are_digests(rest: str, value: str) -> bool:
    return _is_number(rest) and all(_DIGEST.fullmatch(each) for each in value.split(","))


def _is_number(rest: str) -> bool:
    return not rest or (rest.isascii() and rest.isdigit())


def _is_checksum(rest: str, value: str) -> bool:
    if rest == "type":
        return value in ("FULL_OBJECT", "COMPOSITE")
    return rest.isalnum() and rest.isascii() and _DIGEST.fullmatch(value) is not None


def _is_tagging(rest: str, value: str) -> bool:
    pairs = [pair.partition("=")[::2] for pair in value.split("&")] if value else []
    try:
        names = [
            (unquote_plus(name, errors="strict"), unquote_plus(v, errors="strict"))[0]
            for name, v in pairs
        ]
    except UnicodeDecodeError:
        return False
    return not rest and all(names) and len(set(names)) == len(names) <= _MAX_TAGS


_CHECKS: Final[dict[str, Callable[[str, str], bool]]] = {
    RETENTION: _is_retention,
    LEGAL_HOLD: _is_legal_hold,
    "owner": _is_owner,
    "acl": _is_acl,
    "parts": _are_parts,
    "part-checksums": _are_digests,
    "checksum": _is_checksum,
    "tagging": _is_tagging,
}
_UNREADABLE: Final = {RETENTION: f"COMPLIANCE {_LATEST_S}", LEGAL_HOLD: HELD}
