"""A node that is drained gives its blocks of a peer namespace to others before it drops them."""

import os
import signal
import time
from pathlib import Path

from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, kvfs
from tests.integration.several import members, several


def content(number: int) -> bytes:
    return b"%06d" % number * 2000


def test_what_only_a_drained_node_had_is_on_another_one_then() -> None:
    with several(2) as cluster:
        one, other = cluster.nodes
        store = ("--store", str(one.store))
        flags = ("--kind", "cache", "--coherence", "peer")
        assert kvfs("namespace", "create", "blocks", *flags, *store).returncode == 0
        wait_until((other.mount / "blocks").is_dir, "the other node knows it")
        there = other.mount / "blocks"
        (there / "d").mkdir()
        for number in range(300):
            (there / "d" / f"{number}").write_bytes(content(number))
        cluster.wait_for_room()
        looked_for = range(0, 300, 50)
        for number in looked_for:
            wait_until(lambda number=number: is_there(one, number), "the other node knows its name")
        missing: list[int] = []
        assert kvfs("node", "drain", "n2", *store).returncode == 0
        end = time.monotonic() + 60
        while members(one)["n2"]["state"] != "drained":
            assert time.monotonic() < end, members(one)["n2"]
            missing += [number for number in looked_for if not is_there(one, number)]
        assert missing == []
        assert not [each for each in data_of(other, there) if each.stat().st_size]
        assert other.pid is not None
        os.kill(other.pid, signal.SIGSTOP)
        try:
            for number in range(300):
                assert (one.mount / "blocks" / "d" / f"{number}").read_bytes() == content(number)
        finally:
            os.kill(other.pid, signal.SIGCONT)


def is_there(node: Node, number: int) -> bool:
    return (node.mount / "blocks" / "d" / f"{number}").exists()


def data_of(node: Node, top: Path) -> list[Path]:
    """The data files of a namespace."""
    space = f"{top.stat().st_ino >> 48:04x}"
    return list((node.store / "data").glob(f"???/{space}*"))
