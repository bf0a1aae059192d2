"""The console script. To import what a command needs takes longer than many a command, so that is
done where an interrupt is awaited."""

import sys

from cli import interrupts

TYPE_CHECKING = False  # see `interrupts`
if TYPE_CHECKING:
    from typing import NoReturn


def main(arguments: list[str] | None = None) -> "NoReturn":
    """Run a command, and end with its exit code; interrupted, at once."""
    interrupts.handle_by(interrupts.end)
    from cli.root import run

    try:
        interrupts.raise_it()
        code = run(arguments)
    except KeyboardInterrupt:
        interrupts.end()
    finally:
        interrupts.handle_by(interrupts.end)
    sys.exit(code)
