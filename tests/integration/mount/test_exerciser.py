"""The random-operation exerciser in every mode: alone, and on several files at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.integration import exerciser
from tests.integration.conftest import Place

OPERATIONS = int(os.environ.get("KVFS_TEST_OPERATIONS", "3000"))


@pytest.mark.parametrize("seed", range(3 if LONG else 1), indirect=True)
def test_random_operations(here: Path, place: Place, seed: int) -> None:
    done = exerciser.exercise(here, seed, OPERATIONS)
    print(done)
    assert ("lacking" in done) == place.is_bare


def test_random_operations_on_several_files_at_once(here: Path, seed: int) -> None:
    command = [sys.executable, exerciser.__file__, str(here), "--operations", str(OPERATIONS // 2)]
    running = [
        subprocess.Popen(
            [*command, "--seed", str(seed + n)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(3)
    ]
    results = [process.communicate(timeout=250)[0] for process in running]
    assert [p.returncode for p in running] == [0, 0, 0], "\n".join(results)
    assert os.listdir(here) == []
