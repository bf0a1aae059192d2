"""Sets of fingerprints by node, as Python has them: what the tables are compared with."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from kvfs.holdings.fingerprints import NONE, RANGES, U64, sums_by_range, total
from kvfs.holdings.holder_table import HolderTable


def u64(fingerprints: Iterable[int]) -> U64:
    """An array of them, in their order."""
    return np.array(list(fingerprints), np.uint64)


def add_to_all(table: HolderTable, nodes: Sequence[int], some: Sequence[int]) -> None:
    """Has each of these nodes hold them, in one call."""
    counts = [len(some)] * len(nodes)
    table.apply_many(nodes, u64([*some] * len(nodes)), counts, NONE, [0] * len(nodes))


class ClaimModel:
    """What each node holds."""

    def __init__(self) -> None:
        self.claims: defaultdict[int, set[int]] = defaultdict(set)

    def apply(self, node: int, added: Iterable[int], removed: Iterable[int]) -> None:
        self.claims[node] |= set(added)
        self.claims[node] -= set(removed)

    def holders(self, fingerprint: int) -> set[int]:
        return {node for node, held in self.claims.items() if fingerprint in held}

    def assert_same(self, table: HolderTable, asked: list[int], most: int = 1 << 16) -> None:
        """What is asked has the same holders in the table, and each node the same claims."""
        found = table.probe(u64(asked), most)
        assert {position: set(nodes) for position, nodes in found.items()} == {
            position: self.holders(each)
            for position, each in enumerate(asked)
            if self.holders(each)
        }
        for position, each in enumerate(asked):
            assert len(found.get(position, [])) == len(self.holders(each))
            assert set(table.holders_of(each, most)) == self.holders(each)
        assert table.counters.claims == sum(map(len, self.claims.values()))
        for node, held in self.claims.items():
            assert table.count(node) == len(held)
            assert (table.checksums(node) == sums_by_range(u64(held))).all()
            assert table.digest(node) == total(sums_by_range(u64(held)))
            for range_ in {each % RANGES for each in held} | {0}:
                ours = sorted(each for each in held if each % RANGES == range_)
                assert table.fingerprints_of(node, range_).tolist() == ours
