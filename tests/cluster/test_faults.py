"""What is left of files, and what their readers are told, when nodes, the metadata server or the
network between them fail.

Durable files are all there and whole, or say for how long they cannot be had (EIO); those of a
cache are whole or a miss (ENOENT). Nobody hangs.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.engine import HOST as ENGINE
from tests.cluster.histories.hand import Hand
from tests.cluster.histories.values import content
from tests.cluster.waiting import wait_until
from tests.fault.disks import disk
from tests.integration.harness import kvfs

NO_LONGER_S = 60.0
"""Deadlines are some ten seconds; who hangs has none. Machines are slow."""
_numbers = itertools.count()
_FIFREEZE = 0xC0045877
_FITHAW = 0xC0045878


@pytest.fixture(scope="module")
def small_disk(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What node 2 has its store on."""
    with disk(tmp_path_factory.mktemp("disk"), "ext4", 200 << 20) as made:
        (root / "2").mkdir()
        (made.mountpoint / "store").mkdir()
        (root / "2" / "store").symlink_to(made.mountpoint / "store")
        yield made.mountpoint


@pytest.fixture(scope="module")
def running(root: Path, small_disk: Path) -> Iterator[Cluster]:
    assert small_disk.is_mount()
    with Cluster(root, 3) as made:
        (made[1].mount / "kept").mkdir()
        sure = ("create", "sure", "--replicas", "1", "--acknowledge", "sync")
        done = kvfs("namespace", *sure, "--store", str(made[1].store))
        assert done.returncode == 0, done.stderr
        for host, namespace in itertools.product(made, ("kept", "sure")):
            wait_until((host.mount / namespace).is_dir, "all see the durable namespaces")
        yield made


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """Whole, before each test."""
    for name in (ENGINE, "1", "2", "3"):
        running.heal(name)
    running.engine.signal(signal.SIGCONT)
    running.engine.start()
    for host in running:
        host.up()
    for host in running:
        for namespace in ("cache", "kept", "sure"):
            wait_until(lambda p=host.mount / namespace: can_write(p), "all nodes take writes")
    return running


def can_write(directory: Path) -> bool:
    path = directory / f"probe-{next(_numbers)}"
    with contextlib.suppress(OSError):
        path.write_bytes(b"x")
        path.unlink()
        return True
    return False


def made(cluster: Cluster, namespace: str, size: int = 100_000, by: int = 1) -> tuple[str, bytes]:
    """A new file that all see, and what is in it; only its maker has the bytes."""
    name, data = f"{namespace}/file-{next(_numbers)}", os.urandom(size)
    (cluster[by].mount / name).write_bytes(data)
    for host in cluster:
        wait_until((host.mount / name).exists, "all see the file")
    return name, data


def within(do: Callable[[], object]) -> object:
    """What a call gives or raises, as long as it does not hang."""
    answers: list[object] = []

    def work() -> None:
        try:
            answers.append(do())
        except OSError as error:
            answers.append(error.errno)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(NO_LONGER_S)
    assert answers, "it hangs"
    return answers[0]


def read(cluster: Cluster, number: int, name: str) -> object:
    """The bytes, or the number of the error."""
    return within((cluster[number].mount / name).read_bytes)


def copied(cluster: Cluster, name: str, data: bytes) -> None:
    """Node 2 reads the file, and node 3 knows that it has it: its copy counts once it is on the
    disk and recorded."""
    assert read(cluster, 2, name) == data
    asked = ("where", "--json", f"/{name}", "--store", str(cluster[3].store))

    def is_known() -> bool:
        done = kvfs(*asked, inside=cluster[3].inside)
        assert done.returncode == 0, done.stderr
        return "2" in [each["name"] for each in json.loads(done.stdout)["copies"]]

    wait_until(is_known, "the copy of node 2 is recorded")


def settles(cluster: Cluster, number: int, name: str, wanted: object) -> None:
    """Until a read gives this: in between it may be an error or a miss, never other bytes."""
    allowed = (wanted, errno.ENOENT, errno.EIO)

    def is_so() -> bool:
        found = read(cluster, number, name)
        assert found in allowed, f"{name} on {number}: {str(found)[:80]}"
        return found == wanted

    wait_until(is_so, f"{name} on node {number}", 2 * NO_LONGER_S)


