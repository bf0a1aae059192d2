"""Virtual environments of their own for what the tests drive and the project does not depend on.

Each stands in the checkout (git-ignored); the first run makes it from its requirements files and
later runs reuse it until one of those changes.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pytest

from tests.integration.harness import ROOT

HERE: Final = Path(__file__).resolve().parent
VLLM: Final = "0.33.0"


def lmcache() -> Path:
    """The interpreter that has LMCache and safetensors, with torch."""
    files = (HERE / "requirements-torch.txt", HERE / "requirements-lmcache.txt")
    return environment(".venv-lmcache", *files)


def s3_clients() -> Path:
    """The interpreter beside which the clients of the S3 API are."""
    return environment(".venv-s3-clients", HERE / "requirements-s3-clients.txt")


def fsspec() -> Path:
    """The interpreter that has pandas, pyarrow and datasets."""
    return environment(".venv-fsspec", HERE / "requirements-fsspec.txt")


def readers() -> Path:
    """The interpreter that has readers of safetensors files that `lmcache` has not."""
    return environment(".venv-readers", HERE / "requirements-readers.txt")


def sglang() -> list[Path]:
    """The directories of packages that SGLang's own code runs with, on a CPU."""
    own = environment(".venv-sglang", HERE / "requirements-sglang.txt")
    return [packages(each) for each in (own, readers(), lmcache())]


def vllm() -> tuple[Path, Path]:
    """The interpreter that has what vLLM's own code imports, and the directory of that code: its
    wheel is for GPUs, its sources are read as they are, without kernels."""
    interpreter = environment(".venv-vllm", HERE / "requirements-vllm.txt")
    sources = interpreter.parent.parent / "sources"
    if not sources.exists():
        _fetch_vllm(interpreter, sources)
    return interpreter, sources


def packages(interpreter: Path) -> Path:
    """The directory of an environment's packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return interpreter.parent.parent / "lib" / version / "site-packages"


def _fetch_vllm(interpreter: Path, sources: Path) -> None:
    """pip asks the sources who they are, for which they import torch."""
    command: list[str | Path] = [interpreter, "-m", "pip", "download", "--quiet", "--no-deps"]
    both = (packages(interpreter), packages(lmcache()))
    with tempfile.TemporaryDirectory(dir=sources.parent) as scratch:
        done = subprocess.run(
            [
                *(*command, "--no-binary", ":all:", "--no-build-isolation"),
                *("--dest", scratch, f"vllm=={VLLM}"),
            ],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(map(str, both)),
                "VLLM_TARGET_DEVICE": "empty",
                "VLLM_VERSION_OVERRIDE": VLLM,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if "No matching distribution" in done.stderr:
            pytest.skip(f"vLLM's sources are not to be had: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        (archive,) = Path(scratch).glob("*.tar.gz")
        wanted = f"vllm-{VLLM}/vllm"
        subprocess.run(["tar", "-xf", archive, "-C", scratch, wanted], check=True)
        (Path(scratch) / f"vllm-{VLLM}").rename(sources)


def mooncake() -> Path:
    """The interpreter that has Mooncake's transfer engine; skips the test where a library that it
    needs is missing."""
    interpreter = environment(".venv-mooncake", HERE / "requirements-mooncake.txt")
    command: list[str | Path] = [interpreter, "-c", "import mooncake.engine"]
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
            # Making it anew would empty what other checkouts use, who know nothing of this lock.
            assert not home.is_symlink(), (
                f"{home}, a link, is out of date: make {home.resolve()} anew"
            )
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
            for file in requirements:
                _install(interpreter, file)
            stamp.write_text(wanted)
    return interpreter


def _install(interpreter: Path, requirements: Path) -> None:
    command: list[str | Path] = [interpreter, "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--retries", "2", "--disable-pip-version-check", "-r", requirements],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution" in done.stderr:
        pytest.skip(f"not to be had for this Python: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
