"""One namespace: what S3 writes is on the mount, what the mount writes is in S3, at once."""

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs
from tests.integration.client.test_client import sealed
from tests.integration.harness import kvfs as command
from tests.integration.posix import its_watch_ends
from tests.integration.s3 import S3, refused

MIB = 1 << 20


def put(s3: S3, bucket: str, key: str, body: bytes, **more: object) -> None:
    s3.client("main").put_object(Bucket=bucket, Key=key, Body=body, **more)


def get(s3: S3, bucket: str, key: str) -> bytes:
    body = s3.client("main").get_object(Bucket=bucket, Key=key)["Body"].read()
    assert isinstance(body, bytes)
    return body


def keys(s3: S3, bucket: str, **more: object) -> list[str]:
    listed = s3.client("main").list_objects_v2(Bucket=bucket, **more)
    return [each["Key"] for each in listed.get("Contents", ())]


# ---- from S3 to the mount


def test_an_object_is_on_the_mount_when_it_was_put(s3: S3, bucket: str) -> None:
    put(s3, bucket, "a/b", b"hello", Metadata={"x": "y"}, ContentType="text/x-mine")
    path = s3.mount / bucket / "a" / "b"
    assert path.read_bytes() == b"hello"
    assert os.getxattr(path, "user.s3.meta.x") == b"y"
    assert os.getxattr(path, "user.s3.content-type") == b"text/x-mine"
    facts = path.stat()
    assert (facts.st_size, facts.st_nlink) == (5, 1)
    assert abs(facts.st_mtime - time.time()) < 60


def test_a_copy_onto_itself_is_seen_under_each_name(s3: S3, bucket: str) -> None:
    home = s3.mount / bucket
    (home / "other").mkdir()
    put(s3, bucket, "dir/x", b"content")
    link = home / "other" / "x"
    os.link(home / "dir" / "x", link)
    os.utime(link, (1000, 1000))
    with link.open("rb") as file:
        assert os.fstat(file.fileno()).st_mtime == link.stat().st_mtime == 1000
        s3.client("main").copy_object(
            Bucket=bucket,
            Key="dir/x",
            CopySource=f"{bucket}/dir/x",
            MetadataDirective="REPLACE",
            Metadata={"a": "b"},
        )
        assert os.fstat(file.fileno()).st_mtime > 1000
        assert link.stat().st_mtime > 1000


def test_tags_change_the_time_of_the_last_change_of_status(s3: S3, bucket: str) -> None:
    put(s3, bucket, "dir/x", b"content")
    path = s3.mount / bucket / "dir" / "x"
    with kvfs.Client(s3.node.store) as client:
        sealed(client, f"/{bucket}/dir/x")  # the kernel believes what it is told for an hour
    before = path.stat()
    tags = {"TagSet": [{"Key": "a", "Value": "b"}]}
    s3.client("main").put_object_tagging(Bucket=bucket, Key="dir/x", Tagging=tags)
    after = path.stat()
    assert after.st_ctime_ns > before.st_ctime_ns
    assert after.st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(("home_mode", "file_mode"), [(0o700, 0o600), (0o755, 0o644)])
