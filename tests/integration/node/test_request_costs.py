"""What the hot requests cost the daemon in Python calls, as `./dev bench requests` counts them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from benchmarks import _call_counter, _request_rows, _scale_rows, _several
from benchmarks._guard import Guard
from benchmarks._request_rows import COUNTED, Measured
from benchmarks._systems import Unavailable
from tests.ports import free_port

MOST: Final = {
    "absent name": 4,
    "first open": 38,
    "kept descriptor": 13,
    "attributes": 14,
    "block": 118,
}
MOST_OF_CLUSTER: Final = {"peer": 281, "cache": 368}
"""For create, close and rename of a block, by the coherence of its namespace."""

ROUNDS: Final = 3
"""What else the daemon does while a request waits counts with it: it costs the least of these."""


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
    calls = min(_request_rows.calls(node, flow) for _ in range(ROUNDS))
    assert MOST[flow] / 2 < calls <= MOST[flow], "none at all: handlers that are not counted"


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    """A node of a cluster."""
    base: Path = tmp_path_factory.mktemp("member")
    with Guard() as guard:
        try:
            server = _several.Server(base / "server", guard)
        except Unavailable as lacking:
            pytest.skip(str(lacking))
        site = ("--node-name", "one", "--peer", f"127.0.0.1:{free_port()}")
        secret = ("--secret-file", str(base / "key"))
        made = Measured("relay", base, "relay", None, "--engine", server.url(0), *site, *secret)
        try:
            made.start(guard)
            made.command("namespace", "create", "peer", "--kind", "cache", "--coherence", "peer")
            yield made
        finally:
            made.stop()
            server.stop()


@pytest.mark.parametrize("coherence", MOST_OF_CLUSTER)
def test_a_block_takes_no_more_calls_in_a_cluster_than_this(
    member: Measured, coherence: str
) -> None:
    directory = member.mountpoint / coherence / "blocks"
    _several.wait_for(directory.parent.exists, "the namespace")
    directory.mkdir()
    create = _scale_rows.create_and_rename
    create(_request_rows.new_names(str(directory), 1)[0])
    counts = []
    for _ in range(ROUNDS):
        names = _request_rows.new_names(str(directory), COUNTED)
        counted = member.counted(lambda names=names: [create(each) for each in names])
        counts.append(_call_counter.calls(counted, ("create", "flush", "rename")) / COUNTED)
    calls = min(counts)
    most = MOST_OF_CLUSTER[coherence]
    assert most / 2 < calls <= most, "none at all: handlers that are not counted"
