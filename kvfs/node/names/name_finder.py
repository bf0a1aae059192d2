"""Finds names of namespaces that are kept by their nodes, on the nodes that are said to hold them.

| the name here | claimed | what happens |
|---|---|---|
| absent | by nobody | a miss, after one look into a table in memory |
| absent | by some | they are asked, one after the other; what one tells is taken over |
| absent | its homes know by whom | they are asked first, for all names of a look-up together |
| absent | by the cold tier, and no node tells of it | the tier is asked, as the last |
| taken over, confirmed a moment ago | - | it is believed |
| taken over, its data not here | by some, or its holder | as absent; forgotten if all deny it |
| held | - | it is believed |

A record that was taken over, and whose data did not come, is forgotten some seconds later, once no
kernel knows it, as is a directory that came with it, or with a key, and is empty: what is not held
costs no space for long.

Invariants
- At most three holders are asked for a name, each with a deadline.
- A name that nobody confirms is a miss, and no error: so it is in a cache.
"""

import logging
import stat
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

import trio
import trio.lowlevel

from kvfs.base import detach
from kvfs.base.errors import UNDECODABLE, Invalid, KvfsError, NoSpace, Paused, ReadOnly, Unavailable
from kvfs.base.retry import Persistence
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import NAMESPACE_SHIFT, Inode, namespace_of, unpack_inode
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.node.names.name_protocol import MOST_PATH_BYTES, Question
from kvfs.node.names.name_questions import NameQuestions
from kvfs.node.names.tombstones import Tombstones, of_directory
from kvfs.tree import entries, name_escaping
from kvfs.tree.copies import held_names, placements
from kvfs.tree.copies.held_names import COLD, HeldName
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldPage
from kvfs.tree.namespaces import is_peer
from kvfs.vfs.port import Name

log = logging.getLogger(__name__)
Learn = Callable[[Sequence[Question]], Awaitable[None]]
BELIEVED_S: Final = 2.0
_MOST_ASKED: Final = 3
_FORGET_S: Final = 1.0
_NO_NAMES: Final = frozenset((b"", b".", b".."))
_LONG_NAMES: Final = 256
"""Entries that are looked at together for a long name."""
_FORGOTTEN: Final = 256
"""Records that are forgotten in one commit."""


class _Record(NamedTuple):
    """A name's record here."""

    ino: int
    inode: Inode
    is_taken_over: bool
    holders: list[int]


class ColdNames(Protocol):
    """The names that the cold tier has."""

    def is_claimed(self, namespace_id: int, path: bytes) -> bool:
        """Returns whether the tier is said to have a path."""

    async def find(self, namespace_id: int, path: bytes) -> HeldName | None:
        """Returns what the tier tells of a path; None: it has not got it, or does not answer."""


class _Wanted(NamedTuple):
    """A name to be looked for, and the nodes to be asked."""

    namespace_id: int
    path: bytes
    record: _Record | None
    nodes: list[int]
    is_cold: bool
    """Whether the cold tier is said to have it."""


