"""A cold tier that two nodes share, in the S3 API of a third."""

import os
import random
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


@pytest.fixture(scope="module")
def cluster(s3: S3) -> Iterator[Several]:
    bucket, pair = s3.new_bucket(), s3.users["main"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", pair.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", pair.secret)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        try:
            with several(2, "--cold", f"s3://{bucket}", "--cold-endpoint", s3.endpoint) as made:
                yield made
        finally:
            s3.remove_bucket(bucket)


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
