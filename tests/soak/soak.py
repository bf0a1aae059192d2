"""A cluster under load and faults for a long time: campaigns of random operations, one after the
other, whose histories are judged, beside loads that never stop.

| has to hold | how it is seen |
|---|---|
| names and contents are as the levels of coherence promise | each campaign's history is judged |
| no content that nobody wrote | every read of the loads is compared |
| no error but a miss, where nothing was disturbed | times of errors against those of faults |
| memory and descriptors stay flat | samples of each daemon |
| what is listed is there | each host reads all blocks that it lists, when all is calm |
| nothing is lost, next to nothing left over | `kvfs fsck` of each store, when all have stopped |

What a kill leaves is removed by the next start, and so are the data files that no record names
(`stale_data_gc`).
"""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from s3api.auth.credentials import Credentials
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.cluster import SERVES_S3, Cluster
from tests.cluster.histories.campaign import Campaign, Plan
from tests.cluster.histories.events import Disturbance, Hangs
from tests.cluster.histories.peer_campaign import PeerCampaign
from tests.integration.harness import kvfs
from tests.integration.s3 import users_of
from tests.nfs import ganesha
from tests.soak.faults import further_faults
from tests.soak.loads import BLOCK_BYTES, BLOCKS, BUCKET, WEIGHTS, LoadError, Loads
from tests.soak.nfs_load import FILES, SERVES_NFS
from tests.soak.vital_signs import VitalSigns

_BOUND_S: Final = 10.0
"""A cache is late by two seconds, and the kernel's belief by two more; all loads together may hold
up the machine for some seconds beside that."""
_AFTER_S: Final = 30.0
"""Until then a fault may still be felt: leases, a start, what waits for ten seconds."""
_SAMPLE_S: Final = 5.0
_LATE_S: Final = 2.0
"""A sample that comes later than this: the machine is too busy to tell what disturbs whom."""
_BLOCKS_HELD: Final = 200
RESTS: Final = ("leaked_data", "stray_index_entry")
"""What a fetch or a drop leaves that a stop, or another drop, came in between of: a node's sweep
takes the one at its next start, its evictor the other."""
_RESTS_AT_ONCE: Final = 5
_RESTS_OF_A_ROUND: Final = 1
"""On average: a node that is not started anew keeps what its rounds leave."""
_PEER: Final = "peer"
_KINDS: Final = ("strict", "cache", _PEER)
"""Of the rounds, one after the other."""
SERVES: Final = (*SERVES_S3, *(() if ganesha.why_not() else SERVES_NFS))
"""The flags of each node."""
Say = Callable[[str], None]


@dataclass
class SoakResult:
    """What a soak saw."""

    rounds: int = 0
    operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    loads: dict[str, int] = field(default_factory=dict)
    errors_in_faults: int = 0
    rests: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    signs: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "faults": dict(self.faults), "rests": dict(self.rests)}


