"""`kvfs://` on a store, without a node and beside one: what fsspec's own tests do not ask."""

import contextlib
import errno
import gc
import gzip
import io
import lzma
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.callbacks import Callback

import kvfs
from gateway.fsspec import filesystem
from gateway.fsspec.filesystem import KvfsFileSystem
from tests.contract import client_store

MIB = 1 << 20


@pytest.fixture(scope="module", params=["alone", "beside a node"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("store") / "store"
    with client_store.sound(root, beside_node=request.param == "beside a node"):
        yield root


@pytest.fixture
def fs(store: Path) -> Iterator[KvfsFileSystem]:
    fs = KvfsFileSystem(str(store), skip_instance_cache=True)
    yield fs
    fs.close()


@pytest.fixture
def here(fs: KvfsFileSystem, request: pytest.FixtureRequest) -> Iterator[str]:
    path = f"/models/{request.node.originalname}"
    fs.makedirs(path)
    yield path
    fs.rm(path, recursive=True)


def test_programs_find_it_by_its_protocol(store: Path) -> None:
    with fsspec.open("kvfs://models/by/name", "wb", store=str(store)) as file:
        file.write(b"hello")
    fs, path = fsspec.core.url_to_fs("kvfs:///models/by/name", store=str(store))
    assert type(fs) is KvfsFileSystem
    assert path == "/models/by/name"
    assert fs.cat(path) == b"hello"
    assert fs.unstrip_protocol(path) == "kvfs:///models/by/name"
    fs.rm("kvfs://models/by", recursive=True)
    fs.close()


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("kvfs://models/a/", "/models/a"),
        ("kvfs:///models/a", "/models/a"),
        ("/models/a", "/models/a"),
        ("models/a", "/models/a"),
        ("kvfs://", "/"),
        ("/", "/"),
    ],
)
def test_ways_to_write_a_path(given: str, path: str) -> None:
    assert KvfsFileSystem._strip_protocol(given) == path


def test_what_is_known_of_a_file(fs: KvfsFileSystem, here: str) -> None:
    before = time.time() - 1
    fs.pipe_file(f"{here}/a", b"x" * 1000)
    info = fs.info(f"kvfs:/{here}/a")
    assert (info["name"], info["size"], info["type"]) == (f"{here}/a", 1000, "file")
    assert before < fs.modified(f"{here}/a").timestamp() < time.time() + 1
    assert before < fs.created(f"{here}/a").timestamp() < time.time() + 1
    assert fs.ls(here) == [info]
    assert fs.ls(f"{here}/a", detail=False) == [f"{here}/a"]
    assert fs.info(here)["type"] == "directory"
    assert here in fs.ls("/models", detail=False)
    assert {"/cache", "/models"} <= set(fs.ls("/", detail=False))
    version = fs.ukey(f"{here}/a"), fs.checksum(f"{here}/a")
    assert version == (fs.ukey(f"{here}/a"), fs.checksum(f"{here}/a"))
    fs.pipe_file(f"{here}/a", b"y" * 1000)
    assert fs.ukey(f"{here}/a") != version[0]


def test_trees(fs: KvfsFileSystem, here: str) -> None:
    names = ["a", "d/b.csv", "d/e/c.csv", "odd \udcff name"]
    fs.pipe({f"{here}/{name}": name.encode(errors="surrogateescape") for name in names})
    assert fs.find(here) == sorted(f"{here}/{name}" for name in names)
    assert fs.glob(f"{here}/**/*.csv") == [f"{here}/d/b.csv", f"{here}/d/e/c.csv"]
    assert [directory for directory, _, _ in fs.walk(here)] == [here, f"{here}/d", f"{here}/d/e"]
    assert fs.du(here) == sum(len(name) for name in names)
    assert fs.cat(f"{here}/d", recursive=True)[f"{here}/d/e/c.csv"] == b"d/e/c.csv"
    fs.rm(f"{here}/d", recursive=True)
    assert not fs.exists(f"{here}/d")
    assert fs.isfile(f"{here}/{names[-1]}")


