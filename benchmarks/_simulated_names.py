"""Many nodes that tell each other what they hold, in one process and in simulated time: the own
sets, messages, trees, queues and tables are those that nodes run; only the network between them,
the leases and the clock are not real.

Of a large cluster a few nodes are observed: they have tables of holders, in which it is seen when a
name is known, and their processor time is reckoned. The others tell, pass on and answer as nodes
do, and keep nothing.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import trio
import trio.lowlevel
from trio.testing import MockClock

from benchmarks._simulated_node import Meter, Node, NoRemovals, Spent
from kvfs.base.errors import Unavailable
from kvfs.holdings.fingerprints import BITS, U64
from kvfs.holdings.home_map import HomeMap
from kvfs.node.names.name_protocol import TELL

LATENCY_S: Final = 0.0005
"""The least that a message is on its way, with the time that a node takes to begin with it."""
_MOMENT_S: Final = 0.00025
"""What arrives within so long arrives together."""
LEASE_S: Final = 10.0
"""After which a node that is silent counts as dead."""
_OBSERVERS: Final = 16
_STEP_S: Final = 0.02
_MOST_AGES: Final = 100_000
_SETTLE_S: Final = 2.0
"""The least in which news reaches a thousand nodes."""
_LATE_S: Final = 4.0
"""Until what dead nodes did not pass on has come by way of its origins."""


class Network:
    """Messages on their way: trio's own timers would take most of a simulation's time."""

    def __init__(self) -> None:
        self._arriving: deque[tuple[int, list[trio.lowlevel.Task]]] = deque()
        """Those who wait for a message, by the moment in which it arrives."""
        self._some = trio.Event()

    async def carry(self) -> None:
        """Waits while a message is on its way."""
        moment = math.ceil((trio.current_time() + LATENCY_S) / _MOMENT_S)
        if not self._arriving or self._arriving[-1][0] < moment:
            self._arriving.append((moment, []))
            self._some.set()
        waiting, task = self._arriving[-1][1], trio.lowlevel.current_task()
        waiting.append(task)

        def abort(_raise: object) -> trio.lowlevel.Abort:
            waiting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def run(self) -> None:
        """Delivers, until cancelled."""
        while True:
            while self._arriving:
                moment, waiting = self._arriving[0]
                await trio.sleep_until(moment * _MOMENT_S)
                self._arriving.popleft()
                for task in waiting:
                    trio.lowlevel.reschedule(task)
                waiting.clear()
            self._some = trio.Event()
            await self._some.wait()


class World:
    """All nodes and what lies between them."""

    def __init__(self, directory: Path, nodes: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ages: list[float] = []
        """Seconds after which the observers knew a name."""
        self.dead: dict[int, float] = {}
        """When a node died."""
        self.is_cut = False
        """Whether nodes of odd numbers reach none of even ones."""
        self.cut_since = 0.0
        self._born: dict[int, float] = {}
        self._network = Network()
        self._none = NoRemovals(directory / "removals")
        meter = Meter()
        trio.lowlevel.add_instrument(meter)
        self.nodes = {
            number: Node(
                *(
                    directory,
                    number,
                    partial(self._members_of, number),
                    partial(self._call, number),
                ),
                self._none,
                (self._came, meter) if number <= _OBSERVERS else None,
            )
            for number in range(1, nodes + 1)
        }

    @property
    def observers(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.number <= _OBSERVERS]

    async def run(self, nursery: trio.Nursery) -> None:
        """Begins with all nodes; returns when they have met."""
        nursery.start_soon(self._network.run)
        for node in self.nodes.values():
            nursery.start_soon(node.run)
        await trio.sleep(_SETTLE_S)

    def close(self) -> None:
        self._none.close()

    def _members_of(self, me: int) -> list[tuple[int, bool]]:
        """As a node's roster tells: who was silent for the length of a lease is dead."""
        now = trio.current_time()
        silent = self.is_cut and now - self.cut_since > LEASE_S
        if not silent and not self.dead:
            return [(number, True) for number in self.nodes]
        return [
            (
                number,
                now - self.dead.get(number, now) <= LEASE_S and not (silent and (number ^ me) & 1),
            )
            for number in self.nodes
        ]

    async def _call(self, me: int, node: int, method: str, params: Any, deadline_s: float) -> Any:
        teller, target = self.nodes[me], self.nodes[node]
        teller.sent += 1
        await self._network.carry()
        if node in self.dead or me in self.dead or (self.is_cut and (node ^ me) & 1):
            await trio.sleep(deadline_s)
            raise Unavailable("it does not answer")
        answer: Any
        if method == TELL:
            answer = await target.told(me, params)
        else:
            nobody: Any = None
            answer = await target.exchange.asked(nobody, params)
            target.received += 1
            teller.bytes += sum(map(len, answer))
        await self._network.carry()
        return answer

    async def write(self, numbers: Sequence[int], rate: float) -> None:
        """Names come on these nodes, so many a second on each, until cancelled."""
        while True:
            now = trio.current_time()
            for number in numbers:
                if number not in self.dead:
                    whole, rest = divmod(rate * _STEP_S, 1)
                    count = int(whole) + (self.random.random() < rest)
                    names = [self.random.getrandbits(BITS) for _ in range(count)]
                    self._born.update(dict.fromkeys(names, now))
                    if names:
                        self.nodes[number].hold(names)
            await trio.sleep(_STEP_S)

    def are_equal(self) -> bool:
        """Whether each observer knows what each living node holds."""
        return all(
            int(observer.table.digests([node.number])[0]) == node.own.digest()
            for observer in self.observers
            for node in self.nodes.values()
            if node is not observer and node.number not in self.dead
        )

    def make_homes(self) -> None:
        """All nodes are homes of a share from now on."""
        homes = HomeMap(1, dict.fromkeys(self.nodes, ""))
        for node in self.nodes.values():
            node.known.adopt(homes)

    def _came(self, added: U64) -> None:
        now = trio.current_time()
        self.ages += [now - born for each in added.tolist() if (born := self._born.get(each))]


