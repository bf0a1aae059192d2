"""Random operations on names that nodes keep themselves, from several hosts by all ways, under
faults, joins and drains.

Three kinds of names: those in `blocks` are written once, as an engine's blocks are, and read and
removed by all; `shared` ones are written by all; `moves` are renamed too. Directories are each
host's own there, so each makes them.
"""

import contextlib
import math
import random
import shutil
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

from s3api.auth.credentials import Credentials
from tests.cluster.cluster import Cluster, Host
from tests.cluster.histories.campaign import Campaign, Plan
from tests.cluster.histories.events import Disturbance
from tests.cluster.histories.faults import Fault
from tests.cluster.histories.fronts import ByS3, Front, Mount
from tests.cluster.histories.peer_model import check_peer
from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs

_PACE_S: Final = 0.03
"""Between two operations of a worker: names are to live for longer than they take to be heard."""
_LEASE_S: Final = 2.5
"""Within which a node renews its lease."""
_DIRECTORIES: Final = ("blocks", "shared", "moves")
_SHARED: Final = 4
_READS_OF_THE_NEW: Final = 20


class PeerCampaign(Campaign):
    """In a directory of a namespace. `spare`: a host of the same network that does not run; it
    joins, and leaves again by force: where nodes have durable files, some may be its alone by
    then."""

    def __init__(
        self, cluster: Cluster, keys: Credentials, plan: Plan, spare: Host | None, lag_s: float
    ) -> None:
        super().__init__(cluster, keys, plan)
        self._spare = spare
        self._lag_s = lag_s
        self._blocks: list[str] = []
        """Names that were written once."""

    def check(self) -> None:
        check_peer(self.history.events, self.disturbances, self._lag_s)

    # ---- the parts of a run

    def _prepare(self) -> None:
        for host in self._cluster:
            wait_until(self._root(host).parent.is_dir, "all hosts see it")
            for name in _DIRECTORIES:
                (self._root(host) / name).mkdir(parents=True)

    def _faults(self, draw: random.Random) -> list[Fault]:
        host = draw.choice(list(self._cluster))
        drain = Fault(
            lambda: self._command(host, "node", "drain", host.name),
            lambda: self._keep(host),
            f"drain node {host.number}",
            frozenset([host.number]),
            empties=True,
        )
        faults, spare = [*super()._faults(draw), drain], self._spare
        if spare is not None:
            join, leave = partial(self._join, spare), partial(self._leave, spare)
            faults.append(Fault(join, leave, f"node {spare.number} joins"))
        return faults

    def _operate(
        self, host: Host, front: Front, draw: random.Random, _turn: int, values: Iterator[int]
    ) -> None:
        self._stop.wait(_PACE_S)
        kind = draw.choice(("blocks", "blocks", "shared", "moves"))
        if kind == "blocks":
            self._on_block(host, front, draw, next(values))
            return
        name = f"{kind}/{draw.randrange(_SHARED)}"
        match draw.choice(("read", "read", "put", "other")):
            case "read":
                self._read(host, front, name)
            case "put":
                self._put(host, front, draw, name, next(values), in_place=False)
            case _ if kind == "moves" and not isinstance(front, ByS3):
                other = f"{kind}/{(int(name[-1]) + 1) % _SHARED}"
                with self.history.asking(host.number, front.name, "rename", name, other=other):
                    front.rename(name, other)  # type: ignore[attr-defined]
            case _:
                self._remove(host, front, name)

    def _on_block(self, host: Host, front: Front, draw: random.Random, value: int) -> None:
        if not self._blocks or draw.random() < 0.4:
            name = f"blocks/{value:x}"
            self._put(host, front, draw, name, value, in_place=False)
            self._blocks.append(name)
        elif draw.random() < 0.1:
            self._remove(host, front, draw.choice(self._blocks))
        else:
            self._read(host, front, draw.choice(self._blocks))

    # ---- a node that comes and goes

    def _join(self, spare: Host) -> None:
        """It is a new node, which knew nothing before."""
        spare.up()
        alone = frozenset([spare.number])
        self.disturbances.append(Disturbance(-math.inf, time.monotonic(), alone))

    def _leave(self, spare: Host) -> None:
        """It reads some of what others have, and is a node no more."""
        time.sleep(self._lag_s)
        draw = random.Random(f"{self._plan.seed} spare")
        wait_until(self._root(spare).parent.is_dir, "it sees the namespace")
        with contextlib.closing(Mount(self._root(spare).parent)) as front:
            directory = self._root(spare).name
            for name in draw.sample(self._blocks, min(len(self._blocks), _READS_OF_THE_NEW)):
                with self.history.asking(spare.number, front.name, "read", name) as answer:
                    answer.value = front.read(f"{directory}/{name}")
        spare.end()
        self._command(self._cluster[1], "node", "remove", spare.name, "--force")
        shutil.rmtree(spare.store)

    def _keep(self, host: Host) -> None:
        """The end of a drain, once the node has heard of it: it is told with its lease."""
        self._command(host, "node", "drain", host.name, "--stop")
        time.sleep(_LEASE_S)

    def _command(self, host: Host, *words: str) -> None:
        done = kvfs(*words, "--store", str(host.store))
        if done.returncode:
            raise OSError(f"kvfs {' '.join(words)}: {done.stderr.strip()}")
