"""The embedded engine's part of the durability contract: what it acknowledged is there after a
kill; what `sync` acknowledged is there after a power cut; and what is there is always exactly the
first n commits."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.base.errors import NoSpace, Unavailable
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from tests.contract import client_store
from tests.fault import engine_writer
from tests.fault.disks import Disk, cut, disk
from tests.fault.engine_writer import COUNT, REBUILD_STEPS, SECOND, STEPS

ROOT = Path(__file__).resolve().parents[3]
FILESYSTEMS = ("ext4", "xfs")


class Acknowledged:
    """How far the writer got, by what it said."""

    def __init__(self, output: bytes) -> None:
        said = [line.split() for line in output.splitlines()]
        self.committed = max((int(n) for what, n in said if what == b"c"), default=0)
        self.synced = max((int(n) for what, n in said if what == b"s"), default=0)


def start(path: Path, boot: int, commits: int, *then: str) -> subprocess.Popen[bytes]:
    script = str(ROOT / "tests/fault/engine_writer.py")
    command = [sys.executable, script, str(path), str(boot), str(commits), *then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)


def run_until_killed(path: Path, boot: int, commits: int, *then: str) -> Acknowledged:
    program = "import sys; from tests.fault import engine_writer; engine_writer.main(*sys.argv[1:])"
    return Acknowledged(client_store.run_killed(program, str(path), str(boot), str(commits), *then))


def read_some(writer: subprocess.Popen[bytes], lines: int) -> bytes:
    assert writer.stdout is not None
    return b"".join(writer.stdout.readline() for _ in range(lines))


def cut_after(there: Disk, writer: subprocess.Popen[bytes], lines: int) -> Acknowledged:
    """Cut the power when the writer has said so much; what it said until then. A sync that is under
    way when the filesystem is shut down may return as if it were done: no cut power does that."""
    said = Acknowledged(read_some(writer, lines))
    cut(there.mountpoint)
    writer.kill()
    writer.communicate(timeout=60)
    return said


def check(path: Path, boot: int, at_least: int, at_most: int | None = None) -> int:
    """Open it: whole, nothing acknowledged missing, and it goes on working. Returns the commits
    found."""
    engine = EmbeddedEngine(path, boot=boot)
    try:
        found = int(engine.read_now(lambda t: t.get(COUNT)) or b"0")
        assert found >= at_least
        assert at_most is None or found <= at_most
        assert engine_writer.contents(engine) == engine_writer.expected(found)
        second = int(engine.database(SECOND).read_now(lambda t: t.get(COUNT)) or b"0")
        assert second in (found, found - 1)
        assert engine.find_damage() is None
        for n in range(found + 1, found + 60):
            engine_writer.commit(engine, n)
        assert engine_writer.contents(engine) == engine_writer.expected(found + 59)
        assert engine.find_damage() is None
    finally:
        engine.close()
    return found


@pytest.mark.parametrize("lines", [1, 40, 333, 1100])
def test_a_kill_loses_nothing_acknowledged(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "meta"
    with start(path, 1, 100_000) as writer:
        output = read_some(writer, lines)
        writer.kill()
        output += writer.communicate(timeout=60)[0]
    engine = EmbeddedEngine(path, boot=1)
    assert engine.rebuilt is None
    engine.close()
    committed = Acknowledged(output).committed
    check(path, 1, committed, committed + 1)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_each_step_of_a_rotation(tmp_path: Path, step: str, when: str) -> None:
    path = tmp_path / "meta"
    said = run_until_killed(path, 1, 120, f"{when} {step}")
    assert check(path, 1, said.committed) == said.committed


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
@pytest.mark.parametrize("lines", [3, 250, 1500])
def test_a_power_cut_leaves_the_first_commits(tmp_path: Path, filesystem: str, lines: int) -> None:
    with disk(tmp_path, filesystem) as there:
        path = there.mountpoint / "meta"
        with start(path, 1, 100_000) as writer:
            said = cut_after(there, writer, lines)
        there.power_cycle()
        check(path, 2, said.synced)


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_a_power_cut_at_each_step_of_a_rotation(tmp_path: Path, filesystem: str) -> None:
    with disk(tmp_path, filesystem) as there:
        for number, step in enumerate(STEPS):
            for when in ("before", "after"):
                path = there.mountpoint / f"{when} {step}"
                mount = str(there.mountpoint)
                said = run_until_killed(path, 1, 120, f"{when} {step}", mount)
                there.power_cycle()
                assert said.synced == 100
                check(path, number + 2, said.synced, said.committed)


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_a_power_cut_at_each_step_of_a_rebuild(tmp_path: Path, filesystem: str) -> None:
    with disk(tmp_path, filesystem) as there:
        for step in REBUILD_STEPS:
            for when in ("before", "after"):
                path = there.mountpoint / f"{when} {step}"
                mount = str(there.mountpoint)
                said = cut_while_open(there, path)
                run_until_killed(path, 2, 0, f"open {when} {step}", mount)
                there.power_cycle()
                check(path, 3, said.synced)


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_a_sync_covers_the_journals_that_killed_rotations_left(
    tmp_path: Path, filesystem: str
) -> None:
    with disk(tmp_path, filesystem) as there:
        path = there.mountpoint / "meta"
        for step in ("after start_journal", "before _write_base", "before sync_journals"):
            said = run_until_killed(path, 1, 60, step)
        last = said.committed + 1
        engine = EmbeddedEngine(path, boot=1)
        engine_writer.commit(engine, last)
        engine.sync_now()
        cut(there.mountpoint)
        with contextlib.suppress(Unavailable):
            engine.close()
        there.power_cycle()
        assert check(path, 2, last) == last


def cut_while_open(there: Disk, path: Path) -> Acknowledged:
    with start(path, 1, 100_000) as writer:
        said = cut_after(there, writer, 300)
    there.power_cycle()
    return said


@pytest.mark.parametrize("filesystem", FILESYSTEMS)
def test_what_was_closed_in_order_is_used_as_it_is(tmp_path: Path, filesystem: str) -> None:
    with disk(tmp_path, filesystem) as there:
        path = there.mountpoint / "meta"
        engine = EmbeddedEngine(path, boot=1)
        for n in range(1, 301):
            engine_writer.commit(engine, n)
        engine.close()
        cut(there.mountpoint)
        there.power_cycle()
        engine = EmbeddedEngine(path, boot=2)
        assert engine.rebuilt is None
        engine.close()
        check(path, 2, 300, 300)


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    with disk(tmp_path, "ext4", 16 << 20) as there:
        path = there.mountpoint / "meta"
        engine = EmbeddedEngine(path, boot=1)
        ballast = there.mountpoint / "ballast"
        fill(ballast)
        done = 0
        with pytest.raises(NoSpace, match="free some space"):
            for n in range(1, 100_000):
                engine_writer.commit(engine, n)
                done = n
        found = int(engine.read_now(lambda t: t.get(COUNT)) or b"0")
        assert found in (done, done + 1)
        assert engine_writer.contents(engine) == engine_writer.expected(found)
        ballast.unlink()
        for n in range(found + 1, found + 20):
            engine_writer.commit(engine, n)
        engine.close()
        assert check(path, 1, found + 19) == found + 19


def fill(ballast: Path) -> None:
    """Take what space is left, but for a little."""
    space = os.statvfs(ballast.parent)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - (300 << 10))
