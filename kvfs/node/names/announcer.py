"""The announcements of a node: fingerprints of the names that it holds, as commits change them.

A name is held where its file is published here and its data are here; a directory is announced
with the first such file below it, until it is removed.

| event | announced |
|---|---|
| a file is published, or its data came | its name, and its directories once |
| it gets another name | that one in place of the earlier one |
| another file takes its name | the same name still |
| it is removed, evicted or lost | nothing any more |
| a directory is removed | nothing any more |

Invariant
- A name is added when it comes and removed when it goes, once each: `OwnSet` counts them.
- Where files get other names soon after they were closed, a name is announced only when it is older
  than those were (`kvfs.policy.name_delay`): a block's temporary name is told to nobody.
- A name that another node was told of, as it asked, is announced.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import trio
import trio.lowlevel

from kvfs.holdings.fingerprints import Fingerprinter, gathered
from kvfs.holdings.own_set import OwnSet
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import (
    NAMESPACE_SHIFT,
    Flag,
    Inode,
    namespace_of,
    namespace_root,
    unpack_inode,
)
from kvfs.meta.replica.local_transaction import LocalChange
from kvfs.node.names.directory_paths import MOST, DirectoryPaths
from kvfs.policy.name_delay import NameDelay
from kvfs.tree import lifecycle, namespaces
from kvfs.tree.copies import held_names, placements
from kvfs.tree.inodes import read_inodes

_INODE: Final = keys.INODE[0]
_PLACEMENT: Final = keys.PLACEMENT[0]
_ENTRY: Final = keys.ENTRY[0]
_NODE: Final = 9
"""The offset of the node in the key of a placement."""
_SCAN_BATCH: Final = 512
_MOST_GATHERED: Final = 8192
_SECOND_NS: Final = 1_000_000_000


class _Name(NamedTuple):
    """A place in a directory."""

    parent: int
    name: bytes


_Path = tuple[int, bytes]
"""A namespace, and a path in it."""
_Waiting = tuple[int, float]
"""How often a name came (or, less than 0, went), and since when that waits (time.monotonic)."""


class Announcer:
    """The announcements of one node. Changes are gathered until they are flushed: one at a time
    would cost the set a hundred times as much."""

    def __init__(
        self,
        local: EmbeddedEngine,
        paths: DirectoryPaths,
        own: OwnSet,
        fingerprinter: Callable[[int], Fingerprinter],
        wake: Callable[[], None],
        most_delay_s: Callable[[], float],
    ) -> None:
        """`fingerprinter`: that of a namespace. `wake` has `flush_due` called after `due_s`.
        `most_delay_s`: seconds for which a name may wait, so that all nodes know it in time."""
        self._local = local
        self._paths = paths
        self._own = own
        self._fingerprinter = fingerprinter
        self._wake = wake
        self._most_delay_s = most_delay_s
        self._delay = NameDelay()
        self._waiting: dict[_Path, _Waiting] = {}
        """The names that came or went and are not announced yet, the earliest first."""
        self._directories: dict[int, bool] = {}
        """The same of directories: whether they are there."""
        self._announced: dict[int, None] = {}
        """Directories that are announced, the last that were used."""

    @property
    def waiting(self) -> int:
        """Names that came or went, and that no other node can have heard of yet."""
        return len(self._waiting)

    def due_s(self) -> float:
        """Returns the seconds until something is to be announced; infinity: nothing waits."""
        if self._directories:
            return 0.0
        for _, since in self._waiting.values():
            now = time.monotonic()
            return max(0.0, since + self._delay_s(now) - now)
        return math.inf

    def on_local(self, changes: Sequence[LocalChange]) -> None:
        """Notes a commit of this node's own keys."""
        alone = _alone(changes)
        if alone is None:
            self._note_changes(changes)
        else:
            self._note_record(*alone)
        if len(self._waiting) >= _MOST_GATHERED:
            self.flush()
            self._wake()
        elif self._waiting or self._directories:
            self._wake()

    def _note_record(self, key: bytes, was: bytes | None, value: bytes | None) -> None:
        """Does what `_note_changes` does of a commit that changed the record of one file, and
        nothing else that counts: each close and each rename of a block is such a one."""
        before, after = _named(was), _named(value)
        if before is not None and after is not None:
            if before.parent == after.parent and before.name == after.name:
                return
        elif before is None and after is None:
            return
        if self._local.first_now(keys.PLACEMENT + key[1:] + self._local.node) is None:
            return
        if before is not None:
            self._count(before.parent, before.name, -1)
            if after is not None:
                self._gave_up(before, after)
        if after is not None:
            self._count(after.parent, after.name, 1)
            if after.parent not in self._announced:
                self._announce_directories(after.parent)

    def _note_changes(self, changes: Sequence[LocalChange]) -> None:
        node = self._local.node
        before: dict[bytes, bytes | None] = {}
        after: dict[bytes, bytes | None] = {}
        touched: dict[bytes, None] = {}
        removed: list[tuple[bytes, bytes]] = []
        for key, was, value in changes:
            before.setdefault(key, was)
            after[key] = value
            kind = key[0]
            if kind == _INODE or (kind == _PLACEMENT and key[_NODE:] == node):
                touched[key[1:_NODE]] = None
            elif kind == _ENTRY and value is None and was is not None and key[-1:] == b"/":
                removed.append((key, was))
        for packed in touched:
            if keys.PLACEMENT + packed + node not in after:
                old, new = self._moved(packed, before, after)
            else:
                old, new = self._held_name(packed, before), self._held_name(packed, after)
            if old == new:
                continue
            if old is not None:
                self._count(*old, -1)
            if new is not None:
                self._count(*new, 1)
                self._announce_directories(new.parent)
            if old is not None and new is not None:
                key = keys.INODE + packed
                self._gave_up(unpack_inode(before[key] or b""), unpack_inode(after[key] or b""))
        for key, was in removed:
            self._directory_went(_Name(keys.unpack_u64(key, 1), key[_NODE:-1]), was)

    def flush_due(self) -> None:
        """Makes the set what has waited for long enough."""
        now = time.monotonic()
        latest = now - self._delay_s(now)
        due: dict[_Path, _Waiting] = {}
        for path, waiting in self._waiting.items():
            if waiting[1] > latest:
                break
            due[path] = waiting
        for path in due:
            del self._waiting[path]
        self._announce(due)
        if self._waiting:
            self._wake()

    def flush(self) -> None:
        """Makes the set what was noted."""
        changes, self._waiting = self._waiting, {}
        self._announce(changes)

    def told(self, namespace_id: int, paths: Iterable[bytes]) -> None:
        """Announces those of these paths that wait: another node was told of them."""
        if not self._waiting:
            return
        names = [(namespace_id, path) for path in paths]
        early = {name: self._waiting.pop(name) for name in names if name in self._waiting}
        if early:
            self._announce(early)
            self._wake()

    def _announce(self, changes: Mapping[_Path, _Waiting]) -> None:
        directories, self._directories = self._directories, {}
        of = self._fingerprinter
        counted = [(of(path[0]).of(path[1]), count) for path, (count, _) in changes.items()]
        self._remove([each for each, count in counted for _ in range(-count)])
        self._add([each for each, count in counted for _ in range(count)])
        self._ensure([each for each, is_there in directories.items() if is_there])
        self._remove_if_held([each for each, is_there in directories.items() if not is_there])

    async def scan(self, namespace_ids: Iterable[int]) -> None:
        """Announces all that is held in these namespaces, a part at a time; the set holds nothing
        of them yet but what was announced while this runs. Raises KvfsError."""
        node = self._local.node
        for namespace_id in namespace_ids:
            after = 0
            while inos := self._local.read_now(
                lambda t: placements.held_within(t, node, namespace_id, after, _SCAN_BATCH)  # noqa: B023
            ):
                self._note(inos)
                after = inos[-1]
                await trio.lowlevel.checkpoint()

    async def take_up(self) -> None:
        """Announces files that an earlier run published last, and may have been killed before it
        announced them: those that are not sealed. Raises KvfsError."""
        after = 0
        while True:
            inos = self._local.read_now(lambda t: lifecycle.unsealed(t, after, _SCAN_BATCH))  # noqa: B023
            if not inos:
                return
            after = inos[-1]
            self._note(inos)
            await trio.lowlevel.checkpoint()

    def denied(self, namespace_id: int, path: bytes) -> None:
        """Takes back an announcement that turned out to be false: a kill came between a name's end
        and that of its announcement. A name that came after it was denied stays announced."""
        if self._local.read_now(lambda t: held_names.told(t, namespace_id, path)) is not None:
            return
        self.flush()
        self._announced.clear()  # perhaps it was a directory's, whose next file announces it again
        self._remove_if_held([self._fingerprinter(namespace_id).of(path)])
        self._wake()

    def may_be_announced(self, namespace_id: int, path: bytes) -> bool:
        """Returns whether other nodes may have been told of a path."""
        name = namespace_id, path
        waiting = self._waiting.get(name)
        if waiting is not None and waiting[0] > 0:
            return False  # it came a moment ago: numpy need not be asked
        those = gathered([self._fingerprinter(namespace_id).of(path)])
        return not self._own.is_filled or bool(self._own.holds(those)[0])

    # ---- inside

    def _held_name(self, packed: bytes, changed: Mapping[bytes, bytes | None]) -> _Name | None:
        """Returns the name under which this node holds a file, where these keys have these values.
        What was put off is not committed for it."""
        key = keys.INODE + packed
        record = changed[key] if key in changed else self._local.first_now(key)
        name = _name_of(record)
        if name is None:
            return None
        key = keys.PLACEMENT + packed + self._local.node
        placement = changed[key] if key in changed else self._local.first_now(key)
        return None if placement is None else name

    def _moved(
        self,
        packed: bytes,
        before: Mapping[bytes, bytes | None],
        after: Mapping[bytes, bytes | None],
    ) -> tuple[_Name | None, _Name | None]:
        """Returns the former and the present name under which this node holds a file whose record
        alone was changed."""
        old = _name_of(before[keys.INODE + packed])
        new = _name_of(after[keys.INODE + packed])
        if old != new and self._local.first_now(keys.PLACEMENT + packed + self._local.node):
            return old, new
        return None, None

    def _note(self, inos: Sequence[int]) -> None:
        """Announces those of these files that are held in a namespace of this kind."""
        found: list[int] = []
        for packed in self._local.read_now(lambda t: _of_nodes(t, inos)):
            name = self._held_name(packed, {})
            fingerprint = None if name is None else self._fingerprint(name)
            if name is not None and fingerprint is not None:
                found.append(fingerprint)
                self._announce_directories(name.parent)
        self.flush()
        self._ensure(found)
        self._wake()

    def _count(self, parent: int, name: bytes, by: int) -> None:
        path = self._paths.of(parent, name)
        if path is None:
            return
        named = parent >> NAMESPACE_SHIFT, path
        before = self._waiting.get(named)
        if before is None:
            self._waiting[named] = by, time.monotonic()
        elif before[0] + by:
            self._waiting[named] = before[0] + by, before[1]
        else:
            del self._waiting[named]

    def _gave_up(self, before: Inode, after: Inode) -> None:
        """Notes that a file got another name: at its last change, as its record says."""
        lived_s = (after.ctime_ns - before.ctime_ns) / _SECOND_NS
        self._delay.gave_up(lived_s, time.monotonic())

    def _delay_s(self, now: float) -> float:
        return self._delay.seconds(now, self._most_delay_s())

    def _fingerprint(self, name: _Name) -> int | None:
        path = self._paths.of(name.parent, name.name)
        return None if path is None else self._fingerprinter(namespace_of(name.parent)).of(path)

    def _announce_directories(self, parent: int) -> None:
        if parent in self._announced:
            return
        for directory, place in self._local.read_now(lambda t: _way_up(t, parent)):
            fingerprint = self._fingerprint(place)
            if directory not in self._announced and fingerprint is not None:
                self._directories[fingerprint] = True
            self._announced[directory] = None
        self._announced[parent] = None
        while len(self._announced) > MOST:
            del self._announced[next(iter(self._announced))]

    def _directory_went(self, place: _Name, ino: bytes) -> None:
        self._announced.pop(keys.unpack_u64(ino), None)
        fingerprint = self._fingerprint(place)
        if fingerprint is not None:
            self._directories[fingerprint] = False

    def _add(self, fingerprints: Sequence[int]) -> None:
        if fingerprints:
            self._own.add(gathered(fingerprints))

    def _remove(self, fingerprints: Sequence[int]) -> None:
        if fingerprints:
            self._own.remove(gathered(fingerprints))

    def _ensure(self, fingerprints: Sequence[int]) -> None:
        if fingerprints:
            self._own.ensure(gathered(fingerprints))

    def _remove_if_held(self, fingerprints: Sequence[int]) -> None:
        if fingerprints:
            those = gathered(fingerprints)
            self._remove(those[self._own.holds(those)].tolist())


