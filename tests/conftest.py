"""What every test shares: the checkout is importable, and what is random repeats from a seed."""

import os
import random
import sys
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Kept in the environment, so that processes that share the tests draw the same.
SEED = int(os.environ.setdefault("KVFS_TEST_SEED", str(random.SystemRandom().randrange(1 << 32))))

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "kvfs", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvfs")


def pytest_report_header() -> str:
    return f"seed: {SEED} (KVFS_TEST_SEED={SEED} repeats it)"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for this test, drawn from the session's; printed, so that a failure shows it."""
    value = random.Random(f"{SEED} {request.node.name}").randrange(1 << 32)
    print(f"seed {value}")
    return value
