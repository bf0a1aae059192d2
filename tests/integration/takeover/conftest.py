"""Mounts that outlive their daemons, where the kernel has them."""

import pytest

from gateway.fuse.channel import mode_probe


@pytest.fixture(autouse=True)
def outlives() -> None:
    found = mode_probe.takeover()
    if not found.available:
        pytest.skip(found.reason)
