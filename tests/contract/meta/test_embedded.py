"""What the embedded engine promises beyond the contract: several processes, other databases, damage
that is found and mended, and errors that say what to do."""

import contextlib
import itertools
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvfs.base.errors import Corrupt, Exists, Invalid, KvfsError, NoSpace, ReadOnly, Unavailable
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb import long_readers
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.journal import generations
from tests.cluster.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
OTHER = b"\xffother"
_MAP = 24 << 20

INCREMENT = """
import sys
sys.path.insert(0, sys.argv[1])
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

def increment(t):
    t.put(b"n", b"%d" % (int(t.get(b"n") or b"0") + 1))

engine = EmbeddedEngine(sys.argv[2], journal_bytes=20_000)
for _ in range(int(sys.argv[3])):
    engine.transact_now(increment)
engine.close()
"""


WATCH = """
import sys
sys.path.insert(0, sys.argv[1])
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

engine = EmbeddedEngine(sys.argv[2], readonly=True)
for _ in sys.stdin:
    print(engine.generation(), flush=True)
engine.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "meta"


@pytest.fixture
def engine(path: Path) -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(path)
    yield made
    made.close()


def put(engine: EmbeddedEngine, key: bytes, value: bytes) -> None:
    engine.transact_now(lambda t: t.put(key, value))


def contents(engine: EmbeddedEngine) -> dict[bytes, bytes]:
    return engine.read_now(lambda t: dict(t.scan(b"a", b"z")))


def test_several_processes_at_once_lose_no_update(engine: EmbeddedEngine, path: Path) -> None:
    command = [sys.executable, "-c", INCREMENT, str(ROOT), str(path), "200"]
    processes = [subprocess.Popen(command) for _ in range(3)]

    def increment(t: Transaction) -> None:
        t.put(b"n", b"%d" % (int(t.get(b"n") or b"0") + 1))

    for _ in range(200):
        engine.transact_now(increment)
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert engine.read_now(lambda t: t.get(b"n")) == b"800"


def test_what_one_process_commits_another_reads_at_once(engine: EmbeddedEngine, path: Path) -> None:
    put(engine, b"n", b"41")
    command = [sys.executable, "-c", INCREMENT, str(ROOT), str(path), "1"]
    subprocess.run(command, check=True, timeout=60)
    assert engine.read_now(lambda t: t.get(b"n")) == b"42"


def test_commits_of_all_processes_are_in_the_journal(engine: EmbeddedEngine, path: Path) -> None:
    put(engine, b"n", b"0")
    command = [sys.executable, "-c", INCREMENT, str(ROOT), str(path), "300"]
    subprocess.run(command, check=True, timeout=60)
    engine.database(OTHER).transact_now(lambda t: t.put(b"k", b"v"))
    engine.sync_now()
    copy = copy_of(path, torn)
    with_copy(copy, lambda found: found.read_now(lambda t: t.get(b"n")), expect=b"300")


def test_another_database_is_apart_from_the_metadata(engine: EmbeddedEngine) -> None:
    other = engine.database(OTHER)
    put(engine, b"k", b"metadata")
    other.transact_now(lambda t: t.put(b"k", b"other"))
    assert engine.database(OTHER) is other
    assert other.read_now(lambda t: list(t.scan(b"", b"\xff"))) == [(b"k", b"other")]
    assert engine.read_now(lambda t: list(t.scan(b"", b"\xff"))) == [(b"k", b"metadata")]
    with pytest.raises(Exists):
        other.transact_now(delete_and_fail)
    assert other.read_now(lambda t: t.get(b"k")) == b"other"
    with pytest.raises(Invalid, match="0xff"):
        engine.database(b"plain")


def delete_and_fail(t: Transaction) -> None:
    t.delete(b"k")
    raise Exists("as it happens")


def test_first_now_gives_the_first_key_that_is_there(path: Path) -> None:
    engine = EmbeddedEngine(path)
    try:
        engine.transact_now(lambda t: (t.put(b"b", b"1"), t.put(b"c", b"2")))
        assert engine.first_now(b"a", b"b", b"c") == b"1"
        assert engine.first_now(b"c", b"b") == b"2"
        assert engine.first_now(b"a", b"d") is None
    finally:
        engine.close()


def test_each_commit_to_the_metadata_begins_a_generation(path: Path) -> None:
    engine = EmbeddedEngine(path, journal_bytes=20_000)
    reader = subprocess.Popen(
        [sys.executable, "-c", WATCH, str(ROOT), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    seen = [engine.generation()]
    for number in range(400):  # past several journals
        put(engine, b"k", b"%d" % number)
        seen.append(engine.generation())
        if number % 50 == 0:
            engine.rotate_now()
            engine.database(OTHER).transact_now(lambda t: t.put(b"k", b"v"))
            print(file=reader.stdin, flush=True)
            assert int(reader.stdout.readline()) == engine.generation() == seen[-1]
    assert seen == sorted(set(seen))
    subprocess.run([sys.executable, "-c", INCREMENT, str(ROOT), str(path), "1"], check=True)
    assert engine.generation() > seen[-1]
    reader.communicate(timeout=60)
    engine.close()


def test_everything_is_there_after_closing(path: Path) -> None:
    engine = EmbeddedEngine(path)
    put(engine, b"k", b"v")
    engine.database(OTHER).transact_now(lambda t: t.put(b"k", b"other"))
    engine.close()
    engine = EmbeddedEngine(path)
    assert contents(engine) == {b"k": b"v"}
    assert engine.database(OTHER).read_now(lambda t: t.get(b"k")) == b"other"
    assert not engine.restored
    engine.close()


@pytest.mark.parametrize("rebuilt", [False, True])
def test_files_are_for_their_owner_alone(path: Path, rebuilt: bool) -> None:
    EmbeddedEngine(path).close()
    if rebuilt:
        missing(path)
        EmbeddedEngine(path).close()
    assert path.stat().st_mode & 0o777 == 0o700
    for file in path.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file


def torn(copy: Path) -> None:
    """What a power cut may leave of a file that was never synced."""
    data = copy / "data.mdb"
    with data.open("r+b") as file:
        file.write(os.urandom(data.stat().st_size))


def cut_short(copy: Path) -> None:
    os.truncate(copy / "data.mdb", 8192)


def emptied(copy: Path) -> None:
    os.truncate(copy / "data.mdb", 0)


def without_roots(copy: Path) -> None:
    with (copy / "data.mdb").open("r+b") as file:
        file.write(bytes(8192))


def missing(copy: Path) -> None:
    (copy / "data.mdb").unlink()


def of_another_store(copy: Path) -> None:
    other = EmbeddedEngine(copy / "other")
    put(other, b"k", b"other")
    other.rotate_now()
    other.rotate_now()
    other.close()
    shutil.copy(copy / "other" / "data.mdb", copy / "data.mdb")
    shutil.rmtree(copy / "other")


def copy_of(path: Path, damage: Callable[[Path], None]) -> Path:
    """The files as a kill would leave them, and then damaged."""
    copy = path.with_name(f"copy of {path.name}")
    shutil.copytree(path, copy)
    damage(copy)
    return copy


def with_copy(
    copy: Path, ask: Callable[[EmbeddedEngine], object], *, expect: object, boot: int | None = None
) -> None:
    engine = EmbeddedEngine(copy, boot=boot)
    try:
        assert engine.restored
        assert ask(engine) == expect
        assert engine.find_damage() is None
        put(engine, b"more", b"is written")
    finally:
        engine.close()


@pytest.mark.parametrize(
    "damage", [torn, cut_short, emptied, without_roots, missing, of_another_store]
)
@pytest.mark.parametrize("rotated", [False, True])
def test_a_damaged_file_is_rebuilt_and_loses_nothing(
    engine: EmbeddedEngine, path: Path, damage: Callable[[Path], None], rotated: bool
) -> None:
    expected = {}
    for number in range(500):
        key, value = b"k%03d" % (number % 400), b"%d" % number * 20
        put(engine, key, value)
        expected[key] = value
        if rotated and number == 250:
            engine.rotate_now()
    with_copy(copy_of(path, damage), contents, expect=expected)


@contextlib.contextmanager
def no_longer_files(path: Path) -> Iterator[None]:
    """Nobody in this process makes a file longer than the engine's is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((path / "data.mdb").stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("then", ["", "another commit"])