def test_objects_are_of_the_daemon_and_whoever_may_enter_the_bucket_reads_them(
    s3: S3, bucket: str, home_mode: int, file_mode: int
) -> None:
    """A bucket is its owner's alone, until an administrator opens its directory on the mount."""
    home = s3.mount / bucket
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    home.chmod(home_mode)
    put(s3, bucket, "deep/er/file", b"x")
    multipart = s3.client().create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
    named = {"Bucket": bucket, "Key": "parts", "UploadId": multipart}
    tag = s3.client().upload_part(PartNumber=1, Body=b"x", **named)["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    s3.client().complete_multipart_upload(MultipartUpload=parts, **named)
    put(s3, bucket, "large", bytes(2 * MIB))
    for path in (home, home / "deep", home / "deep" / "er"):
        assert stat.S_IMODE(path.stat().st_mode) == home_mode
    for path in (home / "deep" / "er" / "file", home / "parts", home / "large"):
        facts = path.stat()
        assert stat.S_IMODE(facts.st_mode) == file_mode
        assert (facts.st_uid, facts.st_gid) == (os.geteuid(), os.getegid())


def test_a_bucket_that_its_acl_shows_to_everybody_is_so_on_the_mount(s3: S3) -> None:
    name = s3.new_bucket(ACL="public-read")
    assert stat.S_IMODE((s3.mount / name).stat().st_mode) == 0o755
    s3.remove_bucket(name)


@pytest.mark.parametrize("versioning", ["", "Enabled", "Suspended"])
@pytest.mark.parametrize(
    "make", [lambda p: os.symlink("x", p), os.mkfifo, lambda p: os.mknod(p, stat.S_IFCHR | 0o600)]
)
def test_what_s3_cannot_see_it_does_not_replace(
    s3: S3, bucket: str, make: Callable[[Path], None], versioning: str
) -> None:
    client, path = s3.client(), s3.mount / bucket / "d" / "k"
    path.parent.mkdir()
    if versioning:
        status = {"Status": versioning}
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=status)
    make(path)
    before = path.lstat()
    named = {"Bucket": bucket, "Key": "d/k"}
    put(s3, bucket, "source", b"x")
    with refused(400, "InvalidRequest"):
        client.put_object(Body=b"x", **named)
    with refused(400, "InvalidRequest"):
        client.copy_object(CopySource=f"{bucket}/source", **named)
    upload = client.create_multipart_upload(**named)["UploadId"]
    tag = client.upload_part(PartNumber=1, Body=b"x", UploadId=upload, **named)["ETag"]
    with refused(400, "InvalidRequest"):
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        client.complete_multipart_upload(MultipartUpload=parts, UploadId=upload, **named)
    if versioning:
        with refused(400, "InvalidRequest"):
            client.delete_object(**named)
    else:
        client.delete_object(**named)
    after = path.lstat()
    assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
    assert os.listdir(path.parent) == ["k"]
    path.unlink()
    client.put_object(Body=b"x", **named)
    assert path.read_bytes() == b"x"


@pytest.mark.parametrize("how", ["put", "copied", "uploaded"])
def test_a_name_that_the_mount_is_making_is_taken_for_a_put_of_what_is_not_there(
    s3: S3, bucket: str, how: str
) -> None:
    client = s3.client("main")
    put(s3, bucket, "other", b"other")
    where = {"Bucket": bucket, "Key": "made", "IfNoneMatch": "*"}
    path = s3.mount / bucket / "made"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        os.write(fd, b"of the mount")
        with refused(412, "PreconditionFailed"):
            if how == "put":
                client.put_object(**where, Body=b"of S3")
            elif how == "copied":
                client.copy_object(**where, CopySource=f"{bucket}/other")
            else:
                upload = client.create_multipart_upload(Bucket=bucket, Key="made")["UploadId"]
                part = {"Bucket": bucket, "Key": "made", "UploadId": upload, "PartNumber": 1}
                tag = client.upload_part(**part, Body=b"of S3")["ETag"]
                parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
                client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload=parts)
    finally:
        os.close(fd)
    assert get(s3, bucket, "made") == path.read_bytes() == b"of the mount"


def test_a_name_that_the_kernel_knew_as_absent_is_found_after_a_put(s3: S3, bucket: str) -> None:
    path = s3.mount / bucket / "later"
    for _ in range(3):
        assert not path.exists()
    put(s3, bucket, "later", b"now")
    assert path.read_bytes() == b"now"


def test_a_directory_that_was_absent_is_found_after_a_put(s3: S3, bucket: str) -> None:
    path = s3.mount / bucket / "dir" / "sub" / "file"
    assert not path.exists()
    assert not (s3.mount / bucket / "dir").exists()
    put(s3, bucket, "dir/sub/file", b"now")
    assert path.read_bytes() == b"now"
    assert os.listdir(s3.mount / bucket) == ["dir"]


