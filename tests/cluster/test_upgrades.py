"""A cluster whose nodes are upgraded one by one from an earlier program to this one, back, and then
for good, while programs work on all of them: none of their operations fails, and what they saw of
each other is what it would be else.

Two earlier programs: the last one of the version before, whose mounts end with their daemons, and
the first one whose mounts this program goes on with. Both come from the history of this checkout.
"""

import functools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from s3api.auth.credentials import Credentials
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.cluster import SERVES_S3, Cluster, Host
from tests.cluster.histories.campaign import Plan
from tests.cluster.histories.upgrade_campaign import (
    CLIENT,
    MOUNT,
    S3,
    PeerUpgrades,
    Switch,
    Upgrades,
)
from tests.cluster.test_histories import BOUND_S, HEARD_S, PEER, telling_of
from tests.cluster.waiting import wait_until
from tests.conftest import LONG, SEED
from tests.integration.earlier_program import FIRST_HELD, FORMER, earlier_program
from tests.integration.harness import best_mode, kvfs
from tests.integration.s3 import users_of
from tests.integration.takeover.successor import DEADLINE_S, WAIT
from tests.soak.soak import RESTS

pytestmark = [
    pytest.mark.timeout(1_200),
    pytest.mark.skipif(not LONG, reason="nine restarts in each: --long"),
]
SEEDS: Final = [SEED + n for n in range(2)]
_PACE_S: Final = 0.1
_NOBODY: Final[tuple[int, ...]] = ()
_HEARD_S: Final = HEARD_S + 2.0
"""A daemon that has just begun hears and tells of names later."""


class Program(NamedTuple):
    """A program that a node may run."""

    name: str
    before: tuple[str, ...]
    """What stands before its command."""
    outlives: bool
    """Whether a cluster's mounts outlive their daemons."""

    def inside(self, host: Host) -> tuple[str, ...]:
        return (*host.network.inside(host.name), *self.before)


_PRESENT: Final = Program("this program", (), outlives=True)


@pytest.fixture(scope="module", params=[FORMER, FIRST_HELD], ids=["former", "outliving"])
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    commit = str(request.param)
    before = earlier_program(commit, tmp_path_factory.mktemp("earlier"))
    return Program(commit[:7], before, outlives=commit == FIRST_HELD)


@pytest.fixture
def cluster(root: Path, earlier: Program) -> Iterator[Cluster]:
    made = Cluster(root, 3, *SERVES_S3, "--mode", best_mode())
    for host in made:
        _give(host, earlier)
    with made:
        yield made
        for host in made:
            host.end()
        assert not [each for host in made for each in _problems(host)]


def _problems(host: Host) -> Iterator[dict[str, Any]]:
    """What `kvfs fsck` finds, without what the node removes by itself."""
    done = kvfs("fsck", "--json", "--store", str(host.store), timeout_s=DEADLINE_S)
    for each in map(json.loads, done.stdout.splitlines()):
        if "kind" in each and each["kind"] not in RESTS:
            yield {"node": host.number, **each}


def _give(host: Host, program: Program) -> None:
    """It runs this program from its next start on."""
    host.inside = program.inside(host)
    others = tuple(each for each in host.flags if each not in WAIT)
    host.flags = (*others, *WAIT) if program.outlives else others


def _restart(host: Host, program: Program) -> None:
    place = ("--store", str(host.store))
    done = kvfs("restart", *place, inside=program.inside(host), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    _give(host, program)


def _start_anew(host: Host, program: Program) -> None:
    host.pid = host.find()
    host.down()
    _give(host, program)
    host.up()


def _drain_and_start_anew(host: Host, program: Program) -> None:
    """What it alone has is on the others before it goes."""
    _run(host, "node", "drain", host.name)
    wait_until(lambda: _state(host) == "drained", "nothing is left on it", DEADLINE_S)
    _start_anew(host, program)
    _run(host, "node", "drain", host.name, "--stop")


def _state(host: Host) -> str:
    nodes = json.loads(_run(host, "node", "list", "--json"))["nodes"]
    return str(next(each["state"] for each in nodes if each["name"] == host.name))


def _run(host: Host, *words: str) -> str:
    """What a command of its program prints."""
    done = kvfs(*words, "--store", str(host.store), inside=host.inside)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _switches(
    cluster: Cluster, earlier: Program, seed: int, *, is_durable: bool
) -> Iterator[Switch]:
    """To the present program, back, and to it for good."""
    draw = random.Random(f"{seed} order")
    if earlier.outlives:
        make, aside = _restart, _NOBODY
    elif is_durable:
        make, aside = _drain_and_start_anew, (MOUNT, CLIENT, S3)
    else:
        make, aside = _start_anew, (MOUNT,)
    for program in (_PRESENT, earlier, _PRESENT):
        for host in draw.sample(list(cluster), len(cluster.hosts)):
            run = functools.partial(make, host, program)
            yield Switch(host, run, f"node {host.number} runs {program.name}", aside)
    yield Switch(cluster[2], lambda: _finish(cluster), "the upgrade is finished")


def _finish(cluster: Cluster) -> None:
    _run(cluster[2], "node", "finish-upgrade")
    for host in cluster:
        wait_until(lambda host=host: host.status()["engine"]["is_upgraded"], "it is known")


def _plan(seed: int, namespace: str, **differing: Any) -> Plan:
    return Plan(seed, namespace, operations=2_000, directories=20, **differing)


def _keys(cluster: Cluster) -> Credentials:
    with users_of(cluster[1]) as users:
        return users.find(ADMINISTRATOR)


def _upgrade(campaign: Upgrades, switches: Sequence[Switch]) -> None:
    campaign.upgrade(switches, _PACE_S)
    history = campaign.history
    print(f"{len(history.events)} operations; asked again after {history.failures}")
    print(f"longest: {campaign.longest_s}")
    assert not campaign.failed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["durable", "cache"])
def test_no_operation_fails(cluster: Cluster, earlier: Program, kind: str, seed: int) -> None:
    namespace = f"{kind}-{seed}"
    _run(cluster[1], "namespace", "create", namespace, "--kind", kind)
    is_durable = kind == "durable"
    plan = _plan(seed, namespace, with_moves=is_durable)
    campaign = Upgrades(cluster, _keys(cluster), plan)
    with telling_of(cluster):
        _upgrade(campaign, [*_switches(cluster, earlier, seed, is_durable=is_durable)])
        if is_durable:
            campaign.check_strict()
        else:
            campaign.check_cache(BOUND_S)


@pytest.mark.parametrize("seed", SEEDS)
def test_peer_names_go_on(cluster: Cluster, earlier: Program, seed: int) -> None:
    if not earlier.outlives:
        pytest.skip("the version before knows no peer namespaces")
    _run(cluster[1], "namespace", "create", PEER, "--kind", "cache", "--coherence", "peer")
    plan = _plan(seed, f"{PEER}/{seed}", with_moves=False)
    campaign = PeerUpgrades(cluster, _keys(cluster), plan, None, _HEARD_S)
    with telling_of(cluster):
        _upgrade(campaign, [*_switches(cluster, earlier, seed, is_durable=False)])
        campaign.check()
