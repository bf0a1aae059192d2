"""Programs that use a directory until they are told to end, and check all that they did there.

    python tests/integration/takeover/programs.py NAME DIRECTORY UNTIL

UNTIL is a file: once it exists, the program ends, looks at everything that was acknowledged to it,
and prints how much that was. An error of any call, and any content that is not what was written,
ends it with a traceback.
"""

import contextlib
import hashlib
import mmap
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_BLOCKS_KEPT: Final = 60
_BLOCK_BYTES: Final = 256 << 10
_SQLITE_S: Final = 120.0
_FIO: Final = (
    *("--size=8m", "--rw=randwrite", "--verify=crc32c", "--do_verify=1", "--verify_fatal=1"),
    *("--minimal", "--overwrite=0", "--rate_iops=2000", "--fallocate=none"),
)
_ENGINES: Final = (
    ("--ioengine=psync", "--bs=4k"),
    ("--ioengine=mmap", "--bs=4k"),
    ("--ioengine=psync", "--bs=64k", "--fsync=16"),
    ("--ioengine=psync", "--bs=16k", "--numjobs=2"),
)


class Turns:
    """Counts the rounds of a program, which has its end told by a file."""

    def __init__(self, until: Path) -> None:
        self._until = until
        self.done = 0

    def __iter__(self) -> Iterator[int]:
        while not self.done or not self._until.exists():
            yield self.done
            self.done += 1


def append_lines(top: Path, turns: Turns) -> None:
    """A log: each line once, in its order, through descriptors that live for 50 lines."""
    path = top / "log"
    fd = -1
    for turn in turns:
        if turn % 50 == 0:
            if fd >= 0:
                os.close(fd)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line = b"%d\n" % turn
        assert os.write(fd, line) == len(line)
        if turn % 7 == 0:
            os.fsync(fd)
    os.close(fd)
    assert path.read_bytes() == b"".join(b"%d\n" % n for n in range(turns.done))


def keep_blocks(top: Path, turns: Turns) -> None:
    """What LMCache's connector for filesystems does: a block under a temporary name, renamed when
    it is whole; reads of others; the oldest are removed."""
    kept: dict[str, bytes] = {}
    draw = random.Random(1)
    for turn in turns:
        content = draw.randbytes(_BLOCK_BYTES - turn % 4096)
        name = f"model@{turn:08x}.data"
        draft = top / f"{name}.tmp"
        with draft.open("wb", buffering=0) as file:
            assert file.write(content) == len(content)
        draft.replace(top / name)
        kept[name] = hashlib.sha256(content).digest()
        if len(kept) > _BLOCKS_KEPT:
            oldest = next(iter(kept))
            (top / oldest).unlink()
            del kept[oldest]
        _look_at(top / draw.choice(list(kept)), kept)
        assert not (top / f"model@{turn + 1:08x}.data").exists()
        if turn % 20 == 0:
            assert sorted(os.listdir(top)) == sorted(kept)
    for name in kept:
        _look_at(top / name, kept)


