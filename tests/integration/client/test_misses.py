"""A miss says why, at every door: what was looked for and is not there is counted by reason."""

import contextlib
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

import kvfs
from gateway.fsspec.filesystem import KvfsFileSystem
from gds.blocks import Outcome, read_blocks
from kvfs.base import control
from kvfs.base.errors import NotFound
from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs as command
from tests.integration.s3 import S3, serving
from tests.integration.s3_raw import ask

MIB: Final = 1 << 20
Counts = dict[str, dict[str, int]]


def by_mount(s3: S3, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        (s3.mount / path).stat()


def by_s3(s3: S3, path: str) -> None:
    assert ask(s3, "GET", f"/{path}").status == 404


def by_head(s3: S3, path: str) -> None:
    assert ask(s3, "HEAD", f"/{path}").status == 404


def by_copy(s3: S3, path: str) -> None:
    headers = {"x-amz-copy-source": f"/{path}"}
    assert ask(s3, "PUT", "/cache/copy", headers=headers).status == 404


def by_get(s3: S3, path: str) -> None:
    with kvfs.Client(s3.node.store) as client, pytest.raises(NotFound):
        client.get(f"/{path}")


def by_stat(s3: S3, path: str) -> None:
    with kvfs.Client(s3.node.store) as client, pytest.raises(NotFound):
        client.stat(f"/{path}")


def by_exists(s3: S3, path: str) -> None:
    with kvfs.Client(s3.node.store) as client:
        assert client.exists([f"/{path}"]) == [False]


def by_batch(s3: S3, path: str) -> None:
    with kvfs.Client(s3.node.store) as client:
        assert client.get_many([f"/{path}"]) == [None]


def by_blocks(s3: S3, path: str) -> None:
    with kvfs.Client(s3.node.store) as client:
        (block,) = read_blocks([f"/{path}"], [bytearray(MIB)], client=client)
    assert block.outcome is Outcome.MISS


def by_fsspec(s3: S3, path: str) -> None:
    files = KvfsFileSystem(store=str(s3.node.store), skip_instance_cache=True)
    with contextlib.closing(files), pytest.raises(FileNotFoundError):
        files.cat_file(f"/{path}")


@dataclass(frozen=True)
class Door:
    """A way to look for a file."""

    name: str
    """As the counters have it."""
    look: Callable[[S3, str], None]


DOORS: Final = {
    "mount": Door("mount", by_mount),
    "S3 GET": Door("s3", by_s3),
    "S3 HEAD": Door("s3", by_head),
    "S3 copy": Door("s3", by_copy),
    "Client.get": Door("client", by_get),
    "Client.stat": Door("client", by_stat),
    "Client.exists": Door("client", by_exists),
    "Client.get_many": Door("client", by_batch),
    "gds": Door("client", by_blocks),
    "fsspec": Door("client", by_fsspec),
}
OPENING: Final = ("mount", "S3 GET", "Client.get", "Client.get_many", "gds", "fsspec")
"""Doors that find out when a data file has gone."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serving("--s3-workers", "2", "--s3-lifecycle-day-s", "1") as server:
        server.add_user("main")
        place = ("--store", str(server.node.store))
        done = command("namespace", "set", "cache", "--capacity", str(32 * MIB), *place)
        assert done.returncode == 0, done.stderr
        admin = server.client("admin")
        admin.put_bucket_policy(Bucket="cache", Policy=EVERYTHING)
        yield server


EVERYTHING: Final = """{"Version": "2012-10-17", "Statement": [{"Effect": "Allow",
 "Principal": {"AWS": "*"}, "Action": "s3:*",
 "Resource": ["arn:aws:s3:::cache", "arn:aws:s3:::cache/*"]}]}"""


def status(s3: S3) -> dict[str, Any]:
    told = control.call(s3.node.store / "run" / "control.sock", "status")
    assert isinstance(told, dict)
    return told


def misses(s3: S3) -> Counts:
    found: Counts = status(s3)["misses"]
    return found


def counted(s3: S3, look: Callable[[], object]) -> Counts:
    """By how much it moves the counters."""
    before = misses(s3)
    look()
    after = misses(s3)
    moved = {
        door: {reason: n - before[door][reason] for reason, n in counts.items()}
        for door, counts in after.items()
    }
    told = {door: {each: n for each, n in by.items() if n} for door, by in moved.items()}
    return {door: by for door, by in told.items() if by}


@pytest.mark.parametrize("door", DOORS)
def test_what_was_never_there(s3: S3, door: str) -> None:
    path = f"cache/never-{door}".replace(" ", "-")
    assert counted(s3, lambda: DOORS[door].look(s3, path)) == {
        DOORS[door].name: {"never_stored": 1}
    }


@pytest.mark.parametrize("door", DOORS)
def test_what_is_in_no_directory_is_counted_once(s3: S3, door: str) -> None:
    path = f"cache/nowhere-{door}/below/it".replace(" ", "-")
    assert counted(s3, lambda: DOORS[door].look(s3, path)) == {
        DOORS[door].name: {"never_stored": 1}
    }


@pytest.fixture(scope="module")
def evicted(s3: S3) -> dict[str, str]:
    """A file for each door that had to make room."""
    paths = {door: f"cache/evicted-{at}" for at, door in enumerate(DOORS)}
    for path in paths.values():
        (s3.mount / path).write_bytes(bytes(4096))
    gone = status(s3)["counters"]["evicted_files_namespace_full"] + len(paths)
    for number in range(12):
        (s3.mount / "cache" / f"later-{number}").write_bytes(bytes(4 * MIB))
    wait_until(
        lambda: status(s3)["counters"]["evicted_files_namespace_full"] >= gone, "evicted", 60
    )
    return paths


@pytest.mark.parametrize("door", DOORS)
def test_what_was_evicted(s3: S3, evicted: dict[str, str], door: str) -> None:
    look = DOORS[door].look
    assert counted(s3, lambda: look(s3, evicted[door])) == {DOORS[door].name: {"evicted": 1}}


@pytest.mark.parametrize("door", OPENING)
def test_what_was_damaged(s3: S3, door: str) -> None:
    path = s3.mount / "cache" / f"damaged-{door}".replace(" ", "-")
    path.write_bytes(b"data")
    ino = path.stat().st_ino
    [data] = (s3.node.store / "data").glob(f"[0-9a-f]*/{ino:016x}.*")
    data.unlink()

    def look() -> None:
        if door == "mount":  # the kernel knows the name still
            with pytest.raises(FileNotFoundError):
                path.read_bytes()
        else:
            DOORS[door].look(s3, f"cache/{path.name}")

    found = counted(s3, look)
    assert found == {DOORS[door].name: {"damaged": 2 if door == "mount" else 1}}  # it looks twice


@pytest.fixture(scope="module")
def expired(s3: S3) -> str:
    """A bucket in which a lifecycle rule has ended all there was."""
    client, bucket = s3.client(), s3.new_bucket()
    names = [f"{door}/doomed".replace(" ", "-") for door in DOORS]
    for name in names:
        client.put_object(Bucket=bucket, Key=name, Body=b"x")
    rule = {"ID": "r", "Filter": {}, "Status": "Enabled", "Expiration": {"Days": 1}}
    client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [rule]}
    )
    wait_until(lambda: client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0, "all expired", 60)
    return bucket


@pytest.mark.parametrize("door", DOORS)
def test_what_has_expired(s3: S3, expired: str, door: str) -> None:
    """With the directory that was made for it."""
    path = f"{expired}/{door}/doomed".replace(" ", "-")
    look = DOORS[door].look
    assert counted(s3, lambda: look(s3, path)) == {DOORS[door].name: {"expired": 1}}


@pytest.fixture(scope="module")
def versioned(s3: S3) -> str:
    """A bucket that keeps versions."""
    bucket = s3.new_bucket()
    settings: Any = {"Status": "Enabled"}
    s3.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration=settings)
    return bucket


def test_a_version_that_is_not_there(s3: S3, versioned: str) -> None:
    client = s3.client()
    version = client.put_object(Bucket=versioned, Key="v", Body=b"one")["VersionId"]
    client.delete_object(Bucket=versioned, Key="v", VersionId=version)
    client.put_object(Bucket=versioned, Key="v", Body=b"two")
    target = f"/{versioned}/v?versionId={version}"
    for method in ("GET", "HEAD"):
        found = counted(s3, lambda method=method: ask(s3, method, target))
        assert found == {"s3": {"other_version": 1}}


def test_a_version_that_has_expired(s3: S3, versioned: str) -> None:
    client = s3.client()
    version = client.put_object(Bucket=versioned, Key="old", Body=b"one")["VersionId"]
    client.put_object(Bucket=versioned, Key="old", Body=b"two")
    end: Any = {"NoncurrentDays": 1}
    rule = {
        "ID": "r",
        "Filter": {"Prefix": "old"},
        "Status": "Enabled",
        "NoncurrentVersionExpiration": end,
    }
    client.put_bucket_lifecycle_configuration(
        Bucket=versioned, LifecycleConfiguration={"Rules": [rule]}
    )
    listed = {"Bucket": versioned, "Prefix": "old"}
    wait_until(lambda: len(client.list_object_versions(**listed)["Versions"]) == 1, "it ended", 60)
    target = f"/{versioned}/old?versionId={version}"
    assert counted(s3, lambda: ask(s3, "GET", target)) == {"s3": {"expired": 1}}


def test_a_delete_marker_stands_for_another_version(s3: S3, versioned: str) -> None:
    client = s3.client()
    client.put_object(Bucket=versioned, Key="marked", Body=b"one")
    client.delete_object(Bucket=versioned, Key="marked")
    for look in (by_s3, by_head, by_copy):
        found = counted(s3, lambda look=look: look(s3, f"{versioned}/marked"))
        assert found == {"s3": {"other_version": 1}}


@pytest.mark.parametrize(
    ("method", "key", "condition"),
    [
        ("GET", "etag", "If-Match"),
        ("HEAD", "etag", "If-Match"),
        ("PUT", "copy", "x-amz-copy-source-if-match"),
    ],
)
def test_another_etag_than_was_asked_for_is_another_version(
    s3: S3, versioned: str, method: str, key: str, condition: str
) -> None:
    s3.client().put_object(Bucket=versioned, Key="etag", Body=b"one")
    headers = {condition: '"another"'}
    if method == "PUT":
        headers["x-amz-copy-source"] = f"/{versioned}/etag"

    def look() -> None:
        assert ask(s3, method, f"/{versioned}/{key}", headers=headers).status == 412

    assert counted(s3, look) == {"s3": {"other_version": 1}}


def test_what_is_there_and_what_is_removed_moves_nothing(s3: S3) -> None:
    path = s3.mount / "cache" / "there"
    path.write_bytes(b"x")

    def look() -> None:
        assert ask(s3, "GET", "/cache/there").body == b"x"
        assert ask(s3, "DELETE", "/cache/nothing").status == 204
        with kvfs.Client(s3.node.store) as client:
            assert client.get("/cache/there") == b"x"
            assert client.exists(["/cache/there"]) == [True]

    assert counted(s3, look) == {}


def test_a_missing_bucket_is_a_miss(s3: S3) -> None:
    found = counted(s3, lambda: ask(s3, "GET", "/no-such-bucket/key"))
    assert found == {"s3": {"never_stored": 1}}


def test_a_client_tells_while_it_goes_on(s3: S3) -> None:
    before = misses(s3)["client"]["never_stored"]
    with kvfs.Client(s3.node.store) as client:
        asked = 0

        def told() -> bool:
            nonlocal asked
            asked += 1
            assert client.exists(["/cache/nothing"]) == [False]
            return misses(s3)["client"]["never_stored"] > before

        wait_until(told, "the node knows of some")
    assert misses(s3)["client"]["never_stored"] == before + asked


def test_the_reason_outlives_the_node(s3: S3, evicted: dict[str, str]) -> None:
    s3.node.down()
    s3.node.up()
    s3.__post_init__()
    path = evicted["mount"]
    assert counted(s3, lambda: by_mount(s3, path)) == {"mount": {"evicted": 1}}


def test_status_and_metrics_show_them(s3: S3) -> None:
    by_mount(s3, "cache/shown")
    by_s3(s3, "cache/shown")
    by_get(s3, "cache/shown")
    shown = command("status", "--store", str(s3.node.store)).stdout
    for door in ("the mount", "S3", "clients"):
        assert f"looked for by {door} and not there: " in shown
    with urllib.request.urlopen(f"{s3.admin_endpoint}/metrics") as page:
        text = page.read().decode()
    for door in ("mount", "s3", "client"):
        assert f'kvfs_misses_total{{door="{door}",reason="never_stored"}}' in text
