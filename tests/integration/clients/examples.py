"""The programs beside these tests, each in a process of its own whose environment is only what is
said here."""

import os
import subprocess
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).resolve().parent / "programs"
_S: Final = 200


def environ(home: Path, *places: Path, **more: object) -> dict[str, str]:
    """`places`: directories in which modules are found beside the interpreter's own."""
    if places:
        more["PYTHONPATH"] = os.pathsep.join(map(str, places))
    always = {"PATH": os.environ["PATH"], "HOME": str(home)}
    return always | {name: str(value) for name, value in more.items()}


def start(
    interpreter: str | Path, script: str, *arguments: object, env: dict[str, str]
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [interpreter, _HERE / script, *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*running: "subprocess.Popen[str]") -> list[str]:
    """What each printed. Fails where one does not end in time, or with an error."""
    try:
        printed = [each.communicate(timeout=_S)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0] * len(running), "\n".join(printed)
    return printed


def run(interpreter: str | Path, script: str, *arguments: object, env: dict[str, str]) -> str:
    """What it printed."""
    (printed,) = finish(start(interpreter, script, *arguments, env=env))
    return printed
