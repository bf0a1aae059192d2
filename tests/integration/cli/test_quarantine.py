"""`kvfs quarantine`: data files whose records were lost are kept, shown and counted, until an
administrator decides."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.tree.metadata_copy import copy_namespace
from tests.cluster.waiting import wait_until
from tests.integration.conftest import start
from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.several import several

LATER = os.urandom(3 << 20)


@pytest.fixture
def node() -> Iterator[Node]:
    """Its metadata are of a time before /models/later and /cache/block, as after a damage that a
    backup mended; those that it had are beside it, in `meta.newer`."""
    made = Node.make(best_mode())
    try:
        start(made)
        (made.mount / "models" / "kept").write_bytes(b"kept" * 1000)
        until_sealed(made, 1)
        made.down()
        shutil.copytree(made.store / "meta", made.home / "meta.older")
        made.up()
        for name in ("models/later", "cache/block"):
            fd = os.open(made.mount / name, os.O_WRONLY | os.O_CREAT)
            os.write(fd, LATER)
            os.fsync(fd)
            os.close(fd)
        (made.mount / "models" / "later").rename(made.mount / "models" / "renamed")
        until_sealed(made, 2)
        made.down()
        (made.store / "meta").rename(made.home / "meta.newer")
        (made.home / "meta.older").rename(made.store / "meta")
        as_after_a_power_cut(made)
        made.up()
        yield made
    finally:
        made.remove()


def until_sealed(node: Node, count: int) -> None:
    wait_until(
        lambda: node.status()["counters"]["sealed_files"] >= count, f"{count} are sealed", 60
    )


def as_after_a_power_cut(node: Node) -> None:
    for name in ("clean", "recovered"):
        (node.store / name).unlink()


def quarantined(node: Node) -> list[dict[str, Any]]:
    done = kvfs("quarantine", "--store", str(node.store), "--json")
    assert done.returncode == 0, done.stderr
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed


def test_what_no_record_names_is_kept_shown_and_counted(node: Node) -> None:
    assert os.listdir(node.mount / "models") == ["kept"]
    [kept] = quarantined(node)
    assert Path(kept["path"]).read_bytes() == LATER
    assert kept["last_name"] in ("/models/later", "/models/renamed")
    assert (kept["reason"], kept["size_bytes"]) == ("unnamed", len(LATER))
    status = node.status()
    assert status["quarantine"] == {"files": 1, "used_bytes": kept["used_bytes"]}
    in_namespaces = sum(each["used_bytes"] for each in status["namespaces"])
    assert status["store"]["used_bytes"] == in_namespaces + kept["used_bytes"]
    assert "kvfs quarantine" in node.log
    assert len(list((node.store / "data").glob("???/*"))) == 1, "the cache's has gone"

    shown = kvfs("quarantine", "--store", str(node.store)).stdout
    assert kept["path"] in shown
    assert "3.0 MiB" in shown
    assert "no record names it" in shown
    wrong = kvfs("quarantine", "--store", str(node.store), "--empty", "/etc/passwd")
    assert wrong.returncode != 0
    assert "is not in quarantine" in wrong.stderr
    assert Path(kept["path"]).exists()
    done = kvfs("quarantine", "--store", str(node.store), "--empty")
    assert (done.returncode, done.stdout) == (0, "1 data files removed, 3.0 MiB\n")
    status = node.status()
    assert status["quarantine"] == {"files": 0, "used_bytes": 0}
    assert status["store"]["used_bytes"] == in_namespaces


def test_fsck_gives_a_record_its_data_back(node: Node) -> None:
    node.down()
    shutil.rmtree(node.store / "meta")
    (node.home / "meta.newer").rename(node.store / "meta")
    found = kvfs("fsck", "--store", str(node.store))
    assert found.returncode == 1
    assert "quarantined_data: /models/renamed" in found.stdout
    done = kvfs("fsck", "--repair", "--checksums", "--store", str(node.store))
    assert done.returncode == 0, done.stdout
    node.up()
    assert (node.mount / "models" / "renamed").read_bytes() == LATER
    assert quarantined(node) == []


def test_rebuild_reads_what_is_in_quarantine(node: Node) -> None:
    [kept] = quarantined(node)
    node.down()
    shutil.rmtree(node.store / "meta")
    done = kvfs("rebuild", "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    node.up()
    assert (node.mount / kept["last_name"][1:]).read_bytes() == LATER
    assert quarantined(node) == []


def test_what_the_engine_of_living_nodes_lost_is_kept(tmp_path: Path) -> None:
    """One namespace goes back to an older copy, past the check that nodes live there."""
    with several(2) as cluster:
        first, second = cluster.nodes
        (first.mount / "models" / "kept").write_bytes(b"kept" * 1000)
        until_sealed(first, 1)
        assert kvfs("engine", "copy", cluster.url, str(tmp_path / "older")).returncode == 0
        (first.mount / "models" / "later").write_bytes(LATER)
        until_sealed(first, 2)
        assert (second.mount / "models" / "later").read_bytes() == LATER
        older, engine = EmbeddedEngine(tmp_path / "older" / "meta"), DirectEngine(cluster.url)
        with contextlib.closing(older), contextlib.closing(engine):
            copy_namespace(
                older, engine, b"models", replace=True, now=time.time_ns(), progress=lambda _: None
            )
        for node in cluster.nodes:
            wait_until(lambda: os.listdir(node.mount / "models") == ["kept"], "it is heard of")  # noqa: B023
        for node in cluster.nodes:
            node.down()
        for node in cluster.nodes:
            node.up()
            wait_until(lambda: len(quarantined(node)) == 1, "what was lost is put away")  # noqa: B023
            [lost] = quarantined(node)
            assert Path(lost["path"]).read_bytes() == LATER
            if node is first:  # which sealed it, and so had it described
                assert lost["last_name"] == "/models/later"
            assert (node.mount / "models" / "kept").read_bytes() == b"kept" * 1000
