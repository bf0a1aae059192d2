"""The forms in which the mount shows names that only an object store can make, and finds them
again.

An object's key is a path in the engine, its segments as they are; POSIX cannot show all of them:

| in the engine | on the mount |
|---|---|
| directory '' (key `a//b`) | `%` |
| directory or file `.`, `..` | `%2E`, `%2E%2E` |
| a name over 255 bytes; the start of one over 479 | its first 200 bytes, `%`, 16 hex digits |
| of a file and a directory of one name | the file keeps the name, the directory is name + `%` |
| file '' (key `a/`, a marker), of size 0 | hidden |
| file '' with content | `%`; `%%` where there is a directory '' |
| a name with a NUL byte: versions, uploads | hidden |

The hex digits are xxh3-64 of the entry (a directory's ends in '/'). An ordinary name of such a
spelling in the same directory wins: the odd one is then reached as an object only.

Invariants
- A look-up gets here only after the ordinary one missed, and only for a name with `%`.
- The name that `shown` gives for an entry leads `find` to it.
"""

import re
from typing import Final

import xxhash

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import unpack_inode

NUL: Final = b"\0"
"""Marks the names that the system makes for itself; no object's key holds one."""
SPLIT: Final = 480
"""Bytes from which on a segment of a key is continued in a directory (an LMDB key has at most 511):
named after the first 480 bytes and a NUL, it adds no '/' to the key."""
LONGEST: Final = 255
"""The longest name on a mount."""
_STEM: Final = 200
_ODD: Final = frozenset((b"", b"/", b".", b"./", b"..", b"../"))
_SPELLED: Final = {b"": b"%", b".": b"%2E", b"..": b"%2E%2E"}
_LONG_FORM: Final = re.compile(rb"(.{200})%[0-9a-f]{16}", re.DOTALL)


def is_odd(suffix: bytes) -> bool:
    """Returns whether the mount cannot show an entry (a name, a directory's with '/') as it is."""
    if len(suffix) > LONGEST and len(suffix.removesuffix(b"/")) > LONGEST:
        return True
    return NUL in suffix or suffix in _ODD


def is_hidden(suffix: bytes) -> bool:
    """Returns whether it is the system's own, and never shown."""
    return NUL in suffix and not is_continuation(suffix)


def is_continuation(suffix: bytes) -> bool:
    """Returns whether it is the directory of segments that start with the same 480 bytes."""
    return len(suffix) == SPLIT + 2 and suffix.endswith(b"\0/")


def spelled(suffix: bytes) -> bytes:
    """Returns the form on the mount of an odd entry that is not hidden, if nothing else stands
    beside it."""
    directory = suffix.endswith(b"/")
    name = suffix[:-1] if directory else suffix
    short = _SPELLED.get(name)
    if short is not None:
        return short
    return b"%s%%%016x" % (name[:_STEM], xxhash.xxh3_64_intdigest(suffix))


def shown(t: Transaction, parent: int, suffix: bytes) -> bytes | None:
    """Returns the name under which the mount shows an existing entry; None if it does not."""
    prefix = keys.entries(parent)
    directory = suffix.endswith(b"/")
    if not is_odd(suffix):
        if not directory or t.get(prefix + suffix[:-1]) is None:
            return suffix[:-1] if directory else suffix
        return _unless_taken(t, prefix, suffix[:-1] + b"%")
    if is_hidden(suffix):
        return None
    name = spelled(suffix)
    if suffix == b"":
        if not _has_content(t, prefix):
            return None
        name = b"%%" if t.get(prefix + b"/") is not None else name
    elif directory and suffix in _ODD and suffix != b"/" and t.get(prefix + suffix[:-1]):
        name += b"%"
    return _unless_taken(t, prefix, name)


def all_shown(t: Transaction, parent: int, suffix: bytes) -> list[bytes]:
    """Returns every name on the mount that may lead elsewhere when this entry comes or goes."""
    if is_odd(suffix):
        name = spelled(suffix)
        return [] if is_hidden(suffix) else [name, name + b"%"]
    directory = suffix.endswith(b"/")
    name, other = (suffix[:-1], suffix[:-1]) if directory else (suffix, suffix + b"/")
    beside = t.get(keys.ENTRY + keys.pack_u64(parent) + other) is not None
    return [name, name + b"%"] if beside else [name]


def meant(name: bytes) -> list[bytes]:
    """Returns the names in the engine that a name on the mount may stand for, the likeliest first;
    of a long one there are more (`long_start`)."""
    if b"%" not in name:
        return [] if name in (b"", b".", b"..") else [name]
    return list(dict.fromkeys([name, *(each.removesuffix(b"/") for each in _short_forms(name))]))


def long_start(name: bytes) -> bytes | None:
    """Returns the start of the long names that a name on the mount may stand for; None: of none."""
    match = _LONG_FORM.fullmatch(name)
    return None if match is None else match[1]


def is_long_form(name: bytes, suffix: bytes) -> bool:
    """Returns whether a name on the mount may stand for this entry, which is a long one."""
    if not is_odd(suffix) or is_hidden(suffix):
        return False
    return name in (spelled(suffix), spelled(suffix.removesuffix(b"/")))


def find(t: Transaction, parent: int, name: bytes) -> bytes | None:
    """Returns the entry that an odd form stands for, if no ordinary name is spelled so."""
    prefix = keys.entries(parent)
    for suffix in _candidates(t, prefix, name):
        if t.get(prefix + suffix) is not None and shown(t, parent, suffix) == name:
            return suffix
    return None


def _candidates(t: Transaction, prefix: bytes, name: bytes) -> list[bytes]:
    found = _short_forms(name)
    stem = long_start(name)
    return found if stem is None else found + _long_names(t, prefix, stem, name)


def _short_forms(name: bytes) -> list[bytes]:
    found: list[bytes] = []
    if name in (b"%", b"%%"):
        found = [b"/", b""]
    for raw in (b".", b".."):
        if name.rstrip(b"%") == _SPELLED[raw]:
            found += [raw, raw + b"/"]
    if name.endswith(b"%") and len(name) > 1:
        found.append(name[:-1] + b"/")
    return found


def _long_names(t: Transaction, prefix: bytes, stem: bytes, name: bytes) -> list[bytes]:
    start = prefix + stem
    for key, _ in t.scan(start, keys.after(start)):
        suffix = key[len(prefix) :]
        if is_odd(suffix) and not is_hidden(suffix) and spelled(suffix) == name:
            return [suffix]
    return []


def _unless_taken(t: Transaction, prefix: bytes, name: bytes) -> bytes | None:
    if len(name) > LONGEST or t.get(prefix + name) or t.get(prefix + name + b"/"):
        return None
    return name


def _has_content(t: Transaction, prefix: bytes) -> bool:
    value = t.get(prefix)
    record = None if value is None else t.get(keys.INODE + value)
    return record is not None and unpack_inode(record).size > 0
