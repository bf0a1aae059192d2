"""What a read has to know before its result is right. No I/O: it says what to fetch, and goes
on."""

from collections.abc import Callable, Generator, Sequence

from kvfs.meta.redis.committing import Function, Outcome, run
from kvfs.meta.redis.known import Known, Missing, Range
from kvfs.meta.redis.sharding import Layout
from kvfs.meta.redis.view import View

Wanted = Sequence[tuple[View, Missing]]
"""What is to be known, with what was read before, which must still be so."""


def reading(
    function: Function, known: Known, clock: Callable[[], int]
) -> Generator[Wanted, None, Outcome]:
    """Run `function` until all it read was true at one moment after now; yields what to fetch,
    returns the outcome. `clock` tells the number of the last request.

    Of several shards: either nothing was committed in any of them between when the first was read
    and when the last was; or, where something was, all that was read was the same before and after.
    """
    began = clock()
    image: list[object] | None = None
    while True:
        view = View(known, writable=False)
        try:
            outcome = run(function, view)
        except Missing as missing:
            yield [(view, missing)]
            continue
        if not view.reads and not view.scanned:
            return outcome
        shards = view.shards()
        if len(shards) == 1 and all(known.is_since(shard, began) for shard in shards):
            return outcome
        seen = view.image() if len(shards) > 1 else None
        if seen is not None and seen == image:
            return outcome
        ran, tokens = clock(), {shard: known.moments[shard].token for shard in shards}
        yield [(view, Missing())]
        image = None
        if all(known.is_since(shard, ran) for shard in shards):
            if all(known.is_at(shard, token) for shard, token in tokens.items()):
                return outcome
            image = seen


def advance(steps: Generator[Wanted, None, Outcome]) -> Wanted | Outcome:
    """What has to be fetched next, or the outcome."""
    try:
        return next(steps)
    except StopIteration as stop:
        outcome: Outcome = stop.value
        return outcome


def by_shard(layout: Layout, wanted: Wanted) -> dict[int, "Request"]:
    """What to ask each shard."""
    requests: dict[int, Request] = {}
    for view, missing in wanted:
        for shard, keys in layout.split(missing.keys).items():
            _of(requests, shard).keys.update(dict.fromkeys(keys))
        for shard, keys in layout.split(view.reads).items():
            _of(requests, shard).old_keys.update(dict.fromkeys(keys))
        for each in missing.ranges:
            _of(requests, layout.shard_of(each.start)).ranges[each] = None
        for start, end in view.scanned:
            if start < end:
                _of(requests, layout.shard_of(start)).old_ranges[start, end] = None
    return requests


def _of(requests: dict[int, "Request"], shard: int) -> "Request":
    request = requests.get(shard)
    if request is None:
        request = requests[shard] = Request()
    return request


class Request:
    """What a shard is asked: what is new, and what was read already, in case it changed."""

    def __init__(self) -> None:
        self.keys: dict[bytes, None] = {}
        self.ranges: dict[Range, None] = {}
        self.old_keys: dict[bytes, None] = {}
        self.old_ranges: dict[tuple[bytes, bytes], None] = {}
