"""Answers of an origin to nodes that ask what it holds. Pure: it reads the own set."""

from collections.abc import Iterator

from kvfs.holdings.messages import Checksums, HoldingsAsk, Message, RangeContents
from kvfs.holdings.own_set import OwnSet


def answer(own: OwnSet, ask: HoldingsAsk) -> Iterator[Message]:
    """Yields what to send to the node that asked, each made when it is taken: the changes that it
    lacks, in pieces; the contents of ranges; or checksums, if it asks for them, knows another
    epoch, or lacks changes that are not kept any more."""
    if ask.epoch == own.epoch and ask.ranges:
        for range_ in ask.ranges:
            yield RangeContents(
                own.store, own.epoch, own.sequence, range_, own.fingerprints(range_)
            )
        return
    if ask.epoch != own.epoch or ask.since is None:
        yield checksums(own)
        return
    yield from _changes(own, ask.since)


def checksums(own: OwnSet) -> Checksums:
    """Returns the checksums of what the origin holds now."""
    return Checksums(own.store, own.epoch, own.sequence, own.checksums())


def _changes(own: OwnSet, since: int) -> Iterator[Message]:
    newest = own.sequence
    while True:
        deltas = own.deltas_since(since)
        if deltas is None:
            yield checksums(own)
            return
        yield deltas
        if deltas.last >= newest:
            return
        since = deltas.last
