"""Nodes and programs of neighbouring versions side by side: a node of the next version is this
program with the numbers of its protocols one higher."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.base.version import CONTROL, PROTOCOL
from tests.integration.harness import ROOT, CannotStart, Node, best_mode, kvfs
from tests.integration.several import Several, members, several

_NAMES = 20
_CHANGE = """\
from kvfs.base import version
version.PROTOCOL += {0}
version.CONTROL += {0}
"""


@pytest.fixture
def cluster() -> Iterator[Several]:
    with several(1) as made:
        yield made


def later(here: Path, by: int) -> tuple[str, ...]:
    """What stands before a command, so that it is of a version later by so many."""
    here.mkdir(exist_ok=True)
    (here / "sitecustomize.py").write_text(_CHANGE.format(by))
    return ("env", f"PYTHONPATH={here}:{ROOT}")


def test_neighbouring_versions_are_one_cluster(cluster: Several, tmp_path: Path) -> None:
    """And its nodes are upgraded one by one, while programs go on on the others, and back."""
    first = cluster.nodes[0]
    second = cluster.add(inside=later(tmp_path / "next", 1))
    found = members(first)
    assert [found[name]["protocol"] for name in ("n1", "n2")] == [PROTOCOL, PROTOCOL + 1]
    with writing(second) as written:
        for version in (1, 0):
            first.down()
            first.inside = later(tmp_path / "next", 1) if version else ()
            first.up()
            path = first.mount / "models" / f"from-{version}"
            path.write_bytes(b"x" * 1000)
            assert (second.mount / "models" / path.name).read_bytes() == b"x" * 1000
    assert written
    for each in written[-10:]:
        assert (first.mount / "models" / each).read_text() == each
    done = kvfs("where", f"/models/{written[0]}", "--store", str(second.store))
    assert done.returncode == 0, done.stderr


def test_others_are_refused_with_the_remedy(cluster: Several, tmp_path: Path) -> None:
    newer = Node.make(best_mode(), *cluster.flags("n2"))
    newer.inside = later(tmp_path / "later", 2)
    cluster.nodes.append(newer)
    with pytest.raises(CannotStart, match=rf"protocol {PROTOCOL}\).*upgrade node 1") as refused:
        newer.up()
    assert refused.value.code == 2
    place = ("--store", str(cluster.nodes[0].store))
    assert kvfs("status", *place, inside=newer.inside).returncode == 0
    done = kvfs("scrub", *place, inside=newer.inside)
    assert done.returncode == 2
    assert f"version {CONTROL + 2} of the control socket" in done.stderr
    assert "restart the node with the newer one" in done.stderr
    done = kvfs("down", *cluster.nodes[0].place(), inside=newer.inside)
    assert done.returncode == 0, done.stderr
    cluster.nodes[0].pid = None


@contextlib.contextmanager
def writing(node: Node) -> Iterator[list[str]]:
    """Files are made anew and read back on a node's mount while the block lasts; their names, as
    often. Raises what any of that did."""
    names: list[str] = []
    failures: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            while not ended.is_set():
                path = node.mount / "models" / f"load-{len(names) % _NAMES}"
                path.write_text(path.name)
                assert path.read_text() == path.name
                names.append(path.name)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield names
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]
