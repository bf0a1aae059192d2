"""Nodes with their mounts whose namespaces are spread over the servers of a Redis cluster, while
they write."""

import json
import signal
import threading
from collections.abc import Iterator

import msgspec
import pytest

from kvfs.meta import keys
from kvfs.meta.redis.slots import slot_of
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.contract.redis_servers import RedisCluster, RedisServer, killed
from tests.integration.harness import Node, kvfs
from tests.integration.s3 import S3, refused, users_of
from tests.integration.several import Several, several


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"), timeout_ms=3_000)) as cluster:
        for server in cluster.servers:
            server.call("CONFIG", "SET", "cluster-require-full-coverage", "no")
        yield cluster


@pytest.fixture(scope="module")
def nodes(redis: RedisCluster) -> Iterator[Several]:
    with several(2, url=redis.url) as made:
        yield made


def succeeded(*arguments: str) -> str:
    done = kvfs(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_namespaces_are_spread_under_writes_and_go_on_without_each_other(
    nodes: Several, redis: RedisCluster
) -> None:
    one, other = nodes.nodes
    store = str(one.store)
    stopping, written = threading.Event(), list[str]()

    def write() -> None:
        while not stopping.is_set():
            name = f"f{len(written)}"
            (one.mount / "models" / name).write_text(name)
            written.append(name)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: len(written) > 20, "it writes")
        told = succeeded("engine", "spread", "--store", store)
        before = len(written)
        wait_until(lambda: len(written) > before + 20, "it goes on")
    finally:
        stopping.set()
        writer.join()
    assert "models has a shard of its own" in told
    assert sorted(each.name for each in (other.mount / "models").iterdir()) == sorted(written)
    for name in written:
        assert (other.mount / "models" / name).read_text() == name

    shards = {each["name"]: each for each in one.status()["engine"]["shards"]}
    assert shards["models"]["server"] == f"127.0.0.1:{owner(redis, shards, 'models').port}"
    made = [f"new{number}" for number in range(6)]
    for name in made:
        succeeded("namespace", "create", name, "--store", store)
        (one.mount / name / "file").write_text(name)
        assert (other.mount / name / "file").read_text() == name
    (other.mount / "new0").rename(other.mount / "renamed")
    assert (one.mount / "renamed" / "file").read_text() == "new0"
    (one.mount / "renamed" / "file").unlink()
    (other.mount / "renamed").rmdir()
    wait_until(lambda: not (one.mount / "renamed").exists(), "the kernel forgets the name")

    shards = {each["name"]: each for each in one.status()["engine"]["shards"]}
    root = redis.owner(slot_of("kvfs", 0))
    lost = next(name for name in made[1:] if owner(redis, shards, name) is not root)
    kept = [
        name for name in made[1:] if owner(redis, shards, name) is not owner(redis, shards, lost)
    ]
    server = owner(redis, shards, lost)
    server.signal(signal.SIGSTOP)
    try:
        assert (one.mount / lost / "file").read_text() == lost, "as it was"
        with pytest.raises(OSError, match="Read-only file system"):
            (one.mount / lost / "more").write_text(lost)
        for name in kept:
            (one.mount / name / "more").write_text(name)
            assert (other.mount / name / "more").read_text() == name
            assert (other.mount / name / "file").read_text() == name
        lines = json.loads(kvfs("doctor", "--json", "--store", store).stdout)["paths"]
        states = {each["name"]: each["active"] for each in lines}
        assert not states[f"shard of {lost}"]
        assert all(states[f"shard of {name}"] for name in kept)
    finally:
        server.signal(signal.SIGCONT)
    other.kill()
    other.up()
    for name in kept:
        assert (other.mount / name / "more").read_text() == name


def test_namespaces_are_gathered_under_writes_also_after_a_kill_and_become_peers(
    nodes: Several, redis: RedisCluster
) -> None:
    one, other = nodes.nodes[:2]
    store = str(one.store)
    kvfs("engine", "spread", "--store", store)
    for name in ("full", "bare"):
        succeeded("namespace", "create", name, "--kind", "cache", "--store", store)
    before = {each.name: each.read_text() for each in (one.mount / "models").iterdir()}
    stopping, written = threading.Event(), list[str]()
    gather = "engine", "gather", "--store", str(other.store)

    def write() -> None:
        while not stopping.is_set():
            name = f"g{len(written)}"
            (one.mount / "models" / name).write_text(name)
            (one.mount / "full" / name).write_text(name)
            written.append(name)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: len(written) > 20, "it writes")
        gathering = threading.Thread(target=kvfs, args=gather)
        gathering.start()
        registry = redis.owner(slot_of("kvfs", 0))
        place = keys.place(1)
        wait_until(lambda: registry.call("HGET", "{kvfs:0}h", place) != b"", "it is begun")
        other.kill()
        gathering.join()
        other.up()
        wait_until(lambda: not kvfs(*gather).returncode, "what was left closed is reopened")
        before_end = len(written)
        wait_until(lambda: len(written) > before_end + 20, "it goes on")
    finally:
        stopping.set()
        writer.join()
    assert not one.status()["engine"]["shards"]
    last = other.mount / "full" / written[-1]
    wait_until(last.exists, "the other node hears of the last, as in any cache")
    assert sorted(each.name for each in (other.mount / "full").iterdir()) == sorted(written)
    for name in written:
        assert (other.mount / "full" / name).read_text() == name
    there = {each.name: each.read_text() for each in (other.mount / "models").iterdir()}
    assert there == before | {name: name for name in written}

    assert "bare has a shard of its own" in succeeded("engine", "spread", "--store", store)
    for name in ("full", "bare"):
        succeeded("namespace", "set", name, "--coherence", "peer", "--store", str(other.store))
    (one.mount / "bare" / "new").write_text("new")
    wait_until(lambda: (other.mount / "bare" / "new").exists(), "the other node finds it")
    full = other.mount / "full"
    wait_until(lambda: all((full / name).exists() for name in written), "it finds those, too")
    for name in written:
        assert (one.mount / "full" / name).read_text() == name
        assert (other.mount / "full" / name).read_text() == name