def test_ranges(fs: KvfsFileSystem, here: str) -> None:
    data = os.urandom(3 * MIB + 7)
    fs.pipe({f"{here}/a": data, f"{here}/b": b"short"})
    assert fs.cat_file(f"{here}/a", 5, 9) == data[5:9]
    assert fs.cat_file(f"{here}/a", -9, -2) == data[-9:-2]
    assert fs.cat_file(f"{here}/a", MIB, None) == data[MIB:]
    assert fs.cat_file(f"{here}/a", 9, 5) == b""
    asked = [("a", 0, 10), ("b", 1, 3), ("a", MIB, 2 * MIB), ("a", 4 * MIB, 5 * MIB), ("c", 0, 1)]
    names, starts, ends = map(list, zip(*asked, strict=True))
    found = fs.cat_ranges([f"{here}/{name}" for name in names], starts, ends)
    assert found[:4] == [data[:10], b"ho", data[MIB : 2 * MIB], b""]
    assert isinstance(found[4], FileNotFoundError)
    assert fs.cat_ranges([f"{here}/b"] * 2, 1, 2, max_gap=10) == [b"h", b"h"]
    assert fs.cat_ranges([f"{here}/b"] * 2, (0, 1), range(2, 4)) == [b"sh", b"ho"]
    assert fs.cat_ranges([f"{here}/b"] * 2, iter((0, -2)), None) == [b"short", b"rt"]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges([f"{here}/c"], 0, 1, on_error="raise")
    with fs.open(f"{here}/a") as file:
        assert file.size == len(data)
        file.seek(MIB)
        into = bytearray(MIB)
        assert file.readinto(into) == MIB
        assert into == data[MIB : 2 * MIB]
        assert file.read() == data[2 * MIB :]
    assert fs.tail(f"{here}/a", 10) == data[-10:]


def test_small_and_large_writes(fs: KvfsFileSystem, here: str) -> None:
    large = os.urandom(3 * MIB)
    with fs.open(f"{here}/a", "wb") as file:
        for number in range(1000):
            file.write(b"%d," % number)
        file.write(large)
        file.write(b"end")
        assert not fs.exists(f"{here}/a")
    small = b"".join(b"%d," % number for number in range(1000))
    assert fs.cat(f"{here}/a") == small + large + b"end"
    with fs.open(f"{here}/text.gz", "w", compression="infer") as file:
        file.write("höhe")
    assert gzip.decompress(fs.cat(f"{here}/text.gz")) == "höhe".encode()
    with (
        pytest.raises(ZeroDivisionError),
        fs.open(f"{here}/b.gz", "wb", compression="gzip") as file,
    ):
        file.write(b"half")
        raise ZeroDivisionError
    assert not fs.exists(f"{here}/b.gz")


def test_what_is_not_closed_well_does_not_appear(fs: KvfsFileSystem, here: str) -> None:
    fs.pipe_file(f"{here}/a", b"before")
    with pytest.raises(ZeroDivisionError), fs.open(f"{here}/a", "wb") as file:
        file.write(b"after")
        raise ZeroDivisionError
    assert fs.cat(f"{here}/a") == b"before"
    file = fs.open(f"{here}/a", "wb")
    file.write(b"after")
    with pytest.warns(ResourceWarning, match="never closed"):
        del file
        gc.collect()
    assert fs.cat(f"{here}/a") == b"before"


WAYS_TO_WRITE = [
    ("wb", {}),
    ("w", {}),
    ("wt", {"encoding": "utf-16", "newline": "\r\n"}),
    ("wb", {"compression": "gzip"}),
    ("w", {"compression": "gzip"}),
    ("w", {"compression": "xz"}),
]


def read(fs: KvfsFileSystem, path: str, mode: str, options: dict[str, Any]) -> bytes | str:
    """What a file holds that was written so."""
    unpack: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.decompress,
        "xz": lzma.decompress,
        "": bytes,
    }
    data = unpack[options.get("compression", "")](fs.cat(path))
    return data if "b" in mode else data.decode(options.get("encoding", "utf-8"))