def test_a_replaced_object_is_new_on_the_mount_at_once(s3: S3, bucket: str) -> None:
    path = s3.mount / bucket / "file"
    for turn in range(5):
        body = os.urandom(100_000 + turn)
        put(s3, bucket, "file", body)
        assert path.read_bytes() == body
        assert path.stat().st_size == len(body)


def test_who_has_the_file_open_keeps_the_old_object(s3: S3, bucket: str) -> None:
    put(s3, bucket, "file", b"old" * 1000)
    with open(s3.mount / bucket / "file", "rb") as held:
        put(s3, bucket, "file", b"new")
        assert held.read() == b"old" * 1000
        s3.client("main").delete_object(Bucket=bucket, Key="file")
        held.seek(0)
        assert held.read(3) == b"old"
    assert not (s3.mount / bucket / "file").exists()


def test_a_deleted_object_has_gone_from_the_mount(s3: S3, bucket: str) -> None:
    put(s3, bucket, "dir/file", b"x")
    path = s3.mount / bucket / "dir" / "file"
    assert path.exists()
    s3.client("main").delete_object(Bucket=bucket, Key="dir/file")
    assert not path.exists()
    assert keys(s3, bucket) == []


def test_who_watches_an_object_is_told_that_it_went(s3: S3, bucket: str) -> None:
    path = s3.mount / bucket / "file"
    put(s3, bucket, "file", b"old")
    its_watch_ends(path, lambda: put(s3, bucket, "file", b"new"))
    client = s3.client("main")
    its_watch_ends(path, lambda: client.delete_object(Bucket=bucket, Key="file"))


def test_a_bucket_is_a_directory_at_once(s3: S3) -> None:
    name = f"made-{os.getpid()}"
    assert not (s3.mount / name).exists()
    s3.client("main").create_bucket(Bucket=name)
    assert (s3.mount / name).is_dir()
    s3.client("main").delete_bucket(Bucket=name)
    assert not (s3.mount / name).exists()


def test_an_upload_in_parts_is_one_file(s3: S3, bucket: str) -> None:
    client, key = s3.client("main"), "big"
    parts = [os.urandom(5 * MIB), os.urandom(5 * MIB), b"end"]
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    etags = []
    for number, body in enumerate(parts, 1):
        told = client.upload_part(
            Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=body
        )
        etags.append({"PartNumber": number, "ETag": told["ETag"]})
    assert os.listdir(s3.mount / bucket) == []
    client.complete_multipart_upload(
        Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": etags}
    )
    assert (s3.mount / bucket / key).read_bytes() == b"".join(parts)


# ---- from the mount to S3


def test_a_file_closed_on_the_mount_is_in_the_next_list(s3: S3, bucket: str) -> None:
    (s3.mount / bucket / "d").mkdir()
    (s3.mount / bucket / "d" / "file.json").write_bytes(b"{}")
    assert keys(s3, bucket) == ["d/file.json"]
    told = s3.client("main").get_object(Bucket=bucket, Key="d/file.json")
    assert told["Body"].read() == b"{}"
    assert told["ContentType"] == "application/json"
    (entry,) = s3.client("main").list_objects_v2(Bucket=bucket)["Contents"]
    assert (entry["Size"], entry["ETag"]) == (2, told["ETag"])


def test_a_file_of_the_mount_has_a_stable_etag_that_changes_with_it(s3: S3, bucket: str) -> None:
    path = s3.mount / bucket / "file"
    path.write_bytes(b"one")
    first = s3.client("main").head_object(Bucket=bucket, Key="file")["ETag"]
    assert s3.client("main").head_object(Bucket=bucket, Key="file")["ETag"] == first
    time.sleep(0.05)  # two of the kernel's ticks
    path.write_bytes(b"two")
    assert s3.client("main").head_object(Bucket=bucket, Key="file")["ETag"] != first


