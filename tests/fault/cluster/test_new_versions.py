"""New content of a durable file on a node of a cluster has a new name on the disk, which outlives
a power cut as the record in the engine does."""

import os
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.contract.redis_servers import RedisServer, killed
from tests.fault.machine import machine, write

FIRST, SECOND = b"1" * 100_000, b"2" * 100_000


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("disks", [1, 2])
def test_what_was_synced_is_there_under_its_new_version(
    tmp_path: Path, disks: int, kind: str
) -> None:
    with killed(RedisServer(tmp_path / "redis")) as engine, machine(tmp_path, kind, disks) as made:
        made.node.flags += ("--engine", engine.url)
        made.node.up()
        for name in ("synced", "closed"):
            write(made.models / name, FIRST)
        made.write_back()
        write(made.models / "synced", SECOND)
        with (made.models / "closed").open("r+b") as file:
            file.write(SECOND)
        write(made.models / "new", FIRST)
        fd = os.open(made.models / "empty", os.O_WRONLY | os.O_CREAT)
        os.fdatasync(fd)
        os.close(fd)
        with Client(made.node.store) as client:
            client.put("/models/put", FIRST)
        made.lose_power()
        made.node.up()
        assert (made.models / "synced").read_bytes() == SECOND
        assert len((made.models / "closed").read_bytes()) == len(FIRST)
        assert (made.models / "new").read_bytes() == FIRST
        assert (made.models / "empty").read_bytes() == b""
        assert (made.models / "put").read_bytes() == FIRST
        assert made.node.status()["quarantine"]["files"] == 0
