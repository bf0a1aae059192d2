"""The mount's rules for attributes that describe an object.

| attribute | EINVAL | EPERM |
|---|---|---|
| any `user.s3.`, `trusted.s3.` | malformed (`attribute_validation`) | kept in the other class |
| retention | | shorter, of another mode or removed while it is in force |
| legal hold | | removed: only S3 does that |
| version | | always |

Root may replace a retention that cannot be read, but not remove it. No I/O here.
"""

from typing import Final

from kvfs.base.errors import Invalid, NotPermitted
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.objects import attribute_validation, object_attributes
from kvfs.tree import etags

_SECOND: Final = 1_000_000_000


def check_set(t: Transaction, ino: int, attribute: bytes, value: bytes, now_ns: int) -> None:
    """Raises Invalid, NotPermitted."""
    name = _name(attribute)
    if name is None:
        return
    text = value.decode(errors="surrogateescape")
    shown = attribute.decode(errors="backslashreplace")
    if not (
        attribute_validation.is_etag(text)
        if attribute == etags.ETAG
        else attribute_validation.is_sound(name, text)
    ):
        raise Invalid(f"{shown}: S3 could not read this value")
    _check_locks(t, ino, name, text, now_ns)


def check_remove(t: Transaction, ino: int, attribute: bytes, now_ns: int) -> None:
    """Raises NotPermitted."""
    name = _name(attribute)
    if name is not None:
        _check_locks(t, ino, name, None, now_ns)


def _name(attribute: bytes) -> str | None:
    """Returns the callers' name; None: it is about no object."""
    if not attribute.startswith((b"user.s3.", b"trusted.s3.")):
        return None
    if attribute == object_attributes.VERSION:
        raise NotPermitted("the versions of an object are made by S3")
    name = object_attributes.name_of(attribute)
    if name is None:
        shown = attribute.decode(errors="backslashreplace")
        raise NotPermitted(f"{shown} is not where this is kept: see docs/design/objects.md")
    return name


def _check_locks(t: Transaction, ino: int, name: str, new: str | None, now_ns: int) -> None:
    if name not in (attribute_validation.RETENTION, attribute_validation.LEGAL_HOLD):
        return
    packed = t.get(keys.xattr(ino, object_attributes.attribute(name)))
    if packed is None:
        return
    old = packed.decode(errors="surrogateescape")
    if name == attribute_validation.LEGAL_HOLD:
        weaker = (
            attribute_validation.believed(name, old) == attribute_validation.HELD
            and new != attribute_validation.HELD
        )
    else:
        readable = attribute_validation.is_sound(name, old)
        weaker = attribute_validation.weakens(old, new, now_ns / _SECOND) and (
            readable or new is None
        )
    if weaker:
        raise NotPermitted(f"the {name} of this version is in force: only S3 may weaken it")