def test_an_object_changed_on_the_mount_loses_its_old_etag(s3: S3, bucket: str) -> None:
    put(s3, bucket, "file", b"old!")
    before = s3.client("main").head_object(Bucket=bucket, Key="file")["ETag"]
    time.sleep(0.05)
    with open(s3.mount / bucket / "file", "r+b") as file:
        file.write(b"new!")
    told = s3.client("main").get_object(Bucket=bucket, Key="file")
    assert told["Body"].read() == b"new!"
    assert told["ETag"] != before


def test_rename_and_unlink_are_seen_at_once(s3: S3, bucket: str) -> None:
    home = s3.mount / bucket
    put(s3, bucket, "a", b"x")
    os.rename(home / "a", home / "b")
    assert keys(s3, bucket) == ["b"]
    with refused(404, "NoSuchKey"):
        s3.client("main").get_object(Bucket=bucket, Key="a")
    assert get(s3, bucket, "b") == b"x"
    (home / "dir").mkdir()
    os.rename(home / "b", home / "dir" / "c")
    os.rename(home / "dir", home / "moved")
    assert keys(s3, bucket) == ["moved/c"]
    os.unlink(home / "moved" / "c")
    assert keys(s3, bucket) == []
    with refused(404, "NoSuchKey"):
        s3.client("main").get_object(Bucket=bucket, Key="moved/c")


def test_a_truncated_file_has_its_new_size_in_s3(s3: S3, bucket: str) -> None:
    put(s3, bucket, "file", b"0123456789")
    os.truncate(s3.mount / bucket / "file", 4)
    assert s3.client("main").head_object(Bucket=bucket, Key="file")["ContentLength"] == 4
    assert get(s3, bucket, "file") == b"0123"


def test_a_directory_of_the_mount_is_a_bucket_of_the_administrator(s3: S3) -> None:
    name = f"plain-{os.getpid()}"
    home = s3.mount / name
    home.mkdir()
    (home / "f").write_bytes(b"x")
    listed = s3.client("admin").list_buckets()["Buckets"]
    assert name in [each["Name"] for each in listed]
    assert s3.client("admin").get_object(Bucket=name, Key="f")["Body"].read() == b"x"
    with refused(403, "AccessDenied"):
        s3.client("main").get_object(Bucket=name, Key="f")
    (home / "f").unlink()
    home.rmdir()
    with refused(404, "NoSuchBucket"):
        s3.client("admin").list_objects_v2(Bucket=name)


def test_a_name_that_is_no_bucket_is_on_the_mount_alone(s3: S3) -> None:
    home = s3.mount / "Also_No_Bucket"
    home.mkdir()
    try:
        (home / "f").write_bytes(b"x")
        listed = s3.client("admin").list_buckets()["Buckets"]
        assert "Also_No_Bucket" not in [each["Name"] for each in listed]
        done = command("stat", "--store", str(s3.node.store), "/Also_No_Bucket")
        assert "absent: not a legal name of a bucket" in done.stdout
        done = command("stat", "--store", str(s3.node.store), "/models")
        assert "a bucket\n" in done.stdout
    finally:
        (home / "f").unlink()
        home.rmdir()


@pytest.mark.parametrize("make", [Path.touch, lambda p: os.symlink("x", p), os.mkfifo])
def test_nothing_but_directories_may_be_at_the_root(s3: S3, make: object) -> None:
    with pytest.raises(PermissionError) as caught:
        make(s3.mount / "file")  # type: ignore[operator]
    assert caught.value.errno == 1  # EPERM


# ---- while an answer is under way


def begin_get(s3: S3, bucket: str, key: str) -> object:
    """A GET whose answer is read later."""
    return s3.client("main").get_object(Bucket=bucket, Key=key)["Body"]