# ---- nodes


def test_what_another_one_has_is_read_after_a_kill(cluster: Cluster) -> None:
    name, data = made(cluster, "cache")
    copied(cluster, name, data)
    cluster[1].kill()
    settles(cluster, 3, name, data)


def test_what_only_a_killed_node_has_is_a_miss_or_waits(cluster: Cluster) -> None:
    missed, _ = made(cluster, "cache")
    kept, data = made(cluster, "kept")
    cluster[1].kill()
    settles(cluster, 2, missed, errno.ENOENT)
    settles(cluster, 2, kept, errno.EIO)
    cluster[1].up()
    settles(cluster, 2, kept, data)


def test_a_node_that_comes_back_has_what_is_new(cluster: Cluster) -> None:
    changed, old = made(cluster, "kept")
    removed, _ = made(cluster, "kept")
    assert read(cluster, 2, changed) == old
    assert read(cluster, 2, removed) != errno.ENOENT
    cluster[2].kill()
    new = os.urandom(len(old))
    (cluster[1].mount / changed).write_bytes(new)
    (cluster[1].mount / removed).unlink()
    cluster[2].up()
    assert read(cluster, 2, changed) == new
    assert read(cluster, 2, removed) == errno.ENOENT


# ---- the metadata server


def test_a_killed_engine_loses_nothing(cluster: Cluster) -> None:
    names = dict(made(cluster, "kept") for _ in range(3))
    cluster.engine.kill()
    mounts = [host.mount for host in cluster]
    within(lambda: [os.listdir(mount / "cache") for mount in mounts])
    with ThreadPoolExecutor() as pool:
        written = [
            pool.submit(within, partial((m / "kept" / "a").write_bytes, b"")) for m in mounts
        ]
    assert [each.result() for each in written] == [errno.EROFS] * len(mounts)
    cluster.engine.start()
    for name, data in names.items():
        settles(cluster, 1, name, data)
        settles(cluster, 3, name, data)


def test_a_hung_engine_hangs_nobody(cluster: Cluster) -> None:
    kept, data = made(cluster, "kept")
    missed, _ = made(cluster, "cache")
    copied(cluster, kept, data)
    cluster.engine.signal(signal.SIGSTOP)
    wait_until(lambda: read(cluster, 2, missed) == errno.ENOENT, "a cache's file is a miss")
    assert read(cluster, 2, kept) == data
    cluster.engine.signal(signal.SIGCONT)
    settles(cluster, 2, kept, data)


# ---- the network


@pytest.mark.parametrize("ways", ["both", "in", "out"])
def test_who_is_cut_off_serves_nothing_old_where_it_is_to_refuse(
    cluster: Cluster, ways: str
) -> None:
    place = ("--store", str(cluster[1].store))
    if not (cluster[1].mount / "fresh").exists():
        done = kvfs("namespace", "create", "fresh", "--without-engine", "refuse", *place)
        assert done.returncode == 0, done.stderr
    kept, old = made(cluster, "fresh")
    assert read(cluster, 3, kept) == old
    cluster.partition(3, ways)  # type: ignore[arg-type]
    # What a node has to itself it reads for a moment yet: nothing is old before others change it.
    new = os.urandom(len(old))
    wait_until(lambda: written_over(cluster[1].mount / kept, new), "the others go on")
    settles(cluster, 3, kept, errno.EIO)
    assert read(cluster, 3, kept) == errno.EIO
    cluster.heal(3)
    settles(cluster, 3, kept, new)


