"""The daemon of a cluster's node is replaced or killed under its NFS clients, where its mount
outlives it: what they do is done once, and other nodes see it."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

import pytest

from tests.cluster.waiting import wait_until
from tests.conftest import LONG
from tests.integration.several import has, several
from tests.integration.takeover.successor import WAIT, kill
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.node.test_going_on import ALICE, loaded, restart, serving
from tests.nfs.v4 import Owner
from tests.nfs.v4_operations import Share

LACKING = ganesha.why_not()
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=LACKING),
    pytest.mark.usefixtures("outlives"),
]
ROUNDS = 14 if LONG else 2
NAMESPACES = ("strict", "cache")


@dataclass
class Two:
    """Two nodes that export `strict` and `cache`; the mount of the first outlives its daemons."""

    a: Door
    b: Door


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with several(0) as cluster, contextlib.ExitStack() as open_:
        a = open_.enter_context(Door.of(cluster, *WAIT))
        b = open_.enter_context(Door.of(cluster))
        for name in NAMESPACES:
            a.exported(name, mode=0o777)
            a.kvfs("namespace", "set", name, "--coherence", name)
        wait_until(lambda: len(b.node.status()["nfs"]["exports"]) == 2, "both export both")
        b.kvfs("nfs", "list")
        yield Two(a, b)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_clients_see_a_pause_and_no_error(two: Two, namespace: str) -> None:
    server = serving(two.a)
    with loaded(two.a, "paused", namespace) as loads:
        for number in range(ROUNDS):
            restart(two.a) if number % 2 else kill(two.a.node)
            for each in loads:
                each.wait_for_more()
            assert serving(two.a) == server
            assert two.a.node.status()["nfs"]["restarts"] == 0
    print(f"{ROUNDS} daemons; turns: {[each.turns for each in loads]}")
    for each in loads:
        there = two.b.node.mount / namespace / each.name
        wait_until(lambda there=there: os.listdir(there) == ["kept"], "the other node sees it")
        assert (there / "kept").read_bytes() == (each.directory / "kept").read_bytes()


def replaced(two: Two, name: str, content: bytes) -> None:
    """By the other node; returns when the first has heard of it."""
    (two.b.node.mount / "strict" / name).write_bytes(content)
    here = two.a.node.mount / "strict" / name
    wait_until(lambda: has(here, content), "the first node has the newest")


class Reader:
    """A file that a client of version 4 has open."""

    def __init__(self, door: Door, name: str) -> None:
        self._client = door.v41(ALICE)
        at = self._client.walk("strict")
        self.opened = self._client.open(at, name, Owner(), Share.READ)

    def read(self) -> bytes:
        return self._client.read(self.opened.handle, 0, 100, self.opened.stateid).data


def test_contents_that_others_replaced_stay_with_those_who_have_them_open(two: Two) -> None:
    """Programs on the mount read on what they opened; clients of version 4 that, or the newest."""
    contents = [b"%d" % number * (number + 1) for number in range(4)]
    here = two.a.node.mount / "strict" / "file"
    with contextlib.ExitStack() as opened:
        programs: dict[int, BufferedReader] = {}
        readers: dict[int, Reader] = {}
        for number, content in enumerate(contents):
            replaced(two, here.name, content)
            if number % 2:
                readers[number] = Reader(two.a, here.name)
            else:
                programs[number] = opened.enter_context(here.open("rb"))
            kill(two.a.node)
            for which, reader in readers.items():
                assert reader.read() in (contents[which], content)
            for which, program in programs.items():
                assert os.pread(program.fileno(), 100, 0) == contents[which]
            assert here.read_bytes() == content
            assert Reader(two.a, here.name).read() == content
