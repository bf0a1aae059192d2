"""A temporary file of weights to measure with. It is removed at the end, or, if a kill left it, by
the next run in the same place.

A lock (flock, on a file beside it) is held from before it is made until the process ends: a file
whose lock is free is left over. Such locks reach the host, whose name is in that of the
directory.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvfs.base.descriptors import closing
from kvfs.base.errors import Invalid, NoSpace
from kvfs.base.units import format_size

MIB: Final = 1 << 20
LEAST_BYTES: Final = 16 * MIB
_TENSOR_BYTES: Final = 64 * MIB
_CHUNK_BYTES: Final = 8 * MIB
_PAGE: Final = 4096
_PREFIX: Final = f"kvfs-bench-{os.uname().nodename}-"
_NAME: Final = "model.safetensors"
_LOCK: Final = "lock"


@contextlib.contextmanager
def test_file(directory: Path, size: int) -> Iterator[Path]:
    """Makes a file of weights that exists as long as the block lasts. Raises Invalid, NoSpace,
    OSError."""
    if size < LEAST_BYTES:
        raise Invalid(f"a test file has {format_size(LEAST_BYTES)} at least")
    lacking = NoSpace(
        f"{directory} has no room for a test file of {format_size(size)}: --size makes it smaller"
    )
    _remove_left(directory)
    if shutil.disk_usage(directory).free < size:
        raise lacking
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=directory) as home,
        _locked(Path(home)),
    ):
        file = Path(home) / _NAME
        try:
            _write(file, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise lacking from None
        yield file


def _remove_left(directory: Path) -> None:
    """Removes the files that killed runs of this user and host left there; a file that cannot be
    removed stays."""
    for home in directory.glob(f"{glob.escape(_PREFIX)}*"):
        with contextlib.suppress(OSError):
            if home.lstat().st_uid != os.geteuid():
                continue
            with _locked(home):
                if (home / _NAME).exists():
                    shutil.rmtree(home)


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Raises OSError if another process has it locked, or it has gone."""
    with closing(
        os.open(home / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    ) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _write(file: Path, size: int) -> None:
    """Writes tensors of bytes that no disk can compress; their data lie at a multiple of 4 KiB."""
    entries = {
        f"tensor.{number}": {
            "dtype": "U8",
            "shape": [end - begin],
            "data_offsets": [begin, end],
        }
        for number, begin in enumerate(range(0, size, _TENSOR_BYTES))
        for end in [min(begin + _TENSOR_BYTES, size)]
    }
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % _PAGE)
    chunk = memoryview(os.urandom(_CHUNK_BYTES))
    with file.open("wb", buffering=0) as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for begin in range(0, size, len(chunk)):
            rest = chunk[: min(len(chunk), size - begin)]
            while rest:
                rest = rest[out.write(rest) :]
        os.fsync(out.fileno())
