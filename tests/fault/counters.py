"""Counters in an engine: what was acknowledged is in them, once."""

from collections.abc import Callable
from typing import Any

from kvfs.meta.engine import Transaction


def increment(key: bytes) -> Callable[[Transaction], None]:
    """Counts one up."""

    def fn(t: Transaction) -> None:
        t.put(key, b"%d" % (int(t.get(key) or b"0") + 1))

    return fn


def number(engine: Any, key: bytes) -> int:
    """How far a counter is; 0 where there is none."""
    return int(engine.read_now(lambda t: t.get(key)) or b"0")
