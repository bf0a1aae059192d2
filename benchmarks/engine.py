"""The embedded engine against what else could keep the metadata, under one durability contract.

Every candidate runs the same functions of kvfs.tree, must keep each commit through SIGKILL,
and offers a sync after which commits survive power loss. Candidates: the engine as it is (LMDB
without syncing, and a journal), LMDB that syncs each commit, and SQLite in WAL mode with
synchronous=NORMAL, where a sync is one of the log. Rounds are interleaved; medians in microseconds,
and for a commit the bytes that it makes the kernel write. Prints a table, then one JSON object.
"""

import argparse
import contextlib
import hashlib
import os
import sqlite3
import stat
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import lmdb

from benchmarks import _program, _report
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.lmdb_transactions import ReadTransaction
from kvfs.meta.records import Inode, namespace_root
from kvfs.tree import lifecycle, namespaces, tree

T = TypeVar("T")
OURS: Final = "LMDB + journal"
_BATCH: Final = 1_000
"""Names in one `exist`."""

_LOADED: Final = 100
"""Files made by one commit before anything is measured: one commit for all would leave LMDB with a
list of free pages that weighs on every later one."""


class Candidate(Protocol):
    """What each one offers."""

    def read_now(self, fn: Callable[[Transaction], T]) -> T: ...
    def transact_now(self, fn: Callable[[Transaction], T]) -> T: ...
    def sync_now(self) -> None: ...
    def close(self) -> None: ...


class SyncedLmdb:
    """LMDB as it comes: each commit is on disk when it returns."""

    def __init__(self, path: Path) -> None:
        self._environment = lmdb.Environment(str(path), map_size=1 << 34, max_spare_txns=4)

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        with self._environment.begin() as raw:
            return fn(ReadTransaction(raw))

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        with self._environment.begin(write=True) as raw:
            return fn(ReadTransaction(raw))

    def sync_now(self) -> None:
        """Done by each commit."""

    def close(self) -> None:
        self._environment.close()


class SqliteTransaction:
    """One table of keys and values, clustered by key."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    def get(self, key: bytes, /) -> bytes | None:
        row = self._execute("SELECT value FROM pairs WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def get_many(self, keys: Sequence[bytes], /) -> list[bytes | None]:
        marks = ",".join("?" * len(keys))
        query = f"SELECT key, value FROM pairs WHERE key IN ({marks})"
        found = dict(self._execute(query, tuple(keys)).fetchall())
        return [found.get(key) for key in keys]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        query = "SELECT key, value FROM pairs WHERE key >= ? AND key < ? ORDER BY key"
        yield from self._execute(query, (start, end))

    def put(self, key: bytes, value: bytes, /) -> None:
        self._execute("INSERT OR REPLACE INTO pairs VALUES (?, ?)", (key, value))

    def delete(self, key: bytes, /) -> bool:
        return self._execute("DELETE FROM pairs WHERE key = ?", (key,)).rowcount > 0


class Sqlite:
    """SQLite's write-ahead log is not synced by commits (NORMAL), but by `sync_now`."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._connection = sqlite3.connect(
            path / "pairs.db", isolation_level=None, cached_statements=256
        )
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "mmap_size=1073741824"):
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        self._connection.execute(
            "CREATE TABLE pairs (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID"
        )
        self._transaction = SqliteTransaction(self._connection)
        self._log = os.open(path / "pairs.db-wal", os.O_RDONLY)

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        self._connection.execute("BEGIN")
        try:
            return fn(cast(Transaction, self._transaction))
        finally:
            self._connection.execute("ROLLBACK")

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            result = fn(cast(Transaction, self._transaction))
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        return result

    def sync_now(self) -> None:
        os.fdatasync(self._log)

    def close(self) -> None:
        os.close(self._log)
        self._connection.close()


MAKERS: Final[dict[str, Callable[[Path], Candidate]]] = {
    OURS: EmbeddedEngine,
    "LMDB, synced": SyncedLmdb,
    "SQLite, WAL": Sqlite,
}