class Soak:
    """One run, on a cluster that is up and serves S3, and NFS where it can (`SERVES`)."""

    def __init__(self, cluster: Cluster, seed: int, say: Say) -> None:
        self.result = SoakResult()
        self._cluster = cluster
        self._seed = seed
        self._say = say
        self._signs = VitalSigns(cluster)
        self.disturbances: list[Disturbance] = []
        """Those of all rounds."""

    def run(self, seconds: float) -> SoakResult:
        """Goes on for so long, and at least for one round; then all nodes are stopped. Raises
        Hangs: of what hangs nothing can be judged."""
        keys = self._keys()
        self._make_namespaces()
        loads = Loads(self._cluster, keys, self._seed)
        loads.prepare()
        end, draw = time.monotonic() + seconds, random.Random(self._seed)
        with self._sampling():
            with loads.running():
                while not self.result.rounds or time.monotonic() < end:
                    self._round(keys, draw.randrange(1 << 30))
                    self._tell(loads, end)
            loads.look_at_all()
        self.judge(loads)
        self._look_for_rests()
        return self.result

    def _keys(self) -> Credentials:
        with users_of(self._cluster[1]) as users:
            return users.find(ADMINISTRATOR)

    def _make_namespaces(self) -> None:
        held = str(_BLOCKS_HELD * BLOCK_BYTES)
        for name, options in (
            (BLOCKS, ("--kind", "cache", "--coherence", "peer", "--capacity", held)),
            (WEIGHTS, ("--replicas", "1")),
            (_PEER, ("--kind", "cache", "--coherence", "peer")),
            (FILES, ()),
            (BUCKET, ()),
        ):
            self._command("namespace", "create", name, *options)
        if not ganesha.why_not():
            (self._cluster[1].mount / FILES).chmod(0o777)
            self._command("nfs", "export", FILES)
        for host in self._cluster:
            _wait(lambda host=host: (host.mount / BUCKET).is_dir(), "all hosts see the namespaces")

    def _command(self, *words: str) -> None:
        done = kvfs(*words, "--store", str(self._cluster[1].store))
        if done.returncode:
            raise OSError(done.stderr)

    # ---- rounds

    def _round(self, keys: Credentials, seed: int) -> None:
        kind = _KINDS[self.result.rounds % len(_KINDS)]
        plan = self._plan(kind, seed)
        if kind == _PEER:
            campaign: Campaign = PeerCampaign(self._cluster, keys, plan, None, _BOUND_S)
        else:
            campaign = Campaign(self._cluster, keys, plan)
        try:
            self._make_place(kind, plan.namespace)
            campaign.run()
            self._judge_round(campaign, kind)
        except Hangs:
            raise
        except Exception as error:
            what = f"round {self.result.rounds}, {kind}, seed {seed}: {type(error).__name__}"
            self._say(f"{what}: {error}")
            self.result.complaints.append(f"{what}: {error}"[:2_000])
        self.result.rounds += 1
        self.result.operations += len(campaign.history.events)
        self.disturbances += campaign.disturbances
        self.result.faults.update(each.kind for each in campaign.disturbances)

    def _make_place(self, kind: str, name: str) -> None:
        """Makes the namespace of a strict round, or the directory of another."""
        if kind != "strict":
            (self._cluster[1].mount / name).mkdir(exist_ok=True)
            return
        # An engine that is slow to come back is away for its nodes: what they read then is as old
        # as that, unless they are to refuse.
        self._command("namespace", "create", name, "--without-engine", "refuse")

    def _plan(self, kind: str, seed: int) -> Plan:
        is_strict = kind == "strict"
        return Plan(
            seed,
            f"strict-{seed}" if is_strict else f"{kind}/{seed}",
            operations=100 if kind == _PEER else 40,
            directories=2,
            faults=2,
            with_moves=is_strict,
            with_stops=is_strict,
            further_faults=lambda host: further_faults(self._cluster, host),
        )

    def _judge_round(self, campaign: Campaign, kind: str) -> None:
        if kind == "strict":
            campaign.check_strict()
            return
        time.sleep(_BOUND_S)
        campaign.look_at_all()
        if isinstance(campaign, PeerCampaign):
            campaign.check()
        else:
            campaign.check_cache(_BOUND_S)

    def _tell(self, loads: Loads, end: float) -> None:
        left_s = max(0, round(end - time.monotonic()))
        done = loads.journal.done
        self._say(
            f"round {self.result.rounds}: {self.result.operations:,} operations judged,"
            f" {sum(done.values()):,} of the loads, {len(loads.journal.errors)} errors to judge,"
            f" {len(self.result.complaints)} complaints, {left_s} s left"
        )

    def _sampling(self) -> "_Sampling":
        return _Sampling(self._signs, self.disturbances)

    # ---- the end

    def judge(self, loads: Loads) -> None:
        """Adds what did not hold to the result."""
        result, journal = self.result, loads.journal
        result.loads = dict(journal.done)
        result.complaints += [f"wrong content: {each}" for each in journal.wrong]
        undisturbed = [each for each in journal.errors if not self._was_disturbed(each)]
        result.errors_in_faults = len(journal.errors) - len(undisturbed)
        result.complaints += [
            f"an error where nothing was disturbed: {each}" for each in undisturbed
        ]
        result.complaints += self._signs.complaints()
        result.signs = self._signs.summary()

    def _was_disturbed(self, error: LoadError) -> bool:
        """Whether a fault lasted while it went on, or was felt still: of any host, whose data and
        names others may have waited for."""
        return any(
            each.began <= error.ended and error.began <= each.ended + _AFTER_S
            for each in self.disturbances
        )

    def _look_for_rests(self) -> None:
        for host in self._cluster:
            host.up()
        for host in self._cluster:
            host.end()
        for host in self._cluster:
            found = kvfs("fsck", "--json", "--store", str(host.store), timeout_s=300)
            for problem in map(json.loads, found.stdout.splitlines()):
                if problem.get("kind") in RESTS:
                    self.result.rests[problem["kind"]] += 1
                elif "kind" in problem:
                    self.result.complaints.append(f"fsck of node {host.number}: {problem}")
        if self.result.rests.total() > _RESTS_AT_ONCE + _RESTS_OF_A_ROUND * self.result.rounds:
            self.result.complaints.append(f"too much is left over: {self.result.rests}")


class _Sampling:
    """Takes samples in a thread, while the block lasts, and notes when the machine held it up."""

    def __init__(self, signs: VitalSigns, disturbances: list[Disturbance]) -> None:
        self._signs = signs
        self._disturbances = disturbances
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        due = time.monotonic() + _SAMPLE_S
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            self._signs.take()
            ended = time.monotonic()
            if ended > due + _LATE_S:
                began = due - _SAMPLE_S
                self._disturbances.append(Disturbance(began, ended, frozenset(), empties=False))
            due = ended + _SAMPLE_S


def _wait(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.1)
