"""The engine's records of a cluster's nodes and of their claims, and the functions that change
them.

They are msgspec arrays: fields are only ever appended. A node's record is tagged
(`kvfs.meta.records`): nodes of other versions rewrite it.
"""

from collections.abc import Callable
from typing import Final, Literal

import msgspec

from kvfs.base.errors import Conflict, Invalid, NotFound
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Tags, pack
from kvfs.tree import coherence_change

CHANGES_PER_S: Final = 3
"""Reports of all nodes together that tell of space, load and missing copies."""
NodeState = Literal["active", "draining", "drained", "removed"]


class NodeRecord(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """The facts about a node that seldom change; the others come with the lease (`Words`)."""

    number: int
    name: str
    store: str
    """The id of its store."""
    incarnation: int
    """The incarnation of its last start."""
    peer: str = ""
    """HOST:PORT where others reach it; empty: nowhere, it only reads."""
    zone: str = ""
    rack: str = ""
    capacity_bytes: int = 0
    """Bytes that it lends."""
    media: tuple[str, ...] = ("ssd",)
    version: str = ""
    protocol: int = 0
    state: NodeState = "active"
    """'draining': its data are moved away; 'drained': they were; 'removed': it never comes back."""
    tags: Tags | None = None


class Words(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """A node's report about itself, sent with each renewal of its lease."""

    name: str
    protocol: int
    version: str
    boot: int
    """The id of the boot of its host."""
    free_bytes: int = 0
    capacity_bytes: int = 0
    load: float = 0.0
    """Its load, from 0 (idle) to 1 (as busy as it may become)."""
    lacking: int = 0
    """Files that lack copies which this node must have made."""
    obstacle: str = ""
    """The reason why it cannot be drained, for people."""
    place: str = ""
    """The directory of its store, as that host names it (`Store.place`); empty: not told."""
    tls: bool = False
    """Whether it speaks TLS with other nodes."""
    since: int = 0
    """The first of the incarnations with whose mount this one goes on; 0: with none."""
    returns: bool = False
    """Whether another daemon follows this one when it dies: its mount outlives it."""

    def is_of(self, boot: int, place: str) -> bool:
        """Returns whether the reporter was on this host since it was started, with the store that
        is there now. Then it is dead for the holder of that store's lock."""
        return self.boot == boot and self.place in ("", place)


class Reports:
    """A node's reports, one with each renewal. One that differs from that before is brought to all
    nodes. So what changes all the time (space, load, missing copies) is told the more seldom the
    more nodes there are. Pure."""

    def __init__(self, spread: float) -> None:
        """`spread`: from 0 to 1, another one of each node, so that nodes that were started together
        do not report together."""
        self._spread = 0.5 + spread
        self._told: Words | None = None
        self._told_s = 0.0

    def tell(self, words: Words, members: int, now_s: float) -> Words:
        """Returns what to tell at `now_s` (a clock that is never set), where `words` are true and
        `members` nodes hear it: those, or what was told last."""
        told, wait_s = self._told, members / CHANGES_PER_S * self._spread
        is_early = now_s - self._told_s < wait_s
        if told is not None and (told == words or (is_early and _differ_in_figures(told, words))):
            return told
        self._told, self._told_s = words, now_s
        return words

    def forget(self) -> None:
        """Makes the next report be told as it is."""
        self._told = None


def _differ_in_figures(one: Words, other: Words) -> bool:
    """Returns whether they differ in what changes all the time alone."""
    same = msgspec.structs.replace(
        one,
        free_bytes=other.free_bytes,
        capacity_bytes=other.capacity_bytes,
        load=other.load,
        lacking=other.lacking,
    )
    return same == other


class Claim(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """The node that does a job which only one node at a time may do."""

    node: int
    incarnation: int


unpack_node: Final = msgspec.msgpack.Decoder(NodeRecord).decode
unpack_words: Final = msgspec.msgpack.Decoder(Words).decode
unpack_claim: Final = msgspec.msgpack.Decoder(Claim).decode


def packed_nodes(t: Transaction) -> list[bytes]:
    """Returns the records of all that ever joined, by number, as they are kept: enough to see
    whether any was changed."""
    return [value for _, value in t.scan(keys.NODES, keys.after(keys.NODES))]


def list_nodes(t: Transaction) -> list[NodeRecord]:
    """Returns all that ever joined, removed ones too, by number."""
    return [unpack_node(value) for value in packed_nodes(t)]


def members(t: Transaction) -> list[int]:
    """Returns the numbers of all that were not removed."""
    return [each.number for each in list_nodes(t) if each.state != "removed"]


def changing_coherence(t: Transaction, namespace_id: int) -> list[int]:
    """Returns the members that have still to do their part of a change of a namespace's
    coherence."""
    if not coherence_change.is_switching(t, namespace_id):
        return []
    steps = coherence_change.steps(t, namespace_id)
    return [each for each in members(t) if steps.get(each) != coherence_change.DONE]


def get_node(t: Transaction, number: int) -> NodeRecord:
    """Raises NotFound."""
    value = t.get(keys.node(number)) if number < 1 << 16 else None
    if value is None:
        raise NotFound(f"there is no node {number}; `kvfs node list` shows those there are")
    return unpack_node(value)


def number_in(name: str) -> int | None:
    """Returns the number that a person means by this name; None: it is none."""
    return int(name) if name.isascii() and name.isdecimal() else None


def check_name(t: Transaction, number: int, name: str) -> None:
    """Checks that a node may be called this from now on. A number that was removed is no node's any
    more. Raises Conflict."""
    others = [each for each in list_nodes(t) if each.number != number and each.state != "removed"]
    for each in others:
        if each.name == name:
            raise Conflict(
                f"node {each.number} of this cluster is named {name} already: choose another name"
                f" with --node-name, or remove that one (`kvfs node remove {each.number}`)"
            )
    meant = number_in(name)
    if meant not in (None, number) and not _was_removed(t, meant):
        raise Conflict(
            f"this is node {number}: the name {name} would be taken for another one's number;"
            " choose another with --node-name"
        )


def _was_removed(t: Transaction, number: int | None) -> bool:
    value = None if number is None or number >= 1 << 16 else t.get(keys.node(number))
    return value is not None and unpack_node(value).state == "removed"


def find_node(t: Transaction, text: str) -> NodeRecord:
    """Returns the node that a person means, by number or name. Raises NotFound, Invalid
    (several)."""
    number = number_in(text)
    if number is not None and not _was_removed(t, number):
        return get_node(t, number)
    found = [node for node in list_nodes(t) if node.name == text and node.state != "removed"]
    if not found and number is not None:
        return get_node(t, number)
    if not found:
        raise NotFound(f"there is no node '{text}'; `kvfs node list` shows those there are")
    if len(found) > 1:
        numbers = ", ".join(str(node.number) for node in found)
        raise Invalid(f"several nodes are named '{text}': say which by its number, {numbers}")
    return found[0]


def put_node(t: Transaction, record: NodeRecord) -> None:
    t.put(keys.node(record.number), pack(record))


def set_state(
    t: Transaction, number: int, allowed: Callable[[NodeState], bool], state: NodeState
) -> None:
    """Changes the state. Raises NotFound, Invalid if the present one does not allow it."""
    record = get_node(t, number)
    if record.state == state:
        return
    if not allowed(record.state):
        raise Invalid(f"node {number} ({record.name}) is {record.state}: it cannot become {state}")
    put_node(t, msgspec.structs.replace(record, state=state))
