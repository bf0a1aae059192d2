"""The course of an upgrade, by what is known of a store, its node and its cluster."""

import pytest

from kvfs.admin.upgrade_facts import EngineVersion, MetadataVersion, RunningVersion, StoreVersion
from kvfs.admin.upgrade_plan import UpgradePlan, UpgradeSituation, plan
from kvfs.base.version import PROTOCOL
from kvfs.cluster.node_records import NodeRecord
from kvfs.meta import schema

BEFORE, PRESENT = schema.BEFORE.decode(), schema.PRESENT.decode()


def lone(version: str = PRESENT, **known: str) -> StoreVersion:
    return StoreVersion(MetadataVersion(version, [], **known), 1 << 20, 1 << 30, "", 0)


def member(version: str = BEFORE) -> StoreVersion:
    """Node 1 of a cluster."""
    return lone(version)._replace(cluster="c", node=1)


def node(number: int, protocol: int, state: str = "active") -> NodeRecord:
    return NodeRecord(
        number=number,
        name=f"n{number}",
        store="s",
        incarnation=1,
        version="0",
        protocol=protocol,
        state=state,  # type: ignore[arg-type]
    )


def engine(*nodes: NodeRecord, version: str = BEFORE, **known: str) -> EngineVersion:
    return EngineVersion(
        "redis://meta", "Redis 7", "1", MetadataVersion(version, list(nodes), **known)
    )


def planned(
    store: StoreVersion | None,
    running: RunningVersion | None = None,
    of_engine: EngineVersion | None = None,
    refusal: str = "",
) -> UpgradePlan:
    return plan(UpgradeSituation(store, refusal, running, of_engine))


def hindrances(found: UpgradePlan) -> list[str]:
    return [each.name for each in found.findings if each.state == "stop"]


def test_a_store_of_this_form_goes_on_and_back() -> None:
    found = planned(lone())
    assert (found.ready, found.conversion, found.way_back) == (True, "none", "open")
    assert planned(lone("")).conversion == "none"


def test_a_lone_store_of_the_form_before_is_converted_at_its_first_start() -> None:
    found = planned(lone(BEFORE))
    assert (found.ready, found.conversion, found.way_back) == (True, "first start", "closed")


@pytest.mark.parametrize("version", [BEFORE, schema.RISING.decode()])
def test_a_cluster_is_converted_when_it_is_asked_for(version: str) -> None:
    nodes = (node(1, PROTOCOL - 1), node(2, PROTOCOL - 1), node(3, 0, "removed"))
    found = planned(member(), None, engine(*nodes, version=version))
    assert found.ready
    assert (found.conversion, found.way_back) == ("finish-upgrade", "until finish-upgrade")
    assert (found.nodes_before, found.nodes_first) == ([1, 2], [])


@pytest.mark.parametrize("apart", [-2, 2])
def test_a_node_that_is_too_far_hinders_it(apart: int) -> None:
    found = planned(member(), None, engine(node(1, PROTOCOL), node(2, PROTOCOL + apart)))
    assert hindrances(found) == ["other nodes"]
    assert not found.ready
    assert found.nodes_first == [2]


def test_the_engine_counts_and_not_what_the_node_knew_last() -> None:
    found = planned(member(), None, engine(node(1, PROTOCOL), version=PRESENT))
    assert found.conversion == "none"


def test_without_the_engine_the_node_tells_what_it_knew() -> None:
    metadata = MetadataVersion(BEFORE, [node(1, PROTOCOL - 1), node(2, PROTOCOL - 1)])
    found = planned(member()._replace(metadata=metadata))
    assert found.ready
    assert found.nodes_before == [1, 2]
    (told,) = (each for each in found.findings if each.name == "engine")
    assert (told.state, "--engine" in told.remedy) == ("note", True)


@pytest.mark.parametrize("known", [{"refusal": "later"}, {"unread": "it does not answer"}])
def test_an_engine_that_refuses_or_is_silent_hinders_it(known: dict[str, str]) -> None:
    found = planned(member(), None, engine(version="", **known))
    assert hindrances(found) == ["engine"]


def test_a_later_store_hinders_it() -> None:
    assert hindrances(planned(None, refusal="it has format 2")) == ["store"]
    found = planned(lone("", refusal="the metadata have schema 3"))
    assert hindrances(found) == ["metadata"]
    assert (found.conversion, found.way_back) == ("unknown", "unknown")


def test_a_store_that_a_machine_left_is_not_judged_before_its_start() -> None:
    found = planned(lone("", unread="the machine went down"))
    assert (found.ready, found.conversion, found.way_back) == (True, "unknown", "unknown")


@pytest.mark.parametrize(
    ("is_mounted", "takeover_s", "goes_on", "pause"),
    [
        (False, 0, True, "none"),
        (True, 0, True, "ends"),
        (True, 30, True, "held"),
        (True, 30, False, "ends"),
    ],
)
def test_what_becomes_of_the_mount(
    is_mounted: bool, takeover_s: int, goes_on: bool, pause: str
) -> None:
    running = RunningVersion("0", PROTOCOL - 1, 7, is_mounted, takeover_s, goes_on)
    assert planned(lone(), running).pause == pause


@pytest.mark.parametrize(("takeover_s", "state"), [(0, "note"), (30, "ok")])
def test_what_others_miss_while_a_node_is_away_is_told(takeover_s: int, state: str) -> None:
    running = RunningVersion("0", PROTOCOL, 7, True, takeover_s)
    found = planned(member(), running, engine(node(1, PROTOCOL), node(2, PROTOCOL)))
    (told,) = (each for each in found.findings if each.name == "absence")
    assert (told.state, found.ready) == (state, True)
    for alone in (
        planned(member(), running, engine(node(1, PROTOCOL), node(2, PROTOCOL, "removed"))),
        planned(member(), None, engine(node(1, PROTOCOL), node(2, PROTOCOL))),
        planned(lone(), running),
    ):
        assert "absence" not in [each.name for each in alone.findings]


def test_a_disk_without_room_for_a_rebuild_is_told() -> None:
    found = planned(lone()._replace(metadata_bytes=2 << 30))
    (told,) = (each for each in found.findings if each.name == "space")
    assert told.state == "note"
    assert found.ready
