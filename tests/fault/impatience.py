"""Requests to an engine that is not expected to answer are given up soon; all others have the time
that a slow machine takes."""

import contextlib
from collections.abc import Iterator
from typing import Final

from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.replica.direct_engine import DirectEngine
from tests.contract.mirrors import Mirror

SHORT_S: Final = 0.5


@contextlib.contextmanager
def impatient(engine: DirectEngine | Mirror) -> Iterator[None]:
    """What is asked of its server in the block is given up after `SHORT_S`."""
    callers = _callers(engine)
    before = [each.deadline_s for each in callers]
    for each in callers:
        each.deadline_s = SHORT_S
    try:
        yield
    finally:
        for each, deadline_s in zip(callers, before, strict=True):
            each.deadline_s = deadline_s


def _callers(engine: DirectEngine | Mirror) -> list[RetryingClient]:
    if isinstance(engine, Mirror):
        return engine.engine._shards.top.callers
    return [engine._caller]
