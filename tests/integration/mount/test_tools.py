"""Programs that are hard on a filesystem: fio, SQLite, git, rsync, tar, a compiler."""

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.posix import needs_root, touch

MIB = 1 << 20


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [p for p in programs if shutil.which(p) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {' '.join(missing)}")


def run(*command: object, cwd: Path | None = None, **more: Any) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [os.fspath(c) if isinstance(c, os.PathLike) else str(c) for c in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        timeout=200,
        check=False,
        **more,
    )
    output = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{output}"
    return done.stdout.decode(errors="replace")


# --- fio ---

FIO = {
    "psync buffered": "--ioengine=psync --rw=randwrite --bs=4k-64k",
    "psync direct": "--ioengine=psync --direct=1 --rw=randwrite --bs=4k",
    "mmap": "--ioengine=mmap --rw=randwrite --bs=4k",
    "libaio direct": "--ioengine=libaio --direct=1 --rw=randwrite --bs=64k --iodepth=64",
    "io_uring direct": "--ioengine=io_uring --direct=1 --rw=write --bs=256k --iodepth=32",
    "io_uring buffered": "--ioengine=io_uring --rw=randwrite --bs=16k --iodepth=16",
    "two jobs": "--ioengine=psync --rw=write --bs=1m --numjobs=2 --fsync=4",
    "rewrites": "--ioengine=psync --rw=randrw --bs=8k --overwrite=1 --norandommap=0",
}


@needs("fio")
@pytest.mark.parametrize("name", FIO)
def test_fio_verifies(here: Path, name: str) -> None:
    options = FIO[name].split()
    engine = options[0].partition("=")[2]
    if engine not in subprocess.run(["fio", "--enghelp"], capture_output=True, text=True).stdout:
        pytest.skip(f"this fio has no {engine}")
    run(
        "fio",
        "--name=job",
        f"--directory={here}",
        "--size=8m",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--randrepeat=1",
        "--fallocate=none",
        *options,
        cwd=here,
    )


# --- SQLite ---

WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
for n in range(int(sys.argv[3])):
    db.execute("begin immediate")
    (count,) = db.execute("select count(*) from t").fetchone()
    db.execute("insert into t values (?, ?, ?)", (sys.argv[2], n, "x" * 2000))
    db.execute("update total set n = n + 1")
    db.execute("commit")
"""


@pytest.mark.parametrize("journal", ["delete", "truncate", "persist", "wal"])
def test_sqlite_with_two_processes(here: Path, journal: str) -> None:
    path = here / "test.db"
    with connected(path) as db:
        assert db.execute(f"pragma journal_mode={journal}").fetchone()[0] == journal
        db.execute("create table t (writer, n, filler)")
        db.execute("create table total (n)")
        db.execute("insert into total values (0)")
        db.commit()
    rounds = 60
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(w), str(rounds)])
        for w in range(2)
    ]
    assert [p.wait(120) for p in running] == [0, 0]
    with connected(path) as db:
        assert db.execute("pragma integrity_check").fetchone()[0] == "ok"
        assert db.execute("select count(*) from t").fetchone()[0] == 2 * rounds
        assert db.execute("select n from total").fetchone()[0] == 2 * rounds
        db.execute("delete from t where n % 2")
        db.commit()
        db.execute("vacuum")
        assert db.execute("pragma integrity_check").fetchone()[0] == "ok"


def connected(path: Path) -> Any:
    import contextlib

    return contextlib.closing(sqlite3.connect(path, timeout=60))


def test_sqlite_recovers_from_a_killed_writer(here: Path) -> None:
    path = here / "test.db"
    with connected(path) as db:
        db.execute("create table t (n)")
        db.execute("insert into t values (1)")
        db.commit()
    script = (
        "import sqlite3, os, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('pragma cache_size=5')\n"
        "db.execute('begin')\n"
        "db.executemany('insert into t values (?)', ((str(n) * 500,) for n in range(2000)))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], check=False)
    assert done.returncode == -9
    assert (here / "test.db-journal").stat().st_size > 0
    with connected(path) as db:
        assert db.execute("select count(*) from t").fetchone()[0] == 1
        assert db.execute("pragma integrity_check").fetchone()[0] == "ok"


# --- git, tar, rsync ---


def contents(top: Path) -> dict[str, object]:
    """Everything that a copy must keep, by relative path."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            content = ""
        times = status.st_mtime_ns if not path.is_symlink() else 0
        owner = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink)
        attributes = (
            ()
            if path.is_symlink()
            else tuple(
                (n, os.getxattr(path, n))
                for n in sorted(os.listxattr(path))
                if n.startswith("user.")
            )
        )
        size = status.st_size if path.is_file() else 0
        found[str(path.relative_to(top))] = (
            owner,
            times,
            size,
            status.st_rdev,
            content,
            attributes,
        )
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a bit of everything, on the native filesystem."""
    top = tmp_path / "tree"
    (top / "a" / "b" / "c").mkdir(parents=True)
    for n in range(40):
        touch(top / "a" / f"file{n}", 0o600 + n % 64, os.urandom(n * 997))
    touch(top / "a" / "program", 0o4755, b"#!/bin/sh\n")
    touch(top / "a" / "b" / os.fsdecode(b"not utf8 \xff\xfe"), 0o644, b"x")
    touch(top / "a" / "b" / ("long" * 63), 0o444, b"read only")
    os.link(top / "a" / "file7", top / "a" / "b" / "linked7")
    os.symlink("../file3", top / "a" / "b" / "symlink")
    os.symlink("dangling", top / "a" / "b" / "dangling")
    os.mkfifo(top / "a" / "fifo")
    with open(top / "a" / "sparse", "wb") as sparse:
        sparse.truncate(64 * MIB)
        sparse.seek(32 * MIB)
        sparse.write(b"island")
    os.setxattr(top / "a" / "file9", "user.kept", b"value\0with zero")
    os.utime(top / "a" / "file5", ns=(10**18 + 1, 10**18 + 123_456_789))
    (top / "a" / "b" / "c").chmod(0o2750)
    if os.geteuid() == 0:
        os.chown(top / "a" / "file11", 61001, 61002)
        os.lchown(top / "a" / "b" / "symlink", 61001, 61002)
        os.mknod(top / "a" / "device", 0o20600, os.makedev(1, 7))
    return top


@needs_root
@needs("rsync")
def test_rsync_there_and_back(here: Path, tree: Path, tmp_path: Path) -> None:
    before = contents(tree)
    run("rsync", "-aHAXS", "--modify-window=-1", f"{tree}/", f"{here}/copy/")
    assert contents(here / "copy") == before
    assert (here / "copy" / "a" / "sparse").stat().st_blocks * 512 < MIB
    assert (
        run("rsync", "-aHAXSin", "--modify-window=-1", "--checksum", f"{tree}/", f"{here}/copy/")
        == ""
    )
    (tree / "a" / "file3").write_bytes(b"changed")
    (tree / "a" / "file4").unlink()
    run("rsync", "-aHAXS", "--modify-window=-1", "--delete", f"{tree}/", f"{here}/copy/")
    run("rsync", "-aHAXS", "--modify-window=-1", f"{here}/copy/", f"{tmp_path}/back/")
    assert contents(tmp_path / "back") == contents(tree)


@needs("rsync")
def test_rsync_in_place_and_appending(here: Path, tmp_path: Path) -> None:
    source = tmp_path / "f"
    source.write_bytes(os.urandom(3 * MIB))
    run("rsync", "--inplace", "--no-whole-file", source, here / "f")
    data = bytearray(source.read_bytes())
    data[MIB : MIB + 10] = b"0123456789"
    source.write_bytes(data + b"tail")
    run("rsync", "--inplace", "--no-whole-file", "--ignore-times", source, here / "f")
    assert (here / "f").read_bytes() == source.read_bytes()


@needs_root
@needs("tar")
def test_tar_there_and_back(here: Path, tree: Path) -> None:
    before = contents(tree)
    archive = here / "tree.tar"
    run("tar", "--xattrs", "--sparse", "-cf", archive, "-C", tree, ".")
    (here / "out").mkdir()
    run("tar", "--xattrs", "--same-owner", "-xpf", archive, "-C", here / "out")
    assert contents(here / "out") == before
    run("tar", "--compare", "-f", archive, "-C", here / "out")


@needs_root
def test_cp_keeps_everything(here: Path, tree: Path) -> None:
    before = contents(tree)
    run("cp", "-a", tree, here / "copy")
    assert contents(here / "copy") == before
    run("cp", "-a", "--reflink=auto", "--sparse=always", here / "copy", here / "again")
    assert contents(here / "again") == before
    run("mv", here / "again", here / "moved")
    run("rm", "-rf", here / "moved", here / "copy")
    assert os.listdir(here) == []


@needs("git")
def test_git(here: Path) -> None:
    repository = here / "repository"
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "gc.auto=0"]
    run(*git, "init", "-q", repository)
    for n in range(120):
        directory = repository / f"d{n % 7}"
        directory.mkdir(exist_ok=True)
        (directory / f"f{n}").write_bytes(os.urandom(n * 50) + b"text\n" * n)
    run(*git, "add", ".", cwd=repository)
    run(*git, "commit", "-qm", "one", cwd=repository)
    run(*git, "checkout", "-qb", "branch", cwd=repository)
    run(*git, "mv", "d1", "moved", cwd=repository)
    (repository / "d2" / "f2").write_text("changed\n")
    (repository / "d3" / "f3").chmod(0o755)
    (repository / "link").symlink_to("d2/f2")
    run(*git, "add", "-A", cwd=repository)
    run(*git, "commit", "-qam", "two", cwd=repository)
    run(*git, "checkout", "-q", "-", cwd=repository)
    assert not (repository / "moved").exists()
    run(*git, "merge", "-q", "branch", cwd=repository)
    run(*git, "gc", "-q", "--aggressive", "--prune=now", cwd=repository)
    run(*git, "fsck", "--full", "--strict", cwd=repository)
    assert run(*git, "status", "--porcelain", cwd=repository) == ""
    run(*git, "clone", "-q", repository, here / "clone")
    assert run(*git, "status", "--porcelain", cwd=here / "clone") == ""
    assert (here / "clone" / "d3" / "f3").stat().st_mode & 0o111
    run(*git, "worktree", "add", "-q", here / "tree", "branch", cwd=repository)
    run("rm", "-rf", here / "tree")


# --- a compiler, and what it makes ---


@needs("gcc", "ar")
def test_compiling_and_running(here: Path) -> None:
    (here / "part.h").write_text("int answer(void);\n")
    (here / "part.c").write_text('#include "part.h"\nint answer(void) { return 42; }\n')
    (here / "main.c").write_text(
        '#include <stdio.h>\n#include "part.h"\nint main(void) { printf("%d\\n", answer()); }\n'
    )
    run("gcc", "-g", "-pipe", "-c", "part.c", "main.c", cwd=here)
    run("ar", "rcs", "libpart.a", "part.o", cwd=here)
    run("gcc", "-o", "static", "main.o", "libpart.a", cwd=here)
    assert run(here / "static") == "42\n"
    run("gcc", "-shared", "-fPIC", "-o", "libpart.so", "part.c", cwd=here)
    run("gcc", "-o", "dynamic", "main.c", "-L.", "-lpart", f"-Wl,-rpath,{here}", cwd=here)
    assert run(here / "dynamic") == "42\n"


@needs("gcc")
def test_a_running_program_is_not_written(here: Path) -> None:
    program = here / "sleeper"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    running = subprocess.Popen([program, "60"])
    try:
        with pytest.raises(OSError, match="Text file busy"):
            os.open(program, os.O_WRONLY)
        os.unlink(program)  # what installers do: a new file under the old name
        shutil.copy(shutil.which("true") or "/bin/true", program)
        run(program)
    finally:
        running.kill()
        running.wait()


def test_python_imports_from_here(here: Path) -> None:
    package = here / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import value\n")
    (package / "inner.py").write_text("value = 7\n")
    for _ in range(2):
        assert run(sys.executable, "-c", "import package; print(package.value)", cwd=here) == "7\n"
    assert list((package / "__pycache__").glob("*.pyc"))
