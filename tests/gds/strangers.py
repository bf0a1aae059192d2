"""Processes of another user, who may enter neither the store nor what else belongs to root."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.integration.harness import ROOT
from tests.integration.posix import ALICE

_OPEN: Final = """
at=$1; closed=$2; user=$3; shift 3
for name in $1; do
    mkdir -p "$at/$name"
    mount --bind "$closed/$name" "$at/$name"
done
shift
test -z "$closed" || mount --rbind "$at" "$closed"
exec setpriv --reuid "$user" --regid "$user" --clear-groups "$@"
"""
"""Where the interpreter lies in a directory closed to others, it is open to this process."""


def inside(scratch: Path) -> tuple[str, ...]:
    """What stands before the command of such a process. `scratch`: an empty directory. Skips the
    test where that cannot be had."""
    if os.getuid() != 0:
        pytest.skip("to be another user needs root")
    tools = [tool for tool in ("unshare", "setpriv") if shutil.which(tool) is None]
    if tools:
        pytest.skip(f"{tools[0]} is not installed")
    scratch.chmod(0o755)
    needed = [Path(sys.base_prefix).resolve(), Path(sys.prefix), ROOT]
    closed = {each for path in needed if (each := _closed_above(path)) is not None}
    if len(closed) > 1:
        pytest.skip(f"the interpreter lies in several closed directories: {closed}")
    names = {
        path.relative_to(above).parts[0]
        for above in closed
        for path in needed
        if above in path.parents
    }
    places = (
        str(scratch),
        *(map(str, closed) if closed else ("",)),
        str(ALICE),
        " ".join(sorted(names)),
    )
    words = ("unshare", "--mount", "sh", "-ec", _OPEN, "sh", *places)
    done = subprocess.run(
        [*words, sys.executable, "-V"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"another user cannot run the interpreter: {done.stderr.strip()}")
    return words


def _closed_above(path: Path) -> Path | None:
    """The outermost directory above it that others may not enter."""
    return next((each for each in reversed(path.parents) if not each.stat().st_mode & 1), None)
