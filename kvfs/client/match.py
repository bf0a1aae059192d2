"""How many leading keys of a chain are here, and a lease on them (`Client.match`).

The steps and why they suffice are in `kvfs.datastore.leases.taker`; here are m1 to m4. A look-up
reads entries and records by one call of the engine each, and costs the same for a hit as for a
miss; a chain is looked up in parts, so that one that ends early costs no more than it is long.
"""

import io
import os
import stat
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Literal, NamedTuple

from kvfs.base.clock import now
from kvfs.base.errors import Invalid
from kvfs.client.reader import Reader
from kvfs.datastore.leases.holder import require_length
from kvfs.datastore.leases.table import ReadLease, ReadLeaseTable
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, unpack_inode
from kvfs.session import paths
from kvfs.session.paths import Path
from kvfs.session.session import Session
from kvfs.tree import name_escaping, published_view
from kvfs.tree.inodes import BLOCK
from kvfs.tree.namespaces import MAX_NAME
from kvfs.tree.published_view import FoundInode
from kvfs.vfs.touches import Touches

Where = Literal["memory", "disk", "cold", "other node"]
_FIRST: Final = 64
_PART: Final = 512
"""Keys looked up at once: few at first, since many chains end early."""
_NO_FILES: Final = frozenset((b"", b".", b".."))
_MEDIA: Final[dict[str, Where]] = {"ram": "memory"}
_NO_LEASE: Final = "no lease was asked for"


class _Held(NamedTuple):
    table: ReadLeaseTable
    lease: ReadLease


class Match:
    """The leading keys of a chain that were found, and the lease on their contents.

        with client.match(keys) as match:
            blocks = client.get_many(match)

    `len(match)` is the number of leading keys whose contents are on this node; `match.promised` of
    them are leased: they stay readable through the match until it is released, the lease ends, or
    the client is closed, even if their names are removed or replaced meanwhile. A change of a
    file's bytes in place is not kept from anybody. `known` keys have a name here, those beyond
    `len(match)` with contents that are elsewhere (`where`).

    Leaving a `with` block releases it. Any thread may use it.
    """

    def __init__(
        self,
        session: Session,
        reader: Reader,
        keys: list[bytes],
        chain: "_Chain",
        here: int,
        held: _Held | None,
        refusal: str,
    ) -> None:
        self._session = session
        self._reader = reader
        self._keys = keys
        self._chain = chain
        self._here = here
        self._held = held
        self._pid = os.getpid()
        self.known: Final = len(chain.numbers)
        self.promised: Final = 0 if held is None else here
        self.refusal: Final = refusal
        """The reason why not all that is here is promised; empty: all is."""

    def __len__(self) -> int:
        return self._here

    def __bool__(self) -> bool:
        """Returns whether any key is here."""
        return self._here > 0

    @property
    def left_s(self) -> float:
        """Seconds until the lease ends; 0: it has ended, or there is none."""
        held = self._held
        return 0.0 if held is None else max(0.0, held.lease.deadline_ns / 1e9 - now())

    def where(self) -> list[Where]:
        """Returns where the contents of the known keys are: in memory or on disk here, in the cold
        tier, or on another node. It asks the filesystem for each."""
        return [self._where(*self._found(at)) for at in range(self.known)]

    def _found(self, at: int) -> FoundInode:
        return FoundInode(_number(self._chain.numbers[at]), self._chain.inodes[at])

    def _where(self, ino: int, inode: Inode) -> Where:
        medium = self._session.files.medium(ino, inode.version)
        if medium:
            return _MEDIA.get(medium, "disk")
        return "cold" if inode.flags & Flag.COLD else "other node"

    def open(self, at: int) -> io.BufferedReader:
        """Opens the matched content of one key, by its place, for reading: whatever has its name
        now. Raises NotFound (it is not here), Corrupt, Invalid (no such place), OSError."""
        if not 0 <= at < self._here:
            raise Invalid(f"{self._here} keys were matched: there is no {at}")
        path = paths.parse(self._keys[at])
        fd = self._reader.open_exactly(path, self._found(at)).fd
        return io.BufferedReader(io.FileIO(fd, "r"))

    def contents(self, session: Session) -> tuple[list[FoundInode], list[tuple[bytes, ...]]]:
        """Returns inode and path of each key that is here; for `Client.get_many`. Raises Invalid
        (the match is of another store, or of a client that was closed)."""
        if session is not self._session:
            raise Invalid("a match is read by a client of its store, while that is open")
        found = [self._found(at) for at in range(self._here)]
        return found, paths.parse_all(self._keys[: self._here])

    def release(self) -> None:
        """Ends the lease; idempotent. In the child of a fork it does nothing: the lease is its
        parent's."""
        held, self._held = self._held, None
        if held is not None and self._pid == os.getpid():
            held.table.release(held.lease)

    def __enter__(self) -> "Match":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class _Chain(NamedTuple):
    """The leading keys that have a name, as they were at one moment."""

    numbers: list[bytes]
    """Inode numbers in network order."""
    inodes: list[Inode]
    bare: list[int]
    """Places of files that take no space: their contents may be elsewhere."""
    miss: bytes | None
    """The entry of the first key without a file, if its directory is there."""

    def same(self, other: "_Chain") -> int:
        """Returns how many leading keys lead to the same contents in both."""
        count = 0
        for number, inode, other_number, other_inode in zip(
            self.numbers, self.inodes, other.numbers, other.inodes, strict=False
        ):
            if number != other_number or inode.version != other_inode.version:
                break
            count += 1
        return count


