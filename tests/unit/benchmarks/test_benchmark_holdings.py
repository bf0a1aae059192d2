"""The benchmark of who holds what: it runs, and its figures are such as a node relies on."""

from benchmarks.holdings import measure


def test_it_measures_what_a_node_relies_on() -> None:
    rows = measure([100_000], seed=1)["rows"]
    table = rows["table, 100,000 claims"]
    assert table["absent names claimed, of 10 million"] == 0
    assert table["probe of 512 absent, us"] < 5000
    assert rows["messages"]["deltas of 1000, bytes a change"] < 7
    assert rows["own set, 100,000 names"]["bytes a name"] < 150
