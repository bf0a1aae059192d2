"""Appends in libfuse mode: the kernel says where they go, and may not know how long the file is."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from pyfuse3 import FUSEError

from gateway.fuse.channel.libfuse import LibfuseOperations
from gateway.fuse.files.file_ranges import Ranges


def test_a_line_goes_nowhere_but_to_the_end(tmp_path: Path) -> None:
    forgotten: list[int] = []
    with open(tmp_path / "f", "w+b", buffering=0) as data:
        data.write(b"theirs")
        file = SimpleNamespace(fd=data.fileno(), ino=7)
        handle = SimpleNamespace(file=file, appends=True)
        open_files: Any = SimpleNamespace(
            handle=lambda _fh: handle, forget_content=forgotten.append
        )
        operations: Any = SimpleNamespace(open_files=open_files, ranges=Ranges(open_files))
        adapter: Any = LibfuseOperations(operations)
        with pytest.raises(FUSEError) as refused:
            trio.run(adapter.write, 1, 0, b"ours")
        assert refused.value.errno == errno.ESTALE
        assert forgotten == [7]
        assert trio.run(adapter.write, 1, 6, b"ours") == 4
    assert (tmp_path / "f").read_bytes() == b"theirsours"
