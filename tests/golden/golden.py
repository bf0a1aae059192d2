"""What others build on, as readable files beside the tests that make them anew and compare.

A wanted change is accepted by

    KVFS_TEST_ACCEPT=1 ./dev test tests/golden

which writes the files; the commit then shows what changed. Where `CI` is set nothing is accepted.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest

HERE: Final = Path(__file__).resolve().parent
_ACCEPTED: Final = "KVFS_TEST_ACCEPT"
_MOST_LINES: Final = 200


def hold(name: str, lines: Iterable[str]) -> None:
    """Fails where the file `name` has other lines than these."""
    path, text = HERE / name, "".join(f"{line}\n" for line in lines)
    if _accepts(os.environ):
        path.write_text(text)
        return
    held = path.read_text() if path.exists() else ""
    if text != held:
        pytest.fail(_difference(name, held, text), pytrace=False)


def _accepts(environ: Mapping[str, str]) -> bool:
    if environ.get(_ACCEPTED, "") in ("", "0"):
        return False
    if environ.get("CI", "") not in ("", "0", "false"):
        pytest.fail(f"{_ACCEPTED} is set where CI is: nothing is accepted there", pytrace=False)
    return True


def _difference(name: str, held: str, text: str) -> str:
    difference = difflib.unified_diff(
        held.splitlines(), text.splitlines(), f"{name}, as it is held", "as it is now", lineterm=""
    )
    shown = list(difference)[:_MOST_LINES]
    remedy = f"If that is wanted: {_ACCEPTED}=1 ./dev test tests/golden, and commit the file."
    return "\n".join(["Others build on this, and it has changed:", *shown, remedy])