class NameFinder:
    """Finds names for one node."""

    def __init__(
        self,
        engine: Engine,
        me: int,
        is_in_use: Callable[[int], bool],
        paths: DirectoryPaths,
        claims: Callable[[int, bytes], Sequence[int] | None],
        learn: Callable[[], Learn | None],
        questions: NameQuestions,
        listed: Callable[[Sequence[AskedPage], Detail], Awaitable[list[ToldPage]]],
        stones: Tombstones,
        give_up: Callable[[int, Inode], Awaitable[object]],
    ) -> None:
        """`claims` gives the nodes that are said to hold a path of a namespace, the likeliest
        first, or None: homes have to be asked, which is done by what `learn` gives while there are
        any. `listed` gives what nodes have of directories. `give_up` forgets a record whose data
        nobody has. `is_in_use`: whether a kernel knows an inode, or its data are on their way."""
        self._engine = engine
        self._me = me
        self._is_in_use = is_in_use
        self._paths = paths
        self._claims = claims
        self._learn = learn
        self._questions = questions
        self._listed = listed
        self._stones = stones
        self._give_up = give_up
        self.until_open: Callable[[int], Awaitable[None]] = _at_once
        """Returns when a namespace takes changes. Raises Paused."""
        self.cold: ColdNames | None = None
        """The names that the cold tier has, on a node that has one."""
        self._believed: OrderedDict[int, float] = OrderedDict()
        """Records that were taken over, and until when they are believed."""
        self._fading: OrderedDict[int, float] = OrderedDict()
        """Records that are believed no more, and when they are looked at next."""
        self.counters = {
            "names_found": 0,
            "names_forgotten": 0,
            "false_claims": 0,
            "stale_claims": 0,
        }

    def is_doubtful(self, t: Transaction, ino: int, inode: Inode) -> bool:
        """Returns whether a record was taken over, its data are not here, and its holder was not
        asked of late."""
        if inode.blocks or self._believes(ino):
            return False
        return held_names.is_taken_over(t, ino, inode)

    def is_claimed(self, directory: int, name: bytes) -> bool:
        """Returns whether another node is said to have a name, or homes have to be asked that."""
        path = self._paths.of(directory, name)
        if not name or path is None or len(path) > MOST_PATH_BYTES:
            return False
        space = directory >> NAMESPACE_SHIFT
        claims = self._claims(space, path)
        if claims is None or (claims and any(each != self._me for each in claims)):
            return True
        return self.cold is not None and self.cold.is_claimed(space, path)

    async def find(self, names: Sequence[Name]) -> bool:
        """Does what `NodePort.find` describes. Raises Unavailable."""
        is_news = False
        wanted: list[_Wanted] = []
        learn = self._learn()
        if learn is not None and (asked := await self._asked_of_homes(names)):
            await detach.aside()
            await learn(asked)
        for each in names:
            found = await self._look(*each)
            if isinstance(found, _Wanted):
                wanted.append(found)
            else:
                is_news = is_news or found
        if not wanted:
            return is_news
        await detach.aside()
        if len(wanted) == 1:
            return await self._find(wanted[0], takes=True) or is_news
        outcomes: list[bool] = []

        async def find(one: _Wanted) -> None:
            outcomes.append(await self._find(one))

        async with trio.open_nursery() as nursery:
            for one in wanted:
                nursery.start_soon(find, one)
        return any(outcomes) or is_news

    def left(self, directory: int) -> None:
        """Has a directory, out of which a name went, forgotten if it is empty and was made for
        names alone."""
        if directory not in self._fading:
            self._fading[directory] = trio.current_time()

    def lost(self, ino: int) -> None:
        """Notes that nobody had the data of a record that was taken over."""
        self._believed.pop(ino, None)
        self.counters["stale_claims"] += 1

    async def run(self) -> None:
        """Forgets records whose data did not come, until cancelled."""
        forgetting = Persistence(log.warning, "names that others hold are not forgotten")
        await forgetting.repeat(self._forget_old, _FORGET_S)

    def fade(self, inos: Sequence[int]) -> None:
        """Has records that were taken over forgotten, once nobody uses them."""
        for ino in inos:
            self._fading.setdefault(ino, 0.0)

    async def take_up(self, namespace_id: int, nodes: Sequence[int]) -> None:
        """Has the records that an earlier run took over from these nodes forgotten, too. Raises
        KvfsError."""
        for holder in map(keys.pack_node, (COLD, *nodes)):
            after = 0
            while inos := await self._engine.read(
                lambda t: placements.held_within(t, holder, namespace_id, after, _FORGOTTEN)  # noqa: B023
            ):
                self.fade(await self._engine.read(lambda t: _not_held(t, inos)))
                after = inos[-1]

    # ---- inside

    def _believes(self, ino: int) -> bool:
        return self._believed.get(ino, 0.0) > trio.current_time()

    async def _asked_of_homes(self, names: Sequence[Name]) -> list[Question]:
        """Returns the paths of names that may be on other nodes, where homes know on which. Those
        of other spellings are asked about one by one."""

        def absent(t: Transaction) -> list[Question]:
            found: list[Question] = []
            for directory, name in names:
                path = self._paths.of(directory, name)
                if name in _NO_NAMES or path is None or len(path) > MOST_PATH_BYTES:
                    continue
                question = namespace_of(directory), path
                if self._engine.is_local(question[0]) and self._claims(*question) is None:
                    record = _record(t, directory, name)
                    if record is None or (record.is_taken_over and not self._believes(record.ino)):
                        found.append(question)
            return found

        return await self._engine.read(absent)

    async def _look(self, directory: int, name: bytes) -> "_Wanted | bool":
        """Returns what is to be asked for; True: the records here say more than that it is absent;
        False: nobody is said to have it."""
        if not self._engine.is_local(namespace_of(directory)):
            return False
        if b"%" not in name:
            return name not in _NO_NAMES and await self._look_for(directory, name)
        found: _Wanted | bool = False
        for each in name_escaping.meant(name):
            found = found or await self._look_for(directory, each)
        stem = None if found else name_escaping.long_start(name)
        if stem is not None and (long := await self._long_name(directory, stem, name)):
            found = await self._look_for(directory, long)
        return found

    async def _long_name(self, directory: int, stem: bytes, name: bytes) -> bytes | None:
        """Returns the name on other nodes that begins so and that the mount shows as `name`."""
        path = self._paths.of(directory, stem)
        if path is None:
            return None
        space, above = namespace_of(directory), path.removesuffix(stem).removesuffix(b"/")
        start, limit = stem, _LONG_NAMES
        while start.startswith(stem):
            (page,) = await self._listed([AskedPage(space, above, start, limit)], "names")
            for each in page.names:
                if name_escaping.is_long_form(name, each.key):
                    return each.key.removesuffix(b"/")
            start = page.following
        return None

    async def _look_for(self, directory: int, name: bytes) -> "_Wanted | bool":
        """Does what `_look` does, for a name as the engine has it."""
        path = self._paths.of(directory, name)
        if path is None or len(path) > MOST_PATH_BYTES:
            return False
        record = await self._engine.read(lambda t: _record(t, directory, name))
        if record is not None and (not record.is_taken_over or self._believes(record.ino)):
            return True
        namespace_id = namespace_of(directory)
        claims, learn = self._claims(namespace_id, path), self._learn()
        if claims is None and learn is not None:
            await learn([(namespace_id, path)])
            claims = self._claims(namespace_id, path)
        claiming = [each for each in claims or () if each != self._me]
        known = [] if record is None else [each for each in record.holders if each != COLD]
        nodes = [*known, *(each for each in claiming if each not in known)][:_MOST_ASKED]
        is_cold = self.cold is not None and self.cold.is_claimed(namespace_id, path)
        if record is None and not nodes and not is_cold:
            return False
        return _Wanted(namespace_id, path, record, nodes, is_cold)

    async def _find(self, wanted: _Wanted, *, takes: bool = False) -> bool:
        """Returns whether the records here say something else by now. `takes`: the bytes of a small
        file may come along."""
        await self.until_open(wanted.namespace_id)
        for node in wanted.nodes:
            if not self._questions.rests(node) and await self._is_confirmed(node, wanted, takes):
                return True
        if wanted.is_cold and self.cold is not None:
            held = await self.cold.find(wanted.namespace_id, wanted.path)
            if held is not None and await self._is_taken_over(held, wanted, COLD):
                return True
        await self.until_open(wanted.namespace_id)
        if not self._engine.is_local(wanted.namespace_id):
            return True  # all names are here now
        if wanted.record is None:
            return False
        self.lost(wanted.record.ino)
        await self._give_up(wanted.record.ino, wanted.record.inode)
        return True

    async def _is_confirmed(self, node: int, wanted: _Wanted, takes: bool) -> bool:
        """Returns whether the node tells of the name, and it is known here by then."""
        try:
            question = wanted.namespace_id, wanted.path
            held = await self._questions.ask(node, question, takes=takes)
        except KvfsError:
            return False
        if held is None:
            self.counters["false_claims"] += 1
            return False
        return await self._is_taken_over(held, wanted, node)

    async def _is_taken_over(self, held: HeldName, wanted: _Wanted, node: int) -> bool:
        """Returns whether what a node, or the cold tier, tells of a name is known here by then."""
        if self._is_removed(held, wanted):
            self.counters["false_claims"] += 1
            return False
        space, path, holder = wanted.namespace_id, wanted.path, keys.pack_node(node)
        try:
            ino = await self._engine.transact(
                lambda t: held_names.take_over(t, space, path, held, holder)
            )
        except Invalid:
            self.counters["false_claims"] += 1
            return False
        except Paused:
            raise
        except (NoSpace, ReadOnly, Unavailable) as error:  # its data could not come either
            log.debug("a name that node %d holds is not taken over: %s", node, error)
            return False
        if ino is None:
            return False
        self.counters["names_found"] += 1
        if held.ino == ino:
            self._believed.pop(ino, None)
            self._believed[ino] = trio.current_time() + BELIEVED_S
        return True

    def _is_removed(self, held: HeldName, wanted: _Wanted) -> bool:
        """Returns whether what a node tells of was removed since it was written."""
        record = held.record if held.ino else held.directories[-1][1]
        try:
            changed_ns = unpack_inode(record).ctime_ns
        except UNDECODABLE:
            return True
        if not held.ino:
            name = wanted.namespace_id, of_directory(wanted.path)
            return self._stones.hides(*name, changed_ns)
        name = wanted.namespace_id, wanted.path
        if self._stones.hides(*name, changed_ns, held.renews_ns):
            return True
        self._stones.renew([name])
        return False

    async def _forget_old(self) -> None:
        now = trio.current_time()
        while self._believed and next(iter(self._believed.values())) <= now:
            self._fading[self._believed.popitem(last=False)[0]] = now
        while due := [ino for ino, at in islice(self._fading.items(), _FORGOTTEN) if at <= now]:
            in_use = [ino for ino in due if self._is_in_use(ino)]
            doomed = [ino for ino in due if ino not in in_use]
            if doomed:
                gone = await self._engine.transact(
                    lambda t: [each for ino in doomed for each in self._forget(t, ino)]  # noqa: B023
                )
                self.counters["names_forgotten"] += len(gone)
            else:
                await trio.lowlevel.checkpoint()
            for ino in due:
                self._fading.pop(ino, None)
            self._fading.update((ino, now + BELIEVED_S) for ino in in_use)

    def _forget(self, t: Transaction, ino: int) -> list[int]:
        """Drops a record if it is still one that was taken over, or an empty directory made for
        names; returns what has gone."""
        value = t.get(keys.inode(ino))
        inode = None if value is None else unpack_inode(value)
        if inode is None or not inode.nlink or not is_peer(t, namespace_of(ino)):
            return []  # gone, or everybody's record now
        if stat.S_ISDIR(inode.mode):
            gone = entries.prune(t, ino, time.time_ns(), _keep_none, self._is_in_use)
            return [each.removed.ino for each in gone]
        if not held_names.is_taken_over(t, ino, inode):
            return []
        held_names.drop(t, ino)
        return [ino]


async def _at_once(_namespace_id: int) -> None:
    """Stands in where nothing is closed."""


def _not_held(t: Transaction, inos: Sequence[int]) -> list[int]:
    return [ino for ino in inos if not held_names.is_held(t, ino)]


def _keep_none(_ino: int) -> bool:
    return False


def _record(t: Transaction, directory: int, name: bytes) -> _Record | None:
    packed = t.get(keys.file_entry(directory, name))
    if packed is None:
        packed = t.get(keys.directory_entry(directory, name))
    value = None if packed is None else t.get(keys.INODE + packed)
    if packed is None or value is None:
        return None
    ino, inode = keys.unpack_u64(packed), unpack_inode(value)
    found = [keys.unpack_node(each.node) for each in placements.holders(t, ino)]
    return _Record(ino, inode, held_names.is_taken_over(t, ino, inode), found)
