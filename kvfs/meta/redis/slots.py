"""The distribution of slots, as the servers of a Redis cluster tell it. No I/O."""

from binascii import crc_hqx
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from kvfs.meta.redis.location import ServerAddress

SLOTS: Final = 16_384
_UNKNOWN: Final = (None, b"", b"?")
"""The names that a server gives itself if it does not know by which one it is reached."""


class Range(NamedTuple):
    """Slots that one server has."""

    first: int
    last: int
    master: ServerAddress
    replicas: tuple[ServerAddress, ...]


class Redirect(NamedTuple):
    """Another server is the right one."""

    address: ServerAddress
    is_moved: bool
    """Whether it has the slot from now on; False: it is being given it, and answers this request
    alone."""


def slot_of(prefix: str, shard: int) -> int:
    """Returns the slot of a shard's keys, as a cluster computes it from their hash tag."""
    return crc_hqx(b"%b:%d" % (prefix.encode(), shard), 0) % SLOTS


def ranges(answer: Sequence[Any], asked: ServerAddress) -> Iterator[Range]:
    """Yields the ranges in the answer of the server `asked` to CLUSTER SLOTS. Raises ValueError for
    anything else."""
    try:
        for first, last, master, *replicas in answer:
            others = tuple(_address(each, asked) for each in replicas)
            yield Range(int(first), int(last), _address(master, asked), others)
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(str(error)) from error


def redirect(refusal: str, asked: ServerAddress) -> Redirect | None:
    """Returns the right server, as a refusal by the server `asked` names it; None: it names none.
    `MOVED 3999 10.0.0.2:6381`, or ASK; without a host it is that of `asked`."""
    words = refusal.split(" ")
    if len(words) < 3 or words[0] not in ("MOVED", "ASK"):
        return None
    host, _, port = words[2].rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return None
    host = host if host.encode() not in _UNKNOWN else asked.host
    return Redirect(ServerAddress(host, int(port)), words[0] == "MOVED")


def _address(said: Sequence[Any], asked: ServerAddress) -> ServerAddress:
    host = asked.host if said[0] in _UNKNOWN else said[0].decode()
    return ServerAddress(host, int(said[1]))
