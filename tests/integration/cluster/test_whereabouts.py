"""Where the data of files lie on three nodes, one of whose stores they share, and having them
elsewhere."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.base import control
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, base_directory, kvfs
from tests.integration.several import Several, several

MIB = 1 << 20


@pytest.fixture(scope="module")
def flash() -> Iterator[Path]:
    """A directory that all nodes have."""
    home = Path(tempfile.mkdtemp(prefix="kvfs-flash-", dir=base_directory()))
    yield home
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def cluster(flash: Path) -> Iterator[Several]:
    with several(3, "--shared", f"flash={flash}") as made:
        made.wait_for_room()
        run(made.nodes[0], "namespace", "create", "shared", "--media", "shared:flash")
        yield made


def run(node: Node, *arguments: str) -> str:
    done = kvfs(*arguments, "--store", str(node.store), timeout_s=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def where(node: Node, path: str) -> Any:
    return json.loads(run(node, "where", "--json", path))


def brought(node: Node) -> int:
    status = control.call(node.store / "run" / "control.sock", "status")
    return int(status["counters"]["brought_files"])


def data_files(place: Path, path: Path) -> list[Path]:
    return list(place.glob(f"???/{path.stat().st_ino:016x}.*"))


def seen(path: Path) -> Path:
    """As soon as the node goes by the namespace's policy."""
    wait_until(path.parent.is_dir, f"{path.parent} is there")
    return path


def put(cluster: Several, flash: Path, name: str, content: bytes) -> Path:
    """A file of the shared namespace, made by the first node where it belongs."""
    path = seen(cluster.nodes[0].mount / "shared" / name)

    def lies_there() -> bool:
        path.write_bytes(content)
        if data_files(flash, path):
            return True
        path.unlink()
        return False

    wait_until(lies_there, "new files go to the shared store")
    return path


def test_nothing_of_a_shared_store_travels(cluster: Several, flash: Path) -> None:
    content = os.urandom(3 * MIB)
    path = put(cluster, flash, "block", content)
    assert not data_files(cluster.nodes[0].store / "data", path)
    before = [brought(node) for node in cluster.nodes]
    for node in cluster.nodes[1:]:
        assert (node.mount / "shared/block").read_bytes() == content
        assert not data_files(node.store / "data", path)
    assert [brought(node) for node in cluster.nodes] == before
    (copy,) = [
        each for each in where(cluster.nodes[0], "/shared/block")["copies"] if each["medium"]
    ]
    assert (copy["name"], copy["medium"]) == ("n1", "shared:flash")


def test_what_is_changed_there_is_changed_for_all(cluster: Several, flash: Path) -> None:
    first, second, third = (node.mount / "shared" for node in cluster.nodes)
    put(cluster, flash, "changed", b"before")
    assert (second / "changed").read_bytes() == b"before"
    (third / "new").write_bytes(b"after that")
    (third / "new").rename(third / "changed")
    assert (first / "changed").read_bytes() == b"after that"
    assert (second / "changed").read_bytes() == b"after that"
    left = data_files(flash, first / "changed")
    (second / "changed").unlink()
    assert not (first / "changed").exists()
    wait_until(lambda: not any(file.exists() for file in left), "the data file goes")


def test_a_file_is_had_elsewhere_before_it_is_read(cluster: Several) -> None:
    a, b, c = cluster.nodes
    content = os.urandom(2 * MIB)
    (a.mount / "models" / "tree").mkdir()
    for name in ("one", "two"):
        (a.mount / "models" / "tree" / name).write_bytes(content)
    assert [each["name"] for each in where(a, "/models/tree/one")["copies"]] == ["n1"]
    assert "brought 2 files" in run(a, "prefetch", "/models/tree", "--to", "n2", "--to", "n3")
    for node in cluster.nodes:
        copies = where(node, "/models/tree/one")["copies"]
        assert [(each["name"], each["medium"], each["alive"]) for each in copies] == [
            (name, "ssd", True) for name in ("n1", "n2", "n3")
        ]
    before = [brought(b), brought(c)]
    assert (b.mount / "models/tree/two").read_bytes() == content
    assert (c.mount / "models/tree/one").read_bytes() == content
    assert [brought(b), brought(c)] == before
    done = kvfs("prefetch", "/models/tree", "--to", "nobody", "--store", str(a.store))
    assert (done.returncode, "no node nobody runs" in done.stderr) == (3, True)


def test_more_copies_are_made(cluster: Several) -> None:
    a = cluster.nodes[0]
    (a.mount / "models" / "copied").write_bytes(b"x" * MIB)
    assert "1 files have 2 copies" in run(a, "replicate", "/models/copied", "--replicas", "1")
    assert len(where(a, "/models/copied")["copies"]) == 2
    done = kvfs("replicate", "/models/copied", "--replicas", "5", "--store", str(a.store))
    assert done.returncode == 7
    assert "3 copies found no node" in done.stderr, done.stderr


def test_a_shared_store_outlives_the_node_that_wrote(cluster: Several, flash: Path) -> None:
    put(cluster, flash, "lasting", b"x" * MIB)
    cluster.nodes[0].kill()
    try:
        for node in cluster.nodes[1:]:
            assert (node.mount / "shared/lasting").read_bytes() == b"x" * MIB
    finally:
        cluster.nodes[0].up()
    assert (cluster.nodes[0].mount / "shared/lasting").read_bytes() == b"x" * MIB


def test_what_goes_nowhere_is_refused(cluster: Several) -> None:
    store = str(cluster.nodes[0].store)
    done = kvfs("namespace", "set", "shared", "--replicas", "1", "--store", store)
    assert (done.returncode, "no replicas" in done.stderr) == (2, True)


def test_what_is_shared_is_another_nodes_once_its_own_is_drained(
    cluster: Several, flash: Path
) -> None:
    first, second, _ = cluster.nodes
    content = os.urandom(MIB)
    path = put(cluster, flash, "handed", content)
    (file,) = data_files(flash, path)
    run(first, "node", "drain", "n1")

    def is_drained() -> bool:
        nodes = second.status()["cluster"]["nodes"]
        return any(each["name"] == "n1" and each["state"] == "drained" for each in nodes)

    wait_until(is_drained, "nothing is left on it")
    first.down()
    run(second, "node", "remove", "n1")
    assert (second.mount / "shared/handed").read_bytes() == content
    assert file.exists()
    (second.mount / "shared/handed").unlink()
    wait_until(lambda: not file.exists(), "who answers for it removes it")
