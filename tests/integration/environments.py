"""Virtual environments of their own for what the tests drive and the project does not depend on.

Each stands in the checkout (git-ignored); the first run makes it from its requirements files and
later runs reuse it until one of those changes.
"""

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.integration.harness import ROOT

HERE: Final = Path(__file__).resolve().parent


def lmcache() -> Path:
    """The interpreter that has LMCache and safetensors, with torch."""
    files = (HERE / "requirements-torch.txt", HERE / "requirements-lmcache.txt")
    return environment(".venv-lmcache", *files)


def s3_clients() -> Path:
    """The interpreter beside which the clients of the S3 API are."""
    return environment(".venv-s3-clients", HERE / "requirements-s3-clients.txt")


def mooncake() -> Path:
    """The interpreter that has Mooncake's transfer engine; skips the test where a library that it
    needs is missing."""
    interpreter = environment(".venv-mooncake", HERE / "requirements-mooncake.txt")
    command = [interpreter, "-c", "import mooncake.engine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"Mooncake's transfer engine: {done.stderr.strip().splitlines()[-1]}")
    return interpreter


def environment(name: str, *requirements: Path) -> Path:
    """The interpreter of the environment `name`, made when it is missing or out of date; skips the
    test where a package is not to be had for this Python."""
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in requirements)).hexdigest()
    home = ROOT / name
    stamp, interpreter = home / "stamp", home / "bin" / "python"
    with open(ROOT / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
            for file in requirements:
                _install(interpreter, file)
            stamp.write_text(wanted)
    return interpreter


def _install(interpreter: Path, requirements: Path) -> None:
    command = [interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "2"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "-r", requirements],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution" in done.stderr:
        pytest.skip(f"not to be had for this Python: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
