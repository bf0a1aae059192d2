"""Passwords of URLs on the command line, which are written over.

It stands in everybody's list of processes. It is written over for as long as the process and those
that it forks run; until then, some hundredths of a second, it can be read: a password file cannot.

It imports little: it runs before anything else.
"""

import sys

from kvfs.base.printable import passwords


def hide() -> None:
    """Writes over the passwords in this process's arguments, as others see them; the program's own
    `sys.argv` stays. Does nothing where the system does not tell where they are."""
    if not any(True for each in sys.argv for _ in passwords(each)):
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
    arguments = ctypes.string_at(start, end - start).decode("latin-1")  # a letter for each byte
    for first, last in passwords(arguments):
        ctypes.memset(start + first, ord("x"), last - first)
