"""A trace of requests on nodes whose caches are full: how many blocks some node of the cluster has
still, where each evicts by age, and where copies that others have go first
(`node.tasks.eviction.evictor`).
"""

import gzip
import itertools
import json
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_WINDOW: Final = 1024
"""The coldest blocks of a node among which it looks for copies that others have."""
_BATCH: Final = 64
_NODES: Final = 8
_CAPACITIES: Final = (1000, 2500, 5000)


def requests(trace: Path) -> Iterator[list[int]]:
    """Yields the blocks of each request of a trace in Mooncake's form."""
    with gzip.open(trace, "rt") as lines:
        for line in lines:
            yield json.loads(line)["hash_ids"]


def rows(trace: Path, seed: int) -> dict[str, float]:
    """Returns the figures of a trace."""
    asked = list(requests(trace))
    return {
        f"{capacity}, {way}": hits(asked, _NODES, capacity, seed, spares_first=spares_first)
        for capacity in _CAPACITIES
        for way, spares_first in (("by age", False), ("spares first", True))
    }


def hits(
    trace: Iterable[list[int]], nodes: int, capacity: int, seed: int, *, spares_first: bool
) -> float:
    """Returns the share of blocks that any node had. Each request comes to any node; what another
    one has comes from there, and is then held by both."""
    draw = random.Random(seed)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(nodes)]
    holders: defaultdict[int, set[int]] = defaultdict(set)
    asked = anywhere = 0
    for blocks in trace:
        node = draw.randrange(nodes)
        cache = caches[node]
        for block in blocks:
            asked += 1
            anywhere += bool(holders[block])
            cache[block] = None
            cache.move_to_end(block)
            holders[block].add(node)
            if len(cache) >= capacity + _BATCH:
                _evict(node, caches, holders, spares_first=spares_first)
    return anywhere / asked


def _evict(
    node: int,
    caches: list[OrderedDict[int, None]],
    holders: dict[int, set[int]],
    *,
    spares_first: bool,
) -> None:
    """Evicts a batch. Who keeps a copy for another node counts it as used."""
    cache = caches[node]
    gone: list[int] = []
    if spares_first:
        window = itertools.islice(cache, _WINDOW)
        gone = list(itertools.islice((e for e in window if len(holders[e]) > 1), _BATCH))
    for block in gone:
        caches[min(holders[block] - {node})].move_to_end(block)
    gone = gone or list(itertools.islice(cache, _BATCH))
    for block in gone:
        del cache[block]
        holders[block].discard(node)
