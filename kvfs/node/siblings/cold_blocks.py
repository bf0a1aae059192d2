"""The cold tier as a holder of blocks, in namespaces that are kept by their nodes: what is evicted
everywhere is found there by every node, without the metadata server.

An object is named after the node that sent it, namespace and fingerprint, and tells the record, so
that whoever knows a name finds it by one question. Each node has a set of the names that it sent,
which the others know like that of the names that it holds (`name_exchange`); it lies in a file of
the node, so that a start lists nothing. Only where the file is not believed (a power cut, a new
store) the node lists what it sent, behind its start.

| event | in the tier | in the set |
|---|---|---|
| a block is the coldest here, and nobody keeps it | sent by the first of its holders | then added |
| it, or its namespace, is removed anywhere | deleted by who sent it | then taken away |
| a kill after it was sent | an object that nobody finds | - |
| a kill before it is taken away | deleted again at the next start | taken away then |
| more removals come than can wait | all that are known are looked at again | taken away then |

Invariants
- What comes from there has the checksum of its record, else it is none of its content.
- A look-up waits two seconds for the tier, then it is a miss.
- Removals that wait for the tier are bounded. A removal counts for the object of its name for as
  long as it waits, also where its day has passed meanwhile.
"""

import base64
import binascii
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import trio
import trio.lowlevel
import xxhash

from kvfs.base.background import Background
from kvfs.base.errors import UNDECODABLE, Corrupt, KvfsError, NotFound, Unavailable
from kvfs.base.retry import Persistence
from kvfs.holdings.fingerprints import gathered
from kvfs.holdings.own_set import OwnSet
from kvfs.meta.records import Flag, Inode, namespace_of, unpack_inode
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.names.name_sets import NameSets
from kvfs.node.names.tombstones import Tombstone, Tombstones, is_hidden
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.node.tasks.cold_tier import ColdTier
from kvfs.policy import rendezvous
from kvfs.transfer.cold.uploads import ColdUploads
from kvfs.tree.copies import held_names, siblings
from kvfs.tree.copies.cold_copies import Object
from kvfs.tree.copies.held_names import HeldName
from kvfs.tree.copies.siblings import HeldBlock

log = logging.getLogger(__name__)
_TOLD: Final = "kvfs-block"
_MOST_TOLD: Final = 1400
"""Bytes of a record that fit beside an object: 2 kB of text."""
_FIND_S: Final = 2.0
_PATIENT_S: Final = 2.0
_PRESSED_S: Final = 5.0
_AGAIN_S: Final = 10.0
_MOST_REMOVED: Final = 65_536
_PAGE: Final = 1024
"""Removals that are compared with the names in the tier together."""
Name = tuple[int, int]


class _ColdRecord(msgspec.Struct, array_like=True):
    """The record of a file beside its object."""

    path: bytes
    """A hash of the path, which may have 4 kB."""
    held: HeldName


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_ColdRecord).decode


class _Place(NamedTuple):
    """The place of a name in the tier."""

    node: int
    namespace_id: int
    fingerprint: int

    def __str__(self) -> str:
        return f"{_sent_by(self.node)}{self.namespace_id:04x}/{self.fingerprint:012x}"


