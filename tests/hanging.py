"""What a test that never ends leaves behind: its name, where each of its threads stood, and an end.

`timeout` of setup.cfg raises an exception in a test's main thread. That ends no test that catches
it, that waits again while it cleans up, or whose main thread waits in another way. Such a test's
process ends here, some time later; an interrupted run names the tests that were running.
"""

import contextlib
import faulthandler
import os
import time
from collections.abc import Iterator
from typing import Final

import pytest

_GRACE_S: Final = 180.0
"""Beyond a test's own deadline, and for each step of taking down what it made."""


class Hanging:
    """One process's plugin: of a worker that runs tests, or of the one that hands them out."""

    def __init__(self, config: pytest.Config) -> None:
        self._deadline_s = float(config.getini("timeout"))
        # Output of tests is captured when it is needed; it is not yet.
        self._stderr = os.dup(2)
        self._running: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("timeout")
        self._end_after(marker.args[0] if marker else self._deadline_s)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        self._end_after(0)  # anew: pytest cancels it where a test failed
        return (yield)

    def _end_after(self, seconds: float) -> None:
        # A test of a process without threads leaves none for this either.
        with contextlib.suppress(RuntimeError):
            faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True, file=self._stderr)

    # ---- which tests were running, told by all processes to the one that hands them out

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid, began in self._running.items():
            ran_s = time.monotonic() - began
            terminalreporter.write_line(f"RUNNING for {ran_s:.0f} s: {nodeid}")
