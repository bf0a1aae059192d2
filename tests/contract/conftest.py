"""What the suites of transfer share."""

from pathlib import Path

import pytest

from tests.integration.clients.environments import mooncake


@pytest.fixture(params=["tcp", "rdma"])
def over(request: pytest.FixtureRequest) -> Path | None:
    """Each transport: with rdma, the interpreter of the nodes' movers."""
    return mooncake() if request.param == "rdma" else None
