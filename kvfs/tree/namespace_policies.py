"""The settings of a namespace that may be set, and those that go together. Pure.

A lone node refuses settings that only a cluster can keep.
"""

from typing import Final, TypedDict

from kvfs.base.errors import Invalid, NotSupported
from kvfs.base.media import MEDIA, SHARED, is_medium
from kvfs.meta.engine_absence import READ, REFUSE, WAIT
from kvfs.meta.records import Namespace, Tag

KINDS: Final = ("durable", "cache")
EVICTIONS: Final = ("lru",)
PEER: Final = "peer"
COHERENCES: Final = ("strict", "cache", PEER)
ACKNOWLEDGES: Final = ("async", "sync")
_TOGETHER: Final[tuple[list[str], ...]] = ([], ["ssd"], ["ram", "ssd"])
LOCKS: Final = ("host", "cluster")
MD5_ALL: Final = "md5-all"
WITHOUT_ENGINE: Final = (READ, WAIT, REFUSE)
ETAGS: Final = ("md5", "fast", MD5_ALL)
MOST_REPLICAS: Final = 15
_OF_CLUSTER: Final = ("coherence", "replicas", "acknowledge", "locks", "without_engine")


class PolicyChanges(TypedDict, total=False):
    """The settings to be changed; None leaves one as it is."""

    kind: str | None
    capacity: int | None
    eviction: str | None
    coherence: str | None
    replicas: int | None
    acknowledge: str | None
    media: list[str] | None
    cold: bool | None
    locks: str | None
    etag: str | None
    without_engine: str | None


def change(record: Namespace, policy: PolicyChanges, *, in_cluster: bool) -> None:
    """Changes the record. Raises Invalid, NotSupported: then nothing of it counts."""
    fresh = Namespace(name=b"")
    for name, value in policy.items():
        if value is None:
            continue
        if name in _OF_CLUSTER and not in_cluster and value not in (getattr(fresh, name), PEER):
            raise NotSupported(
                f"{name} is for several nodes, and this one is alone: start it with --engine"
            )
        if name == "without_engine":
            _set_without_engine(record, str(value))
        else:
            setattr(record, name, value)
    _check(record)


def _set_without_engine(record: Namespace, value: str) -> None:
    """Writes the tag, which a namespace that does as by default does not have."""
    _among("without the engine a namespace is to", value, WITHOUT_ENGINE)
    tags = {**(record.tags or {}), Tag.WITHOUT_ENGINE: value.encode()}
    if value == READ:
        del tags[Tag.WITHOUT_ENGINE]
    record.tags = tags or None


def _check(record: Namespace) -> None:
    _among("a namespace is", record.kind, KINDS)
    _among("the eviction of a namespace is", record.eviction, EVICTIONS)
    if record.coherence:
        _among("the coherence of a namespace is", record.coherence, COHERENCES)
    _among("a close is acknowledged", record.acknowledge, ACKNOWLEDGES)
    _among("the locks of a namespace are of the", record.locks, LOCKS)
    _among("the ETags of a namespace are", record.etag, ETAGS)
    _check_media(record)
    if record.is_peer:
        _check_peer(record)
    if record.capacity < 0:
        raise Invalid(f"a capacity is at least 0 bytes, not {record.capacity}")
    if not 0 <= record.replicas <= MOST_REPLICAS:
        raise Invalid(f"a file has 0 to {MOST_REPLICAS} replicas, not {record.replicas}")


def _check_peer(record: Namespace) -> None:
    """Raises NotSupported for what needs other nodes to know of the files."""
    lacking = {
        "is a cache: give it --kind cache": record.kind != "cache",
        "has locks of a host: leave --locks host": record.locks != "host",
        "is on the disks of its nodes: leave out --media shared:NAME": any(
            medium.startswith(SHARED) for medium in record.media
        ),
    }
    for what, is_so in lacking.items():
        if is_so:
            raise NotSupported(f"a namespace with --coherence {PEER} {what}")


def _check_media(record: Namespace) -> None:
    for medium in record.media:
        if not is_medium(medium):
            raise Invalid(f"a medium is {', '.join(MEDIA)} or {SHARED}NAME, not '{medium}'")
    if len(set(record.media)) != len(record.media):
        raise Invalid("a medium is named once")
    if "ram" in record.media and record.kind == "durable":
        raise NotSupported("memory loses its data in a power cut: a durable namespace is not on it")
    is_shared = len(record.media) == 1 and record.media[0].startswith(SHARED)
    if is_shared and record.replicas:
        raise NotSupported("a shared store keeps its own copies: its files have no replicas")
    if record.media not in _TOGETHER and not is_shared:
        raise NotSupported(
            "the media of a namespace are ssd, or ram,ssd (what is used least goes from the first "
            f"to the second), or {SHARED}NAME alone"
        )


def _among(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise Invalid(f"{what} {' or '.join(known)}, not '{value}'")


assert set(PolicyChanges.__annotations__) - {"without_engine"} < set(Namespace.__struct_fields__)
