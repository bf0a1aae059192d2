"""What lies on the disk behind a file of a store, and when it has checksums."""

import os
from pathlib import Path

import kvfs
from kvfs.client.client_core import Core
from tests.cluster.waiting import wait_until


def data_file(store: Path, key: str) -> Path:
    """Where the file's bytes are."""
    with kvfs.Client(store) as client, client.open(key) as file:
        return Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))


def wait_for_checksums(store: Path, key: str) -> None:
    """The running node makes them once the file was quiet for a while."""
    core = Core(store)

    def are_there() -> bool:
        opened = core.open_file(key)
        try:
            return core.sums_of(opened) is not None
        finally:
            os.close(opened.fd)

    try:
        wait_until(are_there, f"{key} has checksums")
    finally:
        core.close()


def flip(path: Path, offset: int) -> None:
    """One bit rots, and nobody notices: the file's times stay as they were."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
