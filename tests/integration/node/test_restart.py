"""What a restart keeps: after a clean stop everything, after a kill everything acknowledged."""

import contextlib
import errno
import hashlib
import itertools
import mmap
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.node.former_writers import AT_ONCE_BYTES
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, is_mounted, kvfs, wait_for_exit
from tests.integration.posix import (
    check,
    descriptor,
    handle_of,
    libc,
    link_descriptor,
    make_of,
    needs_root,
    open_handle,
    refused,
    signals,
    touch,
)

MIB = 1 << 20
NewNode = Callable[..., Node]


def fsck_finds_nothing(node: Node) -> None:
    """The node must be stopped."""
    done = kvfs("fsck", "--store", str(node.store), "--checksums")
    assert done.returncode == 0, done.stdout + done.stderr


def furnish(top: Path) -> None:
    """A bit of everything."""
    (top / "d" / "e").mkdir(parents=True)
    for n in range(20):
        touch(top / "d" / f"f{n}", 0o600 + n, bytes([n]) * (n * 5000))
    os.link(top / "d" / "f3", top / "d" / "e" / "linked")
    os.symlink("../d/f1", top / "d" / "symlink")
    make_of("fifo", top / "d" / "fifo")
    make_of("socket", top / "d" / "socket")
    touch(top / "d" / os.fsdecode(b"\xff\xfe"), 0o644, b"bytes")
    os.setxattr(top / "d" / "f1", "user.k", b"v\0v")
    os.setxattr(top / "d", "user.dir", b"w")
    os.utime(top / "d" / "f2", ns=(10**18 + 1, 10**18 + 2))
    (top / "d" / "e").chmod(0o2711)
    with open(top / "d" / "sparse", "wb") as sparse:
        sparse.truncate(1 << 40)
        sparse.seek(1 << 39)
        sparse.write(b"island")
    if os.geteuid() == 0:
        os.chown(top / "d" / "f5", 61001, 61002)
        make_of("device", top / "d" / "device")
    (top / "d" / "f19").unlink()
    (top / "d" / "f18").rename(top / "d" / "e" / "renamed")


def assert_same(top: Path, before: dict[str, tuple[object, ...]]) -> None:
    now = picture(top)
    assert now.keys() == before.keys()
    assert [(p, before[p], now[p]) for p in now if now[p] != before[p]] == []


