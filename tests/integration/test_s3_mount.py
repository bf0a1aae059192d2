"""One namespace: what S3 writes is on the mount, and what the mount writes is in S3."""

from tests.integration.s3 import S3


def test_an_object_is_on_the_mount_when_it_was_put(s3: S3, bucket: str) -> None:
    s3.client("main").put_object(Bucket=bucket, Key="a/b", Body=b"hello", Metadata={"x": "y"})
    assert (s3.mount / bucket / "a" / "b").read_bytes() == b"hello"


def test_a_file_closed_on_the_mount_is_in_the_next_list(s3: S3, bucket: str) -> None:
    (s3.mount / bucket / "file").write_bytes(b"from the mount")
    assert (
        s3.client("main").get_object(Bucket=bucket, Key="file")["Body"].read() == b"from the mount"
    )
