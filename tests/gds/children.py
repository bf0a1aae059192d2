"""Processes of their own that load, for what cannot be tried in the one that tests."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

_S: Final = 120


def run(program: str, *arguments: object, inside: Sequence[str] = ()) -> str:
    """Run a program, which finds the modules that are found here, and its arguments in `sys.argv`;
    what it printed. `inside` stands before the command. Fails where it does not end, or with an
    error."""
    prelude = f"import sys, warnings\nsys.path[:] = {sys.path!r}\nwarnings.simplefilter('ignore')\n"
    done = subprocess.run(
        [*inside, sys.executable, "-c", prelude + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