def test_what_a_close_could_not_record_goes_past_nobody(cluster: Cluster) -> None:
    """It is recorded when the node is heard again, where nobody else has written meanwhile."""
    old, _ = made(cluster, "kept")
    new, alone = (f"kept/file-{next(_numbers)}" for _ in range(2))
    here, there = cluster[1].mount, cluster[2].mount
    hands = [Hand() for _ in range(3)]  # this process has children, and each may close its files
    files = [
        hands[0].open(here / old),
        hands[1].open(here / new),
        hands[2].reserve(here / alone),
    ]
    cluster.partition(1)
    with ThreadPoolExecutor() as pool:
        work = [partial(hand.publish, file, 4) for hand, file in zip(hands, files, strict=True)]
        assert set(pool.map(within, work)) <= {errno.EIO, errno.EROFS}
    for name in (old, new):
        wait_until(lambda: written_over(there / name, b"there"), "the others go on")  # noqa: B023
    cluster.heal(1)
    settles(cluster, 2, alone, content(4))
    for host in cluster:
        for name in (old, new):
            settles(cluster, host.number, name, b"there")
    for hand in hands:
        hand.close()


def written_over(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError):
        path.write_bytes(data)
        return True
    return False


@pytest.mark.parametrize("ways", ["both", "in", "out"])
def test_what_a_close_promised_copies_of_is_whole_on_both_sides_of_a_cut(
    cluster: Cluster, ways: str
) -> None:
    acknowledged = dict(made(cluster, "sure", by=number) for number in (1, 3))
    cluster.partition(3, ways)  # type: ignore[arg-type]
    for name, data in acknowledged.items():
        settles(cluster, 1, name, data)
        settles(cluster, 2, name, data)
    with ThreadPoolExecutor() as pool:
        apart = pool.submit(written, cluster, 3)
        wait_until(lambda: keep(acknowledged, written(cluster, 1)), "closes promise copies again")
        assert apart.result() is None, "nobody took a copy"
    cluster.heal(3)
    for host in cluster:
        for name, data in acknowledged.items():
            settles(cluster, host.number, name, data)


def keep(acknowledged: dict[str, bytes], file: tuple[str, bytes] | None) -> bool:
    acknowledged.update([file] if file else [])
    return file is not None


def written(cluster: Cluster, number: int) -> tuple[str, bytes] | None:
    """A new file whose close said that its copies are there; None: it did not."""
    name, data = f"sure/file-{next(_numbers)}", os.urandom(100_000)
    done = within(partial((cluster[number].mount / name).write_bytes, data))
    return (name, data) if done == len(data) else None


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_read_under_way_goes_on_from_another_holder(cluster: Cluster, how: str) -> None:
    """Of a file that is read while it comes: neither an end nor an error, nor another byte."""
    name, data = made(cluster, "cache", 68 << 20)
    copied(cluster, name, data)
    for number in (1, 2):
        cluster.network.limit(str(number), 200)
    try:
        with (cluster[3].mount / name).open("rb", buffering=0) as file:
            parts = [file.read(8 << 20)]
            if how == "killed":
                cluster[1].kill()
            else:
                cluster.partition(1)
            assert within(lambda: parts.extend(iter(partial(file.read, 1 << 20), b""))) is None
    finally:
        for number in (1, 2):
            cluster.network.limit(str(number), 0)
    is_whole = b"".join(parts) == data
    assert is_whole
    (cluster[3].mount / name).unlink()  # node 2 has little room


@pytest.mark.parametrize("namespace", ["cache", "kept"])
def test_what_a_killed_node_was_giving_is_opened_as_what_nobody_has(
    cluster: Cluster, namespace: str
) -> None:
    """Also while somebody has the file open, of which the rest will not come."""
    name, data = made(cluster, namespace, 68 << 20)
    cluster.network.limit("1", 200)
    try:
        with (cluster[2].mount / name).open("rb", buffering=0) as file:
            assert file.read(1 << 20) == data[: 1 << 20]
            cluster[1].kill()
            ends = (errno.EIO, errno.ENOENT)
            assert within(lambda: [*iter(partial(file.read, 1 << 20), b"")]) in ends
            gone = errno.ENOENT if namespace == "cache" else errno.EIO
            for _ in range(5):
                assert within(lambda: os.open(cluster[2].mount / name, os.O_RDONLY)) == gone
                assert read(cluster, 2, name) == gone
    finally:
        cluster.network.limit("1", 0)
    cluster[1].up()
    if namespace == "kept":
        settles(cluster, 2, name, data)
        (cluster[2].mount / name).unlink()  # node 2 has little room


