"""Coroutines that never wait, run without a task.

An embedded engine never suspends, so neither does a coroutine that awaits nothing else: it is
driven to its end in one step, at the cost of a call.
"""

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def drive(step: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits; its errors pass through. RuntimeError when it
    waits after all."""
    try:
        step.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    step.close()
    raise RuntimeError("a request that must not wait did")