def test_a_get_under_way_sends_the_replaced_object_to_its_end(s3: S3, bucket: str) -> None:
    old = os.urandom(64 * MIB)
    put(s3, bucket, "file", old)
    body = begin_get(s3, bucket, "file")
    head = body.read(MIB)  # type: ignore[attr-defined]
    put(s3, bucket, "file", b"new")
    assert get(s3, bucket, "file") == b"new"
    assert head + body.read() == old  # type: ignore[attr-defined]


def test_a_get_under_way_sends_the_unlinked_file_to_its_end(s3: S3, bucket: str) -> None:
    old = os.urandom(64 * MIB)
    (s3.mount / bucket / "file").write_bytes(old)
    body = begin_get(s3, bucket, "file")
    head = body.read(MIB)  # type: ignore[attr-defined]
    os.unlink(s3.mount / bucket / "file")
    assert head + body.read() == old  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", ["write", "cut"])
def test_a_file_changed_in_place_under_a_get_ends_the_connection(
    s3: S3, bucket: str, change: str
) -> None:
    path = s3.mount / bucket / "file"
    path.write_bytes(b"a" * (64 * MIB))
    body = begin_get(s3, bucket, "file")
    head = body.read(MIB)  # type: ignore[attr-defined]
    if change == "cut":
        os.truncate(path, 32 * MIB)
    else:
        with open(path, "r+b") as file:
            file.seek(48 * MIB)
            file.write(b"b" * MIB)
    got = b""
    with pytest.raises(Exception, match=r"(?i)reset|broken|incomplete|ended"):
        while part := body.read(MIB):  # type: ignore[attr-defined]
            got += part
    assert len(head + got) < 64 * MIB


# ---- caches


def test_an_evicted_file_is_no_such_key(s3: S3) -> None:
    """As after the evictor: the name has gone, and nothing else is said."""
    client = s3.client("admin")
    client.put_object(Bucket="cache", Key="block", Body=b"b")
    done = command("rm", "/cache/block", "--store", str(s3.node.store))
    assert done.returncode == 0, done.stderr
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket="cache", Key="block")
    assert not (s3.mount / "cache" / "block").exists()


def test_a_full_cache_evicts_what_was_put_over_s3(s3: S3) -> None:
    store = ("--store", str(s3.node.store))
    assert command("namespace", "create", "small", "--kind", "cache", *store).returncode == 0
    done = command("namespace", "set", "small", "--capacity", "64MiB", *store)
    assert done.returncode == 0, done.stderr
    client, body = s3.client("admin"), os.urandom(4 * MIB)
    for number in range(40):
        client.put_object(Bucket="small", Key=f"block-{number:02}", Body=body)
    left = [each["Key"] for each in client.list_objects_v2(Bucket="small")["Contents"]]
    assert 4 <= len(left) <= 16
    assert "block-00" not in left
    assert "block-39" in left
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket="small", Key="block-00")
    # Eviction may go on between any two of these lists; none of them gains a block.
    shown = os.listdir(s3.mount / "small")
    later = [each["Key"] for each in client.list_objects_v2(Bucket="small")["Contents"]]
    assert set(later) <= set(shown) <= set(left)


# ---- keys that no path can be


ODD_KEYS = [
    "a",
    "a/",
    "a//b",
    "a/b",
    "/leading",
    "//two",
    "dots/./../x",
    ".",
    "..",
    "with space+plus%25&?#=;'\"\\",
    "nächt/ünïcode/日本語/🙂",
    "new\nline",
    "x" * 300,
    "y" * 1024,
    "trailing/slash/",
]