@pytest.mark.parametrize(("mode", "options"), WAYS_TO_WRITE)
def test_half_a_file_never_appears(
    fs: KvfsFileSystem, here: str, mode: str, options: dict[str, Any]
) -> None:
    path = f"{here}/a"
    fs.pipe_file(path, b"before")
    half = b"half" if "b" in mode else "half"
    with pytest.raises(ZeroDivisionError), fs.open(path, mode, **options) as file:
        file.write(half)
        file.flush()
        raise ZeroDivisionError
    assert file.closed
    assert fs.cat(path) == b"before"
    file = fs.open(path, mode, **options)
    file.write(half)
    with pytest.warns(ResourceWarning, match=f"{path} was opened for writing and never closed"):
        del file
        gc.collect()
    assert fs.cat(path) == b"before"
    with (
        pytest.raises(OSError, match="in the way") as refused,
        fs.open(path, mode, **options) as file,
    ):
        file.write(half)
        raise FileExistsError(errno.EEXIST, "in the way")
    assert refused.value.filename is None
    with fs.open(path, mode, **options) as file:
        file.write(half)
    assert read(fs, path, mode, options) == half


@pytest.mark.parametrize(("mode", "options"), WAYS_TO_WRITE)
def test_a_transaction_ends_what_is_open(
    fs: KvfsFileSystem, here: str, mode: str, options: dict[str, Any]
) -> None:
    text = b"all of it" if "b" in mode else "all of it"
    half = text[:3]
    with fs.transaction:
        file = fs.open(f"{here}/forgotten", mode, **options)
        file.write(text)
        del file
        kept = fs.open(f"{here}/open", mode, **options)
        kept.write(text)
        with contextlib.suppress(ZeroDivisionError), fs.open(f"{here}/b", mode, **options) as file:
            file.write(half)
            raise ZeroDivisionError
    assert kept.closed
    for name in ("forgotten", "open"):
        assert read(fs, f"{here}/{name}", mode, options) == text
    assert not fs.exists(f"{here}/b")


def test_text_that_cannot_be_encoded_leaves_nothing(fs: KvfsFileSystem, here: str) -> None:
    file = fs.open(f"{here}/a", "w", encoding="ascii")
    file.write("half")
    with pytest.raises(UnicodeEncodeError):
        file.write("höhe")
    file.discard()
    with pytest.raises(LookupError):
        fs.open(f"{here}/a", "w", encoding="no such encoding")
    assert fs.ls(here) == []


def test_appending_goes_on_behind_what_is_there(fs: KvfsFileSystem, here: str) -> None:
    for part in (b"one ", b"two ", b"three"):
        with fs.open(f"{here}/a", "ab") as file:
            file.write(part)
    assert fs.cat(f"{here}/a") == b"one two three"


def test_a_transaction_shows_all_files_at_once(fs: KvfsFileSystem, here: str) -> None:
    fs.pipe_file(f"{here}/b", b"before")
    with fs.transaction:
        with fs.open(f"{here}/a", "wb") as file:
            file.write(b"one")
        assert file.closed
        fs.pipe_file(f"{here}/b", b"two")
        with fs.open(f"{here}/new", "xb") as file:
            file.write(b"three")
        assert not fs.exists(f"{here}/a")
        assert fs.cat(f"{here}/b") == b"before"
    assert fs.cat(here, recursive=True) == {
        f"{here}/a": b"one",
        f"{here}/b": b"two",
        f"{here}/new": b"three",
    }
    fs.pipe_file(f"{here}/c", b"at once")
    assert fs.exists(f"{here}/c")


def test_a_transaction_that_fails_shows_nothing(fs: KvfsFileSystem, here: str) -> None:
    def write(*names: str) -> None:
        for name in names:
            with fs.open(f"{here}/{name}", "wb") as file:
                file.write(b"new")

    with pytest.raises(ZeroDivisionError), fs.transaction:
        write("a", "b")
        raise ZeroDivisionError
    assert fs.ls(here) == []
    with pytest.raises(IsADirectoryError), fs.transaction:
        write("a", "b", "c")
        fs.mkdir(f"{here}/b")
    assert fs.ls(here, detail=False) == [f"{here}/b"]
    write("a")
    assert fs.exists(f"{here}/a")