def test_a_refused_commit_does_not_take_place_after_a_power_cut(
    engine: EmbeddedEngine, path: Path, then: str
) -> None:
    """The journal has taken it before LMDB refuses it."""
    for number in range(4):
        put(engine, b"k%d" % number, bytes(1 << 20))
    engine.rotate_now()

    def overwrite(t: Transaction) -> None:
        t.put(b"k0", b"refused" * 500_000)
        t.delete(b"k1")

    with no_longer_files(path), pytest.raises(KvfsError):
        engine.transact_now(overwrite)
    expected = contents(engine)
    assert expected[b"k0"] == expected[b"k1"] == bytes(1 << 20)
    if then:
        put(engine, b"k9", b"more")
        expected[b"k9"] = b"more"
    engine.sync_now()
    copy = copy_of(path, missing)
    with_copy(copy, contents, expect=expected)


@pytest.mark.parametrize("rotated", [False, True])
def test_a_file_older_than_its_journal_is_rebuilt_in_whatever_boot(
    engine: EmbeddedEngine, path: Path, rotated: bool
) -> None:
    put(engine, b"k", b"old")
    older = path.with_name("older")
    shutil.copyfile(path / "data.mdb", older)
    put(engine, b"k", b"new")
    if rotated:
        engine.rotate_now()
    put(engine, b"k2", b"new")
    copy = copy_of(path, missing)
    shutil.copyfile(older, copy / "data.mdb")
    with_copy(copy, contents, expect={b"k": b"new", b"k2": b"new"})