class Subject:
    """A candidate with a namespace of files with hashed names, as prefix blocks have."""

    def __init__(self, path: Path, candidate: Candidate, files: int) -> None:
        self.path = path
        self.candidate = candidate
        self.files = files
        self._made = 0
        candidate.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
        self._space = candidate.transact_now(
            lambda t: namespaces.create(t, b"cache", kind="cache", uid=0, gid=0, now=1)
        )
        self._root = namespace_root(self._space)
        for _ in range(0, files, _LOADED):
            candidate.transact_now(lambda t: [self._add(t) for _ in range(_LOADED)])

    def create(self) -> None:
        self.candidate.transact_now(self._add)

    def life(self) -> None:
        """Create, publish, rename: what writing one block commits."""
        ino = self.candidate.transact_now(self._add)
        name = block_name(self._made)
        self.candidate.transact_now(
            lambda t: lifecycle.publish(
                t, ino, size=1 << 18, blocks=512, mtime_ns=2, ctime_ns=2, boot=1
            )
        )
        self.candidate.transact_now(
            lambda t: tree.rename(
                t, self._root, name, self._root, name + b".bin", now=3, keep=lambda _: False
            )
        )

    def create_and_sync(self) -> None:
        self.create()
        self.candidate.sync_now()

    def hit(self) -> None:
        name = block_name(self._made % self.files + 1)
        self._made += 1
        found = self.candidate.read_now(lambda t: tree.find(t, self._root, name))
        assert found is not None

    def miss(self) -> None:
        found = self.candidate.read_now(lambda t: tree.find(t, self._root, b"no such name"))
        assert found is None

    def exist(self) -> None:
        """Half of the names are there."""
        names = [block_name(2 * self.files // _BATCH * number + 1) for number in range(_BATCH)]
        found = self.candidate.read_now(lambda t: tree.exist(t, self._root, names))
        assert any(found)

    def listing(self) -> None:
        page = self.candidate.read_now(lambda t: tree.list_children(t, self._root, b"", _BATCH))
        assert len(page) == min(_BATCH, self.files)

    def _add(self, t: Transaction) -> int:
        self._made += 1
        ino = namespaces.allocate_inodes(t, self._space, 1)
        return tree.add(t, self._root, block_name(self._made), ino, new_inode())


def block_name(number: int) -> bytes:
    return hashlib.md5(b"%d" % number, usedforsecurity=False).hexdigest().encode()


def new_inode() -> Inode:
    return Inode(
        mode=stat.S_IFREG | 0o644,
        uid=0,
        gid=0,
        nlink=1,
        atime_ns=1,
        mtime_ns=1,
        ctime_ns=1,
        parent=0,
        name=b"",
        boot=1,
    )


class Row:
    """One figure: what is called, how often for one sample, and what it is divided by."""

    def __init__(
        self, name: str, call: Callable[[Subject], None], calls: int, units: int = 1
    ) -> None:
        self.name = name
        self.call = call
        self.calls = calls
        self.units = units

    def sample(self, subject: Subject) -> tuple[float, float]:
        """Microseconds, and bytes that the kernel was made to write, for one unit."""
        call, count = self.call, self.calls * self.units
        written = written_bytes()
        began = time.perf_counter()
        for _ in range(self.calls):
            call(subject)
        took = time.perf_counter() - began
        return took / count * 1e6, (written_bytes() - written) / count


def rows(scale: int) -> list[Row]:
    return [
        Row("lookup, there", Subject.hit, 2_000 * scale),
        Row("lookup, not there", Subject.miss, 2_000 * scale),
        Row("exist, a name of 1,000", Subject.exist, 4 * scale, _BATCH),
        Row("list, a name of 1,000", Subject.listing, 4 * scale, _BATCH),
        Row("create", Subject.create, 500 * scale),
        Row("create, publish, rename", Subject.life, 300 * scale, 3),
        Row("create and sync", Subject.create_and_sync, 20 * scale),
    ]


def written_bytes() -> int:
    """What this process has made the kernel write so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


def measure(options: argparse.Namespace, base: Path) -> list[dict[str, Any]]:
    scale, rounds = (1, 3) if options.quick else (5, 7)
    rounds = options.rounds or rounds
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with contextlib.ExitStack() as stack:
        subjects = {}
        for number, (name, make) in enumerate(MAKERS.items()):
            candidate = make(base / str(number))
            stack.callback(candidate.close)
            subjects[name] = Subject(base / str(number), candidate, options.files)
        for _ in range(rounds):
            for row in rows(scale):
                for name, subject in subjects.items():
                    samples.setdefault(row.name, {}).setdefault(name, []).append(
                        row.sample(subject)
                    )
        sizes = {name: directory_bytes(subject.path) for name, subject in subjects.items()}
    return [*(summary(row, each) for row, each in samples.items()), as_sizes(sizes)]


def summary(row: str, samples: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    medians = {
        name: {
            "us": statistics.median(us for us, _ in each),
            "written_bytes": statistics.median(written for _, written in each),
        }
        for name, each in samples.items()
    }
    return {"row": row, "systems": medians}


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.iterdir())


def as_sizes(sizes: dict[str, int]) -> dict[str, Any]:
    systems = {name: {"bytes": size} for name, size in sizes.items()}
    return {"row": "size at the end", "systems": systems}


def table(measured: list[dict[str, Any]]) -> str:
    lines = [["", *MAKERS]]
    lines += [[row["row"], *(_cell(row["systems"][name]) for name in MAKERS)] for row in measured]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def _cell(figures: dict[str, float]) -> str:
    if "bytes" in figures:
        return f"{figures['bytes'] / 1e6:,.0f} MB"
    written = figures["written_bytes"]
    return f"{figures['us']:,.1f} us" + (f", {written:,.0f} B" if written >= 1 else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev bench engine", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small amounts, ends within 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object there too")
    parser.add_argument("--rounds", type=int, metavar="N", help="default 7, quick 3")
    parser.add_argument("--files", type=int, default=0, help="default 100,000, quick 20,000")
    parser.add_argument("--dir", default="/var/tmp", help="where all is stored; default /var/tmp")
    options = parser.parse_args()
    options.files = options.files or (20_000 if options.quick else 100_000)
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=options.dir) as base:
        measured = measure(options, Path(base))
        report = {
            "benchmark": "engine",
            "quick": options.quick,
            "files": options.files,
            "conditions": _report.conditions(Path(options.dir)),
            "rows": measured,
        }
    print(table(measured))
    _program.print_json(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