class Matcher:
    """Matches for one client; any thread."""

    def __init__(self, session: Session, touches: Touches, reader: Reader) -> None:
        self._session = session
        self._touches = touches
        self._reader = reader

    def match(self, wanted: Sequence[Path], lease_s: float) -> Match:
        """See `Client.match`."""
        lease_s = require_length(lease_s)
        raw = _checked(paths.encode_all(wanted))
        generation = self._session.generation()
        chain = self._session.read(lambda t: _look(t, raw, self._session.boot))
        here = self._count_here(chain, len(chain.numbers))
        held, refusal = self._hold(chain, here, lease_s)
        if held is not None:
            kept = self._verified(raw, chain, here, generation)
            if kept < here:
                here = kept
                held = _shortened(held, here)
        if chain.miss is not None:
            self._touches.missed((chain.miss,))
        return Match(self._session, self._reader, raw, chain, here, held, refusal)

    def _hold(self, chain: _Chain, here: int, lease_s: float) -> tuple[_Held | None, str]:
        """Takes step m2; returns the reason too if there is no lease."""
        if not here:
            return None, ""
        if not lease_s:
            return None, _NO_LEASE
        size = BLOCK * sum([inode.blocks for inode in chain.inodes[:here]])
        held = self._session.leases.hold(b"".join(chain.numbers[:here]), size, lease_s)
        return (None, held) if isinstance(held, str) else (_Held(*held), "")

    def _verified(self, raw: list[bytes], chain: _Chain, here: int, generation: int) -> int:
        """Takes steps m3 and m4; returns how many leading keys are promised."""
        marked = self._session.leases.marked()  # before the generation: see the table of orders
        if marked:
            places = (at for at in range(here) if _number(chain.numbers[at]) in marked)
            here = next(places, here)
        if here and self._session.generation() != generation:
            again = self._session.read(lambda t: _look(t, raw[:here], self._session.boot))
            here = self._count_here(again, min(here, chain.same(again)))
        return here

    def _count_here(self, chain: _Chain, known: int) -> int:
        """Returns how many of the first `known` keys, from the first one on, have their contents on
        this node. On a lone one all have that take space: the others may be in the cold tier."""
        doubtful = chain.bare if self._session.replica is None else range(known)
        files = self._session.files
        for at in doubtful:
            if at >= known:
                break
            if not files.has(_number(chain.numbers[at]), chain.inodes[at].version):
                return at
        return known


def _shortened(held: _Held, count: int) -> _Held | None:
    if count:
        held.table.shorten(held.lease, count)
        return held
    held.table.release(held.lease)
    return None


def _number(packed: bytes) -> int:
    return int.from_bytes(packed, "big")


