"""Several hosts that write into one directory, or one file, at a time: each is told what became of
what it wrote."""

import contextlib
import errno
import fcntl
import mmap
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.base import control
from tests.cluster.waiting import wait_until
from tests.integration.client.test_client import sealed
from tests.integration.harness import Node
from tests.integration.posix import refused
from tests.integration.several import Several, several


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    with several(2) as cluster:
        yield cluster


@pytest.fixture
def a(nodes: Several) -> Path:
    return nodes.nodes[0].mount


@pytest.fixture
def b(nodes: Several) -> Path:
    return nodes.nodes[1].mount


# ---- directories


KINDS = ("free", "taken", "directory")


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_hosts_that_rename_one_name_to_one_other_one_does(
    a: Path, b: Path, kind: str
) -> None:
    """The kernel of the slower one may find the file under both names, which it takes for links."""
    rename_on_both(a, b, kind, rounds=60)


@contextlib.contextmanager
def process_namespace() -> Iterator[int]:
    """A PID namespace without a process of this test; its first process, with which all others of
    it end."""
    holder = subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "sleep", "600"])
    children = Path("/proc", str(holder.pid), "task", str(holder.pid), "children")
    try:
        wait_until(lambda: bool(children.read_text()), "the namespace has its first process")
        yield int(children.read_text())
    finally:
        holder.kill()
        holder.wait()


def test_one_does_it_also_where_the_nodes_do_not_see_who_asks() -> None:
    with process_namespace() as first, several(0) as cluster:
        for _ in range(2):
            node = cluster.add(inside=("nsenter", f"--pid=/proc/{first}/ns/pid"))
            node.pid = None  # it is the number of another process here
        a, b = (each.mount for each in cluster.nodes)
        for kind in KINDS:
            rename_on_both(a, b, kind, rounds=30)