def test_new_names_and_old_ones_appear_together(fs: KvfsFileSystem, here: str) -> None:
    fs.pipe_file(f"{here}/old", b"before")

    def write() -> None:
        for name, mode in (("new", "xb"), ("old", "wb"), ("other", "xb")):
            with fs.open(f"{here}/{name}", mode) as file:
                file.write(b"after")

    with pytest.raises(FileExistsError), fs.transaction:
        write()
        other = pickle.loads(pickle.dumps(fs))
        other.pipe_file(f"{here}/other", b"was faster")
        other.close()
    assert fs.cat(here, recursive=True) == {
        f"{here}/old": b"before",
        f"{here}/other": b"was faster",
    }
    fs.rm_file(f"{here}/other")
    with pytest.raises(IsADirectoryError), fs.transaction:
        write()
        fs.rm_file(f"{here}/old")
        fs.mkdir(f"{here}/old")
    assert fs.find(here) == []
    fs.rmdir(f"{here}/old")
    with fs.transaction:
        write()
    assert fs.find(here) == [f"{here}/{name}" for name in ("new", "old", "other")]


def test_many_files_of_a_transaction(fs: KvfsFileSystem, store: Path, here: str) -> None:
    program = """
import resource, sys
from gateway.fsspec.filesystem import KvfsFileSystem

fs = KvfsFileSystem(sys.argv[1])
fs.ls("/")
resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))

def write(name, count):
    for number in range(count):
        with fs.open(f"{sys.argv[2]}/{name}{number:03}", "w") as file:
            file.write("text")

with fs.transaction:
    write("a", 100)
try:
    with fs.transaction:
        write("b", 200)
except OSError as error:
    print(error.strerror, error.filename)
"""
    said = client_store.run(program, str(store), here).decode()
    assert said.startswith(f"Too many open files {here}/b")
    assert fs.find(here) == [f"{here}/a{number:03}" for number in range(100)]


def test_errors_are_those_of_files(fs: KvfsFileSystem, here: str) -> None:
    fs.pipe_file(f"{here}/a", b"1")
    fs.mkdir(f"{here}/d")
    with pytest.raises(FileNotFoundError, match="nothing"):
        fs.open(f"{here}/nothing")
    with pytest.raises(FileNotFoundError):
        fs.ls(f"{here}/nothing")
    with pytest.raises(FileNotFoundError, match="namespace"):
        fs.pipe_file("/no-such-namespace/a", b"1")
    with pytest.raises(IsADirectoryError):
        fs.cat_file(f"{here}/d")
    with pytest.raises(NotADirectoryError):
        fs.open(f"{here}/a/b")
    with pytest.raises(FileExistsError):
        fs.open(f"{here}/a", "xb")
    with pytest.raises(FileExistsError):
        fs.pipe({f"{here}/a": b"2", f"{here}/b": b"2"}, mode="create")
    with pytest.raises(FileExistsError):
        fs.makedirs(f"{here}/d")
    with pytest.raises(FileExistsError):
        fs.makedirs(f"{here}/a", exist_ok=True)
    for mode in ("r+b", "zzb"):
        with pytest.raises(OSError, match=r"'xb' or 'ab'.* in place through the mount") as refused:
            fs.open(f"{here}/a", mode)
        assert refused.value.errno == errno.EOPNOTSUPP
    fs.pipe_file(f"{here}/d/x", b"1")
    with pytest.raises(OSError, match="not empty") as refused:
        fs.rmdir(f"{here}/d")
    assert refused.value.errno == errno.ENOTEMPTY
    assert refused.value.filename == f"{here}/d"
    assert fs.exists(f"{here}/a/b") is False
    assert fs.exists(f"{here}/b") is False


def test_moves(fs: KvfsFileSystem, here: str) -> None:
    fs.pipe({f"{here}/a": b"1", f"{here}/tree/x/y": b"2"})
    inode = fs.info(f"{here}/a")["ino"]
    fs.mv(f"{here}/a", f"{here}/new/b")
    assert fs.info(f"{here}/new/b")["ino"] == inode
    fs.mv(f"{here}/tree", f"{here}/new", recursive=True)
    assert fs.cat(f"{here}/new/tree/x/y") == b"2"
    fs.mv(f"{here}/new/b", f"{here}/new/")
    fs.mv(f"{here}/new", "/cache/moved", recursive=True)
    assert not fs.exists(f"{here}/new")
    assert fs.cat("/cache/moved/tree/x/y") == b"2"
    assert fs.cat("/cache/moved/b") == b"1"
    fs.rm("/cache/moved", recursive=True)
    with pytest.raises(FileNotFoundError):
        fs.mv(f"{here}/a", f"{here}/b")


