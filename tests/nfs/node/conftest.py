"""Nodes that serve NFS."""

import pytest

from gateway.fuse.channel import mode_probe
from tests.integration.harness import best_mode


@pytest.fixture(scope="module")
def outlives() -> None:
    """Skips where no mount outlives its daemon."""
    found = mode_probe.takeover()
    if not found.available:
        pytest.skip(found.reason)
    if best_mode() == "libfuse":
        pytest.skip("a mount by libfuse ends with its daemon")
