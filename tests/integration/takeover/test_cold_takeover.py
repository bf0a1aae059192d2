"""Nodes with a cold tier, whose daemons are killed: what they were fetching comes by the next."""

import os
import threading
from collections.abc import Iterator

import pytest

from tests.fault.proxy import Proxy, proxied
from tests.integration.harness import kvfs
from tests.integration.s3 import S3
from tests.integration.s3api.objects.test_s3_cold import SIZE, Cold, new_cold
from tests.integration.s3api.objects.test_s3_cold_several import fill, has, tier_of
from tests.integration.several import Several, several
from tests.integration.takeover.successor import WAIT, kill


@pytest.fixture
def cold(s3: S3) -> Iterator[Cold]:
    with new_cold(s3, *WAIT, kinds=["durable"]) as made:
        yield made


def test_programs_go_on(cold: Cold) -> None:
    content = cold.content["cold-durable"]
    fetched, opened, cut, emptied = cold.away("cold-durable")[:4]
    here = next(path for path in content if not cold.is_away(path))
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fetched.read_bytes()))
    with (
        here.open("rb", buffering=0) as reading,
        opened.open("rb", buffering=0) as brought,
        cut.open("r+b", buffering=0) as changing,
        emptied.open("wb", buffering=0) as writing,
    ):
        cold.proxy.held = "out"
        reader.start()
        kill(cold.node)
        cold.proxy.held = None
        reader.join()
        changing.write(b"new")
        writing.write(b"all")
        assert brought.read(SIZE) == content[opened]
        assert reading.read(SIZE) == content[here]
        assert os.pread(changing.fileno(), SIZE, 0) == b"new" + content[cut][3:]
    assert got == [content[fetched]]
    content |= {cut: b"new" + content[cut][3:], emptied: b"all"}
    for path, data in content.items():
        assert path.read_bytes() == data
    kill(cold.node)
    cold.node.down()
    done = kvfs("fsck", "--store", str(cold.node.store))
    assert done.returncode == 0, done.stdout


@pytest.fixture
def pair(s3: S3) -> Iterator[tuple[Several, Proxy]]:
    """Two nodes, whose tier is behind the proxy."""
    with tier_of(s3) as place, proxied(("127.0.0.1", 0), (s3.host, s3.port)) as proxy:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        with several(2, "--cold", place, "--cold-endpoint", endpoint, *WAIT) as made:
            yield made, proxy


def test_programs_of_a_cluster_go_on(pair: tuple[Several, Proxy], seed: int) -> None:
    (node, other), proxy = pair[0].nodes, pair[1]
    options = ("--kind", "durable", "--capacity", str(8 << 20), "--cold", "on")
    done = kvfs("namespace", "create", "cold", *options, "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    content = fill(node, "cold", seed)
    here, there = node.mount / "cold", other.mount / "cold"
    fetched, opened, cut, replaced = [name for name in content if not has(node, here / name)][:4]
    whole = next(name for name in content if has(node, here / name))
    got: list[bytes] = []
    readers = [
        threading.Thread(target=lambda top=top: got.append((top / fetched).read_bytes()))
        for top in (here, there)
    ]
    with (
        (here / whole).open("rb", buffering=0) as reading,
        (here / opened).open("rb", buffering=0) as brought,
        (here / cut).open("r+b", buffering=0) as changing,
        (here / replaced).open("rb", buffering=0) as former,
    ):
        proxy.held = "out"
        for each in readers:
            each.start()
        kill(node)
        proxy.held = None
        for each in readers:
            each.join()
        (there / replaced).write_bytes(b"newer")
        changing.write(b"new")
        for _ in range(2):
            for file, name in ((reading, whole), (brought, opened), (former, replaced)):
                assert os.pread(file.fileno(), SIZE, 0) == content[name]
            assert os.pread(changing.fileno(), SIZE, 0) == b"new" + content[cut][3:]
            kill(node)
    assert got == [content[fetched]] * 2
    content |= {cut: b"new" + content[cut][3:], replaced: b"newer"}
    kill(other)
    for name, data in content.items():
        assert (here / name).read_bytes() == data
        assert (there / name).read_bytes() == data