def picture(top: Path) -> dict[str, tuple[object, ...]]:
    """All that is visible, but for access times of what reading touches."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted([top, *top.rglob("*")]):
        s = path.lstat()
        content: object = ""
        if stat.S_ISLNK(s.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(s.st_mode):
            with open(path, "rb") as file:
                content = hashlib.sha256(file.read(MIB)).hexdigest()
        attributes = tuple(
            (n, os.getxattr(path, n, follow_symlinks=False))
            for n in sorted(os.listxattr(path, follow_symlinks=False))
        )
        found[str(path)] = (
            *(s.st_ino, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_size),
            # A quiet file's blocks are those that its disk has given it by then.
            512 * s.st_blocks < s.st_size,
            *(s.st_mtime_ns, s.st_ctime_ns, s.st_rdev, content, attributes),
        )
    return found


def test_a_clean_stop_keeps_everything(new_node: NewNode) -> None:
    node = new_node()
    top = node.mount / "space"
    top.mkdir()
    furnish(top)
    before = picture(top)
    node.down()
    assert os.listdir(node.mount) == []
    fsck_finds_nothing(node)
    node.up()
    assert_same(top, before)
    node.down()
    fsck_finds_nothing(node)


def test_a_kill_keeps_everything_that_was_closed(new_node: NewNode) -> None:
    node = new_node()
    top = node.mount / "space"
    top.mkdir()
    furnish(top)
    before = picture(top)
    node.kill()
    with refused(errno.ENOTCONN):
        os.listdir(top)
    node.up()  # finds the stale mount and recovers it
    assert_same(top, before)
    node.kill()
    node.up()
    assert_same(top, before)
    node.down()
    fsck_finds_nothing(node)


def data_sizes(node: Node) -> set[int]:
    """The sizes of all data files in the store."""
    return {path.stat().st_size for path in (node.store / "data").rglob("*") if path.is_file()}


@needs_root  # the kernel is to forget
def test_a_nameless_file_that_got_a_name_stays(new_node: NewNode) -> None:
    node = new_node()
    content = {kind: os.urandom(40_000) for kind in ("models", "cache")}
    for kind, data in content.items():
        try:
            fd = os.open(node.mount / kind, os.O_TMPFILE | os.O_RDWR, 0o640)
        except OSError as error:
            assert node.mode == "libfuse"
            assert error.errno == errno.EOPNOTSUPP
            return
        os.write(fd, data)
        link_descriptor(fd, node.mount / kind / "named")
        os.close(fd)
    Path("/proc/sys/vm/drop_caches").write_text("2")
    with descriptor(node.mount / "models", os.O_TMPFILE | os.O_RDWR) as fd:
        os.write(fd, bytes(77_777))
    deadline = time.monotonic() + 30
    while 77_777 in data_sizes(node):  # what came to its end before has gone by then
        assert time.monotonic() < deadline, "a file that nobody can open stays"
        time.sleep(0.02)
    for kind, data in content.items():
        assert (node.mount / kind / "named").read_bytes() == data
    node.down()
    fsck_finds_nothing(node)


def test_sigterm_unmounts(new_node: NewNode) -> None:
    node = new_node()
    (node.mount / "models" / "f").write_bytes(b"data")
    assert node.pid is not None
    watch = os.pidfd_open(node.pid)
    os.kill(node.pid, signal.SIGTERM)
    wait_for_exit(watch)
    os.close(watch)
    node.pid = None
    assert not is_mounted(node.mount)
    node.up()
    assert (node.mount / "models" / "f").read_bytes() == b"data"


def test_what_was_open_when_the_daemon_died(new_node: NewNode) -> None:
    node = new_node()
    top = node.mount / "models"
    (top / "closed").write_bytes(b"published" * 1000)
    (top / "unlinked").write_bytes(bytes(4 * MIB))
    unlinked = os.open(top / "unlinked", os.O_RDWR)
    (top / "unlinked").unlink()
    written = os.open(top / "closed", os.O_RDWR)
    os.pwrite(written, b"PUBLISHED", 0)
    never = os.open(top / "never closed", os.O_CREAT | os.O_RDWR)
    os.write(never, bytes(4 * MIB))
    synced = os.open(top / "synced", os.O_CREAT | os.O_RDWR)
    os.write(synced, b"synced" * 1000)
    os.fsync(synced)
    mapped = os.open(top / "mapped", os.O_CREAT | os.O_RDWR)
    os.ftruncate(mapped, MIB)
    view = mmap.mmap(mapped, MIB)
    os.close(mapped)
    view[:5] = b"store"
    node.kill()
    with refused(errno.ENOTCONN):
        os.fstat(unlinked)
    for fd in (unlinked, written, never, synced):
        try:
            os.close(fd)
        except OSError:
            pass  # the kernel says so that the daemon is gone
    view.close()
    node.up()
    assert not (top / "unlinked").exists()
    assert (top / "closed").stat().st_size == 9000
    assert (top / "closed").read_bytes()[9:] == b"published" * 999
    assert (top / "synced").read_bytes() == b"synced" * 1000
    assert (top / "mapped").stat().st_size == MIB
    node.down()
    fsck_finds_nothing(node)


def test_a_large_file_that_was_open_before_is_opened_once_it_is_copied(new_node: NewNode) -> None:
    node = new_node()
    path, content = node.mount / "models" / "large", b"first" * (AT_ONCE_BYTES // 5 + MIB)
    path.write_bytes(content)
    old = os.open(path, os.O_RDWR)
    node.kill()
    node.up()
    with open(path, "r+b") as new:
        assert node.status()["former_writers"] == {"files": 0, "bytes": 0}
        with contextlib.suppress(OSError):  # relayed: the mount has gone
            os.pwrite(old, b"LATE!", 0)
        assert new.read(5) == b"first"
    with contextlib.suppress(OSError):
        os.close(old)
    assert path.stat().st_size == len(content)


OLD_WRITERS = """
import mmap, os, sys
top, size = sys.argv[1], int(sys.argv[2])
flags = {"written": os.O_RDWR, "appended": os.O_WRONLY | os.O_APPEND, "sparse": os.O_RDWR}
fds = {name: os.open(f"{top}/{name}", each) for name, each in flags.items()}
mapped = os.open(f"{top}/mapped", os.O_RDWR)
view = mmap.mmap(mapped, size)
os.close(mapped)  # the mapping goes on
view[:5] = b"early"
os.write(fds["appended"], b"early")
print("ready", flush=True)
sys.stdin.readline()
for fd in fds.values():
    try:
        os.write(fd, b"LATE")
        os.close(fd)
    except OSError as error:
        print(error)  # relayed: the mount has gone
