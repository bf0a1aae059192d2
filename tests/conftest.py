"""What every test shares: the checkout is importable, and what is random repeats from a seed."""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.hanging import Hanging  # noqa: E402  (importable since the line above)

# Tests send these signals to what they start, which would ignore them too, as in the background of
# a shell or under nohup.
_AS_A_TERMINAL: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
}
for number, handler in _AS_A_TERMINAL.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

LONG = "KVFS_TEST_LONG" in os.environ
"""Whether tests run what a suite has no time for: `./dev test --long`."""

# A suite that says whether a change is good asks the same each time; the long one asks anew. Kept
# in the environment, so that processes that share the tests draw the same.
SEED = int(
    os.environ.setdefault(
        "KVFS_TEST_SEED", str(random.SystemRandom().randrange(1 << 32) if LONG else 1)
    )
)

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "kvfs",
    max_examples=500 if LONG else 50,
    derandomize=not LONG,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvfs")

LONGEST = (
    "integration/clients/test_lmcache.py",
    "integration/clients/test_sglang.py",
    "integration/clients/test_s3_clients.py",
    "cluster/test_histories.py",
    "cluster/test_faults.py",
    "soak/test_soak.py",
    "integration/mount/test_directories.py",
    "integration/mount/test_races.py",
    "fault/disk/test_power_campaign.py",
    "fault/kill/test_engine.py",
    "fault/cluster/test_engine_away.py",
    "integration/mount/test_tools.py",
    "integration/mount/test_exerciser.py",
    "integration/s3api/server/test_s3_serving.py",
    "fault/disk/test_full_disk.py",
    "integration/node/test_restart.py",
    "contract/transfer/test_transfer.py",
    "fault/cluster/test_several_shards.py",
    "contract/objects/test_objects_slots.py",
    "integration/mount/test_new_files.py",
    "fault/disk/test_damaged_journal.py",
    "fault/disk/test_client_disk.py",
    "integration/cli/test_cli.py",
    "fault/disk/test_power_cut.py",
    "fault/cluster/test_membership.py",
    "fault/cluster/test_redis.py",
    "fault/kill/test_recovery.py",
    "fault/kill/test_s3_kill.py",
    "fault/disk/test_damaged_base.py",
    "fault/kill/test_s3_kill_deletes.py",
    "integration/mount/test_odd_names.py",
    "integration/s3api/objects/test_s3_mount.py",
    "integration/s3api/objects/test_s3_objects.py",
    "integration/s3api/objects/test_s3_multipart.py",
    "integration/s3api/objects/test_s3_cold.py",
    "integration/mount/posix/test_posix_data.py",
    "integration/cluster/test_bringing.py",
    "cluster/test_dev_cluster.py",
    "nfs/node/test_going_on.py",
)
"""Files of tests, in the order in which they begin: a long one that begins late has its process
work alone at the end. All others follow."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Hanging(config))


def pytest_report_header() -> str:
    return f"seed: {SEED} (KVFS_TEST_SEED={SEED} repeats it)"


def pytest_sessionfinish() -> None:
    harness = sys.modules.get("tests.integration.harness")
    if harness is not None:
        harness.open_mountpoints()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for this test, drawn from the session's; printed, so that a failure shows it."""
    value = random.Random(f"{SEED} {request.node.name}").randrange(1 << 32)
    print(f"seed {value}")
    return value