def test_moves_that_fail_leave_nothing_behind(fs: KvfsFileSystem, here: str) -> None:
    fs.pipe_file(f"{here}/a", b"1")
    before = fs.ls("/", detail=False), fs.ls(here, detail=False)
    with pytest.raises(FileNotFoundError) as refused:
        fs.mv(f"{here}/missing", f"{here}/deep/x")
    assert refused.value.filename == f"{here}/missing"
    assert refused.value.filename2 == f"{here}/deep/x"
    for source in ("missing", "a"):
        for target in ("/typo/x", "/typo/deep/x", "/typo/"):
            with pytest.raises(FileNotFoundError, match="missing" if source != "a" else "typo"):
                fs.mv(f"{here}/{source}", target)
    with pytest.raises(NotADirectoryError):
        fs.mv(f"{here}/a", f"{here}/a/b/c")
    assert (fs.ls("/", detail=False), fs.ls(here, detail=False)) == before
    fs.mv(f"{here}/a", "/cache/moved/deep/a")
    assert fs.cat("/cache/moved/deep/a") == b"1"
    fs.rm("/cache/moved", recursive=True)


def test_copies_make_no_namespace(fs: KvfsFileSystem, here: str, tmp_path: Path) -> None:
    (tmp_path / "tree" / "d").mkdir(parents=True)
    (tmp_path / "tree" / "d" / "a").write_bytes(b"1")
    with pytest.raises(FileNotFoundError):
        fs.put(str(tmp_path / "tree"), "/typo/deep/x", recursive=True)
    fs.put(str(tmp_path / "tree"), f"{here}/tree", recursive=True)
    with pytest.raises(FileNotFoundError):
        fs.cp(f"{here}/tree", "/typo/deep/x", recursive=True)
    assert not fs.exists("/typo")
    fs.cp(f"{here}/tree", f"{here}/copied", recursive=True)
    assert fs.cat(f"{here}/copied/d/a") == b"1"


def test_directories_and_namespaces(fs: KvfsFileSystem) -> None:
    fs.makedirs("/new-namespace/a/b")
    fs.makedirs("/new-namespace/a/b", exist_ok=True)
    assert fs.isdir("kvfs://new-namespace/a/b")
    with pytest.raises(FileNotFoundError):
        fs.mkdir("/new-namespace/c/d", create_parents=False)
    fs.touch("/new-namespace/a/empty")
    assert fs.size("/new-namespace/a/empty") == 0
    fs.rm("/new-namespace", recursive=True)
    assert not fs.exists("/new-namespace")


class Heard(Callback):
    """What a transfer said of its progress."""

    def call(self, *_: object, **__: object) -> None:
        self.last = (self.value, self.size)


def test_local_files_come_and_go(fs: KvfsFileSystem, here: str, tmp_path: Path) -> None:
    data = os.urandom(2 * MIB)
    (tmp_path / "a").write_bytes(data)
    heard = Heard()
    fs.put_file(str(tmp_path / "a"), f"{here}/a", callback=heard)
    assert heard.last == (len(data), len(data))
    with pytest.raises(FileExistsError):
        fs.put_file(str(tmp_path / "a"), f"{here}/a", mode="create")
    heard = Heard()
    fs.get_file(f"{here}/a", str(tmp_path / "deep" / "b"), callback=heard)
    assert heard.last == (len(data), len(data))
    assert (tmp_path / "deep" / "b").read_bytes() == data
    into = io.BytesIO()
    fs.get_file(f"{here}/a", into)
    assert into.getvalue() == data
    fs.copy(f"{here}/a", f"{here}/copied")
    assert fs.cat(f"{here}/copied") == data


def test_it_can_be_pickled(fs: KvfsFileSystem, here: str) -> None:
    fs.pipe_file(f"{here}/a", b"0123456789")
    other = pickle.loads(pickle.dumps(fs))
    assert other.cat(f"{here}/a") == b"0123456789"
    with fs.open(f"{here}/a") as file:
        file.seek(4)
        with pickle.loads(pickle.dumps(file)) as twin:
            assert twin.read() == b"456789"
    other.close()


