"""A disk that is mounted anew within one boot of the machine, without what was not synced: a volume
that was detached by force, or set back to a snapshot."""

import subprocess
from pathlib import Path

import pytest

from kvfs.meta.lmdb.boot import boot_of
from tests.fault.disks import disk
from tests.fault.machine import machine, write

_MIB = 1 << 20


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_fsynced_files_outlive_a_disk_that_was_detached(tmp_path: Path, kind: str) -> None:
    with machine(tmp_path, kind) as made:
        made.node.up()
        made.write_back()  # so that the metadata look whole, and are old
        names = [f"file-{number}" for number in range(200)]
        for name in names:
            write(made.models / name, name.encode())
        made.lose_power()
        made.node.up()
        assert sorted(each.name for each in made.models.iterdir()) == sorted(names)
        assert all((made.models / name).read_bytes() == name.encode() for name in names)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_what_was_not_synced_is_whole_or_gone(tmp_path: Path, kind: str) -> None:
    """Its record is on disk, with the length that its data had in memory."""
    with machine(tmp_path, kind) as made:
        made.node.up()
        made.write_back()
        (made.models / "young").write_bytes(b"y" * _MIB)
        (made.node.mount / "cache" / "young").write_bytes(b"y" * _MIB)
        write(made.models / "kept", b"kept")
        made.lose_power()
        made.node.up()
        assert (made.models / "kept").read_bytes() == b"kept"
        for path in (made.models / "young", made.node.mount / "cache" / "young"):
            assert not path.exists() or path.read_bytes() == b"y" * _MIB


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_an_orderly_stop_leaves_nothing_doubtful(tmp_path: Path, kind: str) -> None:
    """A file that was closed just before it, in a durable namespace, and never synced."""
    with machine(tmp_path, kind) as made:
        made.node.up()
        (made.models / "young").write_bytes(b"y" * _MIB)
        made.node.down()
        made.lose_power()
        made.node.up()
        assert (made.models / "young").read_bytes() == b"y" * _MIB
        assert "mended" not in made.node.log


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_boot_is_one_of_the_machine_and_of_its_disk(tmp_path: Path, kind: str) -> None:
    """A bind mount, as a container has it that was started again, is the same disk."""
    with disk(tmp_path, kind) as made:
        before = boot_of(made.mountpoint)
        bound = tmp_path / "bound"
        bound.mkdir()
        subprocess.run(["mount", "--bind", made.mountpoint, bound], check=True)
        assert boot_of(bound) == before
        subprocess.run(["umount", bound], check=True)
        made.power_cycle()
        assert boot_of(made.mountpoint) != before
        assert boot_of(made.mountpoint, tmp_path) != boot_of(made.mountpoint)