def rename_on_both(a: Path, b: Path, kind: str, *, rounds: int) -> None:
    root = a / "models" / f"renames-{kind}"
    root.mkdir()
    for number in range(rounds):
        if kind == "directory":
            (root / f"from{number}").mkdir()
        else:
            (root / f"from{number}").write_bytes(b"x")
        if kind == "taken":
            (root / f"to{number}").write_bytes(b"old")
    done: list[int] = []
    failed: list[int | None] = []
    ready = threading.Barrier(2, timeout=60)

    def move(mount: Path) -> None:
        where = os.open(mount / "models" / root.name, os.O_RDONLY)
        for number in range(rounds):
            with contextlib.suppress(FileNotFoundError):
                os.stat(f"to{number}", dir_fd=where)
            ready.wait()
            try:
                os.rename(f"from{number}", f"to{number}", src_dir_fd=where, dst_dir_fd=where)
            except OSError as error:
                failed.append(error.errno)
            else:
                done.append(number)
        os.close(where)

    threads = [threading.Thread(target=move, args=(mount,)) for mount in (a, b)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(done) == list(range(rounds))
    assert set(failed) == {errno.ENOENT}


# ---- one file, written in place


def test_what_another_host_sealed_is_not_what_a_writer_here_has(
    nodes: Several, a: Path, b: Path
) -> None:
    path = Path("models", "sealed elsewhere")
    (a / path).write_bytes(b"first")
    with (b / path).open("w+b", buffering=0) as file:
        (a / path).write_bytes(b"second " * 100)
        with kvfs.Client(nodes.nodes[0].store) as client:
            sealed(client, f"/{path}")
        file.write(b"own, and longer")
        assert os.fstat(file.fileno()).st_size == len(b"own, and longer")
        assert (b / path).stat().st_size == len(b"own, and longer")
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == b"own, and longer"
        file.truncate(3)
        assert os.fstat(file.fileno()).st_size == 3
    for mount in (a, b):
        assert (mount / path).read_bytes() == b"own"


def test_what_another_host_sealed_while_it_is_written_here_is_not_damaged(
    nodes: Several, a: Path, b: Path
) -> None:
    path = Path("models", "cut here")
    (a / path).write_bytes(b"first " * 100)
    assert (b / path).read_bytes() == b"first " * 100
    with (b / path).open("r+b", buffering=0) as file, kvfs.Client(nodes.nodes[1].store) as client:
        file.truncate(3)
        (a / "models" / "later").write_bytes(b"x")
        with kvfs.Client(nodes.nodes[0].store) as there:
            sealed(there, "/models/later")  # with it, or before it, that file
        assert client.get(f"/{path}") == b"fir"
        wait_until(lambda: not client.stat(f"/{path}").checksum, "it has no seal")
        file.write(b"sec")
        assert client.get(f"/{path}") == b"sec"
        assert "damage" not in nodes.nodes[1].log
    for mount in (a, b):
        assert (mount / path).read_bytes() == b"sec"


# ---- appends


def append(path: Path, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def test_no_line_that_hosts_append_is_lost(a: Path, b: Path) -> None:
    """From the first one on, which makes the file."""
    rounds, files = 25, 3
    (a / "models" / "logs").mkdir()
    ready = threading.Barrier(4, timeout=60)
    written: list[tuple[int, bytes]] = []

    def work(mount: Path, who: str) -> None:
        for number in range(rounds):
            ready.wait()
            line = f"{who} {number}\n".encode()
            append(mount / "models" / "logs" / str(number % files), line)
            written.append((number % files, line))

    workers = [(a, "a1"), (b, "b1"), (a, "a2"), (b, "b2")]
    threads = [threading.Thread(target=work, args=each) for each in workers]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(written) == rounds * len(workers)
    for number in range(files):
        lines = sorted(line for at, line in written if at == number)
        for mount in (a, b):
            path = mount / "models" / "logs" / str(number)
            assert sorted(path.read_bytes().splitlines(keepends=True)) == lines


def test_who_appends_waits_for_the_host_that_does(a: Path, b: Path) -> None:
    path = Path("models", "log")
    first = os.open(a / path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(first, b"one\n")
    os.fsync(first)
    second = threading.Thread(target=append, args=(b / path, b"three\n"))
    second.start()
    append(a / path, b"two\n")  # of its own host it waits for nobody
    assert (b / path).read_bytes() in (b"one\n", b"one\ntwo\n")  # readers neither
    os.close(first)
    second.join()
    assert (a / path).read_bytes() == b"one\ntwo\nthree\n"


def test_what_is_appended_goes_past_no_newer_close(a: Path, b: Path) -> None:
    path = Path("models", "mixed")
    append(a / path, b"one\n")
    fd = os.open(a / path, os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"two\n")
    (b / path).write_bytes(b"other\n")
    with refused(errno.ESTALE):
        os.close(fd)
    for mount in (a, b):
        assert (mount / path).read_bytes() == b"other\n"


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_APPEND])
def test_a_descriptor_that_is_opened_anew_has_what_was_closed_before(
    a: Path, b: Path, flags: int
) -> None:
    """No name is looked up then."""
    path = Path("models", f"anew {flags}")
    (a / path).write_bytes(b"0\n")
    held = os.open(a / path, os.O_PATH)
    for number in range(1, 20):
        append(b / path, b"%d\n" % number)
        again = os.open(f"/proc/self/fd/{held}", flags)
        try:
            assert os.pread(again, 100, 0).endswith(b"\n%d\n" % number)
            if flags & os.O_APPEND:
                os.write(again, b"+\n")
        finally:
            os.close(again)
    os.close(held)
    lines = (b / path).read_bytes().split()
    assert [line for line in lines if line != b"+"] == [b"%d" % each for each in range(20)]
    assert lines.count(b"+") == (19 if flags & os.O_APPEND else 0)


# ---- what builds on what was there


def set_to_append(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)


@pytest.mark.parametrize("path", ["passthrough", "relay"])
def test_no_line_is_lost_of_files_that_are_set_to_append_later(path: str) -> None:
    """Each is there, or its close failed."""
    rounds, files = 12, 2
    with several(2, mode=path) as cluster:
        mounts = [each.mount for each in cluster.nodes]
        for number in range(files):
            (mounts[0] / "models" / str(number)).touch()
        ready = threading.Barrier(2, timeout=60)
        kept: list[tuple[int, bytes]] = []
        lost: list[int | None] = []

        def work(mount: Path, who: str) -> None:
            for number in range(rounds):
                ready.wait()
                line = f"{who} {number}\n".encode()
                try:
                    fd = os.open(mount / "models" / str(number % files), os.O_WRONLY)
                    try:
                        set_to_append(fd)
                        os.write(fd, line)
                    finally:
                        os.close(fd)
                except OSError as error:
                    lost.append(error.errno)
                else:
                    kept.append((number % files, line))

        threads = [
            threading.Thread(target=work, args=each) for each in zip(mounts, "ab", strict=True)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(kept) >= rounds
        assert set(lost) <= {errno.ESTALE}
        for number in range(files):
            lines = sorted(line for at, line in kept if at == number)
            for mount in mounts:
                found = (mount / "models" / str(number)).read_bytes()
                assert sorted(found.splitlines(keepends=True)) == lines


def test_what_changes_a_file_in_place_goes_past_no_newer_close(a: Path, b: Path) -> None:
    path = Path("models", "in place")
    (a / path).write_bytes(b"first " * 10)
    early, late = os.open(a / path, os.O_RDWR), os.open(b / path, os.O_RDWR)
    os.pwrite(late, b"late", 0)
    os.pwrite(early, b"early", 0)
    os.fsync(early)
    with refused(errno.ESTALE):
        os.fsync(late)
    with refused(errno.ESTALE):
        os.close(late)
    os.pwrite(early, b"EARLY", 0)
    os.close(early)
    for mount in (a, b):
        assert (mount / path).read_bytes() == b"EARLY" + (b"first " * 10)[5:]


@pytest.mark.parametrize("flags", [0, os.O_TRUNC])
def test_of_two_hosts_that_make_a_file_none_loses_what_it_wrote_in_silence(
    nodes: Several, a: Path, b: Path, flags: int
) -> None:
    """Where one of them is to cut what it finds, it may have come last."""
    path = Path("models", f"made by both {flags}")
    early, late, empty = (
        os.open(mount / path, os.O_CREAT | os.O_WRONLY | flags, 0o644) for mount in (a, b, b)
    )
    os.write(early, b"early")
    os.close(early)
    os.write(late, b"late")
    refused_ino = os.fstat(late).st_ino
    if flags:
        os.close(late)
    else:
        with refused(errno.ESTALE):
            os.close(late)
    with contextlib.suppress(OSError):
        os.close(empty)
    for mount in (a, b):
        assert (mount / path).read_bytes() == (b"late" if flags else b"early")
    if not flags:
        data = nodes.nodes[1].store / "data"
        wait_until(
            lambda: not list(data.glob(f"???/{refused_ino:016x}.*")),
            "the data that nobody is to see have gone",
            timeout_s=30.0,
        )


def test_a_file_that_both_make_and_nobody_fills_is_there(a: Path, b: Path) -> None:
    path = Path("models", "empty")
    early, late = (os.open(mount / path, os.O_CREAT | os.O_RDWR, 0o644) for mount in (a, b))
    os.close(early)
    os.close(late)
    assert (a / path).stat().st_ino == (b / path).stat().st_ino


# ---- a host that was away


def _told(node: Node) -> dict[str, Any]:
    """What it says of its cluster."""
    found: dict[str, Any] = control.call(node.store / "run" / "control.sock", "nodes")
    return found


@contextlib.contextmanager
def stopped(node: Node, witness: Node) -> Iterator[None]:
    """It is stopped, and inside the block taken for dead. No process is started meanwhile: it would
    close what it inherits of that mount, and wait."""
    assert node.pid is not None
    number = _told(node)["node"]

    def is_dead() -> bool:
        found = _told(witness)["nodes"]
        return next(each for each in found if each["number"] == number)["lease"] != "held"

    os.kill(node.pid, signal.SIGSTOP)
    try:
        wait_until(is_dead, "its lease has ended")
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def takes_changes(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        (directory / "probe").mkdir()
        (directory / "probe").rmdir()
        return True
    return False


def test_a_host_that_wakes_up_goes_past_no_newer_close(nodes: Several, a: Path, b: Path) -> None:
    names = ("changed", "cut", "made", "alone")
    for name in ("changed", "cut", "alone"):
        (a / "models" / name).write_bytes(b"first " * 100)
        assert (b / "models" / name).read_bytes()
    flags = {"changed": os.O_RDWR, "cut": os.O_WRONLY | os.O_TRUNC, "alone": os.O_RDWR}
    late = {
        name: os.open(b / "models" / name, flags.get(name, os.O_CREAT | os.O_WRONLY))
        for name in names
    }
    homeless = b / "models" / "homeless"
    homeless.mkdir()
    late["homeless"] = os.open(homeless / "f", os.O_CREAT | os.O_WRONLY)
    for fd in late.values():
        os.pwrite(fd, b"late", 0)
    with stopped(nodes.nodes[1], nodes.nodes[0]):
        for name in ("changed", "cut", "made"):
            (a / "models" / name).write_bytes(b"newer")
        (a / "models" / "homeless").rmdir()  # for nobody waits who is dead
    # What it had asked before it stood still may have come to its deadline meanwhile.
    wait_until(lambda: takes_changes(b / "models"), "it has heard the engine again")
    with refused(errno.ESTALE):
        os.fsync(late["homeless"])
    with refused(errno.ESTALE):
        os.close(late["homeless"])
    os.fsync(late["alone"])  # nobody went past it
    os.close(late["alone"])
    assert (a / "models" / "alone").read_bytes().startswith(b"late")
    for name in ("changed", "cut", "made"):
        with refused(errno.ESTALE):
            os.close(late[name])
        for mount in (a, b):
            assert (mount / "models" / name).read_bytes() == b"newer"
    (b / "models" / "changed").write_bytes(b"again")
    assert (a / "models" / "changed").read_bytes() == b"again"


@pytest.mark.parametrize("is_here", [True, False], ids=["brought", "elsewhere"])
def test_times_that_are_set_on_another_host_than_wrote_the_file_stay(
    nodes: Several, a: Path, b: Path, is_here: bool
) -> None:
    """Before its seal, and after it."""
    path = Path("models", f"times {is_here}")
    (b / path).write_bytes(b"of this host")
    if is_here:
        assert (a / path).read_bytes() == b"of this host"
    os.utime(a / path, (1_000, 2_000))
    for mount in (a, b):
        assert (mount / path).stat().st_mtime == 2_000
    with kvfs.Client(nodes.nodes[1].store) as client:
        sealed(client, f"/{path}")
    for mount in (a, b):
        assert (mount / path).stat().st_mtime == 2_000
        assert (mount / path).read_bytes() == b"of this host"
