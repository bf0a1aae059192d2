"""Small files that are whole at any time: what a disk that fails leaves of them."""

import errno
import os
from pathlib import Path

import pytest

from kvfs.base import private_file
from kvfs.base.errors import Invalid


def test_one_that_cannot_be_written_leaves_the_old_one_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept"
    assert private_file.make(path, b"old")

    def fail(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(os, "fsync", fail)
    for step in (
        lambda: private_file.replace(path, b"new"),
        lambda: private_file.replace(path, b"new", ".draft"),
        lambda: private_file.make(tmp_path / "other", b"new"),
    ):
        with pytest.raises(OSError, match="full"):
            step()
    assert os.listdir(tmp_path) == ["kept"]
    assert path.read_bytes() == b"old"


def test_a_draft_that_a_kill_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".draft").write_bytes(b"half of what was longer")
    private_file.replace(tmp_path / "kept", b"new", ".draft")
    assert os.listdir(tmp_path) == ["kept"]
    assert private_file.read(tmp_path / "kept", 100) == "new"


def test_what_is_there_is_not_made(tmp_path: Path) -> None:
    assert private_file.make(tmp_path / "kept", b"first")
    assert not private_file.make(tmp_path / "kept", b"second")
    assert private_file.read(tmp_path / "kept", 100) == "first"
    assert os.listdir(tmp_path) == ["kept"]


def test_what_others_may_read_is_refused(tmp_path: Path) -> None:
    private_file.replace(tmp_path / "kept", b"x")
    (tmp_path / "kept").chmod(0o640)
    with pytest.raises(Invalid, match="chmod 600"):
        private_file.read(tmp_path / "kept", 100)