class Window(NamedTuple):
    """A second of simulated time for a node, of those that were told."""

    changes: float
    """Of all nodes."""
    received: float
    """Requests that it answered."""
    sent: float
    """Those that it made."""
    bytes: float
    cpu_s: float
    """Processor time of its part for names, without the requests' own."""
    applied: float
    """Changes that its table took."""
    ages: list[float]
    """Of names, when the observers came to know them."""

    @property
    def requests(self) -> float:
        """Those in which it took part."""
        return self.received + self.sent


class Windows(NamedTuple):
    """A node's second when nothing changes, and when names come."""

    at_rest: Window
    busy: Window

    @property
    def cpu_s(self) -> float:
        """What names make more of it."""
        return self.busy.cpu_s - self.at_rest.cpu_s

    @property
    def requests(self) -> float:
        """Likewise."""
        return self.busy.requests - self.at_rest.requests


class Seconds(NamedTuple):
    """Those of the nodes on which names come, and of the others; where they come on all, of all."""

    tellers: Windows
    others: Windows


def run(
    directory: Path,
    nodes: int,
    rate: float,
    seconds: float,
    *,
    writers: int = 0,
    homes: bool = False,
    seed: int = 1,
) -> Seconds:
    """So many names a second come on each of the first `writers` nodes (0: all). `homes`: whether
    each node knows a share of them alone."""
    return trio.run(
        partial(_two_windows, directory, nodes, rate, seconds, writers or nodes, homes, seed),
        clock=MockClock(autojump_threshold=0),
    )


async def _two_windows(
    directory: Path,
    nodes: int,
    rate: float,
    seconds: float,
    writers: int,
    homes: bool,
    seed: int,
) -> Seconds:
    world = World(directory, nodes, seed)
    writing = range(1, writers + 1)
    async with trio.open_nursery() as nursery:
        await world.run(nursery)
        if homes:
            world.make_homes()
            await trio.sleep(_SETTLE_S)
        rests = await _measured(world, seconds, writing)
        nursery.start_soon(world.write, writing, rate)
        await trio.sleep(_SETTLE_S)
        found = [
            Windows(*each)
            for each in zip(rests, await _measured(world, seconds, writing), strict=True)
        ]
        nursery.cancel_scope.cancel()
    world.close()
    return Seconds(*found)


async def _measured(world: World, seconds: float, writing: Sequence[int]) -> tuple[Window, Window]:
    """What `Seconds` has, of a stretch of time."""
    tellers = [each for each in world.observers if each.number in writing]
    others = [each for each in world.observers if each.number not in writing] or tellers
    world.ages.clear()
    before = {each.number: each.spent() for each in world.observers}
    held = sum(world.nodes[number].own.sequence for number in writing)
    await trio.sleep(seconds)
    changes = (sum(world.nodes[number].own.sequence for number in writing) - held) / seconds
    ages = world.random.sample(world.ages, min(_MOST_AGES, len(world.ages)))

    def window(nodes: Sequence[Node]) -> Window:
        spent = np.array([each.spent() for each in nodes])
        spent -= np.array([before[each.number] for each in nodes])
        mean = Spent(*(spent.mean(axis=0) / seconds).tolist())
        return Window(
            *(changes, mean.received, mean.sent, mean.bytes, mean.cpu_s, mean.applied), ages
        )

    return window(tellers), window(others)


class Troubles(NamedTuple):
    """What a cluster does when nodes die, and when it is cut in halves."""

    ages: list[float]
    """Of names that the observers came to know from the death on, until the dead were known to be
    that and what they had not passed on had come."""
    ages_after: list[float]
    """And after that."""
    healed_s: float
    """From the end of the cut until all observers know all."""


def trouble(directory: Path, nodes: int, rate: float, lost: int, cut_s: float) -> Troubles:
    """`lost` nodes die at once; later the others are cut in halves for so long."""
    return trio.run(
        partial(_troubled, directory, nodes, rate, lost, cut_s),
        clock=MockClock(autojump_threshold=0),
    )


async def _troubled(directory: Path, nodes: int, rate: float, lost: int, cut_s: float) -> Troubles:
    world = World(directory, nodes, 2)
    every = range(1, nodes + 1)
    async with trio.open_nursery() as nursery:
        await world.run(nursery)
        writing = await nursery.start(_writing, world, every, rate)
        await trio.sleep(_SETTLE_S)
        now = trio.current_time()
        world.dead = dict.fromkeys(world.random.sample(every[_OBSERVERS:], lost), now)
        unknown = (await _measured(world, LEASE_S + _LATE_S, every))[0].ages
        known = (await _measured(world, _SETTLE_S, every))[0].ages
        world.is_cut, world.cut_since = True, trio.current_time()
        await trio.sleep(cut_s)
        writing.cancel()
        await trio.sleep(_SETTLE_S)
        world.is_cut, healed = False, trio.current_time()
        while not world.are_equal():
            await trio.sleep(0.1)
        healed_s = trio.current_time() - healed
        nursery.cancel_scope.cancel()
    world.close()
    return Troubles(unknown, known, healed_s)


async def _writing(
    world: World,
    numbers: Sequence[int],
    rate: float,
    *,
    task_status: trio.TaskStatus[trio.CancelScope] = trio.TASK_STATUS_IGNORED,
) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await world.write(numbers, rate)
