"""Work that several processes begin at the same moment, so that the load is not one interpreter's.

A task prepares itself in its process and returns what it is to do; all begin when the last is
ready.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

Task = Callable[[], Callable[[], Any]]


class TaskFailed(Exception):
    """The text says how the first failed."""


def together(tasks: Sequence[Task]) -> list[Any]:
    """What each returned (as JSON has it). Raises TaskFailed. No process outlives the call."""
    ready, tell_ready = os.pipe()
    go, tell_go = os.pipe()
    results, tell_result = os.pipe()
    children = []
    try:
        for number, task in enumerate(tasks):
            child = os.fork()
            if child == 0:
                os.close(tell_go)
                _run(task, number, tell_ready, go, tell_result)
            children.append(child)
        os.close(tell_ready)
        os.close(tell_result)
        for _ in children:
            os.read(ready, 1)  # nothing where one ended without a word
        os.close(tell_go)  # all start: their reads see the end of the file
        with os.fdopen(results, encoding="utf-8") as lines:
            answers = dict(map(json.loads, lines))
    finally:
        os.close(ready)
        os.close(go)
        _end(children)
    return [_value(answers.get(number)) for number in range(len(tasks))]


def _run(task: Task, number: int, tell_ready: int, go: int, tell_result: int) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        try:
            try:
                work = task()
            finally:
                os.write(tell_ready, b".")
                os.close(tell_ready)
            os.read(go, 1)
            answer = {"value": work()}
        except Exception as error:
            answer = {"error": _told(error)}
        os.write(tell_result, json.dumps([number, answer]).encode() + b"\n")
    finally:
        os._exit(0)


def _told(error: Exception) -> str:
    """What went wrong first: a nursery raises groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:500]


def _value(answer: dict[str, Any] | None) -> Any:
    if answer is None:
        raise TaskFailed("a process of the load ended without a word")
    if "error" in answer:
        raise TaskFailed(answer["error"])
    return answer["value"]


def _end(children: Sequence[int]) -> None:
    """Those that have not ended (the parent is interrupted) are killed."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