def _checked(raw: list[bytes]) -> list[bytes]:
    """Raises Invalid for a NUL byte."""
    if b"\0" in b"/".join(raw):
        paths.parse_all(raw)
    return [path.rstrip(b"/") if path.endswith(b"/") else path for path in raw]


def _look(t: Transaction, raw: Sequence[bytes], boot: int) -> _Chain:
    """Takes step m1: looks up leading keys until one is missing. Raises Invalid (keys of several
    namespaces)."""
    chain = _Chain([], [], [], None)
    directories = _Directories(t, boot)
    at, size = 0, _FIRST
    while at < len(raw):
        part = raw[at : at + size]
        entries = _entries(t, part, directories)
        found = _add(t, chain, entries, boot)
        if found < len(part):
            return chain._replace(miss=entries[found] if found < len(entries) else None)
        at, size = at + size, _PART
    return chain


class _Directories:
    """The directories of one look-up; all are of one namespace."""

    def __init__(self, t: Transaction, boot: int) -> None:
        self._t = t
        self._boot = boot
        self._known: dict[bytes, bytes | None] = {}
        self._namespace = b""

    def prefix(self, directory: bytes) -> bytes | None:
        """Returns the prefix of its entries; None: there is no such directory, or only namespaces
        in it. Raises Invalid (it is of another namespace than the one before)."""
        if directory in self._known:
            return self._known[directory]
        found = None
        if directory.strip(b"/"):
            ino = published_view.find_directory(self._t, paths.parse(directory), self._boot)
            if isinstance(ino, int):
                found = keys.entries(ino)
                namespace = keys.pack_u64(ino)[:2]
                if self._namespace not in (b"", namespace):
                    raise Invalid(
                        "the keys of a chain are of one namespace: match each namespace by itself"
                    )
                self._namespace = namespace
        self._known[directory] = found
        return found


def _entries(t: Transaction, part: Sequence[bytes], directories: _Directories) -> list[bytes]:
    """Returns the entries of the leading keys that may be files."""
    above = part[0].rpartition(b"/")[0] + b"/"
    together = b"\0".join(part)
    if (
        together.count(b"/") == above.count(b"/") * len(part)
        and together.startswith(above)
        and together.count(b"\0" + above) == len(part) - 1
        and b"%" not in together
        and b"/." not in together
        and len(max(part, key=len)) <= MAX_NAME
    ):  # as good as always: plain names of one directory
        prefix, start = directories.prefix(above[:-1]), len(above)
        return [] if prefix is None else [prefix + path[start:] for path in part]
    return _entries_one_by_one(t, part, directories)


def _entries_one_by_one(
    t: Transaction, part: Sequence[bytes], directories: _Directories
) -> list[bytes]:
    entries: list[bytes] = []
    for path in part:
        directory, _, name = path.rpartition(b"/")
        prefix = directories.prefix(directory)
        if prefix is None or len(name) > MAX_NAME or name in _NO_FILES:
            break
        entry = prefix + name
        if b"%" in name and t.get(entry) is None:
            suffix = name_escaping.find(t, keys.unpack_u64(prefix, 1), name)
            if suffix is not None:
                entry = prefix + suffix
        entries.append(entry)
    return entries


def _add(t: Transaction, chain: _Chain, entries: list[bytes], boot: int) -> int:
    """Adds the leading files among these entries; returns how many."""
    numbers = t.get_many(entries)
    there = numbers.index(None) if None in numbers else len(numbers)
    known = [number for number in numbers[:there] if number is not None]
    first = len(chain.numbers)
    for at, record in enumerate(t.get_many([keys.INODE + number for number in known])):
        if record is None:
            return at
        inode = unpack_inode(record)
        is_plain = inode.flags & Flag.PUBLISHED and inode.boot in (
            0,
            boot,
        )  # as `is_visible` has it
        if not is_plain and not published_view.is_visible(t, _number(known[at]), inode, boot):
            return at
        if not stat.S_ISREG(inode.mode):
            return at
        if not inode.blocks and inode.size:
            chain.bare.append(first + at)
        chain.numbers.append(known[at])
        chain.inodes.append(inode)
    return there
