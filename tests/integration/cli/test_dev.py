"""`./dev` on machines that lack something, made up of stubs: no package is really installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

DEV = Path(__file__).resolve().parents[3] / "dev"
BASICS = ("bash", "cat", "cut", "dirname", "env", "flock", "mktemp", "rm", "sha256sum", "tail")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A directory of commands without fusermount3, apt-get and sudo."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in BASICS:
        found = shutil.which(name)
        assert found is not None
        (commands / name).symlink_to(found)
    return commands


def stub(commands: Path, name: str, script: str) -> None:
    path = commands / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def dev(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DEV, *arguments],
        env={**os.environ, "PATH": str(path) if path else os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_command() -> None:
    done = dev("help")
    assert done.returncode == 0
    for name in (
        "up",
        "down",
        "kvfs",
        "python",
        "cluster",
        "test",
        "fuzz",
        "check",
        "bench",
        "lock",
    ):
        assert f"\n  {name} " in done.stdout


def interpreter(commands: Path, *, optimized: bool, complete: bool = True) -> Path:
    """A stub that says so of itself, and makes no environment."""
    commands.mkdir(exist_ok=True)
    script = f"""case "$2" in
*enable-optimizations*) exit {0 if optimized else 1} ;;
*ensurepip*) exit {0 if complete else 1} ;;
*venv*) exit 1 ;;
*platform*) echo 3.11.9 ;;
*) exit 0 ;;
esac"""
    stub(commands, "python3.11", script)
    return commands / "python3.11"


def chosen(*places: Path, **environment: str) -> str:
    """What find_python takes from these directories, and how it is described."""
    script = """source <(sed -n '/^python_is_recent/,/^# What pip needs/p' "$0")
python=$(find_python) && describe_python "$python" """
    path = ":".join(str(each) for each in places)
    return subprocess.run(
        [shutil.which("bash") or "bash", "-c", script, DEV],
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout


def test_an_optimized_interpreter_is_taken_before_one_that_comes_first(
    bare: Path, tmp_path: Path
) -> None:
    (bare / "sed").symlink_to(shutil.which("sed") or "sed")
    slow = interpreter(tmp_path / "slow", optimized=False)
    fast = interpreter(tmp_path / "fast", optimized=True)
    lacking = interpreter(tmp_path / "lacking", optimized=True, complete=False)
    slow_first = (slow.parent, lacking.parent, fast.parent, bare)
    assert chosen(*slow_first) == f"{fast} (3.11.9, an optimized build)\n"
    assert chosen(*slow_first, PYTHON=str(slow)).startswith(f"{slow} (3.11.9, not optimized")
    assert chosen(slow.parent, lacking.parent, bare).startswith(f"{slow} (3.11.9, not optimized")


def test_an_unknown_command_is_refused() -> None:
    done = dev("launch")
    assert done.returncode == 69
    assert done.stderr.endswith("dev: unknown command 'launch'\n")


def test_without_root_the_line_to_run_is_printed(bare: Path) -> None:
    stub(bare, "id", "echo 1000")
    stub(bare, "sudo", "exit 1")
    stub(bare, "apt-get", "exit 1")
    done = dev("kvfs", "--version", path=bare)
    assert done.returncode == 69
    assert done.stderr == (
        "dev: missing OS packages, run: sudo apt-get install -y --no-install-recommends fuse3\n"
    )


def test_root_installs_what_is_missing_after_one_update(bare: Path, tmp_path: Path) -> None:
    """The first install fails, as on a machine whose package lists were never fetched."""
    calls = tmp_path / "calls"
    stub(bare, "id", "echo 0")
    stub(
        bare,
        "apt-get",
        f'echo "$*" >>{calls}\n'
        f"[ -e {tmp_path}/updated ] && exit 0\n"
        f'case "$*" in *update*) : >{tmp_path}/updated;; *) exit 100;; esac',
    )
    done = dev("bench", "nonesuch", path=bare)
    assert "dev: installing OS packages: fuse3" in done.stderr
    verbs = [line.split("DPkg::Lock::Timeout=300 ")[1] for line in calls.read_text().splitlines()]
    assert verbs == [
        "install --no-install-recommends fuse3",
        "update --no-install-recommends",
        "install --no-install-recommends fuse3",
    ]


def test_without_apt_the_packages_are_named(bare: Path) -> None:
    stub(bare, "id", "echo 0")
    done = dev("kvfs", "--version", path=bare)
    assert done.returncode == 69
    assert done.stderr.endswith("install what Debian calls: fuse3\n")


def test_the_interpreter_that_was_chosen_must_be_recent(bare: Path, tmp_path: Path) -> None:
    """In a checkout of its own, which has no environment yet."""
    for name in ("dev", "setup.cfg", "pyproject.toml", "requirements.lock"):
        shutil.copy(DEV.parent / name, tmp_path / name)
    stub(bare, "fusermount3", "")
    stub(bare, "python3.9", "exit 1")
    done = subprocess.run(
        [tmp_path / "dev", "python"],
        env={"PATH": str(bare), "PYTHON": "python3.9"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 69
    assert done.stderr == "dev: PYTHON=python3.9 is not a Python 3.11 or newer\n"
