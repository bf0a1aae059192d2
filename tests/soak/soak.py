"""A cluster under load and faults for a long time: campaigns of random operations, one after the
other, whose histories are judged, beside loads that never stop.

| has to hold | how it is seen |
|---|---|
| names and contents are as the levels of coherence promise | each campaign's history is judged |
| no content that nobody wrote | every read of the loads is compared |
| no error but a miss, where nothing was disturbed | times of errors against those of faults |
| memory and descriptors stay flat | samples of each daemon |
| nothing is left over | `kvfs fsck` of each store, when all have stopped |
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
from tests.cluster.cluster import Cluster
from tests.cluster.histories.campaign import Campaign, Plan
from tests.cluster.histories.events import Disturbance
from tests.integration.harness import kvfs
from tests.integration.s3 import users_of
from tests.soak.loads import BLOCK_BYTES, BLOCKS, BUCKET, WEIGHTS, LoadError, Loads
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
_RESTS: Final = ("leaked_data", "stray_index_entry")
"""What a fetch leaves whose file was removed meanwhile: a node's sweep takes the one each hour, its
evictor the other."""
_MOST_RESTS: Final = 100
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
    """One run, on a cluster that is up and serves S3."""

    def __init__(self, cluster: Cluster, seed: int, say: Say) -> None:
        self.result = SoakResult()
        self._cluster = cluster
        self._seed = seed
        self._say = say
        self._signs = VitalSigns(cluster)
        self.disturbances: list[Disturbance] = []
        """Those of all rounds."""

    def run(self, seconds: float) -> SoakResult:
        """Goes on for so long, and at least for one round; then all nodes are stopped."""
        keys = self._keys()
        self._make_namespaces()
        loads = Loads(self._cluster, keys, self._seed)
        loads.prepare()
        end, draw = time.monotonic() + seconds, random.Random(self._seed)
        with self._sampling(), loads.running():
            while not self.result.rounds or time.monotonic() < end:
                self._round(keys, draw.randrange(1 << 30))
                self._tell(loads, end)
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
            (BUCKET, ()),
        ):
            place = ("--store", str(self._cluster[1].store))
            made = kvfs("namespace", "create", name, *options, *place)
            if made.returncode:
                raise OSError(made.stderr)
        for host in self._cluster:
            _wait(lambda host=host: (host.mount / BUCKET).is_dir(), "all hosts see the namespaces")

    # ---- rounds

    def _round(self, keys: Credentials, seed: int) -> None:
        is_strict = self.result.rounds % 2 == 0
        name = f"strict-{seed}" if is_strict else f"cache/{seed}"
        (self._cluster[1].mount / name).mkdir()
        plan = Plan(
            seed,
            name,
            operations=40,
            directories=2,
            faults=2,
            with_moves=is_strict,
            with_stops=is_strict,
        )
        campaign = Campaign(self._cluster, keys, plan)
        try:
            campaign.run()
            if is_strict:
                campaign.check_strict()
            else:
                time.sleep(_BOUND_S)
                campaign.look_at_all()
                campaign.check_cache(_BOUND_S)
        except Exception as error:
            what = f"round {self.result.rounds}, seed {seed}: {type(error).__name__}"
            self._say(f"{what}: {error}")
            self.result.complaints.append(f"{what}: {error}"[:2_000])
        self.result.rounds += 1
        self.result.operations += len(campaign.history.events)
        self.disturbances += campaign.disturbances
        for each in campaign.disturbances:
            self.result.faults["node" if each.hosts else "engine"] += 1

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
        """Whether a fault lasted then, or was felt still: of any host, whose data and names others
        may have waited for."""
        return any(
            each.began - 1.0 <= error.at <= each.ended + _AFTER_S for each in self.disturbances
        )

    def _look_for_rests(self) -> None:
        for host in self._cluster:
            host.up()
        for host in self._cluster:
            host.end()
        for host in self._cluster:
            found = kvfs("fsck", "--json", "--store", str(host.store), timeout_s=300)
            for problem in map(json.loads, found.stdout.splitlines()):
                if problem.get("kind") in _RESTS:
                    self.result.rests[problem["kind"]] += 1
                elif "kind" in problem:
                    self.result.complaints.append(f"fsck of node {host.number}: {problem}")
        if sum(self.result.rests.values()) > _MOST_RESTS:
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
