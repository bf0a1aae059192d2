"""Encryption at rest: told and accepted where the storage encrypts, refused where it does not."""

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.datastore.kernel.disk_encryption import encrypted_by
from s3api.auth.key_holders import ADMINISTRATOR
from tests.fault.disks import disk
from tests.integration.harness import Node, best_mode
from tests.integration.harness import kvfs as command
from tests.integration.s3 import S3, refused, serving, users_of

AES256 = {"ServerSideEncryption": "AES256"}
DEFAULT = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]}
_ADD_KEY = 0xC050_6617  # FS_IOC_ADD_ENCRYPTION_KEY
_SET_POLICY = 0x800C_6613  # FS_IOC_SET_ENCRYPTION_POLICY


def encrypt(directory: Path) -> None:
    """What goes into this directory, which is empty, is encrypted with a key of this moment."""
    key = bytearray(struct.pack("II32xII32x", 2, 0, 64, 0) + os.urandom(64))
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _ADD_KEY, key)
        policy = struct.pack("BBBB4x16s", 2, 1, 4, 3, bytes(key[8:24]))
        fcntl.ioctl(fd, _SET_POLICY, policy)
    finally:
        os.close(fd)


@contextlib.contextmanager
def on_fscrypt(directory: Path) -> Iterator[Path]:
    """An encrypted directory on a disk of its own."""
    with disk(directory, "ext4") as made:
        made.unmount()
        subprocess.run(["tune2fs", "-O", "encrypt", made.image], check=True, capture_output=True)
        made.mount()
        home = made.mountpoint / "home"
        home.mkdir()
        try:
            encrypt(home)
        except OSError as error:
            pytest.skip(f"this kernel has no fscrypt: {error}")
        yield home


def check_told(client: Any, bucket: str) -> None:
    """In the answers to all that makes or reads an object."""
    named = {"Bucket": bucket, "Key": "k"}
    told = [client.put_object(Body=b"x", **named, **AES256), client.put_object(Body=b"x", **named)]
    copied = client.copy_object(Bucket=bucket, Key="c", CopySource=f"{bucket}/k", **AES256)
    upload = client.create_multipart_upload(**named, **AES256)
    which = {"UploadId": upload["UploadId"], **named}
    part = client.upload_part(PartNumber=1, Body=b"x", **which)
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    done = client.complete_multipart_upload(MultipartUpload=parts, **which)
    got = client.get_object(**named)
    got["Body"].close()
    told += [copied, upload, part, done, got, client.head_object(**named)]
    assert [each.get("ServerSideEncryption") for each in told] == ["AES256"] * len(told)


def test_what_the_administrator_says_is_told() -> None:
    with serving("--encrypted-storage", "yes") as s3:
        s3.add_user("main")
        client, bucket = s3.client(), s3.new_bucket()
        check_told(client, bucket)
        named = {"Bucket": bucket, "Key": "k"}
        with refused(501, "NotImplemented"):
            client.put_object(Body=b"x", ServerSideEncryption="aws:kms", **named)
        with refused(501, "NotImplemented"):
            client.put_object(
                Body=b"x", SSECustomerAlgorithm="AES256", SSECustomerKey=b"k" * 32, **named
            )
        with refused(404, "ServerSideEncryptionConfigurationNotFoundError"):
            client.get_bucket_encryption(Bucket=bucket)
        client.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration=DEFAULT)
        kept = client.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]
        assert kept["Rules"][0]["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
        kms = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms"}}]}
        with refused(501, "NotImplemented"):
            client.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration=kms)
        client.delete_bucket_encryption(Bucket=bucket)
        with refused(404, "ServerSideEncryptionConfigurationNotFoundError"):
            client.get_bucket_encryption(Bucket=bucket)


def test_a_store_on_fscrypt_is_encrypted(tmp_path: Path) -> None:
    with on_fscrypt(tmp_path / "disk") as home:
        assert encrypted_by(str(home)) == "fscrypt"
        assert encrypted_by(str(home.parent)) == ""
        (home / "mnt").mkdir()
        node = Node(best_mode(), home, ("--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0"))
        node.up()
        try:
            with users_of(node) as users:
                s3 = S3(node, {ADMINISTRATOR: users.find(ADMINISTRATOR)})
            check_told(s3.client("admin"), s3.new_bucket("admin"))
            shown = command("doctor", "--store", str(node.store)).stdout
            assert "AES256 is accepted: fscrypt" in shown
        finally:
            for client in s3.clients.values():
                client.close()
            node.down()


def test_devices_that_encrypt_are_told_from_others(tmp_path: Path) -> None:
    """LVM or an array over dm-crypt encrypts, where all that is below does; integrity does not."""
    device = os.stat(tmp_path).st_dev
    block = tmp_path / "sys" / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    block.mkdir(parents=True)

    def make(where: Path, uuid: str) -> None:
        (where / "dm").mkdir(parents=True)
        (where / "dm" / "uuid").write_text(uuid)

    def found() -> str:
        return encrypted_by(str(tmp_path), tmp_path / "sys")

    assert found() == ""
    make(block, "LVM-abc")
    assert found() == ""
    make(block / "slaves" / "dm-1", "CRYPT-LUKS2-abc-name")
    assert found() == "dm-crypt"
    make(block / "slaves" / "dm-2", "CRYPT-VERITY-abc-name")
    assert found() == ""
    (block / "dm" / "uuid").write_text("CRYPT-LUKS1-abc-name")
    assert found() == "dm-crypt"