def test_holders_that_cannot_be_reached_are_a_miss(cluster: Cluster) -> None:
    """The maker is cut off: the others know the name, and nobody has the bytes."""
    missed, _ = made(cluster, "cache")
    kept, data = made(cluster, "kept")
    cluster.partition(1)
    settles(cluster, 2, missed, errno.ENOENT)
    settles(cluster, 2, kept, errno.EIO)
    cluster.heal(1)
    settles(cluster, 2, kept, data)


# ---- disks


def test_bytes_that_changed_on_the_disk_are_never_read_elsewhere(cluster: Cluster) -> None:
    missed, _ = made(cluster, "cache", 9_000_000)
    kept, data = made(cluster, "kept", 9_000_000)
    for name in (missed, kept):
        sealed(cluster, name)
        spoil(cluster, name)
    settles(cluster, 2, missed, errno.ENOENT)
    settles(cluster, 2, kept, errno.EIO)
    assert data  # it is lost, and said to be


def test_a_disk_that_hangs_stops_its_own_node_alone(cluster: Cluster, small_disk: Path) -> None:
    name, data = made(cluster, "kept", by=2)
    assert read(cluster, 1, name) == data
    with frozen(small_disk):
        settles(cluster, 3, name, data)
        assert within(lambda: can_write(cluster[1].mount / "kept"))
    settles(cluster, 2, name, data)
    wait_until(lambda: can_write(cluster[2].mount / "kept"), "it takes writes again")


def test_a_disk_that_stalls_again_and_again_loses_nothing(
    cluster: Cluster, small_disk: Path
) -> None:
    with stalling(small_disk):
        files = [made(cluster, "kept", 1_000_000, by=2) for _ in range(5)]
        for name, data in files:
            settles(cluster, 1, name, data)
    for name, data in files:
        settles(cluster, 2, name, data)
        settles(cluster, 3, name, data)


@contextlib.contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """What is written to it waits. No program does it: a child closes what others have open on the
    mount, and would wait for the disk that it is to thaw."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _FIFREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, _FITHAW, 0)
    finally:
        os.close(fd)


@contextlib.contextmanager
def stalling(disk: Path) -> Iterator[None]:
    """What is written to it waits, most of the time."""
    is_over = threading.Event()

    def stall() -> None:
        while not is_over.wait(0.2):
            with frozen(disk):
                is_over.wait(0.5)

    thread = threading.Thread(target=stall)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_full_disk_makes_room_or_says_so(cluster: Cluster) -> None:
    """More than node 2 has room for is read there: each file is whole, the oldest go."""
    files = [made(cluster, "cache", 30 << 20) for _ in range(10)]
    for name, data in files:
        found = read(cluster, 2, name)
        assert found in (data, errno.ENOENT, errno.ENOSPC), f"{name}: {str(found)[:80]}"
    for name, data in files:
        assert read(cluster, 1, name) == data, "it went elsewhere too"
    kept, data = made(cluster, "kept", 300 << 20)
    assert read(cluster, 2, kept) in (errno.ENOSPC, data)
    assert read(cluster, 3, kept) == data


def data_file(cluster: Cluster, name: str) -> Path:
    """Of the file on node 1."""
    number = (cluster[1].mount / name).stat().st_ino
    found = list((cluster[1].store / "data").rglob(f"{number:016x}.*"))
    assert len(found) == 1
    return found[0]


def sealed(cluster: Cluster, name: str) -> None:
    """Until its checksums are recorded: what is not sealed is what its data file says."""

    def is_sealed() -> bool:
        done = kvfs("stat", f"/{name}", "--json", "--store", str(cluster[1].store))
        return done.returncode == 0 and bool(json.loads(done.stdout)["xxh3_128"])

    wait_until(is_sealed, "the file is sealed")


def spoil(cluster: Cluster, name: str) -> None:
    """A bit in its second chunk; the times stay, as the disk would have it."""
    path = data_file(cluster, name)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(5_000_000)
        byte = file.read(1)[0]
        file.seek(5_000_000)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
