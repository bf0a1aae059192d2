"""A container's layers on the mount: overlayfs over it."""

import contextlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import base_directory
from tests.integration.posix import folder, needs_root, touch

pytestmark = needs_root


@contextlib.contextmanager
def overlay(layers: Path) -> Iterator[Path]:
    """`lower` below `upper`, put together."""
    merged = Path(tempfile.mkdtemp(prefix="kvfs-overlay-", dir=base_directory()))
    parts = {"lowerdir": "lower", "upperdir": "upper", "workdir": "work"}
    options = ",".join(f"{option}={layers / name}" for option, name in parts.items())
    command = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        if done.returncode and "unknown filesystem" in done.stderr:
            pytest.skip("this kernel has no overlayfs")
        assert done.returncode == 0, done.stderr
        try:
            yield merged
        finally:
            subprocess.run(["umount", str(merged)], check=True)
    finally:
        merged.rmdir()


def test_layers_of_a_container(here: Path) -> None:
    lower, upper, _ = (folder(here / name) for name in ("lower", "upper", "work"))
    touch(lower / "removed", 0o644, b"below")
    touch(lower / "changed", 0o755, b"below")
    folder(lower / "tree")
    touch(lower / "tree" / "file", 0o644, b"below")
    with overlay(here) as merged:
        (merged / "removed").unlink()
        with (merged / "changed").open("ab") as file:
            file.write(b" and above")
        (merged / "tree" / "file").rename(merged / "moved")
        (merged / "new").write_bytes(b"above")
        os.symlink("new", merged / "link")
        assert sorted(os.listdir(merged)) == ["changed", "link", "moved", "new", "tree"]
        assert os.listdir(merged / "tree") == []
        assert (merged / "changed").read_bytes() == b"below and above"
    for gone in (upper / "removed", upper / "tree" / "file"):
        assert stat.S_ISCHR(gone.lstat().st_mode)
        assert gone.lstat().st_rdev == 0
    assert (lower / "removed").read_bytes() == b"below"
    with overlay(here) as merged:  # what the layers say is there still
        assert sorted(os.listdir(merged)) == ["changed", "link", "moved", "new", "tree"]
        assert (merged / "moved").read_bytes() == b"below"
        assert (merged / "link").read_bytes() == b"above"
