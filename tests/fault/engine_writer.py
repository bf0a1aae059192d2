"""A process that commits to an embedded engine until it is stopped, for the tests that stop it.

Commit number n changes a few keys in a way that n alone decides, so that what is found later tells
exactly which commits it holds. Commits and syncs that have returned are acknowledged on standard
output, a line each: `c 17`, `s 17`.
"""

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb import checkpoints, reconstruction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from tests.fault.disks import cut

COUNT: Final = b"count"
SECOND: Final = b"\xffsecond"
SHORT_JOURNAL: Final = 64 << 10
"""So short that a writer rotates all the time; a step's own rotation is to be the only one."""
LONG_JOURNAL: Final = 64 << 20
STEPS: Final = (
    "prepare_journal",
    "start_journal",
    "sync_journals",
    "_write_base",
    "sync_directory",
    "generations",
)
"""Of a rotation, in `bases`; the process is stopped before and after each."""
REBUILD_STEPS: Final = ("read_position", "replay", "sync_directory")

Contents = dict[bytes, bytes]


def change(n: int) -> dict[bytes, bytes | None]:
    """What commit `n` writes: some keys anew, some deleted, now and then a large value."""
    source = random.Random(n)
    changes: dict[bytes, bytes | None] = {COUNT: b"%d" % n}
    for _ in range(source.randrange(1, 8)):
        key = b"k%03d" % source.randrange(300)
        size = source.choice((0, 20, 200, 200, 9_000 if n % 7 == 0 else 50))
        changes[key] = None if source.random() < 0.2 else source.randbytes(size)
    return changes


def expected(commits: int) -> Contents:
    """What is there after so many commits."""
    contents: Contents = {}
    for n in range(1, commits + 1):
        for key, value in change(n).items():
            if value is None:
                contents.pop(key, None)
            else:
                contents[key] = value
    return contents


def contents(engine: EmbeddedEngine) -> Contents:
    return engine.read_now(lambda t: dict(t.scan(b"a", b"z")))


def commit(engine: EmbeddedEngine, n: int) -> None:
    def fn(t: Transaction) -> None:
        for key, value in change(n).items():
            if value is None:
                t.delete(key)
            else:
                t.put(key, value)

    engine.transact_now(fn)
    engine.database(SECOND).transact_now(lambda t: t.put(COUNT, b"%d" % n))


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _write(engine: EmbeddedEngine, commits: int) -> None:
    first = int(engine.read_now(lambda t: t.get(COUNT)) or b"0") + 1
    for n in range(first, first + commits):
        commit(engine, n)
        _say(f"c {n}")
        if n % 50 == 0:
            engine.sync_now()
            _say(f"s {n}")


def _stop_at(module: ModuleType, name: str, before: bool, mount: Path | None) -> None:
    """Stop this process, with the power where `mount` is given, when a module calls a function."""
    original: Callable[..., Any] = getattr(module, name)

    def stopping(*arguments: Any) -> Any:
        result = None if before else original(*arguments)
        if mount is not None:
            cut(mount)
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, stopping)


def main(path: str, boot: str, commits: str, then: str = "", mount: str = "") -> None:
    """`then`: `before NAME` or `after NAME` of a rotation's step, or `open before NAME` of a
    rebuild's."""
    words = then.split()
    power = Path(mount) if mount else None
    if words[:1] == ["open"]:
        _stop_at(reconstruction, words[2], words[1] == "before", power)
    journal_bytes = LONG_JOURNAL if then else SHORT_JOURNAL
    engine = EmbeddedEngine(path, boot=int(boot), journal_bytes=journal_bytes)
    _write(engine, int(commits))
    if words[:1] in (["before"], ["after"]):
        _stop_at(checkpoints, words[1], words[0] == "before", power)
        engine.rotate_now()
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
