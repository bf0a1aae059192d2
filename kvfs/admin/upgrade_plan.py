"""The course of an upgrade of a node to this program, foretold by the facts (`upgrade_facts`). No
I/O.

| asked | hinders it |
|---|---|
| does this program read the store, its metadata, its cluster's | a later version of any of them |
| does it work with the cluster's other nodes | protocols that are more than one apart |
| does the engine answer, and suit | it does not: a start waits for it, or is refused |

What else is foretold hinders nothing: what becomes of the mount, when the metadata take this
program's form and what that costs, whether the program before can come back afterwards.
"""

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from kvfs.admin.upgrade_facts import (
    NO_SCHEMA,
    EngineVersion,
    MetadataVersion,
    RunningVersion,
    StoreVersion,
)
from kvfs.base.units import format_size
from kvfs.base.version import PROTOCOL, VERSION
from kvfs.cluster.node_records import NodeRecord
from kvfs.meta import keys, schema

State = Literal["ok", "note", "stop"]
_NEAR: Final = 1
"""Protocols that nodes may be apart."""


class UpgradeFinding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `stop`: it hinders the upgrade."""

    name: str
    state: State
    reason: str
    remedy: str = ""


class UpgradePlan(msgspec.Struct, kw_only=True):
    """The whole course."""

    ready: bool
    """Whether nothing hinders it."""
    pause: Literal["none", "held", "ends"]
    """The effect on programs that use the mount: there is none; they wait; it ends."""
    conversion: Literal["none", "first start", "finish-upgrade", "unknown"]
    """The moment from which the metadata have this program's form."""
    way_back: Literal["open", "until finish-upgrade", "closed", "unknown"]
    """Whether the program that ran before can run again once this one has started."""
    nodes_before: list[int] = []
    """The cluster's nodes of the version before, which are still to be upgraded."""
    nodes_first: list[int] = []
    """The nodes that are too far from this program, and need another version first."""
    findings: list[UpgradeFinding] = []


class UpgradeSituation(NamedTuple):
    """Everything that is known."""

    store: StoreVersion | None
    """None: the store is of another format, as `refusal` says."""
    refusal: str
    running: RunningVersion | None
    engine: EngineVersion | None
    """None: no engine was named."""


def plan(found: UpgradeSituation) -> UpgradePlan:
    """Foretells the upgrade."""
    made = UpgradePlan(
        ready=True, pause=_pause(found.running), conversion="unknown", way_back="unknown"
    )
    made.findings = [
        UpgradeFinding("program", "ok", f"this is KVFS {VERSION} (protocol {PROTOCOL})"),
        _node(found.running),
        _mount(made.pause, found.running),
    ]
    if found.store is None:
        made.findings.append(UpgradeFinding("store", "stop", found.refusal))
    else:
        made.findings += _of_store(found.store, found, made)
    made.ready = all(each.state != "stop" for each in made.findings)
    return made


def _pause(running: RunningVersion | None) -> Literal["none", "held", "ends"]:
    if running is None or not running.is_mounted:
        return "none"
    return "held" if running.takeover_s and running.goes_on else "ends"


def _node(running: RunningVersion | None) -> UpgradeFinding:
    if running is None:
        return UpgradeFinding("node", "ok", "none runs on the store: `kvfs up` starts this program")
    protocol = f"protocol {running.protocol}" if running.protocol else "it tells no protocol"
    return UpgradeFinding(
        "node", "ok", f"KVFS {running.version} ({protocol}) runs, as process {running.pid}"
    )


def _mount(pause: str, running: RunningVersion | None) -> UpgradeFinding:
    if pause == "none":
        return UpgradeFinding("mount", "ok", "nothing is mounted")
    if pause == "held":
        wait = running.takeover_s if running else 0
        return UpgradeFinding(
            "mount",
            "ok",
            f"held: programs wait for the next daemon, for {wait} s at most, and files stay open",
            "`kvfs restart`",
        )
    ends = "programs that have files open on it get errors"
    stop = "stop them, then `kvfs down` and `kvfs up`"
    if running is not None and running.takeover_s:
        reason = f"it ends: this program cannot go on with a mount of that one's; {ends}"
        return UpgradeFinding("mount", "note", reason, stop)
    return UpgradeFinding(
        "mount",
        "note",
        f"it ends with its daemon: {ends}",
        f"{stop}; a node that was started with takeover_s holds its mount",
    )


def _absence(
    running: RunningVersion | None, pause: str, nodes: list[NodeRecord]
) -> Iterator[UpgradeFinding]:
    """The effect on the cluster's other nodes of a node that runs, while it is away."""
    if running is None or sum(each.state != "removed" for each in nodes) < 2:
        return
    if pause == "held":
        reason = "other nodes wait for this one where they need data that it alone has"
        yield UpgradeFinding("absence", "ok", reason)
        return
    yield UpgradeFinding(
        "absence",
        "note",
        "until this node is back, durable files that it alone has are I/O errors on others, and a"
        " cache's are misses",
        "`kvfs node drain` it before, and `kvfs node drain --stop` afterwards",
    )


def _of_store(
    store: StoreVersion, found: UpgradeSituation, made: UpgradePlan
) -> Iterator[UpgradeFinding]:
    engine = found.engine
    yield UpgradeFinding("store", "ok", "its format is this program's")
    yield _readable("metadata", store.metadata)
    metadata = store.metadata
    if store.cluster:
        yield from _engine(store, engine)
        if engine is not None and not engine.metadata.refusal and not engine.metadata.unread:
            metadata = engine.metadata
        yield from _others(store, metadata.nodes, made)
        yield from _absence(found.running, made.pause, metadata.nodes)
    if store.metadata.refusal or metadata.refusal:
        return
    yield _conversion(store, metadata, made)
    yield _way_back(metadata, made)
    yield _space(store)


