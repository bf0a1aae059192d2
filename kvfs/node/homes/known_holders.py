"""The tables by which a node knows who holds which name: of all that other nodes hold, or of a
home's share.

| state | until | tables that follow | a look-up |
|---|---|---|---|
| all: no map of homes | there is one | that of all | the table |
| to groups | the own ranges are known | that of the ranges | as in groups |
| groups: a map | there is none | that of the ranges | own ranges here, others at their homes |
| to all | the table of all is whole | both | as in groups |

On the way to groups the table of all is as it was when the map came. On both ways it says a part:
what homes that do not know all yet tell beside what they have heard.

Invariants
- A table takes what lacks none of its changes; of what may lack some it asks the origins.
- What is told to others is what this node would believe itself. What may not be all is told as a
  part.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import trio

from kvfs.base.background import Background
from kvfs.holdings.delta_batch import DeltaBatch
from kvfs.holdings.fingerprints import RANGES, U64, gathered, ranges_of
from kvfs.holdings.holder_table import HolderTable
from kvfs.holdings.home_map import HomeMap, Share
from kvfs.holdings.own_set import OwnSet
from kvfs.node.homes.home_protocol import HolderNews
from kvfs.node.homes.home_share import HomeShare
from kvfs.node.homes.set_follower import SetFollower
from kvfs.node.names.name_members import NameMembers
from kvfs.node.names.name_protocol import Call

_LOOK_S: Final = 0.25
_FROZEN_S: Final = 30.0
"""Time for which the table of all is kept once this home knows its ranges: other homes may need
longer."""
_FEW: Final = 4
"""Names that are looked up one by one: so few cost less so."""

MakeTable = Callable[[bool], HolderTable]
"""Makes an empty table, turned or not."""


class KnownHolders:
    """The tables of one node."""

    def __init__(
        self, make_table: MakeTable, own: Sequence[OwnSet], members: NameMembers, call: Call
    ) -> None:
        """`own`: the sets of this node."""
        self._make_table = make_table
        self._own = own
        self._members = members
        self._call = call
        self._tasks = Background()
        self.map: HomeMap | None = None
        """The homes; None: each node knows all."""
        self._former: HomeMap | None = None
        """The map before."""
        self._all: SetFollower | None = self._new(False)
        self._follows_all = True
        self._share: HomeShare | None = None
        self._frozen_until: float | None = None
        """When the table of all goes, once that is known."""
        self._repairs = 0
        """The questions of followers that have ended."""
        self._has_share = trio.Event()
        self._lagging: list[int] = []
        """The answer of `lagging_nodes` until `_lagging_until`."""
        self._lagging_until = -math.inf

    async def run(self) -> None:
        """Keeps the tables up to date, until cancelled."""
        followers = [each.run for each in self._followers()]
        await self._tasks.run(self._keep_looking, *followers)

    # ---- the map

    def adopt(self, homes: HomeMap | None) -> None:
        """Goes by these homes from now on; None: by none. Raises NoSpace if there is no memory for
        another table: then nothing has changed."""
        all_ = self._new(False) if homes is None and not self._follows_all else None
        share = self._new(True) if homes is not None and self._share is None else None
        if self.map is not None:
            self._former = self.map
        self.map = homes
        if homes is None:
            if all_ is not None:
                self._all, self._follows_all, self._frozen_until = all_, True, None
                self._start(all_)
            return
        if self._all is not None and self._follows_all:
            self._repairs += self._all.repairs
            self._all.apply()
            self._all.end()
            self._follows_all = False
        self._frozen_until = None
        if share is not None:
            self._share = HomeShare(share, self._members)
            self._has_share.set()
            self._start(share)
        assert self._share is not None, "it was made now, or is there"
        self._share.want(homes.share_of(self._members.me))

    def map_of(self, number: int) -> HomeMap | None:
        """Returns the map of this number, if it is the present one or that before."""
        known = (self.map, self._former)
        return next((each for each in known if each is not None and each.number == number), None)

    @property
    def asked_map(self) -> HomeMap | None:
        """The map by which homes are asked: the present one, or the last while this node does not
        know all yet."""
        return self.map or (self._former if self._share is not None else None)

    # ---- what comes

    def take(self, batch: DeltaBatch) -> None:
        """Takes changes that other nodes told."""
        if self._all is not None and self._follows_all:
            self._all.take(batch, is_whole=not batch.map_number)
        if self._share is not None:
            is_whole = self._has_all(batch.map_number, self._share.applied)
            self._share.follower.take(batch, is_whole=is_whole)

    def forget(self, node: int) -> None:
        """Drops what a node told that left the cluster."""
        for each in self._tables():
            each.forget(node)

    # ---- asking

    def holders_of(self, fingerprint: int, most: int = 8) -> list[int] | None:
        """Returns up to `most` of the other nodes that say they hold a name; None: that is not
        known here."""
        share = self._share
        if share is None:
            return (self._all or self._main()).table.holders_of(fingerprint, most)
        if share.ready[fingerprint % RANGES]:
            return share.follower.table.holders_of(fingerprint, most)
        return None

    def part_of(self, fingerprint: int, most: int = 8) -> list[int]:
        """Returns up to `most` of the other nodes that are said to hold a name by what this one
        heard of its range so far, and by the table of all."""
        found: list[int] = []
        if self._share is not None and self._share.applied[fingerprint % RANGES]:
            found += self._share.follower.table.holders_of(fingerprint, most)
        if self._all is not None:
            found += self._all.table.holders_of(fingerprint, most)
        return list(dict.fromkeys(found))[:most]

    def probe(self, fingerprints: U64, most: int = 8) -> list[list[int] | None]:
        """Does what `holders_of` does, for many."""
        if len(fingerprints) <= _FEW:
            return [self.holders_of(each, most) for each in fingerprints.tolist()]
        table = self._main().table
        if self._share is None:
            known = table.probe(fingerprints, most)
            return [known.get(place, []) for place in range(len(fingerprints))]
        found: list[list[int] | None] = [None] * len(fingerprints)
        at = self._share.ready[ranges_of(fingerprints)].nonzero()[0].tolist()
        known = table.probe(fingerprints[at], most)
        for line, place in enumerate(at):
            found[place] = known.get(line, [])
        return found

    def tell(self, fingerprints: Sequence[int], most: int) -> list[HolderNews]:
        """Returns what to tell another node that asks who holds these: of each up to `most` nodes,
        this one and what it sent to the cold tier first."""
        those = gathered(fingerprints)
        main = self._main()
        is_whole = not main.table.is_full if self._share is not None else main.knows_all()
        found = [
            HolderNews(self.part_of(each, most), False)
            if nodes is None
            else HolderNews(nodes, is_whole)
            for each, nodes in zip(fingerprints, self.probe(those, most), strict=True)
        ]
        for own in self._own:
            for place in own.holds(those).nonzero()[0].tolist():
                holders, is_all = found[place]
                found[place] = HolderNews([own.store, *holders][:most], is_all)
        return found

    def lagging_nodes(self) -> list[int]:
        """Returns the living members of which something is lacking here, as of `_LOOK_S` ago."""
        if (now := trio.current_time()) >= self._lagging_until:
            follower = self._main()
            living = self._members.living()
            self._lagging = [each for each in living if not follower.knows(each)]
            self._lagging_until = now + _LOOK_S
        return self._lagging

    def knows(self, node: int) -> bool:
        """Returns whether all is known here that a member says it holds, as far as this node is
        told of it."""
        return self._main().knows(node)

    def heard_at(self, node: int) -> float | None:
        """Returns when a member was heard last (trio.current_time), from itself or by others; None:
        it was not yet."""
        heard = [each.received.heard_at(node) for each in self._tables()]
        return max((each for each in heard if each is not None), default=None)

    # ---- its size

    @property
    def is_full(self) -> bool:
        """Whether claims may be refused."""
        return self._main().table.is_full

    @property
    def names(self) -> int | None:
        """The claims of all other nodes: counted, or by those of the own ranges; None: it is not
        known yet."""
        if self._share is None:
            return self._main().table.counters.claims
        if self.map is None:
            return None
        ranges = int(self._share.applied.sum())
        if not ranges or not self._share.is_ready:
            return None
        return self._share.follower.table.counters.claims * RANGES // ranges

    @property
    def repairs(self) -> int:
        """Questions for what was lacking, since the start."""
        return self._repairs + sum(each.repairs for each in self._followers())

    def report(self) -> dict[str, Any]:
        """Returns the part of the node's status."""
        main, homes = self._main(), self.map
        return {
            "others": main.table.counters.claims,
            "table_bytes": sum(each.table.size_bytes for each in self._tables()),
            "is_full": main.table.is_full,
            "lagging": main.received.lagging,
            "homes": None
            if homes is None
            else {
                "map": homes.number,
                "nodes": len(homes.zones),
                "of": RANGES,
                "ranges": int(homes.share_of(self._members.me).sum()),
                "ready": int(self._share.ready.sum()) if self._share is not None else 0,
            },
        }

    # ---- inside

    def _main(self) -> SetFollower:
        """Returns what a look-up goes by: the ranges, or without them all."""
        if self._share is not None:
            return self._share.follower
        assert self._all is not None, "one of both is there"
        return self._all

    def _tables(self) -> list[SetFollower]:
        share = [] if self._share is None else [self._share.follower]
        return share if self._all is None else [self._all, *share]

    def _followers(self) -> list[SetFollower]:
        return [each for each in self._tables() if each is not self._all or self._follows_all]

    def _has_all(self, map_number: int, ranges: Share) -> bool:
        """Returns whether a batch has all changes in these ranges."""
        if not map_number:
            return True
        homes = self.map_of(map_number)
        return homes is not None and bool((ranges <= homes.share_of(self._members.me)).all())

    def _start(self, follower: SetFollower) -> None:
        if self._tasks.runs:
            self._tasks.begin(follower.run)

    def _new(self, is_turned: bool) -> SetFollower:
        return SetFollower(self._make_table(is_turned), self._members, self._call)

    async def _keep_looking(self) -> None:
        while True:
            await self._has_share.wait()
            self._look()
            await trio.sleep(_LOOK_S)

    def _look(self) -> None:
        assert self._share is not None, "there is one"
        self._share.look()
        if self.map is not None:
            self._thaw()
        elif self._all is not None and self._all.knows_all():
            self._repairs += self._share.follower.repairs
            self._share.follower.end()
            self._share = None
            self._has_share = trio.Event()

    def _thaw(self) -> None:
        """Drops the table of all when it is not needed any more."""
        if self._all is None or self._share is None or not self._share.is_ready:
            return
        now = trio.current_time()
        if self._frozen_until is None:
            self._frozen_until = now + _FROZEN_S
        elif now > self._frozen_until:
            self._all = None
