"""Nodes that begin to speak TLS one by one, as their users have them; and what is said of it."""

import json
import os
from typing import Any

from tests.cluster.waiting import wait_until
from tests.integration.conftest import start
from tests.integration.harness import Node, kvfs
from tests.integration.several import several

SIZE = 9 << 20


def line(node: Node) -> dict[str, Any]:
    done = kvfs("doctor", "--json", "--store", str(node.store))
    lines = {each["name"]: each for each in json.loads(done.stdout)["paths"]}
    return dict(lines["TLS between nodes"])


def crosses(one: Node, other: Node) -> None:
    for writer, reader in ((one, other), (other, one)):
        data, name = os.urandom(SIZE), os.urandom(4).hex()
        (writer.mount / "models" / name).write_bytes(data)
        assert (reader.mount / "models" / name).read_bytes() == data


def secrets(node: Node) -> int:
    return int(node.status()["cluster"]["secrets"])


def again(node: Node, mode: str) -> None:
    node.down()
    node.flags = (*node.flags, "--peer-tls", mode)
    start(node)


def test_nodes_begin_to_speak_tls_one_by_one() -> None:
    with several(2) as cluster:
        one, two = cluster.nodes
        assert line(one)["active"] is False
        again(one, "accept")
        crosses(one, two)
        wait_until(lambda: "met without TLS" in line(one)["reason"], "the other speaks none")
        again(two, "accept")
        wait_until(lambda: "speak none" not in line(one)["reason"], "the other speaks it")
        crosses(one, two)
        again(one, "require")
        again(two, "require")
        crosses(one, two)
        assert line(two)["active"] is True
        assert line(two)["remedy"] == ""
        for change, count in (("--rotate", 2), ("--retire", 1)):
            assert kvfs("node", "secret", change, "--store", str(one.store)).returncode == 0
            wait_until(lambda count=count: secrets(two) == count, "the other hears of it")
            crosses(one, two)
        two.kill()
        start(two)
        crosses(one, two)
        assert "refused" not in one.log + two.log
