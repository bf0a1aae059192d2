"""The homes of ranges, and who is told what on the way to them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.holdings.fingerprints import RANGES
from kvfs.holdings.home_map import HOMES, HomeMap

numbers = st.integers(1, (1 << 15) - 1)
zones = st.sampled_from(["", "a", "b"])
clusters = st.dictionaries(numbers, zones, min_size=1, max_size=40)


def homes(made: HomeMap) -> list[list[int]]:
    return [made.homes_of(range_) for range_ in range(RANGES)]


few = settings(max_examples=15)
"""Each example looks at all ranges."""


@few
@given(clusters)
def test_each_range_has_homes_in_several_zones_where_there_are_any(nodes: dict[int, str]) -> None:
    made = HomeMap(1, nodes)
    for range_, found in enumerate(homes(made)):
        assert len(set(found)) == len(found) == min(HOMES, len(nodes))
        assert len({nodes[each] for each in found}) == min(HOMES, len(set(nodes.values())))
        assert [node for node in nodes if made.share_of(node)[range_]] == sorted(
            found, key=list(nodes).index
        )


@few
@given(clusters, numbers)
def test_a_node_that_comes_takes_ranges_for_itself_alone(nodes: dict[int, str], new: int) -> None:
    nodes = {node: "" for node in nodes if node != new}
    nodes = nodes or {new % 9 + 40000: ""}
    before, after = homes(HomeMap(1, nodes)), homes(HomeMap(2, {**nodes, new: ""}))
    for was, now in zip(before, after, strict=True):
        assert set(now) <= {*was, new}
        assert len(nodes) == 1 or set(now) & set(was)


def test_homes_are_spread_evenly() -> None:
    made = HomeMap(1, dict.fromkeys(range(1, 21), ""))
    counts = [int(made.share_of(node).sum()) for node in range(1, 21)]
    assert sum(counts) == HOMES * RANGES
    assert 70 < min(counts) <= max(counts) < 140


@few
@given(clusters, st.data())
def test_what_an_origin_tells_passes_by_nodes_that_are_told_of_all_homes_below_them(
    nodes: dict[int, str], data: st.DataObject
) -> None:
    made = HomeMap(1, nodes)
    origin = data.draw(st.sampled_from(sorted(nodes)))
    dead = data.draw(st.sets(st.sampled_from(sorted(nodes)))) - {origin}
    told = {origin: HomeMap(1, {origin: ""}).share_of(origin)}
    waiting = [origin]
    while waiting:
        teller = waiting.pop()
        for child, ranges in made.children(origin, teller, dead):
            assert child not in told
            assert (ranges <= told[teller]).all()
            told[child] = ranges
            waiting.append(child)
    assert set(told) == set(nodes) - dead
    for node in told:
        assert (made.share_of(node) <= told[node]).all()