def _alone(changes: Sequence[LocalChange]) -> LocalChange | None:
    """Returns the change of a record where it is the only one, and no placement changed and no
    directory was removed with it."""
    alone = None
    for change in changes:
        key = change[0]
        kind = key[0]
        if kind == _INODE:
            if alone is not None:
                return None
            alone = change
        elif kind == _PLACEMENT or (kind == _ENTRY and change[2] is None and key[-1:] == b"/"):
            return None
    return alone


def _named(record: bytes | None) -> Inode | None:
    """Returns the record of a file that has a name which can be held."""
    if record is None:
        return None
    inode = unpack_inode(record)
    if not inode.flags & Flag.PUBLISHED or not inode.nlink or inode.mode & 0o170000 != 0o100000:
        return None
    return inode


def _name_of(record: bytes | None) -> _Name | None:
    inode = _named(record)
    return None if inode is None else _Name(inode.parent, inode.name)


def _of_nodes(t: Transaction, inos: Sequence[int]) -> list[bytes]:
    """Returns those of namespaces that are kept by their nodes, packed."""
    return [keys.pack_u64(ino) for ino in inos if namespaces.is_peer(t, namespace_of(ino))]


def _way_up(t: Transaction, directory: int) -> list[tuple[int, _Name]]:
    """Returns a directory and those above it, with their places, but for the namespace's root."""
    found: list[tuple[int, _Name]] = []
    while directory != namespace_root(namespace_of(directory)):
        (inode,) = read_inodes(t, [directory])
        if inode is None or not inode.nlink:
            break
        found.append((directory, _Name(inode.parent, inode.name)))
        directory = inode.parent
    return found
