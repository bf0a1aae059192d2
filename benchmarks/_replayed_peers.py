"""Members of a cluster that are played, all in one process, for one real node beside them. They
hold leases, are entered in the engine, listen, and exchange what they hold by the code of nodes,
but for the server of their connections: Linux lets one process have a hundred of a node's.

Each has a set of names that nobody needs to keep: the n-th name that it ever got is a function of
its number and n, so the changes since any time are made when they are asked for. It begins with so
many; from then on, every other change adds a name, and the next one takes the oldest away.
"""

import contextlib
import functools
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import trio

from kvfs.base.errors import KvfsError, Unavailable
from kvfs.base.version import PROTOCOL, VERSION
from kvfs.cluster import peer_protocol
from kvfs.cluster.handshake import Answering, Party
from kvfs.cluster.node_records import NodeRecord, Words
from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.peer_protocol import PeerAddress, PeerIdentity
from kvfs.cluster.secrets import Secrets
from kvfs.holdings import delta_batch
from kvfs.holdings.delta_codec import MOST_CHANGES, decode, encode
from kvfs.holdings.dissemination_tree import DisseminationTree
from kvfs.holdings.fingerprints import BITS, RANGES, U64, mixed, ranges_of, sums_by_range
from kvfs.holdings.messages import Checksums, Deltas, HoldingsAsk, Message, RangeContents
from kvfs.http.http_client import render_request
from kvfs.meta.node_leases import HeardLeases, Joined
from kvfs.meta.records import pack
from kvfs.meta.redis.calling import locate
from kvfs.meta.redis.leasing import LeaseTable
from kvfs.node.names import removal_sums
from kvfs.node.names.name_members import interval_s
from kvfs.node.names.name_protocol import ASK, ASK_REMOVED, CONFIRM, TELL
from kvfs.node.names.peer_outbox import PeerOutbox
from kvfs.node.names.removal_sums import RemovalSum

_DEADLINE_S: Final = 30.0
_SUM_S: Final = 1.0
"""How often a node tells what it removed, which is nothing here."""
_RENEWAL_S: Final = 5.0
"""Half as often as nodes do: all members share a processor with what is measured."""
_PIECE: Final = 1 << 16
_HEAD_BYTES: Final = 8 << 10
_Answer = Callable[[Any], Awaitable[Any]]
_unpack: Final = msgspec.msgpack.Decoder().decode


class PlayedSet:
    """The names of one member, as its own set would tell of them."""

    def __init__(self, number: int, first: int) -> None:
        """`number`: another one has other names."""
        self._number = number
        self.store = number
        """The number of the node that holds it."""
        self._first = first
        self.sequence = first
        self._digest = self._sum(0, first)

    def grow(self, changes: int) -> Deltas:
        """Makes so many changes more; returns the message that tells of them."""
        since = self.sequence
        self.sequence += changes
        (came, gone), (had, lacked) = self._span(self.sequence), self._span(since)
        self._digest += self._sum(had, came) - self._sum(lacked, gone)
        return self._deltas(since, self.sequence)

    def answer(self, ask: HoldingsAsk) -> list[Message]:
        """What `kvfs.holdings.answers` tells."""
        if ask.ranges:
            held, places = self._by_range(self.sequence)
            return [
                RangeContents(self.store, 1, self.sequence, each, held[slice(*places[each])])
                for each in ask.ranges
            ]
        if ask.since is None or ask.epoch != 1:
            return [Checksums(self.store, 1, self.sequence, sums_by_range(self._held()))]
        bounds = [*range(ask.since, self.sequence, MOST_CHANGES), self.sequence]
        return [self._deltas(*each) for each in itertools.pairwise(bounds)]

    def _deltas(self, since: int, last: int) -> Deltas:
        (came, gone), (had, lacked) = self._span(last), self._span(since)
        # A name that came and went meanwhile is in neither.
        added = np.sort(self._names(max(had, gone), came))
        removed = np.sort(self._names(lacked, min(had, gone)))
        digest = self._digest % (1 << 64) if last == self.sequence else None
        return Deltas(self.store, 1, since + 1, last, added, removed, digest)

    def _span(self, sequence: int) -> tuple[int, int]:
        """How many names had come, and gone, after that change."""
        later = max(0, sequence - self._first)
        return min(sequence, self._first) + (later + 1) // 2, later // 2

    @functools.lru_cache(maxsize=8)  # noqa: B019  (a node asks so many at a time)
    def _by_range(self, sequence: int) -> tuple[U64, list[tuple[int, int]]]:
        """Returns what is held after that change, range by range, and where each is."""
        assert sequence == self.sequence
        held = self._held()
        ranges = ranges_of(held).astype(np.uint64)
        keyed = np.sort((ranges << np.uint64(BITS)) | held)
        firsts = np.arange(RANGES + 1, dtype=np.uint64) << np.uint64(BITS)
        bounds = np.searchsorted(keyed, firsts).tolist()
        return keyed & np.uint64((1 << BITS) - 1), list(itertools.pairwise(bounds))

    def _held(self) -> U64:
        came, gone = self._span(self.sequence)
        return self._names(gone, came)

    def _names(self, begin: int, end: int) -> U64:
        numbers = np.arange(begin, max(begin, end), dtype=np.uint64) + np.uint64(self._number << 32)
        return mixed(numbers) >> np.uint64(64 - BITS)

    def _sum(self, begin: int, end: int) -> int:
        bounds = [*range(begin, end, _PIECE), end]
        pieces = (mixed(self._names(*each)) for each in itertools.pairwise(bounds))
        return sum(int(each.sum(dtype=np.uint64)) for each in pieces)


