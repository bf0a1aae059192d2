"""The names of all nodes as one view, for lists: those of this host's records, and the pages that
other nodes told.

A list is a plain function of a transaction. It is run on a view that has both; where it comes to a
part of a directory of which the others were not asked yet, `PageWanted` ends it, its caller asks
for the pages, and runs it again. So no transaction is open while another node is waited for.

Invariants
- A name that this host has is its own, whatever others have under it.
- What is in the view is as of one moment here, and as others told it: nothing of it is kept.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, cast

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_of, namespace_root, unpack_inode
from kvfs.tree import namespaces
from kvfs.tree.copies import held_names
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldPage
from kvfs.tree.name_escaping import NUL

_AHEAD: Final = 63
"""Directories after the wanted one that are asked for with it."""
_AHEAD_ENTRIES: Final = 64
"""Entries of each of these."""
_LOOKED_AT: Final = 512
"""Names that are looked at for them."""
_XATTR: Final = keys.XATTR[0]
_ENTRY: Final = keys.ENTRY[0]
_NAME: Final = 9
"""The offset of the name in the key of an entry."""


class PageWanted(Exception):
    """Other nodes are to be asked for these parts of directories."""

    def __init__(self, directories: Sequence[int], asked: Sequence[AskedPage]) -> None:
        super().__init__(asked)
        self.directories = directories
        """Their inodes, as the view has them."""
        self.asked = asked


class _Part(NamedTuple):
    """The names that others have of a directory, from `start` up to `end` (empty: its end)."""

    start: bytes
    end: bytes
    names: list[bytes]
    inos: list[bytes]
    modes: list[int]

    def has(self, name: bytes) -> bool:
        """Returns whether it tells of this place."""
        return self.start <= name and (not self.end or name < self.end)

    def at(self, name: bytes) -> int | None:
        """Returns the position of a name; None: others have none such."""
        at = bisect_left(self.names, name)
        return at if at < len(self.names) and self.names[at] == name else None


_NOTHING: Final = _Part(b"", b"", [], [], [])


class AllNames:
    """The pages of one list."""

    def __init__(self, detail: Detail, limit: int, *, is_deep: bool = False) -> None:
        """`limit`: entries of a directory that are asked for at a time. `is_deep`: whether it lists
        what is below directories, too."""
        self.detail: Final = detail
        self.is_deep: Final = is_deep
        self._limit = limit
        self._parts: dict[int, list[_Part]] = {}
        self._places: dict[int, tuple[int, bytes, bytes]] = {}
        """Parent in the view, name and path of each directory that others told of."""
        self._records: dict[bytes, bytes] = {}
        self._attributes: dict[bytes, list[tuple[bytes, bytes]]] = {}
        """The attributes among these, by the start of their keys."""

    def over(self, t: Transaction) -> Transaction:
        """Returns the view over a transaction. It can be read."""
        return cast(Transaction, _View(t, self))

    def add(self, wanted: PageWanted, pages: Sequence[ToldPage]) -> None:
        """Adds what was wanted."""
        for directory, asked, page in zip(wanted.directories, wanted.asked, pages, strict=True):
            inos = [keys.pack_u64(each.ino) for each in page.names]
            names = [each.key for each in page.names]
            modes = [each.mode for each in page.names]
            part = _Part(asked.start, page.following, names, inos, modes)
            self._parts.setdefault(directory, []).append(part)
            above = asked.path + b"/" if asked.path else b""
            for told, packed in zip(page.names, inos, strict=True):
                if self.is_deep and told.key.endswith(b"/"):
                    name = told.key[:-1]
                    self._places[told.ino] = directory, name, above + name
                if told.record:
                    self._records[keys.INODE + packed] = told.record
                prefix = keys.XATTR + packed
                if told.attributes:
                    pairs = [(prefix + name, value) for name, value in told.attributes]
                    self._attributes[prefix] = sorted(pairs)
                    self._records.update(pairs)

    def clear(self) -> None:
        """Forgets all that was told."""
        self._parts.clear()
        self._places.clear()
        self._records.clear()
        self._attributes.clear()

    def record(self, key: bytes) -> bytes | None:
        """Returns a record or attribute that others told."""
        return self._records.get(key)

    def attributes(self, start: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the attributes of one inode between these keys that others told."""
        told = self._attributes.get(start[:_NAME], ())
        return [each for each in told if start <= each[0] < end]

    def mode(self, directory: int, name: bytes) -> int:
        """Returns the mode of what others have under a name; 0: nothing that is known."""
        part = self.part(directory, name)
        at = None if part is None else part.at(name)
        return 0 if part is None or at is None else part.modes[at]

    def forget(self, directory: int, name: bytes) -> None:
        """Forgets what was told of the names of a directory before this one, but for its part."""
        kept = [each for each in self._parts.get(directory, ()) if not each.end or name < each.end]
        self._parts[directory] = kept

    def part(self, directory: int, name: bytes) -> _Part | None:
        """Returns what others have from this place in a directory on."""
        return next((each for each in self._parts.get(directory, ()) if each.has(name)), None)

    def asked(
        self, t: Transaction, directory: int, start: bytes, limit: int = 0
    ) -> AskedPage | None:
        """Returns the question for what others have from a place in a directory on; None: it has no
        name any more, or one that is told to nobody."""
        told = self._places.get(directory)
        path = told[2] if told is not None else held_names.path_of(t.get, directory)
        is_top = directory == namespace_root(namespace_of(directory))
        if path is None or not (path or is_top):
            return None
        return AskedPage(namespace_of(directory), path, start, limit or self._limit)

    def place(self, t: Transaction, directory: int) -> tuple[int, bytes] | None:
        """Returns the parent of a directory and its name there; None for a namespace's own."""
        told = self._places.get(directory)
        if told is not None:
            return told[:2]
        value = t.get(keys.inode(directory))
        inode = None if value is None else unpack_inode(value)
        if inode is None or namespace_of(inode.parent) == 0:
            return None
        return inode.parent, inode.name