def _readable(name: str, metadata: MetadataVersion) -> UpgradeFinding:
    if metadata.refusal:
        return UpgradeFinding(name, "stop", metadata.refusal)
    if metadata.unread:
        return UpgradeFinding(name, "note", f"their version is not known yet: {metadata.unread}")
    if metadata.schema == NO_SCHEMA:
        return UpgradeFinding(name, "ok", "there are none yet")
    reads = f"this program reads {keys.SCHEMA - 1} and {keys.SCHEMA}"
    return UpgradeFinding(name, "ok", f"schema {metadata.schema}; {reads}")


def _engine(store: StoreVersion, engine: EngineVersion | None) -> Iterator[UpgradeFinding]:
    if engine is None:
        yield UpgradeFinding(
            "engine",
            "note",
            f"the store is node {store.node} of the cluster {store.cluster}, whose engine was not"
            " asked: the nodes below are those that this one knew last",
            "name it with --engine",
        )
        return
    metadata = engine.metadata
    if metadata.refusal:
        yield UpgradeFinding("engine", "stop", metadata.refusal)
    elif metadata.unread:
        yield UpgradeFinding(
            "engine", "stop", f"{metadata.unread}: a start would wait for it", "see to it first"
        )
    else:
        layout = f"layout {engine.layout}" if engine.layout else "without metadata"
        yield UpgradeFinding("engine", "ok", f"{engine.server}, {layout}, at {engine.shown}")


def _others(
    store: StoreVersion, nodes: list[NodeRecord], made: UpgradePlan
) -> Iterator[UpgradeFinding]:
    """The cluster's other nodes, and the order in which they go."""
    members = [each for each in nodes if each.state != "removed"]
    others = [each for each in members if each.number != store.node]
    made.nodes_first = [each.number for each in others if abs(each.protocol - PROTOCOL) > _NEAR]
    made.nodes_before = [each.number for each in members if 0 < PROTOCOL - each.protocol <= _NEAR]
    for each in others:
        if each.number in made.nodes_first:
            yield _far(each)
    near = [each for each in others if each.number in made.nodes_before]
    if near:
        names = ", ".join(_shown(each) for each in near)
        yield UpgradeFinding(
            "other nodes",
            "ok",
            f"of the version before: {names}. They go on beside this program, and are upgraded one"
            " by one, in any order",
        )
    elif not made.nodes_first:
        yield UpgradeFinding("other nodes", "ok", f"{len(others)}, none of an earlier version")


def _far(node: NodeRecord) -> UpgradeFinding:
    speaks = f"node {_shown(node)} runs KVFS {node.version} (protocol {node.protocol})"
    apart = f"this program speaks {PROTOCOL}, and they may be one apart"
    if node.protocol < PROTOCOL:
        between = "upgrade that node first, to a version between, or remove it (`kvfs node remove`)"
        return UpgradeFinding("other nodes", "stop", f"{speaks}, {apart}", between)
    return UpgradeFinding(
        "other nodes", "stop", f"{speaks}, {apart}", "install a later version here"
    )


def _shown(node: NodeRecord) -> str:
    return f"{node.number} ({node.name})"


def _conversion(
    store: StoreVersion, metadata: MetadataVersion, made: UpgradePlan
) -> UpgradeFinding:
    if metadata.unread:
        return UpgradeFinding("conversion", "note", "not known before the first start")
    if metadata.schema in (NO_SCHEMA, schema.PRESENT.decode()):
        made.conversion = "none"
        return UpgradeFinding("conversion", "ok", "none: the metadata have this program's form")
    cost = "one commit, however many files there are; it needs no space"
    if not store.cluster:
        made.conversion = "first start"
        return UpgradeFinding("conversion", "note", f"at the first `kvfs up`: {cost}")
    made.conversion = "finish-upgrade"
    when = "once all nodes are of this version" if made.nodes_before else "now, if it is to stay"
    return UpgradeFinding(
        "conversion",
        "ok",
        f"none until it is asked for: then {cost}",
        f"`kvfs node finish-upgrade`, {when}",
    )


def _way_back(metadata: MetadataVersion, made: UpgradePlan) -> UpgradeFinding:
    name = "way back"
    if made.conversion == "none":
        made.way_back = "open"
        reads = f"any program that reads schema {keys.SCHEMA} can go on with the store"
        return UpgradeFinding(name, "ok", f"open: {reads}")
    if made.conversion == "finish-upgrade":
        made.way_back = "until finish-upgrade"
        return UpgradeFinding(name, "ok", "open until `kvfs node finish-upgrade`, then closed")
    if made.conversion == "first start":
        made.way_back = "closed"
        return UpgradeFinding(
            name,
            "note",
            f"closed from the first start on: programs that read schema {metadata.schema} alone"
            " refuse the store then",
            "make a backup before (`kvfs backup create`, by the program before)",
        )
    return UpgradeFinding(name, "note", "not known before the first start")


def _space(store: StoreVersion) -> UpgradeFinding:
    """A start that finds its file damaged makes it anew beside the old one."""
    free, needed = format_size(store.free_bytes), format_size(store.metadata_bytes)
    reason = f"{free} are free; a start that has to rebuild the metadata needs up to {needed}"
    if store.free_bytes < store.metadata_bytes:
        return UpgradeFinding("space", "note", reason, "free some space on the store's disk")
    return UpgradeFinding("space", "ok", reason)
