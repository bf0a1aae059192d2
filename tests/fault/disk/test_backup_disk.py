"""The disk that backups go to is full."""

import json
import os
from pathlib import Path

import trio

from tests.contract.small_node import small_node
from tests.fault.disks import disk
from tests.integration.harness import kvfs

MIB = 1 << 20


def test_a_full_disk_is_named_and_the_next_run_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with small_node(store) as node:
        space = node.namespace("models", kind="durable")
        for number in range(10):
            node.write(space, f"file-{number}", os.urandom(6 * MIB))
        trio.run(node.sealer.settle)
    with disk(tmp_path / "target", "ext4", 128 * MIB) as target:
        foreign, place = target.mountpoint / "foreign", str(target.mountpoint / "backups")
        foreign.write_bytes(bytes(70 * MIB))
        command = ("backup", "create", "--store", str(store), "--backup", place, "--json")
        refused = kvfs(*command)
        assert (refused.returncode, refused.stdout) == (6, "")
        assert f"{place} is full" in refused.stderr
        listed = kvfs("backup", "list", "--backup", place, "--json")
        assert json.loads(listed.stdout) == []
        there = sum(path.stat().st_size for path in Path(place, "large").rglob("*"))
        assert there >= 12 * MIB
        foreign.unlink()
        made = kvfs(*command)
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["files"] == 10
        assert list(Path(place).rglob(".*")) == []
