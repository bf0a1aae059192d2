"""Whose the directories of a store may be, and which files in them are opened."""

import errno
import fcntl
import os
import signal
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.commands.models import bench_file
from kvfs.base import private_file
from kvfs.base.errors import AccessDenied, Invalid
from kvfs.base.media import Place, parse_shared
from kvfs.datastore import places
from kvfs.datastore.files import DataFiles
from kvfs.datastore.kernel import safe_open
from kvfs.datastore.layout import create_store, open_store
from kvfs.datastore.tiered_files import TieredFiles
from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.posix import ALICE, make_of, needs_root, refused

pytestmark = needs_root
INO = 3 << 48 | 5


@pytest.fixture(params=["openat2", "by component"])
def files(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DataFiles]:
    if request.param == "openat2" and not safe_open._is_supported():
        pytest.skip("this kernel has no openat2, or a filter forbids it")
    monkeypatch.setattr(safe_open, "_is_supported", lambda: request.param == "openat2")
    made = DataFiles(create_store(tmp_path / "store").data)
    fd = made.create(INO, 0)
    os.write(fd, b"ours")
    os.close(fd)
    yield made
    made.close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"root's alone")
    path.chmod(0o600)
    return path


def test_a_data_file_is_opened(files: DataFiles) -> None:
    fd = files.open(INO, 0, os.O_RDWR)
    assert os.pread(fd, 10, 0) == b"ours"
    assert not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(FileNotFoundError):
        files.open(INO, 1, os.O_RDONLY)