def test_a_journal_cut_short_costs_nothing_while_the_file_is_whole(
    engine: EmbeddedEngine, path: Path
) -> None:
    put(engine, b"k", b"v")
    copy = copy_of(path, lambda copy: os.truncate(copy / "journal.1", 40))
    again = EmbeddedEngine(copy)
    assert not again.restored
    put(again, b"k2", b"v")
    again.sync_now()
    second = copy_of(copy, missing)
    again.close()
    with_copy(second, contents, expect={b"k": b"v", b"k2": b"v"})


@pytest.mark.parametrize("rotated", [False, True])
def test_a_rebuilt_file_goes_back_to_no_earlier_generation(
    engine: EmbeddedEngine, path: Path, rotated: bool
) -> None:
    """Who remembers what was read in one would take it for the present."""
    put(engine, b"k", b"old")
    if rotated:
        engine.rotate_now()
    base = engine.generation()
    put(engine, b"k", b"new")
    with_copy(copy_of(path, missing), EmbeddedEngine.generation, expect=engine.generation())
    assert engine.generation() > base


def test_after_a_reboot_it_is_rebuilt_whatever_it_looks_like(
    engine: EmbeddedEngine, path: Path
) -> None:
    put(engine, b"k", b"v")
    copy = copy_of(path, lambda _: None)
    with_copy(copy, contents, expect={b"k": b"v"}, boot=12345)


def test_a_torn_journal_ends_at_its_last_whole_record(engine: EmbeddedEngine, path: Path) -> None:
    for number in range(10):
        put(engine, b"k", b"%d" % number)

    def tear(copy: Path) -> None:
        journal = copy / "journal.1"
        os.truncate(journal, journal.stat().st_size - 3)

    with_copy(copy_of(path, tear), contents, expect={b"k": b"8"}, boot=12345)


