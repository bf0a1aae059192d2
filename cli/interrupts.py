"""Ctrl-C outside a command: while one is imported, and while Python ends.

Imported first of all, so it imports little: until then an interrupt is a traceback.
"""

import os
import signal

TYPE_CHECKING = False  # to import typing takes as long as all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

INTERRUPTED = 130
"""The exit code."""


def end(*_: object) -> "NoReturn":
    """Ends the process at once and silently: a signal handler. Threads are not waited for, which
    may be waiting for an answer."""
    os._exit(INTERRUPTED)


def handle_by(handler: "Callable[[int, FrameType | None], object]") -> None:
    """Handles interrupts by `handler`. If they are ignored, as in the background of a shell, they
    stay so."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def raise_it() -> None:
    """Raises a KeyboardInterrupt, as Python does."""
    handle_by(signal.default_int_handler)