print("wrote", flush=True)
view[:4] = b"LATE"
view.close()
"""


@pytest.mark.parametrize("end", ["kill", "down", "umount"])
def test_what_was_open_before_changes_nothing_after(new_node: NewNode, end: str) -> None:
    """By passthrough the kernel goes on writing for whoever has a file open, mount or not."""
    node = new_node()
    top, size = node.mount / "models", 20_000
    for name in ("written", "appended", "mapped"):
        (top / name).write_bytes(b"first" * (size // 5))
    with open(top / "sparse", "wb") as sparse:
        sparse.truncate(1 << 40)
        os.pwrite(sparse.fileno(), b"island", 1 << 39)
    program = subprocess.Popen(
        [sys.executable, "-c", OLD_WRITERS, top, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    with program:
        assert program.stdout.readline() == "ready\n"
        if end == "umount":
            assert kvfs("umount", "--lazy", "--store", str(node.store)).returncode == 0
            assert kvfs("mount", "--store", str(node.store)).returncode == 0
        else:
            getattr(node, end)()
            node.up()
        before = {name: (top / name).read_bytes() for name in ("written", "appended", "mapped")}
        assert before["written"] == b"first" * (size // 5)
        assert before["appended"] == b"first" * (size // 5) + b"early"
        program.stdin.write("\n")
        program.stdin.flush()
        while program.stdout.readline() not in ("wrote\n", ""):
            pass
        program.wait(30)
    assert {name: (top / name).read_bytes() for name in before} == before
    with open(top / "sparse", "rb") as sparse:
        assert os.pread(sparse.fileno(), 4, 0) == bytes(4)
        assert os.pread(sparse.fileno(), 6, 1 << 39) == b"island"
        assert os.fstat(sparse.fileno()).st_blocks < 1 << 10
    with open(top / "written", "r+b") as again:
        again.write(b"new")
    assert (top / "written").read_bytes()[:8] == b"newstfir"
    node.down()
    fsck_finds_nothing(node)


WRITER = """
import os, sys
top, worker = sys.argv[1], sys.argv[3]
log = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def note(what, n):
    os.write(log, f"{what} {worker}-{n}\\n".encode())
os.makedirs(f"{top}/{worker}", exist_ok=True)
n = 0
while True:
    path = f"{top}/{worker}/{worker}-{n}"
    note("store", n)
    with open(f"{path}.tmp", "wb") as out:
        out.write(f"{worker}-{n} ".encode() * 4000)
    os.replace(f"{path}.tmp", path)
    note("stored", n)
    if n % 3 == 2:
        note("remove", n - 1)
        os.unlink(f"{top}/{worker}/{worker}-{n - 1}")
        note("removed", n - 1)
    n += 1