def test_a_damaged_base_is_an_error_that_names_it(engine: EmbeddedEngine, path: Path) -> None:
    put(engine, b"k", b"v")

    def destroy(copy: Path) -> None:
        missing(copy)
        os.truncate(copy / "journal.1", 5)

    copy = copy_of(path, destroy)
    with pytest.raises(Corrupt, match=r"journal\.1 is damaged.*backup"):
        EmbeddedEngine(copy)


def test_a_missing_base_is_an_error_and_nothing_is_removed(
    engine: EmbeddedEngine, path: Path
) -> None:
    put(engine, b"k", b"v")
    copy = copy_of(path, lambda copy: (copy / "base.1").unlink())
    with pytest.raises(Corrupt, match=r"base .* missing"):
        EmbeddedEngine(copy)
    assert (copy / "data.mdb").exists()
    assert (copy / "journal.1").exists()


def test_a_creation_that_was_cut_off_is_made_again(path: Path) -> None:
    path.mkdir()
    (path / "data.mdb").write_bytes(b"")
    (path / "state").write_bytes(b"")
    engine = EmbeddedEngine(path)
    put(engine, b"k", b"v")
    assert contents(engine) == {b"k": b"v"}
    engine.close()


def test_a_long_journal_is_replaced_by_a_base(path: Path) -> None:
    engine = EmbeddedEngine(path, journal_bytes=10_000)
    for number in range(200):
        put(engine, b"k%d" % number, bytes(100))
    engine.rotate_now()
    bases = sorted(file.name for file in path.glob("base.*"))
    journals = sorted(file.name for file in path.glob("journal.*"))
    assert len(bases) == len(journals) == 1
    assert bases != ["base.1"]
    assert (path / journals[0]).stat().st_size < 10_000
    assert len(contents(engine)) == 200
    engine.close()


def test_a_base_or_journal_that_another_process_has_just_replaced_hinders_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outdated(directory: Path, kind: str) -> list[int]:
        return [0, *generations(directory, kind), 99]

    monkeypatch.setattr("kvfs.meta.lmdb.syncer.generations", outdated)
    engine = EmbeddedEngine(path)
    try:
        engine.rotate_now()
        put(engine, b"k", b"v")
        engine.sync_now()
    finally:
        engine.close()


def test_a_reader_sees_commits_and_cannot_write(engine: EmbeddedEngine, path: Path) -> None:
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from kvfs.base.errors import ReadOnly
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
engine = EmbeddedEngine(sys.argv[2], readonly=True)
assert engine.read_now(lambda t: t.get(b"k")) == b"v"
try:
    engine.transact_now(lambda t: t.put(b"k", b"new"))
except ReadOnly:
    engine.close()
    print("refused")
"""
    put(engine, b"k", b"v")
    command = [sys.executable, "-c", script, str(ROOT), str(path)]
    said = subprocess.run(command, check=True, timeout=60, capture_output=True)
    assert said.stdout == b"refused\n"
    assert contents(engine) == {b"k": b"v"}


@pytest.mark.usefixtures("engine")
def test_a_reader_refuses_what_only_a_writer_can_mend(path: Path) -> None:
    with pytest.raises(Unavailable, match="start the node once"):
        EmbeddedEngine(path / "nowhere", readonly=True)
    copy = copy_of(path, lambda _: None)
    with pytest.raises(Unavailable, match="start the node once"):
        EmbeddedEngine(copy, readonly=True, boot=12345)


def test_a_file_at_its_largest_size_takes_removals_and_then_as_much_as_before(path: Path) -> None:
    """The system gave little address space. The file gets no shorter: what was removed leaves free
    pages, which count."""
    engine = EmbeddedEngine(path, map_size=_MAP)
    done = fill(engine)
    assert len(contents(engine)) == done
    put(engine, b"k0", b"small")
    engine.close()
    engine = EmbeddedEngine(path, map_size=_MAP)
    put(engine, b"k1", b"started")
    engine.transact_now(lambda t: t.delete(b"k2"))
    for first in range(0, done, 200):
        engine.transact_now(partial(delete_many, range(first, min(first + 200, done))))
    assert contents(engine) == {}
    assert fill(engine) >= done * 9 // 10
    engine.close()


def delete_many(numbers: range, t: Transaction) -> None:
    for number in numbers:
        t.delete(b"k%d" % number)


def fill(engine: EmbeddedEngine) -> int:
    """Puts until that is refused, also alone; returns how many pairs there are."""
    done = 0
    for together in (200, 1):
        while put_many(engine, range(done, done + together)):
            done += together
    return done


def put_many(engine: EmbeddedEngine, numbers: range) -> bool:
    """Returns whether there was room."""

    def fn(t: Transaction) -> None:
        for number in numbers:
            t.put(b"k%d" % number, bytes(500))

    try:
        engine.transact_now(fn)
    except NoSpace as error:
        assert "largest size" in str(error)
        return False
    return True


def test_a_file_that_another_process_made_too_large_is_an_error_that_says_so(path: Path) -> None:
    engine = EmbeddedEngine(path, map_size=_MAP)
    script = f"""