class ColdBlocks:
    """The cold tier for the blocks of one node."""

    def __init__(
        self,
        engine: ReplicaEngine,
        me: int,
        tier: ColdTier,
        sets: Callable[[], NameSets],
        stones: Tombstones,
        differing: DifferingNames,
    ) -> None:
        """`sets`: the names of this node, and those that others are said to hold. `stones`: the
        removals that are known."""
        self._engine = engine
        self._me = me
        self._tier = tier
        self._sets = sets
        self._stones = stones
        self._differing = differing
        self._removed: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        """Names, and up to which change their removal hides copies."""
        self._again: list[Tombstone] = []
        """Removals that are looked at again, since not all could wait."""
        self._owes_all = True
        self._removed_spaces: dict[int, None] = {}
        self._changing: dict[_Place, trio.Event] = {}
        """Objects that are sent or deleted now."""
        self._came = trio.Event()
        self._tasks = Background()
        self._uploads = ColdUploads[int, HeldBlock](self._tasks, self._send, lambda: tier.is_away)

    @property
    def is_sending(self) -> bool:
        """Whether blocks are on their way there."""
        return bool(self._uploads)

    async def run(self) -> None:
        """Sends and deletes, until cancelled."""
        await self._tasks.run(self._keep)

    async def _keep(self) -> None:
        filling = Persistence(log.warning, "names in the cold tier are not all told yet")
        if not self._own.is_filled:
            await filling.until_done(self._fill)
        self._came.set()
        await self._delete_removed()

    def removed(self, stones: Iterable[Tombstone]) -> None:
        """Notes removals, made here or elsewhere: what this node sent of them is deleted."""
        for each in stones:
            if each.name in self._removed or len(self._removed) < _MOST_REMOVED:
                self._removed[each.name] = self._stones.reach_ns(each)
            else:
                self._owes_all = True
        self._came.set()

    def namespace_removed(self, namespace_id: int) -> None:
        """Notes that a namespace was removed: what this node sent of it is deleted."""
        self._removed_spaces[namespace_id] = None
        self._came.set()

    # ---- found

    def is_claimed(self, namespace_id: int, path: bytes) -> bool:
        """Returns whether the tier is said to have a path."""
        return bool(self._sets().cold_holders(namespace_id, path)[1])

    async def find(self, namespace_id: int, path: bytes) -> HeldName | None:
        """Returns what the tier tells of a path; None: it has not got it, or does not answer."""
        with trio.move_on_after(_FIND_S):
            for place in await self._places(namespace_id, path):
                try:
                    record = await self._told(place)
                except KvfsError as error:
                    log.debug("the cold tier does not tell of a name: %s", error)
                    return None
                if record is not None and record.path == _hash(path):
                    return record.held
        return None

    async def fetch(self, ino: int, inode: Inode, fd: int) -> bytes | None:
        """Fills a new file with the content of a record; returns the checksums of its chunks. None:
        the tier has not got that. Raises Unavailable, OSError."""
        path = await self._engine.read(lambda t: held_names.path_of(t.get, ino))
        if path is None or not inode.flags & Flag.SEALED:
            return None
        for place in await self._places(namespace_of(ino), path):
            if self._tier.is_away:
                raise Unavailable("the cold tier did not answer lately")
            try:
                return await self._tier.receive(str(place), inode.checksum, inode.size, fd)
            except NotFound:
                continue
            except Corrupt:
                self._differing.found(place.namespace_id, path, place.node)
        return None

    async def _places(self, namespace_id: int, path: bytes) -> list[_Place]:
        await self._sets().learn([(namespace_id, path)])
        fingerprint, nodes = self._sets().cold_holders(namespace_id, path)
        return [_Place(node, namespace_id, fingerprint) for node in nodes]

    async def _told(self, place: _Place) -> _ColdRecord | None:
        """Raises KvfsError."""
        told = await self._tier.told(str(place))
        if told is None:
            return None
        try:
            return _decode(base64.b64decode(told.get(_TOLD, ""), validate=True))
        except (*UNDECODABLE, binascii.Error):
            raise Corrupt(f"the cold tier tells no record with {place}") from None

    # ---- sent

    async def sent(self, chosen: Sequence[Name], *, patient: bool) -> list[Name]:
        """Sends blocks whose namespace asks for it, and returns which of all these files may be
        evicted now. Not `patient`: those too that the tier has not taken soon. Raises KvfsError."""
        inos = [ino for ino, _ in chosen if self._asks_for_tier(namespace_of(ino))]
        if not inos:
            return list(chosen)
        blocks = await self._engine.read(lambda t: siblings.look(t, inos))
        names = [(each.namespace_id, each.path) for each in blocks]
        await self._sets().learn(names)
        with trio.move_on_after(_PATIENT_S if patient else _PRESSED_S):
            to_be_sent = await self._to_be_sent(blocks)
            await self._uploads.send({each.ino: each for each in to_be_sent})
        if not patient or self._tier.is_away:
            return list(chosen)
        await self._sets().learn(names)
        there = {each.ino for each in blocks if self.is_claimed(each.namespace_id, each.path)}
        return [name for name in chosen if name[0] not in inos or name[0] in there]

    def _asks_for_tier(self, space: int) -> bool:
        found = self._engine.namespace(space) if self._engine.is_local(space) else None
        return found is not None and found.cold

    async def _to_be_sent(self, blocks: Sequence[HeldBlock]) -> list[HeldBlock]:
        """Returns the sealed blocks that the tier lacks, and that this node is to send: the first
        of those that are said to hold them."""
        sets = self._sets()
        sealed = [
            each
            for each in blocks
            if each.is_sealed and not self.is_claimed(each.namespace_id, each.path)
        ]
        claims = await sets.claims_of([(each.namespace_id, each.path) for each in sealed])
        return [
            each
            for each, (content, nodes) in zip(sealed, claims, strict=True)
            if rendezvous.first(content, {self._me, *(nodes or ())}) == self._me
        ]

    async def _send(self, block: HeldBlock) -> None:
        space, path = block.namespace_id, block.path
        block.held.renews_ns = self._stones.renews(space, path)
        block.held.siblings = []
        packed = _encode(_ColdRecord(_hash(path), block.held))
        if len(packed) > _MOST_TOLD:
            log.info("inode %#x has too many attributes for the cold tier", block.ino)
            return
        place = _Place(self._me, space, self._sets().cold_holders(space, path)[0])
        wanted = Object(block.ino, block.inode.version, block.inode.checksum)
        told = {_TOLD: base64.b64encode(packed).decode()}
        async with self._alone_with(place):
            if await self._tier.put(wanted, str(place), told):
                self._own.ensure(gathered([place.fingerprint]))
                self._sets().exchange.changed()
                self.removed(self._stones.renewed([(space, path)]))  # it came meanwhile, perhaps
                with suppress(Unavailable):
                    if self._engine.namespace(space) is None:
                        self.namespace_removed(space)  # and was gone through, perhaps

    @asynccontextmanager
    async def _alone_with(self, place: _Place) -> AsyncIterator[None]:
        """Keeps the other task that sends or deletes this object waiting: what the tier did last
        and what was noted last would be different things."""
        while place in self._changing:
            await self._changing[place].wait()
        self._changing[place] = trio.Event()
        try:
            yield
        finally:
            self._changing.pop(place).set()

    # ---- deleted

    async def _delete_removed(self) -> None:
        deleting = Persistence(log.warning, "the cold tier keeps what was removed for now")
        while True:
            await self._came.wait()
            self._came = trio.Event()
            while self._removed or self._again or self._owes_all:
                await deleting.attempt(self._delete_some, pause_s=_AGAIN_S)
            while self._removed_spaces:
                await deleting.attempt(self._delete_space, pause_s=_AGAIN_S)

    async def _delete_some(self) -> None:
        """Deletes the objects of removed names that this node sent; at last those of all names
        whose removal is known, where not all could wait. Raises KvfsError."""
        if not self._removed:
            if not self._again:
                self._owes_all, self._again = False, self._stones.all()
            page = self._again[-_PAGE:]
            self._removed.update((each.name, self._stones.reach_ns(each)) for each in page)
            del self._again[-_PAGE:]
        some = list(islice(self._removed.items(), _PAGE))
        sets = self._sets()
        fingerprints = [sets.fingerprint(*name) for name, _ in some]
        is_sent = self._own.holds(gathered(fingerprints)).tolist()
        for (name, reach_ns), fingerprint, was_sent in zip(
            some, fingerprints, is_sent, strict=True
        ):
            if was_sent:
                await self._delete_one(name, reach_ns, fingerprint)
            if self._removed.get(name) == reach_ns:
                del self._removed[name]
        await trio.lowlevel.checkpoint()

    async def _delete_one(self, name: tuple[int, bytes], reach_ns: int, fingerprint: int) -> None:
        """Deletes the object of a removed name, which this node sent; also one whose record makes
        no sense, since nobody finds that. Raises KvfsError."""
        place = _Place(self._me, name[0], fingerprint)
        async with self._alone_with(place):
            try:
                record = await self._told(place)
                is_removed = record is not None and _is_removed(record, name[1], reach_ns)
            except Corrupt as error:
                log.warning("it is deleted: %s", error)
                record, is_removed = None, True
            if is_removed:
                await self._tier.delete(str(place))
            if is_removed or record is None:
                self._forget(fingerprint)

    async def _delete_space(self) -> None:
        """Deletes what this node sent of the first removed namespace. Raises KvfsError."""
        space = next(iter(self._removed_spaces))
        del self._removed_spaces[space]  # what is sent meanwhile has it gone through again
        try:
            for name in await self._tier.names(f"{_sent_by(self._me)}{space:04x}/"):
                await self._tier.delete(name)
                if (fingerprint := _fingerprint(name)) is not None:
                    self._forget(fingerprint)
        except BaseException:
            self._removed_spaces[space] = None
            raise

    def _forget(self, fingerprint: int) -> None:
        self._own.remove(gathered([fingerprint]))
        self._sets().exchange.changed()

    # ---- the set

    @property
    def _own(self) -> OwnSet:
        own = self._sets().cold
        assert own is not None, "a node with a cold tier has one"
        return own

    async def _fill(self) -> None:
        """Makes the set what the tier has of this node. Raises KvfsError."""
        names = await self._tier.names(_sent_by(self._me))
        if found := [each for name in names if (each := _fingerprint(name)) is not None]:
            self._own.ensure(gathered(found))
        self._own.mark_filled()
        self._sets().exchange.changed()


def _is_removed(record: _ColdRecord, path: bytes, reach_ns: int) -> bool:
    """Returns whether an object is of the name that was removed, and not of a later file."""
    if record.path != _hash(path):
        return False
    changed_ns = unpack_inode(record.held.record).ctime_ns
    return is_hidden(reach_ns, changed_ns, record.held.renews_ns)


def _sent_by(node: int) -> str:
    return f"names/{node:04x}/"


def _fingerprint(name: str) -> int | None:
    """Returns the fingerprint of an object's name; None: it is no block's."""
    try:
        return int(name.rpartition("/")[2], 16)
    except ValueError:
        return None


def _hash(path: bytes) -> bytes:
    return xxhash.xxh3_128_digest(path)
