"""What somebody else puts where a node keeps data: refused at the start, and opened at no door."""

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from kvfs.base.errors import KvfsError
from kvfs.client import Client
from kvfs.client.mount.backing_file import open_backing
from kvfs.client.mount.mount_create import new_file
from tests.cluster.waiting import wait_until
from tests.integration.harness import CannotStart, Node, best_mode, kvfs
from tests.integration.posix import ALICE, as_user, needs_root, refused
from tests.integration.s3 import S3

pytestmark = needs_root
SECRET = b"root's alone"


@pytest.fixture
def common() -> Iterator[Path]:
    """A directory in which all users make theirs."""
    path = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir="/tmp")).resolve()
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


def test_a_tier_made_by_another_user_is_refused(common: Path) -> None:
    tier = common / "kvfs"
    with as_user(ALICE):
        tier.mkdir(mode=0o777)
    node = Node.make(best_mode(), "--tier", f"ssd={tier}:1GiB")
    try:
        with pytest.raises(CannotStart, match=f"{tier} belongs to uid {ALICE}") as told:
            node.up()
        assert told.value.code == 5
        assert os.listdir(tier) == []
        tier.rmdir()
        node.up()  # its own, made in a directory of all users
        assert tier.stat().st_mode & 0o777 == 0o700
        with as_user(ALICE), refused(errno.EPERM, errno.EACCES):
            tier.rename(common / "away")
    finally:
        node.remove()


@pytest.mark.parametrize("options", ["size=64m,mode=0700", "size=64m"], ids=["ours", "everybody's"])
def test_a_tmpfs_is_lent_as_it_is_or_a_directory_below_it(common: Path, options: str) -> None:
    """One that is mounted as README says, and one as containers have it: all users may write."""
    hot = common / "hot"
    hot.mkdir()
    node = Node.make(best_mode(), "--tier", f"ram={hot}:32MiB")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "kvfs", hot], check=True)
    try:
        if "mode" not in options:
            with pytest.raises(CannotStart, match="others may write in the tier") as told:
                node.up()
            assert f"name a directory below it, such as {hot}/kvfs" in str(told.value)
            hot = hot / "kvfs"
            node.flags = ("--tier", f"ram={hot}:32MiB")
        node.up()
        assert hot.stat().st_mode & 0o777 == 0o700
        assert (hot / "kvfs-place").exists()
    finally:
        node.remove()
        subprocess.run(["umount", common / "hot"], check=True)


def test_a_data_file_that_became_a_link_is_opened_at_no_door(s3: S3, bucket: str) -> None:
    secret = s3.node.home / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    path = s3.mount / bucket / "file"
    path.write_bytes(b"x" * len(SECRET))
    name = f"{path.stat().st_ino:016x}.*"
    (data,) = (s3.node.store / "data").glob(f"???/{name}")

    def is_closed() -> bool:
        """No descriptor of it is left in the node."""
        done = subprocess.run(
            ["find", f"/proc/{s3.node.pid}/fd", "-lname", str(data)],
            capture_output=True,
            check=False,
        )
        return not done.stdout

    (s3.mount / bucket / "other").write_bytes(b"")
    os.truncate(path, 0)  # lets go of a descriptor that is kept for the next open
    path.write_bytes(b"y" * len(SECRET))
    wait_until(is_closed, "the data file is closed", 30)
    data.unlink()
    data.symlink_to(secret)
    for flags in (os.O_RDONLY, os.O_RDWR):
        with refused(errno.EIO):
            os.close(os.open(path, flags))
    with Client(s3.node.store) as client, pytest.raises((KvfsError, OSError)):
        client.get(f"/{bucket}/file")
    with pytest.raises(ClientError):
        s3.client("admin").get_object(Bucket=bucket, Key="file")
    assert secret.read_bytes() == SECRET
    assert f"the data file {data} is reached through a symbolic link" in s3.node.log
    data.unlink()


def test_a_store_within_a_directory_of_another_user_is_refused(common: Path) -> None:
    node = Node.make(best_mode())
    try:
        theirs = common / "theirs"
        with as_user(ALICE):
            theirs.mkdir()
        node.store.symlink_to(theirs / "store")
        with pytest.raises(CannotStart, match=f"{theirs} belongs to uid {ALICE}"):
            node.up()
    finally:
        node.remove()
    assert not (theirs / "store").exists()


def test_the_store_that_another_users_mount_names_is_not_entered() -> None:
    """The mount is that of a user, the store root's own: what such a mount says of its store may be
    a lie."""
    node = Node.make(best_mode())
    node.inside = ("setpriv", "--ruid", str(ALICE))
    try:
        node.up()
        path = node.mount / "models" / "file"
        path.write_bytes(b"x" * 1000)
        done = kvfs("backing", str(path), "--for", "0", "--store", str(node.store))
        assert done.returncode == 5, done
        assert f"{path} is on a mount of uid {ALICE}" in done.stderr
        backing = open_backing(path)
        assert os.fstat(backing.fd).st_dev == path.stat().st_dev
        os.close(backing.fd)
        with new_file(node.mount / "models" / "new", 3) as fd:
            assert os.fstat(fd).st_dev == path.stat().st_dev
            os.write(fd, b"new")
        assert (node.mount / "models" / "new").read_bytes() == b"new"
    finally:
        node.remove()


def test_no_process_is_ended_for_a_lock_that_somebody_else_put_there(common: Path) -> None:
    lock, command = common / "pidfile", ("sh", "-c", "echo held; exec sleep 60")
    holder = subprocess.Popen(["flock", "--no-fork", str(lock), *command], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        lock.write_text(f"{holder.pid}\n")
        store = common / "store"
        with as_user(ALICE):
            store.mkdir()
        os.link(lock, store / "lock")
        done = kvfs("down", "--store", str(store), "--timeout", "1")
        assert done.returncode == 5, done
        assert f"{store} belongs to uid {ALICE}" in done.stderr
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.communicate()
