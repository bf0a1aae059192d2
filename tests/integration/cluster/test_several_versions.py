"""Nodes and programs of neighbouring versions side by side: a node of the version before is a real
checkout of it; one of the next is this program with the numbers of its protocols one higher."""

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.base.version import CONTROL, PROTOCOL
from tests.cluster.waiting import wait_until
from tests.integration.conftest import start
from tests.integration.earlier_program import FORMER, earlier_program
from tests.integration.harness import ROOT, CannotStart, Node, best_mode, kvfs
from tests.integration.several import Several, members, several

_REFUSAL = "the metadata have schema 2, this KVFS reads 1: use the version that made it"
_NAMES = 20
_CHANGE = """\
from kvfs.base import version
version.PROTOCOL += {0}
version.CONTROL += {0}
"""
_KILLED = """\
import os, signal
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
upgrade = EmbeddedEngine.upgrade_now
def upgrade_now(engine):
    if "{0}" == "after":
        upgrade(engine)
    os.kill(os.getpid(), signal.SIGKILL)
EmbeddedEngine.upgrade_now = upgrade_now
"""
_KILLED_IN_A_CLUSTER = {
    "after the first step": """\
import os, signal
from kvfs.cluster.membership import Membership
async def earlier(member, protocol):
    os.kill(os.getpid(), signal.SIGKILL)
Membership.earlier = earlier
""",
    "after the last step": """\
import os, signal
from kvfs.cluster import schema_upgrade
finish = schema_upgrade.finish
async def finished(*arguments):
    await finish(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
schema_upgrade.finish = finished
""",
}
_CLIENT = """\
import sys
from kvfs.client import Client
with Client(sys.argv[1]) as client:
    for line in sys.stdin:
        try:
            client.put(line.split()[1], b"x" * 1000)
            print("done", flush=True)
        except Exception as error:
            print(repr(error), flush=True)
"""


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What stands before a command, so that it is of the version before."""
    return earlier_program(FORMER, tmp_path_factory.mktemp("former"))


@pytest.fixture
def cluster() -> Iterator[Several]:
    with several(1) as made:
        yield made


def later(here: Path, by: int) -> tuple[str, ...]:
    """What stands before a command, so that it is of a version later by so many."""
    return patched(here, _CHANGE.format(by))


def patched(here: Path, change: str) -> tuple[str, ...]:
    """What stands before a command, so that its program is changed as it starts."""
    here.mkdir(exist_ok=True)
    (here / "sitecustomize.py").write_text(change)
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


# ---- a program of the version before


def test_a_store_is_upgraded_at_its_first_start_and_the_version_before_refuses_it(
    former: tuple[str, ...],
) -> None:
    node = Node.make(best_mode())
    node.inside = former
    try:
        start(node)
        (node.mount / "models" / "a").write_bytes(b"written before")
        foretold = foretelling(node)
        assert (foretold["conversion"], foretold["way_back"]) == ("first start", "closed")
        assert foretold["pause"] == "ends"
        node.down()
        assert foretelling(node)["pause"] == "none"
        node.inside = ()
        node.up()
        assert node.status()["engine"]["is_upgraded"]
        assert foretelling(node)["conversion"] == "none"
        assert (node.mount / "models" / "a").read_bytes() == b"written before"
        (node.mount / "models" / "b").write_bytes(b"written after")
        node.down()
        node.inside = former
        with pytest.raises(CannotStart, match=_REFUSAL) as refused:
            node.up()
        assert refused.value.code == 2
        done = kvfs("fsck", "--repair", "--store", str(node.store), inside=former)
        assert (done.returncode, bool(re.search(_REFUSAL, done.stderr))) == (2, True), done
        with client_of(former, node) as said, pytest.raises(AssertionError, match=_REFUSAL):
            said("put /models/c")
        node.inside = ()
        node.up()
        assert (node.mount / "models" / "b").read_bytes() == b"written after"
    finally:
        node.remove()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_start_that_is_killed_at_the_upgrade_is_done_again(
    former: tuple[str, ...], when: str, tmp_path: Path
) -> None:
    node = Node.make(best_mode())
    node.inside = former
    try:
        start(node)
        (node.mount / "models" / "a").write_bytes(b"written before")
        node.down()
        node.inside = patched(tmp_path / when, _KILLED.format(when))
        with pytest.raises(CannotStart):
            node.up()
        node.inside = ()
        node.up()
        assert node.status()["engine"]["is_upgraded"]
        assert (node.mount / "models" / "a").read_bytes() == b"written before"
    finally:
        node.remove()


def test_a_program_of_the_version_before_that_runs_on_delays_the_upgrade(
    former: tuple[str, ...],
) -> None:
    node = Node.make(best_mode())
    node.inside = former
    try:
        start(node)
        with client_of(former, node) as said:
            said("put /models/a")
            node.down()
            node.inside = ()
            node.up()
            assert not node.status()["engine"]["is_upgraded"]
            assert "a program that runs uses them" in node.log
            shown = kvfs("status", "--store", str(node.store)).stdout
            assert "the metadata have the form of the version before" in shown
            said("put /models/b")
        node.down()
        node.up()
        assert node.status()["engine"]["is_upgraded"]
        assert "the version before" not in kvfs("status", "--store", str(node.store)).stdout
        for name in ("a", "b"):
            assert (node.mount / "models" / name).read_bytes() == b"x" * 1000
    finally:
        node.remove()


def test_a_cluster_is_upgraded_node_by_node_and_back_while_it_is_written_to(
    former: tuple[str, ...],
) -> None:
    with several(0) as cluster:
        one, two = cluster.add(inside=former), cluster.add(inside=former)
        foretold = foretelling(one, cluster)
        assert (foretold["nodes_before"], foretold["nodes_first"]) == ([1, 2], [])
        assert foretold["way_back"] == "until finish-upgrade"
        with writing(two):
            for version in ((), former, ()):
                restart(one, version)
                path = one.mount / "models" / f"from-{len(version)}"
                path.write_bytes(b"x" * 1000)
                assert (two.mount / "models" / path.name).read_bytes() == b"x" * 1000
            assert not one.status()["engine"]["is_upgraded"]
            done = finish_upgrade(one)
            assert done.returncode == 4, done
            assert "of an earlier version of KVFS: node 2 (n2). Start each" in done.stderr
            assert foretelling(one, cluster)["nodes_before"] == [2]
        assert keeps_order(cluster), "the version before reads keys in their order"
        with writing(one):
            restart(two, ())
        with writing(one), client_of(former, one) as said:
            said("put /models/by-a-former-client")
            done = finish_upgrade(two)
            assert done.returncode == 0, done.stderr
            for each in (one, two):
                wait_until(lambda each=each: each.status()["engine"]["is_upgraded"], "it is known")
            with pytest.raises(AssertionError, match="start the program anew, with this one"):
                said("put /models/by-a-former-client")
        assert not keeps_order(cluster)
        foretold = foretelling(one, cluster)
        assert (foretold["conversion"], foretold["way_back"]) == ("none", "open")
        assert finish_upgrade(one).stdout == "the metadata have the form of this version already\n"
        one.down()
        one.inside = former
        with pytest.raises(CannotStart, match=_REFUSAL), writing(two):
            one.up()
        restart(one, ())
        assert (one.mount / "models" / "by-a-former-client").read_bytes() == b"x" * 1000


@pytest.mark.parametrize("when", _KILLED_IN_A_CLUSTER)
def test_a_node_that_is_killed_at_the_end_of_the_upgrade_leaves_it_to_the_next_request(
    former: tuple[str, ...], when: str, tmp_path: Path
) -> None:
    """The others go on meanwhile."""
    with several(0) as cluster:
        one, two = cluster.add(inside=former), cluster.add(inside=former)
        restart(one, ())
        restart(two, patched(tmp_path / "killed", _KILLED_IN_A_CLUSTER[when]))
        with writing(one):
            assert finish_upgrade(two).returncode != 0
            two.pid = None
            restart(two, ())
            done = finish_upgrade(two)
            assert done.returncode == 0, done.stderr
            is_done = "already" in done.stdout
            assert is_done == (when == "after the last step")
        for each in (one, two):
            wait_until(lambda each=each: each.status()["engine"]["is_upgraded"], "it is known")


def keeps_order(cluster: Several) -> bool:
    """Whether the server has every key in the order that only programs of the version before ask
    for."""
    counts = "return {redis.call('HLEN', KEYS[1]), redis.call('ZCOUNT', KEYS[2], 0, 0)}"
    values, names = cluster.server.call("EVAL", counts, 2, "{kvfs:0}h", "{kvfs:0}z")
    assert names in (0, 1, values)
    return bool(names > 1)


def foretelling(node: Node, cluster: Several | None = None) -> dict[str, Any]:
    """The course of an upgrade to this program, as it says itself; nothing hinders it."""
    engine = ("--engine", cluster.url) if cluster is not None else ()
    done = kvfs("upgrade", "--check", "--json", "--store", str(node.store), *engine)
    assert done.returncode == 0, done
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def restart(node: Node, inside: tuple[str, ...]) -> None:
    """With another program; stopped first where it runs."""
    if node.pid is not None:
        node.down()
    node.inside = inside
    node.up()


def finish_upgrade(node: Node) -> subprocess.CompletedProcess[str]:
    return kvfs("node", "finish-upgrade", "--store", str(node.store))


@contextlib.contextmanager
def client_of(inside: tuple[str, ...], node: Node) -> Iterator[Callable[[str], None]]:
    """A process that has the store open for as long as the block lasts; what is called does as it
    is told, and raises AssertionError with what was said where that failed."""
    command = [*inside, sys.executable, "-c", _CLIENT, str(node.store)]
    with subprocess.Popen(
        command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def say(order: str) -> None:
            print(order, file=process.stdin, flush=True)
            answer = process.stdout.readline()  # type: ignore[union-attr]
            assert answer == "done\n", answer

        try:
            yield say
        finally:
            process.stdin.close()
            assert process.wait() == 0


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
