"""Commits that the embedded engine puts off: nobody commits past them, and no kill loses one."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.base.errors import Exists, NoSpace
from kvfs.meta import keys, schema
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.journal import JournalWriter
from kvfs.meta.lmdb.reserve import Reserve

ROOT = Path(__file__).resolve().parents[3]
OTHER = b"\xffother"
BEFORE, AFTER = b"before", b"after"

PUT_OFF = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

engine = EmbeddedEngine(sys.argv[2], boot=int(sys.argv[3]))
engine.transact_now(lambda t: t.put(b"V", b"2"))
engine.transact_now(lambda t: t.put(b"before", b"1"))
for name in sys.argv[4:]:
    engine.transact_now(lambda t: t.put(name.encode(), b"1"), True)
os.kill(os.getpid(), signal.SIGKILL)
"""


CHANGE = """
import sys
sys.path.insert(0, sys.argv[1])
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

engine = EmbeddedEngine(sys.argv[2])
print(flush=True)
sys.stdin.readline()
print(engine.read_now(lambda t: t.get(b"k")))
print(engine.transact_now(lambda t: (t.get(b"k"), t.put(b"k", b"theirs"))[0]))
engine.close()
"""


PUT_OFF_WHEN_TOLD = """
import sys
sys.path.insert(0, sys.argv[1])
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

engine = EmbeddedEngine(sys.argv[2])
engine.transact_now(lambda t: t.put(b"before", b"1"))  # makes room for what it puts off
print(flush=True)
sys.stdin.readline()
engine.transact_now(lambda t: t.put(b"k", b"theirs"), True)
print(flush=True)
sys.stdin.readline()
print(engine.first_now(b"k"), engine.read_now(lambda t: t.get(b"k")))
engine.close()
"""


class AfterCommit:
    """A transaction of LMDB, and a step between its commit and whatever its process does next."""

    def __init__(self, raw: Any, step: Callable[[], object]) -> None:
        self._raw = raw
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def commit(self) -> None:
        self._raw.commit()
        self._step()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "meta"


@pytest.fixture
def engine(path: Path) -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(path)
    begin(made)
    yield made
    made.close()


def put(engine: EmbeddedEngine, key: bytes, value: bytes = b"1") -> None:
    engine.transact_now(lambda t: t.put(key, value))


def begin(engine: EmbeddedEngine) -> None:
    """Gives it the present schema: no earlier program commits beside it."""
    put(engine, keys.VERSION, schema.PRESENT)
    put(engine, BEFORE)


def put_off(engine: EmbeddedEngine, key: bytes, value: bytes = b"1") -> None:
    engine.transact_unseen(lambda t: t.put(key, value))


def contents(engine: EmbeddedEngine) -> dict[bytes, bytes]:
    return engine.read_now(lambda t: dict(t.scan(b"a", b"z")))


def put_off_and_die(path: Path, *names: str, boot: int = 1) -> None:
    command = [sys.executable, "-c", PUT_OFF, str(ROOT), str(path), str(boot), *names]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def test_what_is_put_off_costs_no_commit(engine: EmbeddedEngine) -> None:
    before = engine.generation()
    put_off(engine, b"k")
    assert engine.generation() == before
    put(engine, AFTER)
    assert engine.generation() == before + 1
    assert contents(engine) == {BEFORE: b"1", b"k": b"1", AFTER: b"1"}


def test_its_own_process_sees_it_at_once(engine: EmbeddedEngine) -> None:
    put_off(engine, b"k")
    put_off(engine, b"k", b"2")
    assert engine.first_now(b"j", b"k") == b"2"
    assert engine.first_now(BEFORE) == b"1"
    assert contents(engine) == {BEFORE: b"1", b"k": b"2"}


def test_what_is_put_off_sees_what_was_before(engine: EmbeddedEngine) -> None:
    def increment(t: Transaction) -> None:
        t.put(b"n", b"%d" % (int(t.get(b"n") or b"0") + 1))

    for _ in range(40):  # more than are put off at a time
        engine.transact_unseen(increment)
    assert engine.first_now(b"n") == b"40"
    assert contents(engine)[b"n"] == b"40"


