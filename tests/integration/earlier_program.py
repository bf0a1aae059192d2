"""Programs of earlier commits, run beside this checkout's."""

import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.integration.harness import ROOT

FORMER: Final = "6f7655283ba92bd4f6ba275920776af4cf230d17"
"""The last commit of the version before: its metadata had schema 1."""
FIRST_HELD: Final = "95e6d543afe6a5561006b81add8c74cb75e29e11"
"""The first one whose mounts, which outlive their daemons, this program goes on with: the journal
of a mount (`gateway.holder.mount_journal`) has had this layout since."""
_PACKAGES: Final = ("kvfs", "gateway", "s3api", "gds", "cli")


def earlier_program(commit: str, here: Path) -> tuple[str, ...]:
    """What stands before a command, so that it is of this commit, which is unpacked `here`; its
    packages are those that this checkout runs with. Skips where the commit is not in this
    checkout's history, as in a shallow clone."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "archive", commit, *_PACKAGES]
    archive = subprocess.run(git, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the earlier program is not in this checkout's history: {archive.stderr!r}")
    subprocess.run(["tar", "-xC", str(here)], input=archive.stdout, check=True)
    return ("env", f"PYTHONPATH={here}")