def test_no_link_is_followed_to_a_data_file(
    files: DataFiles, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(files.path(INO, 0))
    path.unlink()
    path.symlink_to(secret)
    with refused(errno.EIO):
        files.open(INO, 0, os.O_RDWR)
    assert str(path) in caplog.text
    assert "symbolic link" in caplog.text
    assert files.stat(INO, 0).st_size != secret.stat().st_size


def test_no_link_is_followed_to_a_directory_of_data_files(
    files: DataFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near = Path(files.path(INO, 0)).parent
    near.rename(tmp_path / "elsewhere")
    near.symlink_to(tmp_path / "elsewhere")
    with refused(errno.EIO):
        files.open(INO, 0, os.O_RDONLY)
    with refused(errno.EIO):
        files.create(INO + 1, 0)
    assert os.listdir(tmp_path / "elsewhere") == [f"{INO:016x}.0"]
    assert "symbolic link" in caplog.text


def test_a_file_of_somebody_else_is_no_data_file(
    files: DataFiles, caplog: pytest.LogCaptureFixture
) -> None:
    os.chown(files.path(INO, 0), ALICE, ALICE)
    with refused(errno.EIO):
        files.open(INO, 0, os.O_RDONLY)
    assert f"uid {ALICE}" in caplog.text


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_DIRECT])
@pytest.mark.parametrize("kind", ["directory", "fifo", "socket", "device", "lost device"])
def test_what_is_no_regular_file_is_no_data_file(
    files: DataFiles, kind: str, flags: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A FIFO has whoever opens it wait for the other side."""
    path = Path(files.path(INO, 0))
    path.unlink()
    if kind == "lost device":
        os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(254, 9))
    else:
        make_of(kind, path)
    with refused(errno.EIO):
        files.open(INO, 0, flags)
    assert f"the data file {path} is no regular file" in caplog.text


def test_a_descriptor_of_a_data_file_waits_where_its_reader_has_to(files: DataFiles) -> None:
    fd = files.open(INO, 0, os.O_RDONLY)
    assert os.get_blocking(fd)
    os.close(fd)


def test_a_leased_data_file_is_opened_once_the_lease_is_given_back(files: DataFiles) -> None:
    leased = files.open(INO, 0, os.O_RDWR)
    asked = threading.Event()
    # Any thread of the process may be the one that the kernel tells.
    before = signal.signal(signal.SIGIO, lambda *_: asked.set())
    try:
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(BlockingIOError):
            files.open(INO, 0, os.O_RDONLY | os.O_NONBLOCK)
        assert asked.wait(30)
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(files.open, INO, 0, os.O_RDONLY)
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            fd = opened.result()
    finally:
        signal.signal(signal.SIGIO, before)
    assert os.pread(fd, 10, 0) == b"ours"
    assert os.get_blocking(fd)
    os.close(fd)
    os.close(leased)


def test_the_owner_that_a_shared_directory_declares_is_believed(tmp_path: Path) -> None:
    """Of a filesystem that takes root for somebody else."""
    store = create_store(tmp_path / "store")
    root = tmp_path / "shared"
    root.mkdir()
    os.chown(root, ALICE, ALICE)
    with pytest.raises(AccessDenied, match=rf"{root} belongs to uid {ALICE}.*shared directory"):
        places.prepare(store, [parse_shared(f"big={root}")], "a cluster")
    place = parse_shared(f"big={root}:owner={ALICE}")
    assert parse_shared(f"big={str(place).partition('=')[2]}") == place
    places.prepare(store, [place], "a cluster")
    files = TieredFiles(store)
    files.use({3: place.root})
    fd = files.create(INO, 0)
    os.fchown(fd, ALICE, ALICE)
    os.close(fd)
    os.close(files.open(INO, 0, os.O_RDONLY))
    files.close()


def test_a_tier_of_somebody_else_is_refused(tmp_path: Path) -> None:
    store = create_store(tmp_path / "store")
    root = tmp_path / "tier"
    root.mkdir()
    os.chown(root, ALICE, ALICE)
    with pytest.raises(AccessDenied, match=rf"{root} belongs to uid {ALICE}.*the tier"):
        places.prepare(store, [Place("ssd", str(root), 1 << 30)], "")
    assert os.listdir(root) == []


def test_a_tier_that_somebody_else_made_since_the_start_is_not_used(tmp_path: Path) -> None:
    """A tmpfs is empty after a boot; then a client is the first to look."""
    store = create_store(tmp_path / "store")
    root = tmp_path / "tier"
    places.prepare(store, [Place("ssd", str(root), 1 << 30)], "")
    os.chown(root, ALICE, ALICE)
    with pytest.raises(AccessDenied, match=f"uid {ALICE}"):
        TieredFiles(store)


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_tier_that_others_may_write_in_is_refused(tmp_path: Path, mode: int) -> None:
    store = create_store(tmp_path / "store")
    root = tmp_path / "tier"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(AccessDenied, match=f"chmod go-w {root}"):
        places.prepare(store, [Place("ssd", str(root), 1 << 30)], "")


def test_a_store_of_somebody_else_is_refused_to_whoever_opens_it(tmp_path: Path) -> None:
    store = create_store(tmp_path / "store")
    os.chown(store.root, ALICE, ALICE)
    with pytest.raises(AccessDenied, match=rf"{store.root} belongs to uid {ALICE}"):
        open_store(store.root)
    with pytest.raises(AccessDenied, match=rf"{store.root} belongs to uid {ALICE}"):
        create_store(store.root)


def test_a_store_that_others_may_write_in_is_refused(tmp_path: Path) -> None:
    store = create_store(tmp_path / "store")
    store.root.chmod(0o770)
    with pytest.raises(AccessDenied, match=f"chmod go-w {store.root}"):
        open_store(store.root)


def test_an_empty_directory_is_closed_to_others_when_it_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    assert create_store(tmp_path / "store").root.stat().st_mode & 0o777 == 0o700
    (tmp_path / "common").mkdir()
    (tmp_path / "common").chmod(0o1777)
    with pytest.raises(AccessDenied, match="name a directory below it"):
        create_store(tmp_path / "common")
    assert (tmp_path / "common").stat().st_mode & 0o7777 == 0o1777


def test_what_others_could_put_in_its_place_is_no_store(tmp_path: Path) -> None:
    above = tmp_path / "above"
    store = create_store(above / "deep" / "store")
    assert above.stat().st_mode & 0o777 == 0o755
    above.chmod(0o777)
    with pytest.raises(AccessDenied, match=f"chmod go-w {above}"):
        open_store(store.root)
    above.chmod(0o1777)
    open_store(store.root)  # what is root's in it stays
    os.chown(above, ALICE, ALICE)
    with pytest.raises(AccessDenied, match=f"{above} belongs to uid {ALICE}"):
        open_store(store.root)
    os.chown(above, 0, 0)
    os.chown(above / "deep", ALICE, ALICE)
    with pytest.raises(AccessDenied, match=f"{above / 'deep'} belongs to uid {ALICE}"):
        open_store(store.root)


def test_a_link_to_a_store_counts_by_where_it_leads(tmp_path: Path) -> None:
    common = tmp_path / "common"
    store = create_store(common / "store")
    (tmp_path / "by-root").symlink_to("common/../common/store")
    assert open_store(tmp_path / "by-root").identity == store.identity
    (store.data).rename(tmp_path / "data")
    store.data.symlink_to(tmp_path / "data")
    open_store(store.root)
    os.chown(tmp_path / "data", ALICE, ALICE)
    with pytest.raises(AccessDenied, match=f"uid {ALICE}"):
        open_store(store.root)
    os.chown(tmp_path / "data", 0, 0)
    common.chmod(0o1777)
    (common / "link").symlink_to(store.root)
    os.lchown(common / "link", ALICE, ALICE)
    with pytest.raises(AccessDenied, match=f"{common / 'link'} belongs to uid {ALICE}"):
        open_store(common / "link")


def test_fsck_takes_no_link_for_a_data_file(tmp_path: Path, secret: Path) -> None:
    node = Node.make(best_mode())
    try:
        node.up()
        path = node.mount / "models" / "file"
        path.write_bytes(b"x" * secret.stat().st_size)
        name = f"{path.stat().st_ino:016x}.0"
        node.down()
        (data,) = (node.store / "data").glob(f"???/{name}")
        data.rename(tmp_path / "away")
        data.symlink_to(secret)
        done = kvfs("fsck", "--repair", "--store", str(node.store))
        assert done.returncode == 1, done
        assert f"foreign_data: {data}" in done.stdout
        data.unlink()
        (tmp_path / "away").rename(data)
        done = kvfs("fsck", "--repair", "--store", str(node.store))
        assert done.returncode == 0, done
    finally:
        node.remove()


def test_a_secret_of_somebody_else_is_refused(tmp_path: Path) -> None:
    private_file.replace(tmp_path / "kept", b"x")
    os.chown(tmp_path / "kept", ALICE, ALICE)
    with pytest.raises(Invalid, match="be its owner"):
        private_file.read(tmp_path / "kept", 100)


def test_what_looks_like_the_left_file_of_a_benchmark_is_left_alone(tmp_path: Path) -> None:
    """A user's, with a link in place of the lock: it would be made where the link leads."""
    theirs = tmp_path / f"kvfs-bench-{os.uname().nodename}-theirs"
    theirs.mkdir()
    (theirs / "lock").symlink_to(tmp_path / "made")
    os.chown(theirs, ALICE, ALICE)
    with bench_file.test_file(tmp_path, bench_file.LEAST_BYTES):
        assert not (tmp_path / "made").exists()
