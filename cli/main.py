"""The console script. Importing what a command needs often takes longer than the command itself, so
it is done where an interrupt is expected."""

import sys

from cli import hidden_passwords, interrupts

TYPE_CHECKING = False  # see `interrupts`
if TYPE_CHECKING:
    from typing import NoReturn


def main(arguments: list[str] | None = None) -> "NoReturn":
    """Runs a command, and ends with its exit code; interrupted, at once."""
    interrupts.handle_by(interrupts.end)
    hidden_passwords.hide()
    from cli.root import run

    try:
        interrupts.raise_it()
        code = run(arguments)
    except KeyboardInterrupt:
        interrupts.end()
    finally:
        interrupts.handle_by(interrupts.end)
    sys.exit(code)