def _look_at(path: Path, kept: dict[str, bytes]) -> None:
    content = bytearray(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        assert file.readinto(content) == len(content)
    assert hashlib.sha256(content).digest() == kept[path.name], path


def change_names(top: Path, turns: Turns) -> None:
    """Calls that fail if they are done twice."""
    with (top / "counted").open("w+b", buffering=0) as counted:
        counted.write(bytes(4096))
        with mmap.mmap(counted.fileno(), 4096) as mapped:
            for turn in turns:
                a_turn(top / "d", turn)
                mapped[:8] = turn.to_bytes(8, "little")
                assert os.pread(counted.fileno(), 8, 0) == turn.to_bytes(8, "little")
    assert sorted(os.listdir(top)) == ["counted"]


def a_turn(top: Path, turn: int) -> None:
    """Makes a directory and removes it again, with everything in it made and removed once."""
    top.mkdir()
    content = b"%d" % turn
    file, other = top / "file", top / "other"
    with file.open("xb", buffering=0) as made:
        made.write(content)
    os.link(file, other)
    assert file.stat().st_nlink == 2
    os.setxattr(file, "user.turn", content, os.XATTR_CREATE)
    with contextlib.suppress(FileExistsError):
        os.setxattr(file, "user.turn", b"", os.XATTR_CREATE)
        raise AssertionError("an attribute was made twice")
    os.removexattr(other, "user.turn")
    other.rename(top / "renamed")
    (top / "renamed").unlink()
    assert file.stat().st_nlink == 1
    (top / "symbolic").symlink_to("file")
    assert (top / "symbolic").read_bytes() == content
    os.mknod(top / "node", 0o100600)
    os.mkfifo(top / "pipe")
    os.truncate(top / "node", 100)
    fd = os.open(top, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, content)
    os.link(f"/proc/self/fd/{fd}", top / "nameless", src_dir_fd=fd)  # else it would not follow
    os.close(fd)
    assert (top / "nameless").read_bytes() == content
    names = ["file", "nameless", "node", "pipe", "symbolic"]
    assert sorted(os.listdir(top)) == names
    for name in names:
        (top / name).unlink()
    top.rmdir()


def count_in_a_locked_file(top: Path, turns: Turns) -> None:
    """Two processes that count in one file, under a lock that is a file which only one can make."""
    number, lock = top / "number", top / "lock"
    ours = 0
    child = os.fork()
    for _ in turns:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        value = int(number.read_text()) if number.exists() else 0
        draft = top / "draft"
        draft.write_text(str(value + 1))
        draft.replace(number)
        ours += 1
        lock.unlink()
    (top / f"counted-{child == 0}").write_text(str(ours))
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    counted = [int((top / f"counted-{each}").read_text()) for each in (True, False)]
    assert int(number.read_text()) == sum(counted)
    turns.done = sum(counted)


def commit_rows(top: Path, turns: Turns) -> None:
    """sqlite, by two processes, one file with a journal for rolling back, one with a log."""
    for mode in ("delete", "wal"):
        with _opened(top / mode, mode) as database:
            database.execute("create table rows (writer int, turn int, text text)")
    child = os.fork()
    for turn in turns:
        for mode in ("delete", "wal"):
            with _opened(top / mode, mode) as database, database:
                row = bool(child), turn, "x" * (turn % 3000)
                database.execute("insert into rows values (?, ?, ?)", row)
    (top / f"committed-{child == 0}").write_text(str(turns.done))
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    counted = [int((top / f"committed-{each}").read_text()) for each in (True, False)]
    for mode in ("delete", "wal"):
        with _opened(top / mode, mode) as database:
            assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
            rows = database.execute("select distinct writer, turn from rows").fetchall()
            found = database.execute("select count(*) from rows").fetchone()[0]
            assert found == len(rows) == sum(counted)
    turns.done = 2 * sum(counted)


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, timeout=_SQLITE_S)) as database:
        database.execute(f"pragma journal_mode = {mode}")
        yield database


def commit_files(top: Path, turns: Turns) -> None:
    """git: commits, and checks of all of them at the end."""
    repository = top / "repository"
    repository.mkdir()
    _git(repository, "init", "--quiet")
    for turn in turns:
        (repository / f"file-{turn % 40}").write_text(f"{turn}\n" * 500)
        _git(repository, "add", "--all")
        _git(repository, "commit", "--quiet", "--message", str(turn))
        if turn % 50 == 49:
            _git(repository, "gc", "--quiet")
    _git(repository, "fsck", "--full", "--strict")
    assert int(_git(repository, "rev-list", "--count", "HEAD")) == turns.done
    assert not _git(repository, "status", "--porcelain")


def _git(repository: Path, *words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "gc.auto=0")
    command = ["git", *who, "-C", str(repository), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def verify_with_fio(top: Path, turns: Turns) -> None:
    """fio, which compares all that it wrote."""
    for turn in turns:
        directory = top / f"fio-{turn}"
        directory.mkdir()
        seed = f"--randseed={turn}"
        words = ("--name=verify", f"--directory={directory}", seed, *_FIO)
        done = subprocess.run(
            ["fio", *words, *_ENGINES[turn % len(_ENGINES)]],
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
        )
        assert not done.returncode, done.stdout + done.stderr
        assert "error" not in done.stderr + done.stdout, done.stdout + done.stderr
        shutil.rmtree(directory)


PROGRAMS: Final[dict[str, Callable[[Path, Turns], None]]] = {
    "logger": append_lines,
    "blocks": keep_blocks,
    "names": change_names,
    "lock": count_in_a_locked_file,
    "sqlite": commit_rows,
    "git": commit_files,
    "fio": verify_with_fio,
}


def main() -> None:
    """Runs the program that the arguments name."""
    name, directory, until = sys.argv[1:]
    turns = Turns(Path(until))
    PROGRAMS[name](Path(directory), turns)
    print(turns.done)


if __name__ == "__main__":
    main()
