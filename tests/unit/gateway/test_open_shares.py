"""Each user's share in the open files of a mount: given back where an open fails."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.fuse.files.open_files import OpenFiles
from kvfs.base.descriptors import OpenFileShares
from kvfs.meta.records import Inode


def test_a_descriptor_that_cannot_be_opened_holds_no_share(tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise OSError("the index cannot be read")

    node = SimpleNamespace(
        volume=SimpleNamespace(
            engine=None, index=SimpleNamespace(touch=fail), holders=SimpleNamespace()
        ),
        transfers=SimpleNamespace(is_shared=False),
        engine=None,
        port=None,
        appends=None,
        former_writers=None,
        open_file_shares=OpenFileShares(1000, is_shared=True),
        near=None,
        boot=1,
        is_strict=None,
    )
    memory = SimpleNamespace(attributes=None, content_soon=None)
    registrations = SimpleNamespace(renamed=None, cut=None)
    files = OpenFiles(*cast("Any", (node, registrations, memory)))
    (tmp_path / "data").write_bytes(b"data")
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    inode = cast("Inode", SimpleNamespace(version=0, mode=0o100644, flags=0, atime_ns=0))
    with pytest.raises(OSError, match="the index cannot be read"):
        files.open_descriptor(7, inode, fd, os.O_RDONLY, 1000)
    assert files.shares.held == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
