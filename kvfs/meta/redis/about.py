"""A server's report of itself (INFO): whether it is suitable, and what it can promise. No I/O."""

import re
from typing import Final, NamedTuple

from kvfs.base.errors import Invalid, NotSupported
from kvfs.meta.redis.location import EngineLocation, Kind
from kvfs.meta.redis.scripts import Item

_OLDEST: Final = (6, 2)
_WITH_WAITAOF: Final = (7, 2)


class Sync(NamedTuple):
    """The command that makes a server keep its data, and its promise."""

    command: tuple[Item, ...]
    """The command; empty: none."""
    promise: str
    """The guarantee once the command was answered, or at any time if there is none."""


def read_info(text: bytes) -> dict[str, str]:
    """Returns the fields of INFO's answer."""
    lines = text.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def check_server(about: dict[str, str], location: EngineLocation) -> None:
    """Checks that a server with this report, `about` itself (INFO), is suitable. Raises
    NotSupported, Invalid."""
    named = location.shown
    version = about.get("redis_version", "0")
    if _version(version) < _OLDEST:
        raise NotSupported(f"the engine {named} is version {version}: 6.2 or newer is needed")
    policy = about.get("maxmemory_policy", "noeviction")
    if policy.startswith("allkeys"):
        raise NotSupported(
            f"the engine {named} would drop metadata when its memory is full"
            f" (maxmemory-policy {policy}): set it to noeviction"
        )
    clustered = about.get("cluster_enabled") == "1"
    if clustered != (location.kind is Kind.CLUSTER):
        what = "is" if clustered else "is not"
        scheme = "redis+cluster://" if clustered else "redis://"
        raise Invalid(f"{named} {what} a server of a cluster: its URL starts with {scheme}")


def seems_emptied(commands: dict[str, str], keys: int) -> bool:
    """Returns whether a server that counted these commands (INFO commandstats), and has so many
    keys, had others: it was told to drop them, or it has none and was once told to append to a
    log."""

    def called(name: str) -> bool:
        found = re.match(r"calls=(\d+)", commands.get(f"cmdstat_{name}", ""))
        return found is not None and int(found[1]) > 0

    return called("flushall") or called("flushdb") or (not keys and called("xadd"))


def sync_means(about: dict[str, str], appendfsync: str, timeout_ms: int) -> Sync:
    """Returns the command for a server with this report `about` itself (INFO)."""
    version = about.get("valkey_version") or about.get("redis_version", "0")
    aof = about.get("aof_enabled") == "1"
    if aof and appendfsync == "always":
        return Sync((), "each commit is on the server's disk when it is answered")
    if aof and _version(version) >= _WITH_WAITAOF:
        return Sync((b"WAITAOF", 1, 0, timeout_ms), "it is on the server's disk")
    if int(about.get("connected_slaves", "0")):
        return Sync((b"WAIT", 1, timeout_ms), "it is in the memory of a replica as well")
    if aof:
        return Sync(
            (), f"it is on the server's disk within two seconds (appendfsync {appendfsync})"
        )
    return Sync((), "it is in the server's memory, and on its disk with the next snapshot")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
