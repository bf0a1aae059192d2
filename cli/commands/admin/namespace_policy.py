"""The policy of a namespace on the command line: its options, how it is shown, and the tiers
that it needs."""

from typing import TYPE_CHECKING, Any, Final

import click

from cli import node_requests
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, NotSupported, Unavailable
from kvfs.base.media import is_medium
from kvfs.base.units import format_size, parse_size

if TYPE_CHECKING:
    from kvfs.meta.records import Namespace
    from kvfs.tree.namespace_policies import PolicyChanges

_OPTIONS: Final = (
    ("kind", "KIND", "Kind of namespace: durable (never dropped) or cache (evictable)."),
    ("capacity", "SIZE", "Limit of its data, like 4GiB; 0: the store's own."),
    ("eviction", "NAME", "Order of eviction: lru, the least recently used first."),
    ("media", "MEDIA", "Media of its data, the preferred one first: ram, ssd, or ram,ssd."),
    ("cold", "on|off", "Whether files go to the cold tier before they are evicted."),
    (
        "coherence",
        "LEVEL",
        "Coherence between hosts: strict (close-to-open), cache (within 2 s) or peer (names are"
        " each node's own).",
    ),
    ("replicas", "N", "Copies of each file on other nodes."),
    (
        "acknowledge",
        "WHEN",
        "When close returns: async (at once), or sync (once the replicas have the file).",
    ),
    ("locks", "REACH", "Reach of locks: host or cluster."),
    ("etag", "HOW", "ETags of S3: md5 (of bodies), md5-all (of files too) or fast."),
    (
        "without_engine",
        "HOW",
        "While the engine is away: read (files as they were, changes are refused), wait (changes"
        " wait a minute for it), or refuse (all is an error).",
    ),
)
NAMES: Final = tuple(name for name, _, _ in _OPTIONS)
SHOWN: Final = tuple("--" + name.replace("_", "-") for name in NAMES)


def options(function: Any) -> Any:
    """Adds the options of `kvfs namespace create` and `set`."""
    for name, metavar, text in reversed(_OPTIONS):
        shown = "--" + name.replace("_", "-")
        function = click.option(shown, metavar=metavar, help=text)(function)
    return function


def take(flags: dict[str, Any]) -> "PolicyChanges":
    """Takes the given settings out of a command's flags. Raises Invalid, NotSupported."""
    given = {name: flags.pop(name) for name in NAMES}
    policy: PolicyChanges = {}
    for name, text in given.items():
        if text is not None:
            policy[name] = _PARSERS.get(name, str)(text)  # type: ignore[literal-required]
    return policy


def facts(namespace: "Namespace") -> dict[str, Any]:
    """Returns the policy for machines."""
    return {
        "kind": namespace.kind,
        "capacity_bytes": namespace.capacity,
        "eviction": namespace.eviction if namespace.kind == "cache" else None,
        "media": namespace.media,
        "cold": namespace.cold,
        "coherence": namespace.coherence or ("strict" if namespace.is_strict else "cache"),
        "replicas": namespace.replicas,
        "acknowledge": namespace.acknowledge,
        "locks": namespace.locks,
        "etag": namespace.etag,
        "without_engine": namespace.without_engine,
    }


def _capacity(text: str) -> int:
    if text.strip().endswith("%"):
        raise NotSupported("a namespace's capacity is a size, like 4GiB; shares are for the store")
    return parse_size(text)


def _eviction(text: str) -> str:
    from kvfs.tree.namespace_policies import EVICTIONS

    if text not in EVICTIONS:
        raise NotSupported(f"eviction '{text}' is not built; there is: {', '.join(EVICTIONS)}")
    return text


def _media(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise Invalid(f"--cold is on or off, not '{text}'")
    return text == "on"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise Invalid(f"--replicas is a number, not '{text}'")
    return int(text)


def shown_capacity(size: int) -> str:
    """Returns the capacity for people."""
    return format_size(size) if size else "-"


_PARSERS: Final[dict[str, Any]] = {
    "capacity": _capacity,
    "eviction": _eviction,
    "media": _media,
    "cold": _switch,
    "replicas": _count,
}


def require(config: Config, wanted: "PolicyChanges") -> None:
    """Raises NotSupported if a namespace is to use a tier that is missing: on the running node, or
    by the settings if none runs."""
    if wanted.get("cold") and not _has_cold_tier(config):
        raise NotSupported(
            "there is no cold tier: name one with the setting cold (--cold s3://BUCKET/PREFIX of "
            "`kvfs up`)"
        )

    lent = _lent(config) if wanted.get("media") else set()
    for medium in wanted.get("media") or []:
        if medium != "ssd" and is_medium(medium) and medium not in lent:
            raise NotSupported(
                f"the node has no {medium}: name a place with --tier ram=DIR:SIZE or --shared "
                "NAME=DIR of `kvfs up`"
            )


def _has_cold_tier(config: Config) -> bool:
    try:
        return node_requests.ask(config, "status")["cold"] is not None
    except Unavailable:
        return bool(config.cold)


def _lent(config: Config) -> set[str]:
    try:
        return {each["medium"] for each in node_requests.ask(config, "status")["tiers"]}
    except Unavailable:
        return {each.medium for each in (*config.tier, *config.shared)}
