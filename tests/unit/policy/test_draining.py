"""What people are told of a node that cannot be emptied."""

from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host
from kvfs.policy.drain_report import Obstacles
from kvfs.policy.eviction import headroom

GIB = 1 << 30
ME = 1


def host(number: int, room: int = 0, **changes: object) -> Host:
    capacity = 100 * GIB
    made = Host(number, capacity, headroom(capacity) + room)
    return made._replace(**changes)  # type: ignore[arg-type]


def test_nothing_is_said_where_nothing_is_in_the_way() -> None:
    assert Obstacles().describe(ClusterSnapshot([host(ME), host(2)]), ME) == ""


def test_those_who_lack_least_room_are_named_with_what_they_lack() -> None:
    found = Obstacles()
    found.homeless(3 * GIB, [])
    found.homeless(1 * GIB, [])
    hosts = [
        host(ME, room=90 * GIB, state="draining"),
        *(host(number, room=number * GIB // 2) for number in range(2, 7)),
        host(8, room=3 * GIB, state="drained"),
        host(9, room=3 * GIB, alive=False),
    ]
    assert found.describe(ClusterSnapshot(hosts), ME) == (
        "2 files, 4.0 GiB, for which no other node has room"
        " (node 6 lacks 1.0 GiB, node 5 lacks 1.5 GiB, node 4 lacks 2.0 GiB)"
    )


def test_nodes_without_the_medium_lack_nothing_that_counts() -> None:
    found = Obstacles()
    found.homeless(GIB, ["ram"])
    hosts = [host(2), host(3, media=frozenset({"ram", "ssd"}))]
    assert found.describe(ClusterSnapshot(hosts), ME) == (
        "1 file, 1.0 GiB, for which no other node has room (node 3 lacks 1.0 GiB)"
    )
    assert found.describe(ClusterSnapshot(hosts[:1]), ME) == (
        "1 file, 1.0 GiB, for which no other node has room"
    )


def test_all_that_is_in_the_way_is_said() -> None:
    found = Obstacles()
    found.homeless(512, [])
    found.refused({2: "the disk is full"})
    found.shared = 2
    found.in_use = 1
    assert found.describe(ClusterSnapshot([host(ME, state="draining")]), ME) == (
        "1 file, 512 B, for which no node is there; "
        "1 file that nobody took (node 2: the disk is full); "
        "2 files in a shared store that no other node has; 1 file in use"
    )
