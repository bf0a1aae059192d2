"""Ctrl-C ends a command at once, from its first import to its last step, without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import ROOT

_SLEEPS = """
import atexit, pathlib, time

def sleep():
    pathlib.Path({here!r}).touch()
    time.sleep(600)

{when}
"""


@pytest.mark.parametrize(
    ("module", "when"),
    [("click", "sleep()"), ("sitecustomize", "atexit.register(sleep)")],
    ids=["as it is imported", "as it ends"],
)
def test_an_interrupt_at_either_end_of_a_command_ends_it(
    tmp_path: Path, module: str, when: str
) -> None:
    here = tmp_path / "here"
    (tmp_path / f"{module}.py").write_text(_SLEEPS.format(here=str(here), when=when))
    with subprocess.Popen(
        [sys.executable, "-c", "from cli.main import main; main()", "--version"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd="/",
        text=True,
    ) as process:
        wait_until(here.exists, "it has come there")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")
