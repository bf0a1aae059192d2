"""The receiver of what other nodes say they hold: its decisions. Pure: no clock, no network; it
applies messages to the table of holders and returns what is to be asked.

For each origin there is a state `epoch, sequence`: the table has what the origin held after that
change. At sequence 0 an origin holds nothing, so a node that knows nothing of an origin is simply
far behind.

| message | when | then |
|---|---|---|
| any | of a later epoch | the origin's claims are dropped; epoch, 0 |
| any | of an earlier one | ignored; the same, if the later one has been silent for `SILENT_S` |
| deltas | they begin after sequence + 1 | something is lacking: ask for the changes since |
| | they end before sequence, as all for `SILENT_S` | the origin is begun anew |
| | they end after sequence | applied, also if some of them were before |
| | their digest differs from the table's | ask for checksums |
| checksums | of sequence or later | sequence is theirs; ask for the ranges that differ |
| range contents | as late as sequence | they replace the range |
| | earlier, but asked for | the same, and back to their sequence: ask for the changes since |

Changes say that a fingerprint came or left, and the last one counts; so it does no harm to apply
them again to a state that is newer, in order and up to that state's sequence. This is why ranges
may be replaced one by one while changes go on.

An earlier epoch is almost always a message that was long on its way; the origin's clock may also
have been set back while it lost its set.

What is asked for is asked for again until it came, at most every `ASK_AGAIN_S`. What an origin
answers itself (`receive`) is believed over what others told of it: an epoch or a sequence number
that it does not know is forgotten then, so a node that lies of others is not believed for long.

A receiver with a share (`set_share`) is a home of some ranges alone (`home_map`): it applies what
lies in these, and of a batch that may lack some of them it asks the origins. A digest says nothing
of a part; so the checksums of each origin are asked for now and then, and instead of very many
changes, most of which lie elsewhere. A range that is gained is lacking of every origin.

Most rows of a batch are the next of their origin and nothing is lacking of it: those are compared
and applied together, and the others one by one.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.holdings.claim_table import ClaimTable
from kvfs.holdings.delta_batch import DeltaBatch, of_messages
from kvfs.holdings.fingerprints import RANGES, U64
from kvfs.holdings.home_map import Share
from kvfs.holdings.messages import Checksums, Deltas, HoldingsAsk, RangeContents
from kvfs.holdings.row_address import Lines

ASK_AGAIN_S: Final = 2.0
SILENT_S: Final = 10.0
"""More than the time between two messages of a live origin."""
_MOST_STORES: Final = 1 << 16
"""Stores are numbered by 16 bits."""
_LONGEST_DISPUTE_S: Final = 64.0
"""The longest time before an origin is asked again whose digest did not fit what it told."""
_ASKED_RANGES: Final = 32
"""Ranges that are asked for together."""
_AUDIT_S: Final = 600.0
"""Time after which the checksums of an origin are compared again by a home of some ranges."""
_MOST_AHEAD: Final = 1 << 13
"""Changes that a home of some ranges asks for, if it lacks no more of them."""


@dataclass(slots=True)
class ReceivedCounters:
    """Messages that were not simply the next ones."""

    duplicates: int = 0
    gaps: int = 0
    epochs: int = 0
    """Origins that were begun anew."""
    outdated: int = 0
    """Messages of an earlier epoch, or from before what is known."""
    differences: int = 0
    """Digests that differed."""
    repaired_ranges: int = 0


@dataclass(slots=True)
class _Lack:
    """Something of an origin that is lacking."""

    is_different: bool = False
    """Whether checksums are wanted."""
    ranges: set[int] = field(default_factory=set)
    """Ranges whose contents are wanted."""
    asked: HoldingsAsk | None = None
    asked_at: float = 0.0


class ReceivedSets:
    """The state of every origin."""

    def __init__(self, table: ClaimTable) -> None:
        self._table = table
        self._is_known: NDArray[np.bool_] = np.zeros(_MOST_STORES, np.bool_)
        self._epochs: U64 = np.zeros(_MOST_STORES, np.uint64)
        self._sequences: Lines = np.zeros(_MOST_STORES, np.int64)
        self._heard: Lines = np.zeros(_MOST_STORES, np.int64)
        """The latest sequence of the epoch that any message told."""
        self._heard_at: NDArray[np.float64] = np.zeros(_MOST_STORES)
        """When a message of the epoch last came."""
        self._reached_at: NDArray[np.float64] = np.zeros(_MOST_STORES)
        """When a message last told of the sequence, or of a later one."""
        self._ahead: Lines = np.zeros(_MOST_STORES, np.int64)
        """Up to here some ranges are newer than the sequence: digests mean nothing before it."""
        self._disputes: NDArray[np.uint8] = np.zeros(_MOST_STORES, np.uint8)
        """How often the digest differed since it last did not."""
        self._disputed_until: NDArray[np.float64] = np.zeros(_MOST_STORES)
        """The time before which it is not compared again."""
        self._lacks: dict[int, _Lack] = {}
        self._is_lacking: NDArray[np.bool_] = np.zeros(_MOST_STORES, np.bool_)
        """Whether a store is among these."""
        self._share: Share | None = None
        self._audits: deque[int] = deque()
        """Origins whose checksums are to be asked for, in this order."""
        self._audited_at = self._audit_s = 0.0
        """When the last one was asked, and the time between two of them in this round."""
        self.counters = ReceivedCounters()

    def standing(self, store: int) -> tuple[int, int] | None:
        """Returns the epoch and sequence up to which an origin is known; None: it is not."""
        if not self._is_known[store]:
            return None
        return int(self._epochs[store]), int(self._sequences[store])

    def is_whole(self, store: int) -> bool:
        """Returns whether an origin is known, and nothing of it known to be lacking."""
        return bool(self._is_known[store] and not self._is_lacking[store])

    def lacks(self, store: int) -> bool:
        """Returns whether something of an origin is known to be lacking."""
        return bool(self._is_lacking[store])

    @property
    def lagging(self) -> int:
        """Origins of which something is known to be lacking."""
        return len(self._lacks)

    def receive(self, message: Deltas | Checksums | RangeContents, now: float) -> list[HoldingsAsk]:
        """Applies a part of what an origin itself answers; returns what to ask it next. `now`:
        seconds of any clock that does not go back."""
        store = message.store
        self._follow(store, message.epoch)
        self._heard_at[store] = now
        if isinstance(message, Deltas):
            return self._receive_rows(of_messages([message]), now)
        self._heard[store] = max(self._heard[store], message.sequence)
        if isinstance(message, Checksums):
            self._take_checksums(message)
        else:
            self._take_contents(message)
        return self._asks(store, now)

    def answered(self, ask: HoldingsAsk, now: float) -> None:
        """Notes that an origin has answered a question to its end. If that brought nothing, it has
        no such changes as others told of."""
        if ask.since is not None and self.standing(ask.store) == (ask.epoch, ask.since):
            self._heard[ask.store] = ask.since
            self._asks(ask.store, now)

    def heard_at(self, store: int) -> float | None:
        """Returns when a message of an origin came last; None: none is known."""
        return float(self._heard_at[store]) if self._is_known[store] else None

    def receive_batch(
        self, batch: DeltaBatch, now: float, *, is_whole: bool = True
    ) -> list[HoldingsAsk]:
        """Applies changes that nodes tell of themselves or pass on; returns what to ask of their
        origins. `is_whole`: whether none was left out that belongs here."""
        if not is_whole:
            return self._receive_rows(batch, now, is_whole=False)
        asks: list[HoldingsAsk] = []
        while len(batch):
            is_first = np.zeros(len(batch), np.bool_)
            is_first[np.unique(batch.stores, return_index=True)[1]] = True
            asks += self._receive_rows(batch.of(is_first), now)
            if is_first.all():
                break
            batch = batch.of(~is_first)  # the later ones build on these
        return asks

    @property
    def share(self) -> Share | None:
        """The ranges that are applied; None: all."""
        return self._share

    def set_share(self, share: Share) -> None:
        """Makes these the ranges that are applied: claims in others go, and those in ranges that
        are new are asked for. The table has none of the latter."""
        before = np.zeros(RANGES, np.bool_) if self._share is None else self._share
        self._share = share
        if (before & ~share).any():
            self._table.lose(before & ~share)
        for lack in self._lacks.values():
            lack.ranges = {each for each in lack.ranges if share[each]}
        if (share & ~before).any():
            for store in np.flatnonzero(self._is_known).tolist():
                self._lack(store).is_different = True

    def due(self, now: float) -> list[HoldingsAsk]:
        """Returns what is to be asked again."""
        if self._share is not None:
            self._audit(now)
        return [ask for store in tuple(self._lacks) for ask in self._asks(store, now)]

    def forget(self, store: int) -> None:
        """Drops an origin that is no member any more, and its claims."""
        self._is_known[store] = False
        self._settle(store)
        self._table.drop_node(store)

    # --- messages

    def _follow(self, store: int, epoch: int) -> None:
        """Begins an origin's epoch, unless it is the one that is known."""
        if self._is_known[store]:
            if int(self._epochs[store]) == epoch:
                return
            self.counters.epochs += 1
        self._begin(store, epoch)

    def _begin(self, store: int, epoch: int) -> None:
        """Knows nothing of an origin but its epoch."""
        self._table.drop_node(store)
        self._is_known[store] = True
        self._epochs[store] = epoch
        self._sequences[store] = self._heard[store] = self._ahead[store] = 0
        self._disputes[store] = self._disputed_until[store] = 0
        self._settle(store)

    def _audit(self, now: float) -> None:
        """Has the checksums of origins compared, each in turn, all of them within `_AUDIT_S`."""
        if not self._audits:
            self._audits.extend(np.flatnonzero(self._is_known).tolist())
            self._audited_at, self._audit_s = now, _AUDIT_S / max(len(self._audits), 1)
        while self._audits and now - self._audited_at >= self._audit_s:
            self._audited_at += self._audit_s
            store = self._audits.popleft()
            if self.is_whole(store):
                self._lack(store).is_different = True

    def _receive_rows(
        self, batch: DeltaBatch, now: float, *, is_whole: bool = True
    ) -> list[HoldingsAsk]:
        """Applies rows of different origins, if they have all that belongs here; returns what to
        ask of them."""
        is_taken = self._find_epochs(batch, now)
        if not is_taken.all():
            batch = batch.of(is_taken)
        stores, lasts = batch.stores, batch.lasts
        self._heard_at[stores] = now
        if is_whole:
            self._heard[stores] = np.maximum(self._heard[stores], lasts)
        else:  # one origin may have several rows
            np.maximum.at(self._heard, stores, lasts)
        known = self._sequences[stores]
        is_late = (batch.firsts > known + 1) | (not is_whole)
        is_news = ~is_late & (lasts > known)
        self.counters.gaps += int(np.count_nonzero(is_late))
        self.counters.duplicates += int(np.count_nonzero(~is_late & ~is_news & (batch.changes > 0)))
        self._reached_at[stores[lasts >= known]] = now
        if is_news.any():
            news = batch.of(is_news)
            if self._share is not None:
                news = news.within([self._share], 0)
            self._table.apply_many(
                news.stores.tolist(),
                news.added,
                news.added_counts,
                news.removed,
                news.removed_counts,
            )
            self._sequences[news.stores] = news.lasts
        self._compare(batch, now)
        self._doubt(stores[lasts < known], now)
        behind = (self._heard[stores] > self._sequences[stores]) | self._is_lacking[stores]
        return [ask for each in stores[behind].tolist() for ask in self._asks(each, now)]

    def _find_epochs(self, batch: DeltaBatch, now: float) -> NDArray[np.bool_]:
        """Returns which rows belong to the epoch of their origin, after those were begun that are
        new."""
        stores, epochs = batch.stores, batch.epochs
        is_same: NDArray[np.bool_] = self._is_known[stores] & (self._epochs[stores] == epochs)
        for line in np.flatnonzero(~is_same).tolist():
            store, epoch = int(stores[line]), int(epochs[line])
            is_earlier = self._is_known[store] and epoch < int(self._epochs[store])
            if is_earlier and now - self._heard_at[store] < SILENT_S:
                self.counters.outdated += 1
            else:
                self._follow(store, epoch)
                is_same[line] = True
        return is_same

    def _doubt(self, behind: NDArray[np.uint16], now: float) -> None:
        """Begins origins anew of which others told changes that they have not made: for long all
        say that they have not come so far."""
        for store in behind[now - self._reached_at[behind] >= SILENT_S].tolist():
            self.counters.epochs += 1
            self._begin(store, int(self._epochs[store]))
            self._reached_at[store] = now
            self._heard[store] = 1

    def _compare(self, batch: DeltaBatch, now: float) -> None:
        """Compares the table with what the rows say that their origins hold: ever more seldom where
        that differs still, after all was asked for."""
        stores, lasts = batch.stores, batch.lasts
        means = batch.has_digest & (lasts == self._sequences[stores])
        means &= (lasts >= self._ahead[stores]) & (now >= self._disputed_until[stores])
        if self._share is not None or self._table.is_full or not means.any():
            return
        compared = stores[means]
        differs = self._table.digests(compared.tolist()) != batch.digests[means]
        self._disputes[compared[~differs]] = 0
        for store in compared[differs].tolist():
            lack = self._lack(store)
            if not lack.ranges:
                self.counters.differences += 1
                lack.is_different = True
                pause_s = 2.0 ** float(self._disputes[store])
                self._disputed_until[store] = now + pause_s
                self._disputes[store] += pause_s < _LONGEST_DISPUTE_S

    def _take_checksums(self, message: Checksums) -> None:
        store = message.store
        if message.sequence < self._sequences[store]:
            self.counters.outdated += 1
            return
        self._sequences[store] = message.sequence
        lack = self._lack(store)
        lack.is_different, lack.ranges = False, set()
        if not self._table.is_full:
            differs = self._table.checksums(store) != message.sums
            if self._share is not None:
                differs &= self._share
            lack.ranges = set(np.flatnonzero(differs).tolist())

    def _take_contents(self, message: RangeContents) -> None:
        store, lack = message.store, self._lacks.get(message.store)
        is_wanted = lack is not None and message.range_ in lack.ranges
        is_elsewhere = self._share is not None and not self._share[message.range_]
        if is_elsewhere or (message.sequence < self._sequences[store] and not is_wanted):
            self.counters.outdated += 1
            return
        self._table.replace_range(store, message.range_, message.fingerprints)
        self._ahead[store] = max(self._ahead[store], message.sequence)
        self._sequences[store] = min(self._sequences[store], message.sequence)
        if lack is not None and is_wanted:
            lack.ranges.remove(message.range_)
            self.counters.repaired_ranges += 1

    # --- asking

    def _lack(self, store: int) -> _Lack:
        self._is_lacking[store] = True
        return self._lacks.setdefault(store, _Lack())

    def _settle(self, store: int) -> None:
        self._is_lacking[store] = False
        self._lacks.pop(store, None)

    def _asks(self, store: int, now: float) -> list[HoldingsAsk]:
        lack = self._lack(store)
        wanted = self._wanted(store, lack)
        if wanted is None:
            self._settle(store)
            return []
        if _covers(lack.asked, wanted) and now - lack.asked_at < ASK_AGAIN_S:
            return []
        lack.asked, lack.asked_at = wanted, now
        return [wanted]

    def _wanted(self, store: int, lack: _Lack) -> HoldingsAsk | None:
        epoch, sequence = int(self._epochs[store]), int(self._sequences[store])
        if lack.ranges:
            asked = lack.asked.ranges if lack.asked else ()
            ranges = lack.ranges.intersection(asked) or lack.ranges
            return HoldingsAsk(store, epoch, ranges=tuple(sorted(ranges)[:_ASKED_RANGES]))
        ahead = int(self._heard[store]) - sequence
        if lack.is_different or (self._share is not None and ahead > _MOST_AHEAD):
            return HoldingsAsk(store, epoch)
        if self._heard[store] > sequence:
            return HoldingsAsk(store, epoch, since=sequence)
        return None


def _covers(asked: HoldingsAsk | None, wanted: HoldingsAsk) -> bool:
    """Returns whether the answer to `asked` is on its way and brings what is wanted."""
    if asked is None or (asked.since is None) != (wanted.since is None):
        return False
    return bool(asked.ranges) == bool(wanted.ranges) and set(wanted.ranges) <= set(asked.ranges)
