"""A cold tier that two nodes share, in the S3 API of a third."""

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.base import control
from kvfs.client import Client
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, kvfs
from tests.integration.s3 import S3
from tests.integration.several import Several, several

MIB = 1 << 20
SIZE = MIB // 4
CAPACITY = 8 * MIB
PATIENCE_S = 120.0


@contextlib.contextmanager
def tier_of(s3: S3) -> Iterator[str]:
    """A tier of its own, which daemons that are started meanwhile may use."""
    bucket, pair = s3.new_bucket(), s3.users["main"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", pair.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", pair.secret)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        try:
            yield f"s3://{bucket}"
        finally:
            s3.remove_bucket(bucket)


@pytest.fixture(scope="module")
def cluster(s3: S3) -> Iterator[Several]:
    with (
        tier_of(s3) as place,
        several(2, "--cold", place, "--cold-endpoint", s3.endpoint) as made,
    ):
        yield made


def used(node: Node, name: str) -> int:
    status = control.call(node.store / "run" / "control.sock", "status")
    (found,) = [each for each in status["namespaces"] if each["name"] == name]
    return int(found["used_bytes"])


def fill(node: Node, name: str, seed: int) -> dict[str, bytes]:
    """A little more than fits, when what came first has its checksums."""
    content: dict[str, bytes] = {}
    draw = random.Random(seed)
    with Client(node.store) as client:
        for count in (24, 2, 2):
            batch = [f"block-{len(content) + number}" for number in range(count)]
            for each in batch:
                content[each] = draw.randbytes(SIZE)
                (node.mount / name / each).write_bytes(content[each])
            for each in batch:
                path = f"/{name}/{each}"
                wait_until(lambda path=path: bool(client.stat(path).checksum), path, PATIENCE_S)
            wait_until(
                lambda: used(node, name) <= CAPACITY * 3 // 4,
                "what is over it has gone",
                PATIENCE_S,
            )
    return content


def has(node: Node, path: Path) -> bool:
    return bool(list((node.store / "data").glob(f"???/{path.stat().st_ino:016x}.*")))


def test_what_one_node_sent_there_others_fetch(cluster: Several, seed: int) -> None:
    a, b = cluster.nodes
    options = ("--kind", "durable", "--capacity", str(CAPACITY), "--cold", "on")
    done = kvfs("namespace", "create", "cold", *options, "--store", str(a.store))
    assert done.returncode == 0, done.stderr
    content = fill(a, "cold", seed)
    away = [name for name in content if not has(a, a.mount / "cold" / name)]
    assert away
    cluster.nodes[0].kill()
    try:
        for name in away:
            assert (b.mount / "cold" / name).read_bytes() == content[name]
            assert has(b, b.mount / "cold" / name)
    finally:
        a.up()
    for name, data in content.items():
        assert (a.mount / "cold" / name).read_bytes() == data
        assert (b.mount / "cold" / name).read_bytes() == data


def objects_in(s3: S3, node: Node) -> int:
    """The blocks that nodes have sent to the tier."""
    bucket = node.flags[node.flags.index("--cold") + 1].removeprefix("s3://")
    pages = s3.client("main").get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return sum("/names/" in each["Key"] for page in pages for each in page.get("Contents", ()))


def fill_slowly(node: Node, name: str, seed: int) -> dict[str, bytes]:
    """More than fits, a few at a time: each is sealed before it is the coldest."""
    draw = random.Random(seed)
    content = {f"block-{number}": draw.randbytes(SIZE) for number in range(44)}
    names = list(content)
    for start in range(0, len(names), 4):
        sealed = counter(node, "sealed_files")
        for each in names[start : start + 4]:
            (node.mount / name / each).write_bytes(content[each])
        wait_until(
            lambda sealed=sealed: counter(node, "sealed_files") >= sealed + 4, "sealed", PATIENCE_S
        )
    return content


def has_emptied(directory: Path) -> bool:
    """Removes what is listed there; returns whether nothing was. A name may have gone meanwhile."""
    names = os.listdir(directory)
    for name in names:
        (directory / name).unlink(missing_ok=True)
    return not names


def counter(node: Node, name: str) -> int:
    return int(node.status()["counters"][name])


def test_blocks_that_were_evicted_are_found_there_by_every_node(
    cluster: Several, s3: S3, seed: int
) -> None:
    a, b = cluster.nodes
    options = (
        "--kind",
        "cache",
        "--coherence",
        "peer",
        "--capacity",
        str(CAPACITY),
        "--cold",
        "on",
    )
    done = kvfs("namespace", "create", "blocks", *options, "--store", str(a.store))
    assert done.returncode == 0, done.stderr
    wait_until((b.mount / "blocks").is_dir, "the namespace is known")
    (b.mount / "blocks" / "first").write_bytes(b"takes numbers for files")
    content = fill_slowly(a, "blocks", seed + 1)
    away = [name for name in content if not has(a, a.mount / "blocks" / name)]
    assert len(away) >= 4
    assert counter(a, "cold_sent_files") >= len(away)
    read, removed, later, *rest = away
    cluster.server.signal(signal.SIGSTOP)
    try:
        a.kill()
        assert (b.mount / "blocks" / read).read_bytes() == content[read]
        assert has(b, b.mount / "blocks" / read)
        (b.mount / "blocks" / removed).unlink()
        assert not (b.mount / "blocks" / "none").exists()
    finally:
        cluster.server.signal(signal.SIGCONT)
    before = objects_in(s3, a)
    a.up()
    wait_until(lambda: objects_in(s3, a) == before - 1, "what was removed is deleted there", 60)
    b.kill()
    a.kill()
    a.up()
    b.up()
    assert not (a.mount / "blocks" / removed).exists()
    for node in (b, a):
        wait_until((node.mount / "blocks" / later).exists, "it is found after a restart of all")
        assert (node.mount / "blocks" / later).read_bytes() == content[later]
    for name in rest:
        assert (b.mount / "blocks" / name).read_bytes() == content[name]
    assert objects_in(s3, a)
    wait_until(lambda: has_emptied(b.mount / "blocks"), "no node lists a name", 60)

    def is_removed() -> bool:
        return not kvfs("namespace", "remove", "blocks", "--store", str(a.store)).returncode

    wait_until(is_removed, "no node has files of it any more", 60)
    wait_until(lambda: not objects_in(s3, a), "what was sent of it is deleted", 60)
