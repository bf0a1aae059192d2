"""What the hot requests cost the daemon in Python calls, as `./dev bench requests` counts them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from benchmarks import _request_rows
from benchmarks._guard import Guard
from benchmarks._request_rows import Measured

MOST: Final = {
    "absent name": 6,
    "first open": 40,
    "kept descriptor": 13,
    "attributes": 16,
    "block": 130,
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    base: Path = tmp_path_factory.mktemp("costs")
    with Guard() as guard:
        made = Measured("relay", base, "relay", None)
        try:
            made.start(guard)
            yield made
        finally:
            made.stop()


@pytest.mark.parametrize("flow", MOST)
def test_hot_requests_take_no_more_calls_than_this(node: Measured, flow: str) -> None:
    calls = _request_rows.calls(node, flow)
    assert MOST[flow] / 2 < calls <= MOST[flow], "none at all: handlers that are not counted"