def test_others_see_nothing_of_it_before_they_change_something(
    engine: EmbeddedEngine, path: Path
) -> None:
    command = [sys.executable, "-c", CHANGE, str(ROOT), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        put_off(engine, b"k")
        seen = other.communicate(b"\n")[0].split()
    assert seen == [b"None", b"b'1'"]
    assert engine.first_now(b"k") == b"theirs"
    assert contents(engine) == {BEFORE: b"1", b"k": b"theirs"}


def test_a_transaction_that_fails_leaves_it_put_off(engine: EmbeddedEngine) -> None:
    put_off(engine, b"k")

    def fail(t: Transaction) -> None:
        t.put(b"k", b"2")
        raise Exists("no")

    for unseen in (False, True):
        with pytest.raises(Exists):
            engine.transact_now(fail, unseen)
    assert engine.first_now(b"k") == b"1"
    assert contents(engine) == {BEFORE: b"1", b"k": b"1"}


def test_a_commit_to_another_database_passes_nothing(engine: EmbeddedEngine) -> None:
    other = engine.database(OTHER)
    put_off(engine, b"k")
    other.transact_now(lambda t: t.put(b"o", b"1"))
    assert engine.first_now(b"k") == b"1"
    assert contents(engine) == {BEFORE: b"1", b"k": b"1"}
    assert other.read_now(lambda t: t.get(b"o")) == b"1"


def test_a_kill_loses_none(path: Path) -> None:
    put_off_and_die(path, "k", "l")
    engine = EmbeddedEngine(path, boot=1)
    try:
        assert contents(engine) == {BEFORE: b"1", b"k": b"1", b"l": b"1"}
    finally:
        engine.close()


def test_a_process_that_lives_on_takes_up_what_a_killed_one_put_off(path: Path) -> None:
    engine = EmbeddedEngine(path, boot=1)
    try:
        put_off_and_die(path, "k")
        put(engine, AFTER)
        assert contents(engine) == {BEFORE: b"1", b"k": b"1", AFTER: b"1"}
    finally:
        engine.close()


def test_a_kill_between_a_commit_and_its_note_writes_nothing_twice(path: Path) -> None:
    put_off_and_die(path, "k")
    file = path / "deferred"
    counted = file.read_bytes()
    engine = EmbeddedEngine(path, boot=1)
    try:
        engine.transact_now(lambda t: t.delete(b"k"))
        with file.open("r+b") as written:
            written.write(counted)
        put(engine, AFTER)
        assert contents(engine) == {BEFORE: b"1", AFTER: b"1"}
        put_off(engine, b"l")
        assert contents(engine) == {BEFORE: b"1", AFTER: b"1", b"l": b"1"}
    finally:
        engine.close()


def test_another_process_may_put_off_as_soon_as_a_commit_took_everything_along(
    engine: EmbeddedEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that committed has not run on yet, and has nothing to say about what came since."""
    command = [sys.executable, "-c", PUT_OFF_WHEN_TOLD, str(ROOT), str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        told, answers = other.stdin, other.stdout
        answers.readline()

        def put_off_there() -> None:
            told.write(b"\n")
            answers.readline()

        metadata = engine.transact_now.__self__  # type: ignore[attr-defined]
        real = metadata._begin
        put_off(engine, b"mine")
        with monkeypatch.context() as patched:
            patched.setattr(
                metadata, "_begin", lambda *given: AfterCommit(real(*given), put_off_there)
            )
            put(engine, AFTER)
        seen = other.communicate(b"\n")[0].split()
    assert seen == [b"b'theirs'", b"b'theirs'"]
    assert contents(engine) == {BEFORE: b"1", AFTER: b"1", b"k": b"theirs", b"mine": b"1"}


def test_what_another_process_put_off_since_is_committed_as_well(
    engine: EmbeddedEngine, path: Path
) -> None:
    """What this process remembers of its own is not all that is put off."""
    command = [sys.executable, "-c", PUT_OFF_WHEN_TOLD, str(ROOT), str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        put_off(engine, b"mine")
        put_off(engine, b"k", b"mine")
        other.stdin.write(b"\n")
        other.stdout.readline()
        put(engine, AFTER)
        other.communicate(b"\n")
    assert contents(engine) == {BEFORE: b"1", AFTER: b"1", b"k": b"theirs", b"mine": b"1"}


def test_a_power_cut_ends_it(path: Path) -> None:
    put_off_and_die(path, "k")
    engine = EmbeddedEngine(path, boot=2)
    try:
        assert b"k" not in contents(engine)
        put(engine, AFTER)
        assert b"k" not in contents(engine)
    finally:
        engine.close()


def test_a_process_of_another_mount_namespace_ends_none(path: Path) -> None:
    """It may take the running boot for another one: a filesystem without a device, as tmpfs or
    btrfs, has another mount there."""
    engine = EmbeddedEngine(path, boot=1)
    try:
        begin(engine)
        put_off(engine, b"l")
        command = [sys.executable, "-c", CHANGE, str(ROOT), str(path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        ) as other:
            assert other.stdout is not None
            other.stdout.readline()
            assert contents(engine) == {BEFORE: b"1", b"l": b"1"}
            put_off(engine, b"k", b"mine")
            seen = other.communicate(b"\n")[0].split()
        assert seen == [b"None", b"b'mine'"]
        assert contents(engine) == {BEFORE: b"1", b"l": b"1", b"k": b"theirs"}
    finally:
        engine.close()


def test_a_close_in_order_loses_none(path: Path) -> None:
    engine = EmbeddedEngine(path)
    begin(engine)
    put_off(engine, b"k")
    engine.close()
    engine = EmbeddedEngine(path)
    try:
        assert contents(engine) == {BEFORE: b"1", b"k": b"1"}
    finally:
        engine.close()


def test_a_close_in_order_commits_it_so_that_a_reboot_ends_none(path: Path) -> None:
    """A start would find no data file of it, since it looks at what the engine lists alone."""
    engine = EmbeddedEngine(path, boot=1)
    begin(engine)
    put_off(engine, b"k")
    engine.close()
    engine = EmbeddedEngine(path, boot=2)
    try:
        assert contents(engine) == {BEFORE: b"1", b"k": b"1"}
        assert not engine.restored
    finally:
        engine.close()


def test_a_close_that_cannot_commit_it_is_none_in_order(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a start after a reboot compares all data files with the records."""
    engine = EmbeddedEngine(path, boot=1)
    begin(engine)
    put_off(engine, b"k")
    with monkeypatch.context() as patched:
        patched.setattr(JournalWriter, "append", refuse)
        engine.close()
    engine = EmbeddedEngine(path, boot=2)
    try:
        assert engine.restored
    finally:
        engine.close()


def test_a_sync_takes_it_along(path: Path) -> None:
    engine = EmbeddedEngine(path, boot=1)
    begin(engine)
    put_off(engine, b"k")
    engine.sync_now()
    copy = path.with_name("copy")
    shutil.copytree(path, copy)  # what the disk has
    try:
        cut = EmbeddedEngine(copy, boot=2)
        try:
            assert contents(cut) == {BEFORE: b"1", b"k": b"1"}
        finally:
            cut.close()
    finally:
        engine.close()


def test_a_new_base_ends_none(engine: EmbeddedEngine) -> None:
    put_off(engine, b"k")
    engine.rotate_now()
    assert engine.first_now(b"k") == b"1"
    assert contents(engine) == {BEFORE: b"1", b"k": b"1"}


def test_beside_an_earlier_program_nothing_is_put_off(engine: EmbeddedEngine) -> None:
    """It would commit without a look."""
    put(engine, keys.VERSION, b"1")
    before = engine.generation()
    put_off(engine, b"k")
    assert engine.generation() == before + 1


@pytest.fixture
def fill_disk(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Leaves little of the engine's reserve, and nothing to fill it up with."""

    def none_left(reserve: Reserve, *_: object, **__: object) -> None:
        reserve.left, reserve.until = 0.1, 0

    def fill() -> None:
        monkeypatch.setattr(Reserve, "fill", none_left)
        monkeypatch.setattr(engine._reserve, "until", 0)

    return fill


def test_on_a_full_disk_nothing_is_put_off(
    engine: EmbeddedEngine, fill_disk: Callable[[], None]
) -> None:
    """What is put off has its place: else it would be refused when nobody can be told."""
    put_off(engine, b"k")
    fill_disk()
    engine.transact_now(lambda t: t.delete(BEFORE))
    assert contents(engine) == {b"k": b"1"}
    with pytest.raises(NoSpace):
        put_off(engine, b"l" * 100, b"1" * 100)
    assert contents(engine) == {b"k": b"1"}


def test_what_is_put_off_is_removed_on_a_full_disk(
    engine: EmbeddedEngine, fill_disk: Callable[[], None]
) -> None:
    def remove(t: Transaction) -> None:
        t.delete(b"k" * 100)
        t.put(b"l", b"1")  # as an orphan's key

    put_off(engine, b"k" * 100)
    fill_disk()
    engine.transact_now(remove)
    assert contents(engine) == {BEFORE: b"1", b"l": b"1"}


def test_a_read_sees_it_though_it_cannot_be_committed(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_off(engine, b"k")
    engine.transact_unseen(lambda t: t.delete(BEFORE))
    with monkeypatch.context() as patched:
        patched.setattr(JournalWriter, "append", refuse)
        assert contents(engine) == {b"k": b"1"}
        assert engine.first_now(BEFORE) is None
    assert contents(engine) == {b"k": b"1"}


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_read_within_a_read_ends_though_what_was_put_off_cannot_be_committed(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of the index, for the space that a node has left."""
    other = engine.database(OTHER)
    other.transact_now(lambda t: t.put(b"k", b"other"))
    put_off(engine, b"k")
    found: list[tuple[bytes | None, ...]] = []

    def fn(t: Transaction) -> tuple[bytes | None, ...]:
        within = engine.read_now(lambda t: t.get(b"k"))
        return t.get(b"k"), within, other.read_now(lambda t: t.get(b"k"))

    with monkeypatch.context() as patched:
        patched.setattr(JournalWriter, "append", refuse)
        reader = threading.Thread(target=lambda: found.append(engine.read_now(fn)), daemon=True)
        reader.start()
        reader.join(30)
    assert found == [(b"1", b"1", b"other")]
    assert engine.read_now(fn) == found[0]