def test_odd_keys_are_kept_apart_and_listed_in_the_order_of_their_bytes(
    s3: S3, bucket: str
) -> None:
    for key in ODD_KEYS:
        put(s3, bucket, key, b"" if key.endswith("/") else key.encode())
    ordered = sorted(ODD_KEYS, key=str.encode)
    assert keys(s3, bucket) == ordered
    for key in ODD_KEYS:
        assert get(s3, bucket, key) == (b"" if key.endswith("/") else key.encode())
    assert (s3.mount / bucket / "a").read_bytes() == b"a"
    assert (s3.mount / bucket / "a%" / "b").read_bytes() == b"a/b"
    assert (s3.mount / bucket / "a%" / "%" / "b").read_bytes() == b"a//b"
    for key in ODD_KEYS:
        s3.client("main").delete_object(Bucket=bucket, Key=key)
    assert keys(s3, bucket) == []
    assert os.listdir(s3.mount / bucket) == []


def test_keys_never_lead_out_of_the_bucket(s3: S3, bucket: str) -> None:
    for key in ("../../../../etc/passwd", "../models/x", "..", "a/../../x"):
        put(s3, bucket, key, b"inside")
        assert get(s3, bucket, key) == b"inside"
    assert not (s3.mount / "models" / "x").exists()
    assert not (s3.mount / "x").exists()


# ---- names that the kernel looks up for the first time while S3 changes them


def test_a_first_look_up_beside_a_put_leaves_nothing_stale(s3: S3, bucket: str) -> None:
    """The kernel keeps what it is told, absence too, for an hour."""
    client = s3.client("main")
    for turn in range(60):
        put(s3, bucket, f"d{turn}/first", b"x")
    for turn in range(60):
        path = s3.mount / bucket / f"d{turn}" / "second"
        looking = threading.Thread(target=path.exists)
        looking.start()
        client.put_object(Bucket=bucket, Key=f"d{turn}/second", Body=b"y")
        assert path.read_bytes() == b"y"
        looking.join()
        assert sorted(os.listdir(path.parent)) == ["first", "second"]


def test_a_first_look_up_beside_a_delete_leaves_nothing_stale(s3: S3, bucket: str) -> None:
    client = s3.client("main")
    for turn in range(60):
        put(s3, bucket, f"d{turn}/stays", b"x")
        put(s3, bucket, f"d{turn}/goes", b"x")
    for turn in range(60):
        path = s3.mount / bucket / f"d{turn}" / "goes"
        looking = threading.Thread(target=path.exists)
        looking.start()
        client.delete_object(Bucket=bucket, Key=f"d{turn}/goes")
        assert not path.exists()
        looking.join()
        assert os.listdir(path.parent) == ["stays"]


def test_a_directory_that_the_kernel_has_forgotten_is_seen_as_it_is(s3: S3, bucket: str) -> None:
    put(s3, bucket, "d/first", b"x")
    directory = s3.mount / bucket / "d"
    before = directory.stat().st_mtime_ns
    assert os.listdir(directory) == ["first"]
    assert not (directory / "second").exists()
    # Best effort: without the right to, the kernel forgets nothing and is told of the change.
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("2")
    put(s3, bucket, "d/second", b"y")
    assert (directory / "second").read_bytes() == b"y"
    assert sorted(os.listdir(directory)) == ["first", "second"]
    assert directory.stat().st_mtime_ns > before


def test_what_is_deleted_unseen_gives_its_space_back(s3: S3, bucket: str) -> None:
    """Nobody on the mount ever looked, so that nobody is told at once: it goes all the same."""
    client = s3.client("main")
    before = used_bytes(s3, bucket)
    for number in range(8):
        put(s3, bucket, f"unseen/{number}", bytes(MIB))
    assert used_bytes(s3, bucket) >= before + 8 * MIB
    for number in range(8):
        client.delete_object(Bucket=bucket, Key=f"unseen/{number}")
    until = time.monotonic() + 20
    while used_bytes(s3, bucket) > before and time.monotonic() < until:
        time.sleep(0.05)
    assert used_bytes(s3, bucket) <= before


def used_bytes(s3: S3, bucket: str) -> int:
    namespaces = s3.node.status()["namespaces"]
    return int(next(each["used_bytes"] for each in namespaces if each["name"] == bucket))