def test_a_child_goes_on_after_a_fork(fs: KvfsFileSystem, here: str) -> None:
    fs.pipe_file(f"{here}/a", b"parent's")
    child = os.fork()
    if not child:
        code = 1
        try:
            fs.pipe_file(f"{here}/b", fs.cat(f"{here}/a") + b" and the child's")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert fs.cat(f"{here}/b") == b"parent's and the child's"


def test_a_fork_while_a_thread_opens_the_store(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, forking = threading.Event(), threading.Event()

    class Slow(kvfs.Client):
        def __init__(self, *arguments: Any) -> None:
            opening.set()
            assert forking.wait(60)
            super().__init__(*arguments)

    monkeypatch.setattr(filesystem, "Client", Slow)
    fs = KvfsFileSystem(str(store), skip_instance_cache=True)
    thread = threading.Thread(target=fs.ls, args=("/",))
    thread.start()
    assert opening.wait(60)
    forking.set()
    child = os.fork()
    if not child:
        signal.alarm(60)
        code = 1
        try:
            fs.ls("/")
            code = 0
        finally:
            os._exit(code)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    fs.close()


def test_closed_ones_hold_nothing(store: Path) -> None:
    fs = KvfsFileSystem(str(store), skip_instance_cache=True)
    for _ in range(3):
        client = weakref.ref(fs.client)
        fs.ls("/")
        fs.close()
        gc.collect()
        assert client() is None


def test_another_process_sees_it_at_once(fs: KvfsFileSystem, store: Path, here: str) -> None:
    program = """
import sys, fsspec
with fsspec.open("kvfs:/" + sys.argv[2] + "/b", "wb", store=sys.argv[1]) as file:
    file.write(fsspec.open("kvfs:/" + sys.argv[2] + "/a", store=sys.argv[1]).open().read() * 2)
"""
    fs.pipe_file(f"{here}/a", b"twice ")
    client_store.run(program, str(store), here)
    assert fs.cat(f"{here}/b") == b"twice twice "


def test_threads_share_it(fs: KvfsFileSystem, here: str) -> None:
    def work(number: int) -> None:
        for turn in range(20):
            fs.pipe_file(f"{here}/{number}-{turn}", b"%d" % turn * number)
            assert fs.cat(f"{here}/{number}-{turn}") == b"%d" % turn * number

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fs.ls(here)) == 160


def test_an_open_file_outlives_what_happens_to_its_name(fs: KvfsFileSystem, here: str) -> None:
    fs.pipe_file(f"{here}/a", b"first")
    with fs.open(f"{here}/a") as file:
        fs.pipe_file(f"{here}/a", b"second")
        fs.rm(f"{here}/a")
        assert file.read() == b"first"


@pytest.mark.parametrize("name", ["\ud800", "nul\0byte", "x" * 300])
def test_names_that_cannot_be(fs: KvfsFileSystem, here: str, name: str) -> None:
    path = f"{here}/{name}"
    works: list[Callable[[], object]] = [
        lambda: fs.open(path, "w"),
        lambda: fs.pipe_file(path, b"1"),
        lambda: fs.pipe({path: b"1"}),
        lambda: fs.mkdir(path),
    ]
    for work in works:
        with pytest.raises(OSError, match=r"Invalid argument|name too long") as refused:
            work()
        assert refused.value.filename == path
    assert fs.ls(here) == []


def test_errors_of_local_files_name_those(
    fs: KvfsFileSystem, here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "d").mkdir()
    with pytest.raises(FileNotFoundError) as refused:
        fs.put_file("missing", f"{here}/a")
    assert refused.value.filename == "missing"
    with pytest.raises(FileNotFoundError) as refused:
        fs.put_file("a", "/typo/a")
    assert refused.value.filename2 == "/typo/a"
    fs.put_file("a", f"{here}/a")
    with pytest.raises(OSError, match="is a directory") as in_the_way:
        fs.get_file(f"{here}/a", "d")
    assert in_the_way.value.filename2 == str(tmp_path / "d")


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    fs = KvfsFileSystem(str(tmp_path / "nothing"), skip_instance_cache=True)
    with pytest.raises(FileNotFoundError, match="nothing"):
        fs.ls("/")
