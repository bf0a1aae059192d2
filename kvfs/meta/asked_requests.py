"""The request in whose name a change is made, and a witness of what becomes of changes that a
server commits.

A mount that outlives its daemon has to know, after a kill, whether a request was done that was not
answered. By what is there now that cannot be told where other nodes change the same names. But the
server tells of each process's last request what became of it (`kvfs.meta.redis.log`), and of
earlier ones the process heard before it sent the last: so it is enough to have noted, before
anything is sent, which of them has a change, and afterwards which were done.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple, Protocol

asking: Final[ContextVar[int]] = ContextVar("asking", default=0)
"""The number of the kernel's request that is served; a task has the one that it began with."""


class Sent(NamedTuple):
    """The place of a change in what was sent to a server."""

    shard: int
    engine: bytes
    """The name of the process at the server."""
    number: int
    """The number of its request there."""
    place: int
    """The place among the changes of that request."""


class Witness(Protocol):
    """Keeps beyond a kill what became of requests' changes. Used from the event loop."""

    has_noted: bool
    """Whether a change noted its request since this was set to False."""

    def sent(self, request: int, sent: Sent) -> None:
        """Notes that the change of a request is about to be sent."""

    def done(self, request: int) -> None:
        """Notes that the change of a request that was sent was done."""


class ChangeWitness:
    """The witness of a node's changes, once there is one."""

    def __init__(self) -> None:
        self.witness: Witness | None = None

    def about_to_send(
        self, shard: int, engine: bytes, number: int, requests: Sequence[int]
    ) -> None:
        """Notes what goes in one request to a server: the requests of its changes, 0 for those that
        nobody has to know of."""
        witness = self.witness
        if witness is not None:
            for place, request in enumerate(requests):
                if request:
                    witness.sent(request, Sent(shard, engine, number, place))

    def done(self, request: int) -> None:
        """Notes that the change of a request was done; 0: nobody has to know of it."""
        if request and self.witness is not None:
            self.witness.done(request)


def became(answer: bytes | None, sent: Sent) -> bool | None:
    """Returns whether a change was done, by what the server says of the last request of the process
    that sent it; None: that tells nothing of it."""
    if answer is None:
        return False  # it never committed anything there
    number, _, rest = answer.partition(b" ")
    results = rest.partition(b" ")[0]
    if int(number) != sent.number:
        return False if int(number) < sent.number else None
    if results == b"1":
        return True  # all together, as APPEND does
    return results[sent.place : sent.place + 1] == b"1"