def owner(redis: RedisCluster, shards: dict[str, dict[str, int]], name: str) -> RedisServer:
    return redis.owner(slot_of("kvfs", shards[name]["namespace"]))


def test_a_node_that_joins_reads_of_a_namespace_what_it_is_asked_for_until_it_uses_it(
    nodes: Several,
) -> None:
    one = nodes.nodes[0]
    store = str(one.store)
    kvfs("engine", "spread", "--store", store)
    succeeded("namespace", "create", "far", "--store", store)
    for number in range(30):
        (one.mount / "far" / f"f{number}").write_text(str(number))
    joined = nodes.add()
    assert state(joined, "far") == "not followed"
    assert (joined.mount / "far" / "f7").stat().st_size == 1
    assert not (joined.mount / "far" / "absent").exists()
    (one.mount / "far" / "f7").rename(one.mount / "far" / "moved")
    assert not (joined.mount / "far" / "f7").exists()
    assert "1" in succeeded("stat", "/far/moved", "--store", str(joined.store))
    assert kvfs("stat", "/far/f7", "--store", str(joined.store)).returncode == 3
    assert state(joined, "far") == "not followed"
    assert (joined.mount / "far" / "moved").read_text() == "7"
    assert state(joined, "far") == "followed"
    assert len(list((joined.mount / "far").iterdir())) == 30
    succeeded("namespace", "create", "other", "--store", store)
    (one.mount / "other" / "file").write_text("there")
    assert state(joined, "other") == "not followed"
    assert "file" in succeeded("ls", "/other", "--store", str(joined.store))
    assert state(joined, "other") == "followed"


def test_s3_has_a_bucket_followed_for_those_who_may_use_it_alone(nodes: Several) -> None:
    one = nodes.nodes[0]
    store = str(one.store)
    kvfs("engine", "spread", "--store", store)
    for name in ("private", "source", "parts", "target"):
        succeeded("namespace", "create", name, "--store", store)
        (one.mount / name / "key").write_bytes(b"data")
    joined = nodes.add("--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--s3-workers", "1")
    with users_of(joined) as users:
        server = S3(joined, {ADMINISTRATOR: users.find(ADMINISTRATOR)})
    stranger = server.add_user("stranger")
    server.users["liar"] = msgspec.structs.replace(stranger, secret="x" * 40)
    admin = server.client(ADMINISTRATOR)
    for user in (None, "stranger"):
        for _ in range(20):
            with refused(403, "AccessDenied"):
                server.client(user).get_object(Bucket="private", Key="key")
        with refused(403, "AccessDenied"):
            server.client(user).copy_object(Bucket="target", Key="copy", CopySource="private/key")
    with refused(403, "SignatureDoesNotMatch"):
        server.client("liar").list_objects_v2(Bucket="private")
    assert {state(joined, name) for name in ("private", "target")} == {"not followed"}
    admin.copy_object(Bucket="target", Key="copy", CopySource="source/key")
    assert admin.get_object(Bucket="target", Key="copy")["Body"].read() == b"data"
    upload = admin.create_multipart_upload(Bucket="target", Key="whole")["UploadId"]
    named = {"Bucket": "target", "Key": "whole", "UploadId": upload}
    admin.upload_part_copy(**named, PartNumber=1, CopySource="parts/key")
    assert admin.head_object(Bucket="private", Key="key")["ContentLength"] == 4
    assert {state(joined, name) for name in ("private", "source", "parts")} == {"followed"}
    for client in server.clients.values():
        client.close()


def state(node: Node, name: str) -> str:
    """Whether the node follows a namespace, as its status tells."""
    (found,) = [each for each in node.status()["engine"]["shards"] if each["name"] == name]
    return str(found["state"])