"""


def test_kills_under_load(new_node: NewNode, tmp_path: Path) -> None:
    """Acknowledged is acknowledged: over several kills nothing is lost, torn or leaked."""
    node = new_node()
    top = node.mount / "load"
    top.mkdir()
    log = tmp_path / "log"
    for turn in range(4):
        command = [sys.executable, "-c", WRITER, str(top), str(log)]
        workers = [
            subprocess.Popen([*command, f"turn{turn}w{n}"], stderr=subprocess.DEVNULL)
            for n in range(3)
        ]
        wait_for_lines(log, (turn + 1) * 240)
        node.kill()
        for worker in workers:
            assert worker.wait(30) != 0  # the mount is gone under it
        node.up()
        check_log(top, log)
    node.down()
    fsck_finds_nothing(node)


def wait_for_lines(log: Path, count: int) -> None:
    for _ in range(6000):
        if log.exists() and log.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)
    pytest.fail("the writers do not get on")


def check_log(top: Path, log: Path) -> None:
    last = {}
    for line in log.read_text().splitlines():
        what, name = line.split()
        last[name] = what
    for name, what in last.items():
        path = top / name.split("-")[0] / name
        whole = f"{name} ".encode() * 4000
        if what == "stored":
            assert path.read_bytes() == whole, name
        elif what == "removed":
            assert not path.exists(), name
        elif path.exists():  # not acknowledged: there or not, but never in part
            assert path.read_bytes() == whole, name


@needs_root
def test_handles_outlive_restarts(new_node: NewNode) -> None:
    """What an NFS server keeps: numbers stay, LOOKUP of `.` and `..` finds the way back."""
    node = new_node()
    top = node.mount / "models"
    path = top / "a" / "b" / "file"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"by handle")
    gone = touch(top / "a" / "gone")
    handles = [handle_of(p) for p in (path, path.parent, top, node.mount, gone)]
    for stop in (node.down, node.kill):
        stop()
        node.up()
        if gone.exists():
            gone.unlink()
        fd = open_handle(node.mount, handles[0], os.O_RDONLY)
        assert os.read(fd, 100) == b"by handle"
        os.close(fd)
        directory = open_handle(node.mount, handles[1], os.O_RDONLY | os.O_DIRECTORY)
        assert os.listdir(directory) == ["file"]
        assert os.readlink(f"/proc/self/fd/{directory}") == str(path.parent)
        assert os.stat("..", dir_fd=directory).st_ino == path.parent.parent.stat().st_ino
        os.close(directory)
        with refused(errno.ESTALE):
            open_handle(node.mount, handles[4], os.O_RDONLY)


def test_a_full_cache_evicts_and_a_full_durable_namespace_says_so(new_node: NewNode) -> None:
    capacity = 256 * MIB
    node = new_node("--capacity", str(capacity))
    cache, durable = node.mount / "cache", node.mount / "models"
    size = 4 * MIB
    script = (
        "import os, sys\n"
        "for n in range(40):\n"
        "    path = f'{sys.argv[1]}/{sys.argv[2]}-{n}'\n"
        f"    open(path + '.tmp', 'wb').write(bytes([n]) * {size})\n"
        "    os.replace(path + '.tmp', path)\n"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", script, cache, f"w{n}"], stderr=subprocess.PIPE)
        for n in range(4)
    ]
    errors = [w.communicate(timeout=120)[1].decode() for w in workers]
    assert [w.returncode for w in workers] == [0] * 4, "".join(errors)
    left = [p for p in cache.iterdir() if not p.name.endswith(".tmp")]
    assert 0 < len(left) < 160
    for path in left:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue  # evicted since
        assert len(data) == size
        assert data == data[:1] * size
    found = os.statvfs(node.mount)
    assert (found.f_blocks - found.f_bfree) * found.f_frsize <= capacity
    stored = []
    with refused(errno.ENOSPC):
        for n in range(100):
            path = durable / f"f{n}"
            with descriptor(path, os.O_CREAT | os.O_WRONLY) as fd:
                for _ in range(4):
                    os.write(fd, bytes([n]) * MIB)
            stored.append(path)
    assert len(stored) * size > capacity // 2
    for n, path in enumerate(stored):
        assert path.read_bytes() == bytes([n]) * size


def test_attributes_fill_the_store_too(new_node: NewNode) -> None:
    durable = new_node("--capacity", str(40 * MIB)).mount / "models"
    set_here = 0
    with refused(errno.ENOSPC):
        for number in range(4000):
            path = durable / f"{number}"
            path.touch()
            os.setxattr(path, "user.a", bytes(60_000))
            set_here += 1
    assert set_here > 500
    further = itertools.count()

    def is_full() -> bool:
        """Once a new base has taken the place of the journal, there is room again for some."""
        number = next(further)
        path, name = durable / f"{number % set_here}", f"user.b{number // set_here}"
        try:
            os.setxattr(path, name, b"x")
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return True
        with contextlib.suppress(OSError):
            os.setxattr(path, name, bytes(60_000))
        return False

    wait_until(is_full, "not one byte more is taken")
    assert os.getxattr(durable / "0", "user.a") == bytes(60_000)
    os.removexattr(durable / "0", "user.a")
    (durable / "1").unlink()


@pytest.mark.parametrize("restart", [True, False])
def test_no_signal_ends_a_create_that_waits_for_room(new_node: NewNode, *, restart: bool) -> None:
    cache = new_node("--capacity", str(32 * MIB)).mount / "cache"
    flags = os.O_CREAT | os.O_WRONLY
    with signals(0.002, restart=restart):
        for number in range(80):
            fd = check(libc.open(os.fsencode(cache / f"b{number}"), flags, 0o644), number)
            os.write(fd, bytes(MIB))
            os.close(fd)
