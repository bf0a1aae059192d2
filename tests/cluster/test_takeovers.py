"""Mounts that outlive their daemons, under load from several hosts whose daemons are killed and
replaced: no call of a program fails, and what they saw of each other is what it would be else.

A short run each time, ten long ones with LONG. The seed is printed.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.cluster import SERVES_S3, Cluster, Host
from tests.cluster.histories.campaign import Campaign, Plan
from tests.cluster.histories.faults import Fault
from tests.cluster.test_histories import telling_of
from tests.conftest import LONG, SEED
from tests.integration.harness import best_mode, kvfs
from tests.integration.s3 import users_of
from tests.integration.takeover.successor import DEADLINE_S, WAIT, follow

pytestmark = pytest.mark.timeout(1_200)
SEEDS: Final = [SEED + n for n in range(10)] if LONG else [31]
SIZE: Final[dict[str, Any]] = {} if LONG else {"operations": 60, "directories": 2}


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[Cluster]:
    with Cluster(root, 2, *SERVES_S3, *WAIT, "--mode", best_mode()) as made:
        yield made


def _kill(host: Host) -> None:
    host.kill()
    follow(host, host.killed)


def _restart(host: Host) -> None:
    place = ("--store", str(host.store))
    done = kvfs("restart", *place, inside=host.inside, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr


class TakeoverCampaign(Campaign):
    """One whose programs use the mounts alone, which go on."""

    failed: dict[str, int]

    def _faults(self, draw: random.Random) -> list[Fault]:
        host = draw.choice(list(self._cluster))
        return [
            Fault(lambda: _kill(host), lambda: None, f"kill node {host.number}"),
            Fault(lambda: _restart(host), lambda: None, f"restart node {host.number}"),
        ]

    def _work(self, host: Host, number: int) -> None:
        if not number:
            super()._work(host, number)

    def look_at_all(self) -> None:
        self.failed = dict(self.history.failures)
        super().look_at_all()


@pytest.mark.parametrize("kind", ["durable", "cache"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_call_fails_and_nothing_is_lost(cluster: Cluster, seed: int, kind: str) -> None:
    print(f"seed {seed}")
    namespace = f"{kind}-{seed}"
    made = kvfs("namespace", "create", namespace, "--kind", kind, "--store", str(cluster[1].store))
    assert made.returncode == 0, made.stderr
    with users_of(cluster[1]) as users:
        keys = users.find(ADMINISTRATOR)
    plan = Plan(seed, namespace, **SIZE, faults=6 if LONG else 3, with_moves=kind == "durable")
    campaign = TakeoverCampaign(cluster, keys, plan)
    with telling_of(cluster):
        history = campaign.run()
        print(f"{len(history.events)} operations; failed: {campaign.failed}")
        assert not campaign.failed
        assert all(each.is_known for each in history.events)
        if kind == "durable":
            campaign.check_strict()
