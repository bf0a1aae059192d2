"""Whether what several hosts see of each other, under faults, is what the levels of coherence
promise.

Two short ones run each time; `KVFS_TEST_HISTORIES=10` runs ten long ones of each level instead,
`KVFS_TEST_SHORT_HISTORIES=90` as many short ones (behind the long ones, where both are asked for);
`KVFS_TEST_MODES=relay` has the mounts be of that mode.
The seed is printed; with a history that fails, what the nodes told of late.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from s3api.auth.credentials import Credentials
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.cluster import SERVES_S3, Cluster, Host
from tests.cluster.histories.campaign import Campaign, Plan
from tests.cluster.histories.peer_campaign import PeerCampaign
from tests.conftest import LONG, SEED
from tests.integration.harness import best_mode, kvfs
from tests.integration.s3 import users_of

LONG_ONES: Final = int(os.environ.get("KVFS_TEST_HISTORIES", "0"))
SHORT_ONES: Final = int(os.environ.get("KVFS_TEST_SHORT_HISTORIES", "0"))
SEEDS: Final = [SEED + n for n in range(LONG_ONES + SHORT_ONES)] or [22, 27]
SHORT: Final[dict[str, Any]] = {"operations": 40, "directories": 2, "faults": 2}
pytestmark = pytest.mark.timeout(1_200)
"""Each step of a campaign has a deadline of its own; how long all of it takes says how busy the
machine is."""
PEER: Final = "peer"
HEARD_S: Final = 2.0 + (0.0 if LONG else 6.0)
"""Names are heard of within two seconds; beside other tests all may take longer."""
BOUND_S: Final = 2.0 + 2.0
"""A node believes its mirror for two seconds, its kernel what it was told for two more at most."""


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[Cluster]:
    with Cluster(root, 3, *SERVES_S3, "--mode", best_mode()) as made:
        yield made


@pytest.fixture(scope="module")
def keys(cluster: Cluster) -> Credentials:
    with users_of(cluster[1]) as users:
        return users.find(ADMINISTRATOR)


def campaign_of(
    cluster: Cluster, keys: Credentials, seed: int, namespace: str, **differing: Any
) -> Campaign:
    size = {} if seed in SEEDS[:LONG_ONES] else SHORT
    return Campaign(cluster, keys, Plan(seed, namespace, **size, **differing))


@contextlib.contextmanager
def telling_of(cluster: Cluster) -> Iterator[None]:
    """What the nodes told of late, where a history fails."""
    try:
        yield
    except BaseException:
        for host in cluster:
            print(f"---- node {host.number}\n{host.log[-5000:]}")
        raise


@pytest.mark.parametrize("seed", SEEDS)
def test_strict_names_are_registers(cluster: Cluster, keys: Credentials, seed: int) -> None:
    print(f"seed {seed}")
    namespace = f"strict-{seed}"
    # Without the engine, what is read is as old as that, unless it is to refuse.
    place = ("--without-engine", "refuse", "--store", str(cluster[1].store))
    made = kvfs("namespace", "create", namespace, "--kind", "durable", *place)
    assert made.returncode == 0, made.stderr
    campaign = campaign_of(cluster, keys, seed, namespace)
    with telling_of(cluster):
        history = campaign.run()
        print(f"{len(history.events)} operations; failed: {history.failures}")
        campaign.check_strict()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cache_is_late_by_no_more_than_its_bound(
    cluster: Cluster, keys: Credentials, seed: int
) -> None:
    print(f"seed {seed}")
    namespace = f"cache/{seed}"
    (cluster[1].mount / namespace).mkdir()
    campaign = campaign_of(cluster, keys, seed, namespace, with_moves=False, with_stops=False)
    with telling_of(cluster):
        campaign.run()
        time.sleep(BOUND_S)  # what is read from now on is the last that was written, or a miss
        campaign.look_at_all()
        history = campaign.history
        print(f"{len(history.events)} operations; failed: {history.failures}")
        campaign.check_cache(BOUND_S)


@pytest.fixture(scope="module")
def spare(cluster: Cluster) -> Iterator[Host]:
    """A host beside the cluster's, where no node runs yet."""
    with cluster.spare(len(cluster.hosts) + 1) as made:
        yield made


PEER_SEEDS: Final = [SEED + n for n in range(5)] if LONG else SEEDS[:1]


@pytest.mark.parametrize("seed", PEER_SEEDS)
def test_peer_names_are_found_and_never_wrong(
    cluster: Cluster, keys: Credentials, spare: Host, seed: int
) -> None:
    print(f"seed {seed}")
    _make_peer_namespace(cluster)
    size: dict[str, Any] = {"operations": 800, "faults": 8} if LONG else {"operations": 200}
    plan = Plan(seed, f"{PEER}/{seed}", with_moves=False, **size)
    campaign = PeerCampaign(cluster, keys, plan, spare, HEARD_S)
    with telling_of(cluster):
        campaign.run()
        time.sleep(HEARD_S)
        campaign.look_at_all()
        history = campaign.history
        print(f"{len(history.events)} operations; failed: {history.failures}")
        campaign.check()


def _make_peer_namespace(cluster: Cluster) -> None:
    if (cluster[1].mount / PEER).exists():
        return
    place = ("--store", str(cluster[1].store))
    made = kvfs("namespace", "create", PEER, "--kind", "cache", "--coherence", "peer", *place)
    assert made.returncode == 0, made.stderr