class _View:
    """A transaction, and beside it what others told."""

    def __init__(self, t: Transaction, others: AllNames) -> None:
        self._t = t
        self._others = others
        self._spaces: dict[int, bool] = {}
        self.node = t.node

    def get(self, key: bytes) -> bytes | None:
        value = self._t.get(key)
        return self._told(key) if value is None else value

    def get_many(self, wanted: Sequence[bytes]) -> list[bytes | None]:
        found = self._t.get_many(wanted)
        return [
            self._told(key) if value is None else value
            for key, value in zip(wanted, found, strict=True)
        ]

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        if start[0] == _ENTRY and len(start) >= _NAME:
            directory, name = keys.unpack_u64(start, 1), start[_NAME:]
            is_hidden = NUL in name[:-1] and end.startswith(start[: _NAME + name.index(NUL) + 1])
            if self._is_kept(directory) and not is_hidden:
                return self._names(directory, start, end)
        elif start[0] == _XATTR:
            told = self._others.attributes(start, end)
            if told:
                return iter(sorted(dict([*told, *self._t.scan(start, end)]).items()))
        return self._t.scan(start, end)

    def scan_keys(self, start: bytes, end: bytes) -> Iterator[bytes]:
        return (key for key, _ in self.scan(start, end))

    def _told(self, key: bytes) -> bytes | None:
        return self._told_entry(key) if key[0] == _ENTRY else self._others.record(key)

    def _is_kept(self, directory: int) -> bool:
        space = namespace_of(directory)
        if space not in self._spaces:
            self._spaces[space] = bool(space) and namespaces.is_peer(self._t, space)
        return self._spaces[space]

    def _told_entry(self, key: bytes) -> bytes | None:
        directory, name = keys.unpack_u64(key, 1), key[_NAME:]
        if not self._is_kept(directory):
            return None
        part = self._part(directory, name)
        at = part.at(name)
        return None if at is None else part.inos[at]

    def _names(self, directory: int, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        own = self._t.scan(start, end)
        pair = next(own, None)
        prefix, at = start[:_NAME], start[_NAME:]
        while True:
            part = self._part(directory, at)
            for told in range(bisect_left(part.names, at), len(part.names)):
                key = prefix + part.names[told]
                while pair is not None and pair[0] < key:
                    yield pair
                    pair = next(own, None)
                if key >= end:
                    break
                if pair is None or pair[0] != key:
                    yield key, part.inos[told]
            limit = prefix + part.end if part.end else end
            while pair is not None and pair[0] < limit:
                yield pair
                pair = next(own, None)
            if limit >= end:
                return
            at = part.end

    def _part(self, directory: int, start: bytes) -> _Part:
        """Returns what others have from a place in a directory on. If they were not asked yet, it
        raises what is to be asked for: that, and at the beginning of a directory those after it,
        which a list comes to next."""
        part = self._others.part(directory, start)
        if part is not None:
            return part
        first = self._others.asked(self._t, directory, start)
        if first is None:
            return _NOTHING
        directories, asked = [directory], [first]
        for each in () if start or not self._others.is_deep else self._after(directory):
            if (further := self._others.asked(self._t, each, b"", _AHEAD_ENTRIES)) is not None:
                directories.append(each)
                asked.append(further)
        raise PageWanted(directories, asked)

    def _after(self, directory: int) -> list[int]:
        """Returns directories beside this one that follow it, as far as they are known."""
        place = self._others.place(self._t, directory)
        if place is None:
            return []
        parent, name = place
        found: list[int] = []
        prefix = keys.entries(parent)
        following = self._names(parent, prefix + name + b"/" + NUL, keys.after(prefix))
        for _ in range(_LOOKED_AT):
            try:
                pair = next(following, None)
            except PageWanted:
                break
            if pair is None or len(found) >= _AHEAD:
                break
            ino = keys.unpack_u64(pair[1])
            if pair[0].endswith(b"/") and self._others.part(ino, b"") is None:
                found.append(ino)
        return found