import sys; sys.path.insert(0, sys.argv[1])
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
engine = EmbeddedEngine(sys.argv[2])
engine.transact_now(lambda t: t.put(b"k", bytes({_MAP})))
engine.close()
"""
    command = [sys.executable, "-c", script, str(ROOT), str(path)]
    subprocess.run(command, check=True, timeout=60)
    with pytest.raises(Unavailable, match="ulimit -v"):
        contents(engine)
    with pytest.raises(Unavailable, match="ulimit -v"):
        engine.close()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((Unavailable, ReadOnly)):
        EmbeddedEngine(tmp_path / "file" / "meta")


@contextlib.contextmanager
def no_descriptors(but: int = 0) -> Iterator[None]:
    """This process can open no more than so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    free = (number for number in itertools.count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, but, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_open_that_fails_halfway_holds_nothing_and_is_tried_again(path: Path) -> None:
    EmbeddedEngine(path).close()
    for there in range(100):
        with no_descriptors(there):
            try:
                EmbeddedEngine(path).close()
                break
            except Unavailable:
                continue
    assert 5 < there < 99, "it failed at each step"
    held = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)
    ]
    assert not [each for each in held if each.startswith(str(path))]


def _is_open(fd: str) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


def test_a_process_without_descriptors_syncs(path: Path) -> None:
    engine = EmbeddedEngine(path)
    engine.transact_now(lambda t: t.put(b"k", b"v"))
    with no_descriptors():
        engine.sync_now()
    assert engine.failure is None
    engine.close()


def test_a_journal_that_cannot_be_opened_is_no_lost_write(path: Path) -> None:
    """Another process has begun a new one, and this one has no descriptor left for it."""
    engine = EmbeddedEngine(path)
    engine.sync_now()
    other = INCREMENT.replace("engine.close()", "engine.rotate_now()\nengine.close()")
    command = [sys.executable, "-c", other, str(ROOT), str(path), "10"]
    subprocess.run(command, check=True, timeout=60)
    with no_descriptors(), pytest.raises(Unavailable, match="cannot be opened"):
        engine.sync_now()
    assert engine.failure is None
    engine.sync_now()
    engine.transact_now(lambda t: t.put(b"k", b"v"))
    engine.sync_now()
    engine.close()


def test_a_reader_that_does_not_end_is_named_while_the_file_grows_for_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_readers, "LONG_S", 0.0)
    engine = EmbeddedEngine(path)
    put(engine, b"a", b"1")
    with engine.environment.begin():
        put(engine, b"a", b"2")
        wait_until(lambda: engine.long_reader is not None, "the reader is seen")
        assert f"process {os.getpid()} " in (engine.long_reader or "")
    put(engine, b"a", b"3")
    wait_until(lambda: engine.long_reader is None, "it has ended")
    engine.close()