class Traffic:
    """What the real node was sent, and what it sent."""

    def __init__(self) -> None:
        self.deltas = 0
        """Changes in requests that the real node took."""
        self.rows = 0
        """The rows that they came in, one for some changes of a member."""
        self.requests = 0
        self.bytes = 0
        """Bytes of requests to it, with their heads."""
        self.late = 0
        """Requests that were not taken."""
        self.passed = 0
        """Rows that it passed on."""
        self.asked = 0
        self.made = 0
        """Requests that it made itself to pass on."""

    def __sub__(self, other: "Traffic") -> dict[str, int]:
        return {name: now - getattr(other, name) for name, now in vars(self).items()}

    def copy(self) -> "Traffic":
        made = Traffic()
        vars(made).update(vars(self))
        return made


class Scene(NamedTuple):
    """What all members know."""

    url: str
    secrets: Secrets
    real: PeerAddress
    traffic: Traffic


class PlayedMember:
    """One of them."""

    def __init__(self, scene: Scene, number: int, blocks: int) -> None:
        """It holds so many blocks."""
        self._scene = scene
        self.name = f"played-{number:05d}"
        self._table = LeaseTable(locate(scene.url), _DEADLINE_S)
        self.me = Joined(0, 0)
        self._words = pack(
            Words(name=self.name, protocol=PROTOCOL, version=VERSION, boot=1 << 60, place="1:1")
        )
        self._heard = HeardLeases()
        self.held = PlayedSet(number, blocks)

    async def join(self) -> None:
        """Takes a lease and a number."""
        secrets, traffic = self._scene.secrets, self._scene.traffic
        self.me = await self._table.join(self.name, self.name, self._words, secrets.digests, None)
        self.held.store = self.me.node
        self._listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        _, port = self._listeners[0].socket.getsockname()
        party = Party(secrets.cluster, self.me.node, self.me.incarnation, self.name)
        self.at = PeerAddress(self.me.node, "127.0.0.1", port)
        self.identity = PeerIdentity(party, lambda: secrets, self.at)
        self._client = PeerClient(self.identity)

        async def tell(params: Any) -> None:
            traffic.made += 1
            traffic.passed += _rows_in(params[0])

        async def confirm(params: Any) -> list[None]:
            return [None] * len(params[1])

        async def ask(params: Any) -> list[bytes]:
            traffic.asked += 1
            message = decode(params[0])
            assert isinstance(message, HoldingsAsk)
            return [encode(each) for each in self.held.answer(message)]

        async def ask_removed(_params: Any) -> list[bytes]:
            return []

        self._methods: dict[bytes, _Answer] = {
            peer_protocol.method_target(TELL): tell,
            peer_protocol.method_target(CONFIRM): confirm,
            peer_protocol.method_target(ASK): ask,
            peer_protocol.method_target(ASK_REMOVED): ask_removed,
        }

    def record(self) -> NodeRecord:
        """Its record in the engine."""
        return NodeRecord(
            number=self.me.node,
            name=self.name,
            store=f"{self.me.node:032x}",
            incarnation=self.me.incarnation,
            peer=f"{self.at.host}:{self.at.port}",
            version=VERSION,
            protocol=PROTOCOL,
        )

    async def run(self) -> None:
        """Listens and renews its lease, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._attend, self._listeners)
            await trio.sleep(random.random() * _RENEWAL_S)
            while True:
                with contextlib.suppress(Unavailable):  # the next one, as a node does
                    await self._table.renew(self.me, self._words, self._heard)
                await trio.sleep(_RENEWAL_S)

    async def call(self, _node: int, method: str, params: Any, deadline_s: float) -> Any:
        """Asks the real node, and counts that."""
        scene = self._scene
        try:
            answer = await self._client.call(scene.real, method, params, deadline_s)
        except KvfsError:
            scene.traffic.late += 1
            raise
        scene.traffic.requests += 1
        scene.traffic.bytes += _size_of(method, params, self.at)
        if method == TELL and params.deltas:
            told = delta_batch.decode(params.deltas)
            scene.traffic.rows += len(told)
            scene.traffic.deltas += int(told.changes.sum())
        return answer

    async def hear(self, answer: Any) -> None:
        """Takes what the real node answers."""
        self._scene.traffic.passed += _rows_in(answer[0])

    async def _attend(self, stream: trio.SocketStream) -> None:
        """Answers the requests of one connection, which come from a node and are well-formed."""
        known, data = Answering(self._scene.secrets, self.identity.party), b""
        with contextlib.suppress(trio.BrokenResourceError):
            while True:
                while (end := data.find(b"\r\n\r\n") + 4) < 4:
                    if not (more := await stream.receive_some(_HEAD_BYTES)):
                        return
                    data += more
                line, *lines = data[: end - 4].split(b"\r\n")
                fields = {
                    name.lower(): value for name, _, value in (e.partition(b": ") for e in lines)
                }
                size = end + int(fields[b"content-length"])
                while len(data) < size:
                    data += await stream.receive_some(size - len(data))
                body, data = data[end:size], data[size:]
                if peer_protocol.PROOF in fields:
                    known.conclude(peer_protocol.parse_proof(fields[peer_protocol.PROOF]))
                target = line.split()[1]
                if target == peer_protocol.HELLO:
                    answer = known.reply(body)
                else:
                    answer = msgspec.msgpack.encode(await self._methods[target](_unpack(body)))
                head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
                await stream.send_all(head + answer)


class Senders:
    """Those members whom the real node has as parents in the trees of all: they send what these
    tell."""

    def __init__(self, members: Mapping[int, PlayedMember], real: int) -> None:
        tree = DisseminationTree([real, *members])
        self._real = real
        self._sent: dict[int, list[PlayedMember]] = {}
        for origin, member in members.items():
            self._sent.setdefault(_parent(tree, origin, real), []).append(member)
        self._interval_s = interval_s(len(self._sent))
        self._outboxes = {
            number: PeerOutbox(members[number].call, lambda: self._interval_s, members[number].hear)
            for number in self._sent
        }

    @property
    def count(self) -> int:
        """How many members send to the real node."""
        return len(self._sent)

    async def run(self) -> None:
        """Sends what they are to, until cancelled."""
        async with trio.open_nursery() as nursery:
            for number, outbox in self._outboxes.items():
                nursery.start_soon(outbox.run)
                nursery.start_soon(self._tell_removals, outbox, self._sent[number])

    async def stream(self, changes_per_s: float) -> None:
        """Tells of so many changes of each member a second, until cancelled."""
        pace_s = self._interval_s if changes_per_s else 1.0
        async with trio.open_nursery() as nursery:
            for number, outbox in self._outboxes.items():
                origins = self._sent[number]
                nursery.start_soon(self._stream, outbox, origins, changes_per_s, pace_s)

    async def _stream(
        self, outbox: PeerOutbox, origins: Sequence[PlayedMember], rate: float, pace_s: float
    ) -> None:
        await trio.sleep(random.random() * pace_s)
        owed, told_s = 0.0, trio.current_time()
        while True:
            now_s = trio.current_time()
            owed, told_s = owed + (now_s - told_s) * rate, now_s
            changes = min(int(owed), MOST_CHANGES)
            owed -= changes
            grown = [each.held.grow(changes) for each in origins]
            outbox.tell(self._real, delta_batch.packed(delta_batch.of_messages(grown)))
            await trio.sleep(pace_s)

    async def _tell_removals(self, outbox: PeerOutbox, origins: Sequence[PlayedMember]) -> None:
        rows = [removal_sums.pack(RemovalSum(e.me.node, e.me.node, 0, 0, 0)) for e in origins]
        while True:
            for each in rows:
                outbox.tell_sum(self._real, each)
            await trio.sleep(_SUM_S)


def _parent(tree: DisseminationTree, origin: int, real: int) -> int:
    """The member that passes on to the real node what comes from the origin."""
    level = [origin]
    while level:
        following = []
        for each in level:
            children = tree.children(origin, each)
            if real in children:
                return each
            following += children
        level = following
    raise AssertionError("the tree reaches all members")


def _rows_in(encoded: bytes) -> int:
    return len(delta_batch.decode(encoded)) if encoded else 0


def _size_of(method: str, params: Any, at: PeerAddress) -> int:
    """Bytes of a request, with its head."""
    body = msgspec.msgpack.encode(params)
    fields = [(peer_protocol.AT, peer_protocol.render_at(at))]
    return len(render_request("POST", peer_protocol.method_target(method), fields, body))
