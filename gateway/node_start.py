"""How a node with its mount begins, and how the next daemon is started if its mount outlives it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

_PACKAGES: Final = Path(__file__).resolve().parent.parent
TAKE_OVER: Final = "--take-over"
"""The option with which a daemon only goes on with a mount that waits for one."""
HAND_OVER: Final = "--hand-over"
"""The option with which it asks the running daemon for its mount before."""
HANDED_OVER: Final = 75
"""The exit code of a service that leaves its mount to the next daemon, which its manager starts."""
_ONCE: Final = (TAKE_OVER, HAND_OVER, "--replace")
"""Options of one start, not of those that follow it."""


class Successor(NamedTuple):
    """The command line by which the next daemon is started, as this one was."""

    arguments: Sequence[str]
    directory: str

    def command(self) -> list[str]:
        """Returns the program with its arguments, of the packages that run now."""
        program = f"import sys; sys.path[0] = {str(_PACKAGES)!r}; from cli.main import main; main()"
        given = [each for each in self.arguments if each not in _ONCE]
        return [sys.executable, "-c", program, *given, TAKE_OVER]


class Start(NamedTuple):
    """How a node begins."""

    mounted: bool
    replaces: bool = False
    """Whether it ends the node that runs on the store before, and takes its S3 listeners."""
    takes_over: bool = False
    """Whether it only goes on with the mount of another daemon."""
    asks: bool = False
    """Whether it asks the running daemon for that mount, and takes its S3 listeners."""
    successor: Successor | None = None
    """The next daemon, which the holder of the mount starts; None: somebody else does."""
    is_service: bool = False
    """Whether a service manager does."""
