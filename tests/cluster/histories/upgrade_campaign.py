"""Random operations from several hosts by all ways while the program of one node after the other is
replaced.

What programs do for it: by S3 they ask another node where one fails, with the client they ask again
until their node is back. On a mount that outlives its daemon they do nothing; where it ends, those
of that host stand aside until it is back.
"""

import contextlib
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from tests.cluster.cluster import Host
from tests.cluster.histories.campaign import Campaign
from tests.cluster.histories.events import Disturbance
from tests.cluster.histories.fronts import ByS3, Front, Mount
from tests.cluster.histories.peer_campaign import PeerCampaign
from tests.cluster.waiting import wait_until

_PATIENCE_S: Final = 60.0
"""A program's: then it has failed for good."""
_AGAIN_S: Final = 0.05
MOUNT: Final = 0
CLIENT: Final = 1
S3: Final = 2
"""The ways of a campaign's workers."""


class Switch(NamedTuple):
    """One node goes on with another program."""

    host: Host
    run: Callable[[], object]
    name: str
    aside: tuple[int, ...] = ()
    """The ways by which nobody uses the node meanwhile."""


class Upgrades(Campaign):
    """A campaign in which nothing else happens. It ends with the last switch."""

    switches: Sequence[Switch]
    pace_s: float
    """Between two operations of a worker: they are to last as long as all switches."""
    failed: list[str]
    """Operations that failed for their program for good, and how."""
    longest_s: dict[str, float]
    """How long the longest operation took by each way; by S3 and the client with all attempts."""

    def upgrade(self, switches: Sequence[Switch], pace_s: float) -> None:
        """Runs it, and returns when all hosts see the same. Raises what `run` raises."""
        self.switches, self.pace_s = switches, pace_s
        self.failed, self.longest_s = [], {}
        ways, numbers = (MOUNT, CLIENT, S3), [host.number for host in self._cluster]
        self._uses = {(each, way): threading.Lock() for each in numbers for way in ways}
        self.run()

    def _be_bad(self, workers: list[threading.Thread]) -> None:
        draw = random.Random(f"{self._plan.seed} pauses")
        for switch in self.switches:
            self._wait(draw.uniform(0.2, 0.8), workers)
            began = time.monotonic()
            self._make(switch)
            ended = time.monotonic()
            print(f"{began:.4f} {switch.name}, until {ended:.4f}")
            alone = frozenset([switch.host.number])
            self.disturbances.append(Disturbance(began, ended, alone, name=switch.name))
        self._wait(draw.uniform(0.5, 1.0), workers)

    def _make(self, switch: Switch) -> None:
        with contextlib.ExitStack() as aside:
            for way in switch.aside:
                aside.enter_context(self._uses[switch.host.number, way])
            switch.run()
            wait_until(self._root(switch.host).is_dir, "the node knows the namespace")

    def _operate(
        self, host: Host, front: Front, draw: random.Random, turn: int, values: Iterator[int]
    ) -> None:
        """The same, with another value, until it is known what came of it; on a mount once."""
        self._stop.wait(self.pace_s)
        way = _way(front)
        state, began = draw.getstate(), math.inf
        for asked in self._to_ask(host, way):
            with self._using(asked, way) as may_use:
                if not may_use:
                    continue
                began = min(began, time.monotonic())
                draw.setstate(state)
                with self._front_at(asked, host, front) as door:
                    super()._operate(asked, door, draw, turn, values)
            if not self.history.went_wrong:
                break
            if way == MOUNT or time.monotonic() > began + _PATIENCE_S:
                self.failed.append(f"{began:.4f} {front.name} of node {host.number}")
                break
            time.sleep(_AGAIN_S)
        took = time.monotonic() - began
        self.longest_s[front.name] = max(took, self.longest_s.get(front.name, 0.0))

    def _to_ask(self, host: Host, way: int) -> Iterator[Host]:
        """Its own node and then, by S3, the others and it again, for ever."""
        others = [each for each in self._cluster if each is not host and way == S3]
        return itertools.cycle([host, *others])

    @contextlib.contextmanager
    def _using(self, host: Host, way: int) -> Iterator[bool]:
        """Whether the node may be used now: by S3 there are others, else this waits for it."""
        lock = self._uses[host.number, way]
        may_use = lock.acquire(timeout=_AGAIN_S if way == S3 else -1)
        try:
            yield may_use
        finally:
            if may_use:
                lock.release()

    def _front_at(
        self, asked: Host, host: Host, front: Front
    ) -> contextlib.AbstractContextManager[Front]:
        return contextlib.nullcontext(front) if asked is host else self._front(asked, S3)


def _way(front: Front) -> int:
    return MOUNT if isinstance(front, Mount) else S3 if isinstance(front, ByS3) else CLIENT


class PeerUpgrades(Upgrades, PeerCampaign):
    """The same with names that nodes keep themselves."""
