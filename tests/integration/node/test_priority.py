"""The node's turn at a busy CPU."""

import json
import os
from collections.abc import Callable, Iterator

import pytest

from tests.integration.harness import Node, best_mode, kvfs

MAY_NOT = ("setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice")


@pytest.fixture
def started() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(*flags: str, inside: tuple[str, ...] = ()) -> Node:
        node = Node.make(best_mode(), *flags)
        node.inside = inside
        nodes.append(node)
        return node.up()

    yield start
    for node in nodes:
        node.remove()


def nice_of(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def doctor(node: Node) -> dict[str, object]:
    done = kvfs("doctor", "--json", "--store", str(node.store))
    (line,) = (each for each in json.loads(done.stdout)["paths"] if each["name"] == "priority")
    assert isinstance(line, dict)
    return line


def may_raise() -> bool:
    with open("/proc/self/status", encoding="ascii") as status:
        (mask,) = (int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    return bool(mask >> 23 & 1)


def test_a_node_and_its_workers_go_before_other_programs(started: Callable[..., Node]) -> None:
    if not may_raise():
        pytest.skip("a raised priority needs CAP_SYS_NICE")
    node = started("--s3", "127.0.0.1:0", "--s3-workers", "1", "--admin", "off")
    status = node.status()
    assert status["nice"] == -10
    for pid in (status["pid"], *status["s3"]["workers"]):
        assert nice_of(pid) == -10
        if os.path.exists(group := f"/proc/{pid}/autogroup"):
            with open(group, encoding="ascii") as file:
                assert file.read().split()[-1] in ("-10", "0")  # 0: groups are switched off
    assert doctor(node)["active"] is True


def test_the_setting_leaves_it_as_it_was(started: Callable[..., Node]) -> None:
    node = started("--priority", "0")
    assert nice_of(node.status()["pid"]) == nice_of(0)


def test_a_node_that_may_not_says_so_and_runs(started: Callable[..., Node]) -> None:
    node = started(inside=MAY_NOT)
    assert node.status()["nice"] == nice_of(0)
    assert "no raised priority" in node.log
    assert "other programs" in str(doctor(node)["reason"])
