"""Passwords of URLs, where others may read them: they are written over.

The command line stands in everybody's list of processes. It is written over for as long as the
process and those that it forks run; until then, some hundredths of a second, it can be read: a
password file cannot.

It imports little: it runs before anything else.
"""

import re
import sys

_URL = re.compile(rb"[a-z][a-z+]*://[^/?#\0:]*:([^/?#\0]+)@", re.IGNORECASE)
"""A URL whose first group is a password: from the first colon to the last at sign of what stands
before its path, as `kvfs.meta.redis.location` reads it."""
SHOWN = b"xxxxx"
"""Stands in place of a password."""


def without(text: str) -> str:
    """Returns a text, with SHOWN in place of the passwords of URLs."""
    found = _URL.sub(
        lambda url: url[0][: url.start(1) - url.start()] + SHOWN + b"@",
        text.encode(errors="surrogateescape"),
    )
    return found.decode(errors="surrogateescape")


def hide() -> None:
    """Writes over the passwords in this process's arguments, as others see them; the program's own
    `sys.argv` stays. Does nothing where the system does not tell where they are."""
    if not any(_URL.search(each.encode(errors="surrogateescape")) for each in sys.argv):
        return
    import ctypes

    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    if not 0 < start < end:
        return
    for found in _URL.finditer(ctypes.string_at(start, end - start)):
        first, last = found.span(1)
        ctypes.memset(start + first, ord("x"), last - first)
