"""The power goes: what a client committed, or wrote stably, is there; the write verifier is another
one, so that it sends the rest again."""

import subprocess
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.fault.disks import EVERYTHING, LOG_FLUSHED, NO_LOG_FLUSH
from tests.fault.machine import machine
from tests.integration.harness import kvfs
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.rpc import AuthSys
from tests.nfs.status import NfsError
from tests.nfs.v3_types import Stability
from tests.nfs.v4 import Owner
from tests.nfs.v4_operations import Guarded
from tests.ports import free_port

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
ALICE = AuthSys(uid=4001, gid=4001)
SIZE = 100_000


def unmount_below(directory: Path) -> None:
    """What a killed node left mounted on its disk, which could not be unmounted beneath it."""
    with open("/proc/self/mountinfo") as table:
        points = [line.split()[4] for line in table]
    for each in sorted((p for p in points if p.startswith(f"{directory}/")), reverse=True):
        subprocess.run(["umount", "--lazy", each], check=False, capture_output=True)


@pytest.mark.parametrize(
    ("kind", "how"), [("ext4", NO_LOG_FLUSH), ("ext4", EVERYTHING), ("xfs", LOG_FLUSHED)]
)
def test_what_was_committed_outlives_the_power(tmp_path: Path, kind: str, how: int) -> None:
    port, mount_port = free_port(), free_port()
    flags = "--nfs", f"127.0.0.1:{port}", "--nfs-v3", "--nfs-mount-port", str(mount_port)
    with machine(tmp_path, kind, flags=flags) as made:
        made.node.up()
        door = Door(made.node, port, mount_port)
        door.exported("models", mode=0o777)
        made.write_back()
        client, root = door.v3(ALICE), door.mounts().mount("/models").handle
        verifiers = set()
        for number in range(4):
            handle = client.create(root, f"committed{number}").handle
            client.write(handle, 0, bytes([number]) * SIZE, Stability.UNSTABLE)
            verifiers.add(client.commit(handle))
            handle = client.create(root, f"stable{number}").handle
            assert client.write(handle, 0, bytes([number]) * SIZE).committed is Stability.FILE_SYNC
        client4 = door.v41(ALICE)
        opened = client4.open(client4.walk("models"), "version4", Owner(), creation=Guarded())
        client4.write(opened.handle, 0, b"4" * SIZE, Stability.UNSTABLE, opened.stateid)
        client4.commit(opened.handle)
        lost = client.create(root, "uncommitted").handle
        client.write(lost, 0, b"u" * SIZE, Stability.UNSTABLE)
        door.close()
        server = made.node.status()["nfs"]["pid"]

        def has_ended() -> None:
            wait_until(lambda: not Path(f"/proc/{server}").exists(), "the server has ended")
            unmount_below(made.node.store)

        made.lose_power([how], has_ended)
        made.node.up()
        door = Door(made.node, port, mount_port)
        for number in range(4):
            for name in ("committed", "stable"):
                found = (made.models / f"{name}{number}").read_bytes()
                assert found == bytes([number]) * SIZE
        client, root = door.v3(ALICE), door.mounts().mount("/models").handle
        assert client.read(client.lookup(root, "version4").handle, 0, SIZE).data == b"4" * SIZE
        try:
            again = client.write(lost, 0, b"u" * SIZE, Stability.UNSTABLE)
        except NfsError as error:
            assert "STALE" in error.name  # even its name is gone: the client makes it again
            again = client.write(client.create(root, "uncommitted").handle, 0, b"u" * SIZE)
        assert again.verifier not in verifiers
        door.close()
        made.node.down()
        done = kvfs("fsck", "--store", str(made.node.store))
        assert done.returncode == 0, done.stdout + done.stderr
