"""The Python API on a store, without a node and beside one."""

import contextlib
import gc
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import kvfs
from kvfs.base.errors import (
    CrossNamespace,
    Exists,
    Invalid,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    NotSupported,
    TooLarge,
    Unavailable,
)
from kvfs.client.reader import StoredChecksums
from kvfs.datastore.kernel.file_sequence import FileSequence
from kvfs.objects.object_store import ObjectStore
from kvfs.tree.published_view import FoundInode
from tests.contract import client_store


@pytest.fixture(scope="module", params=["alone", "beside a node"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("store") / "store"
    with client_store.sound(root, beside_node=request.param == "beside a node"):
        yield root


@pytest.fixture
def client(store: Path) -> Iterator[kvfs.Client]:
    with kvfs.Client(store) as client:
        yield client


@pytest.fixture
def home(client: kvfs.Client, request: pytest.FixtureRequest) -> str:
    path = f"/cache/{request.node.originalname}"
    client.mkdir(path)
    return path


def names(client: kvfs.Client, path: str) -> list[bytes]:
    return [entry.name for entry in client.list(path)]


def test_what_is_put_is_got(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"hello")
    assert client.get(f"{home}/a") == b"hello"
    assert client.exists([f"{home}/a", f"{home}/b"]) == [True, False]
    assert client.stat(f"{home}/a").size == 5


def test_an_error_holds_nothing_once_it_is_handled(client: kvfs.Client, home: str) -> None:
    """Else each would keep one of the engine's 126 views until the garbage collector comes."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(200):
            with contextlib.suppress(NotFound):
                client.get(f"{home}/none")
            with contextlib.suppress(NotFound):
                client.stat(f"{home}/none/below")
            assert client.get_many([f"{home}/none", f"{home}/none/below"]) == [None, None]
    finally:
        gc.enable()


def test_an_empty_file(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/empty", b"")
    assert client.get(f"{home}/empty") == b""
    assert client.stat(f"{home}/empty").size == 0


def test_a_put_replaces_the_file_whole(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"a long first version")
    before = client.open(f"{home}/a")
    client.put(f"{home}/a", b"short")
    assert client.get(f"{home}/a") == b"short"
    with before:
        assert before.read() == b"a long first version"


def test_paths_are_text_or_bytes_with_or_without_a_slash(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/ü", b"1")
    assert client.get(f"{home}/ü".encode()) == b"1"
    assert client.get(f"{home}/ü"[1:]) == b"1"
    assert client.get(Path(home) / "ü") == b"1"
    raw = home.encode() + b"/\xff\xfe"
    client.put(raw, b"2")
    assert names(client, home) == ["ü".encode(), b"\xff\xfe"]
    assert client.get(os.fsdecode(raw)) == b"2"
    with pytest.raises(Invalid, match="NUL"):
        client.get("/cache/a\0b")
    for work in (client.get, client.stat, lambda path: client.exists([path])):
        with pytest.raises(Invalid, match=r"ud800.*surrogates"):
            work(f"{home}/\ud800")
    with pytest.raises(Invalid, match="a list of paths"):
        client.exists(f"{home}/a")
    with pytest.raises(Invalid, match="a list of paths"):
        client.get_many(home.encode())  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="text or bytes"):
        client.get(3)  # type: ignore[call-overload]


def test_parts_of_a_file(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"0123456789")
    assert client.get(f"{home}/a", offset=3, size=4) == b"3456"
    assert client.get(f"{home}/a", offset=8, size=100) == b"89"
    assert client.get(f"{home}/a", offset=100) == b""
    with pytest.raises(Invalid, match="negative"):
        client.get(f"{home}/a", offset=-1)


def test_reading_into_a_buffer(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"0123456789")
    buffer = bytearray(b"." * 12)
    assert client.get(f"{home}/a", into=buffer) == 10
    assert buffer == b"0123456789.."
    assert client.get(f"{home}/a", memoryview(buffer)[2:6], offset=5, size=4) == 4
    assert buffer == b"01567" + b"8" + b"6789.."
    with pytest.raises(TooLarge, match="10 bytes do not fit into a buffer of 9"):
        client.get(f"{home}/a", into=bytearray(9))


def test_exclusive_needs_a_free_name(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"1", exclusive=True)
    with pytest.raises(Exists, match=f"{home}/a exists already"):
        client.put(f"{home}/a", b"2", exclusive=True)
    assert client.get(f"{home}/a") == b"1"


def test_parents_are_made_when_asked_for(client: kvfs.Client, home: str) -> None:
    with pytest.raises(NotFound, match=f"{home}/x/y/z: no such directory as x"):
        client.put(f"{home}/x/y/z", b"1")
    client.put(f"{home}/x/y/z", b"1", parents=True)
    assert client.get(f"{home}/x/y/z") == b"1"
    assert client.stat(f"{home}/x").is_directory
    assert client.stat(f"{home}/x").nlink == 3
    client.put(f"{home}/x/y/w", b"2", parents=True)
    assert names(client, f"{home}/x/y") == [b"w", b"z"]


def test_where_nothing_can_be_put(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/file", b"")
    for top in ("/top", "top", f"{home}/../../top"):
        with pytest.raises(NotPermitted, match="/top: a file stands in a namespace"):
            client.put(top, b"")
    with pytest.raises(Invalid, match=f"{home}/x/../y: '..' cannot be a name"):
        client.put(f"{home}/x/../y", b"", parents=True)
    with pytest.raises(NotFound, match="no namespace missing: make it"):
        client.put("/missing/a", b"", parents=True)
    with pytest.raises(NotADirectory, match=f"{home}/file/a: file is not a directory"):
        client.put(f"{home}/file/a", b"", parents=True)
    with pytest.raises(IsADirectory, match=f"{home} is a directory"):
        client.put(home, b"")
    with pytest.raises(NameTooLong, match=f"{home}/n*: a name has at most 255 bytes"):
        client.put(f"{home}/{'n' * 256}", b"")
    for nothing in ("/", ""):
        with pytest.raises(Invalid, match="/ has no name"):
            client.put(nothing, b"")
    assert names(client, home) == [b"file"]


def test_what_cannot_be_got(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/file", b"")
    with pytest.raises(NotFound, match=f"{home}/a: no such file"):
        client.get(f"{home}/a")
    with pytest.raises(NotADirectory, match=f"{home}/file/a"):
        client.get(f"{home}/file/a")
    with pytest.raises(IsADirectory, match=home):
        client.get(home)


def test_attributes(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"x" * 10_000, mode=0o640)
    found = client.stat(f"{home}/a")
    assert stat.S_IMODE(found.mode) == 0o640
    assert found.is_file
    assert not found.is_directory
    assert (found.name, found.size, found.blocks, found.nlink) == (b"a", 10_000, 24, 1)
    assert (found.uid, found.gid) == (os.geteuid(), os.getegid())
    assert client.stat("/").ino == 1
    assert client.stat("/cache").name == b"cache"


def test_a_directory_is_listed_in_the_order_of_its_names(client: kvfs.Client, home: str) -> None:
    for name in ("b", "a", "ab", "a-", "Z", "é"):
        client.put(f"{home}/{name}", b"")
    client.mkdir(f"{home}/a1")
    assert names(client, home) == [b"Z", b"a", b"a-", b"a1", b"ab", b"b", "é".encode()]
    with pytest.raises(NotADirectory):
        list(client.list(f"{home}/a"))
    with pytest.raises(NotFound):
        list(client.list(f"{home}/missing"))


def test_a_long_directory_is_listed_in_pages(client: kvfs.Client, home: str) -> None:
    client.put_many((f"{home}/{number:05}", b"") for number in range(2_500))
    listed = client.list(home)
    first = [next(listed).name for _ in range(10)]
    client.remove(f"{home}/00005")
    client.remove(f"{home}/02000")
    client.put(f"{home}/02000a", b"")
    found = first + [entry.name for entry in listed]
    assert len(found) == len(set(found)) == 2_500
    assert found == sorted(found)
    assert b"02000a" in found
    assert b"02000" not in found


def test_a_listing_goes_on_after_a_key(client: kvfs.Client, home: str) -> None:
    client.mkdir(f"{home}/b")
    for name in ("a", "b-", "c"):
        client.put(f"{home}/{name}", b"")
    keys = [entry.key for entry in client.list(home)]
    assert keys == [b"a", b"b-", b"b/", b"c"]
    for at, key in enumerate(keys):
        assert [entry.key for entry in client.list(home, after=key)] == keys[at + 1 :]


def test_a_listing_goes_on_after_names_that_no_path_can_have(
    client: kvfs.Client, home: str, store: Path
) -> None:
    directory = f"{home.removeprefix('/cache/')}/odd/"
    objects = ObjectStore(store)
    try:
        long = "x" * 300
        for key in ("#", "a", "a/b", "/b", "./b", "../b", ".", "z", "z/", f"{long}/1", f"{long}2"):
            draft = objects.begin(b"cache", f"{directory}{key}".encode(), 0)
            objects.commit(draft, "e", {})
    finally:
        objects.close()
    listed = list(client.list(f"{home}/odd"))
    assert len({entry.name for entry in listed}) == len(listed) == 11
    for at, entry in enumerate(listed):
        assert list(client.list(f"{home}/odd", after=entry.key)) == listed[at + 1 :]
        assert client.stat(f"{home}/odd".encode() + b"/" + entry.name).ino == entry.ino


def test_remove(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"1")
    opened = client.open(f"{home}/a")
    client.remove(f"{home}/a")
    assert client.exists([f"{home}/a"]) == [False]
    with opened:
        assert opened.read() == b"1"
    with pytest.raises(NotFound, match=f"{home}/a"):
        client.remove(f"{home}/a")
    with pytest.raises(IsADirectory):
        client.remove(home)
    client.put(f"{home}/file", b"")
    for remove in (client.remove, client.rmdir):
        with pytest.raises(NotADirectory, match=f"{home}/file/a: a part of the path"):
            remove(f"{home}/file/a")


def test_rename(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"1")
    client.put(f"{home}/b", b"2")
    client.rename(f"{home}/a", f"{home}/b")
    assert names(client, home) == [b"b"]
    assert client.get(f"{home}/b") == b"1"
    client.put(f"{home}/c", b"3")
    with pytest.raises(Exists):
        client.rename(f"{home}/b", f"{home}/c", exclusive=True)
    with pytest.raises(NotFound, match=f"{home}/gone"):
        client.rename(f"{home}/gone", f"{home}/d")
    with pytest.raises(NotFound, match=r"^/nowhere/b: no such file or directory"):
        client.rename(f"{home}/b", "/nowhere/b")
    with pytest.raises(NotADirectory, match=f"^{home}/c/b: a part of the path"):
        client.rename(f"{home}/b", f"{home}/c/b")
    with pytest.raises(CrossNamespace, match=f"^{home}/b to /models/b: "):
        client.rename(f"{home}/b", "/models/b")
    client.mkdir(f"{home}/d")
    client.rename(f"{home}/d", f"{home}/e")
    assert names(client, home) == [b"b", b"c", b"e"]
    with pytest.raises(IsADirectory):
        client.rename(f"{home}/b", f"{home}/e")


def test_directories(client: kvfs.Client, home: str) -> None:
    client.mkdir(f"{home}/a", mode=0o700)
    assert stat.S_IMODE(client.stat(f"{home}/a").mode) == 0o700
    with pytest.raises(Exists):
        client.mkdir(f"{home}/a")
    with pytest.raises(NotFound):
        client.mkdir(f"{home}/b/c")
    client.mkdir(f"{home}/b/c", parents=True)
    with pytest.raises(NotEmpty):
        client.rmdir(f"{home}/b")
    client.rmdir(f"{home}/b/c")
    client.rmdir(f"{home}/b")
    assert names(client, home) == [b"a"]
    client.put(f"{home}/file", b"")
    with pytest.raises(NotADirectory):
        client.rmdir(f"{home}/file")


def test_a_directory_at_the_top_is_a_namespace(client: kvfs.Client) -> None:
    client.mkdir("/fresh")
    client.put("/fresh/a", b"1")
    client.rename("/fresh", "/renamed")
    assert client.get("/renamed/a") == b"1"
    client.remove("/renamed/a")
    client.rmdir("/renamed")
    assert b"renamed" not in names(client, "/")


def test_exists_for_paths_of_every_kind(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"")
    client.mkdir(f"{home}/d")
    asked = {
        f"{home}/a": True,
        f"{home}/d": True,
        f"{home}/d/": True,
        f"{home}/d/.": True,
        f"{home}/d/..": True,
        f"{home}//a": True,
        f"{home}/a/b": False,
        f"{home}/missing/b": False,
        f"{home}/{'n' * 300}": False,
        "/missing/a": False,
        "/": True,
        "": True,
        "cache": True,
    }
    assert dict(zip(asked, client.exists(list(asked)), strict=True)) == asked
    assert client.exists([]) == []


def test_put_many_puts_all_or_nothing(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/taken", b"old")
    with pytest.raises(Exists, match="taken"):
        client.put_many(
            [(f"{home}/{name}", b"new") for name in ("a", "taken", "z")], exclusive=True
        )
    assert names(client, home) == [b"taken"]
    client.put_many((f"{home}/{name}", name.encode()) for name in ("a", "taken", "z"))
    assert names(client, home) == [b"a", b"taken", b"z"]
    assert client.get(f"{home}/taken") == b"taken"
    client.put_many([])


def test_of_the_same_path_the_last_counts(client: kvfs.Client, home: str) -> None:
    client.put_many([(f"{home}/a", b"1"), (f"{home}/b", b"2"), (f"{home}//a", b"3")])
    assert client.get(f"{home}/a") == b"3"


def test_many_large_files_at_once(client: kvfs.Client, home: str, seed: int) -> None:
    blocks = {f"{home}/{number}": (b"%d " % (seed + number)) * 50_000 for number in range(20)}
    client.put_many(blocks.items())
    assert client.get_many(list(blocks)) == list(blocks.values())
    buffers = [bytearray(len(block) + 5) for block in blocks.values()]
    sizes = client.get_many(list(blocks), buffers)
    assert sizes == [len(block) for block in blocks.values()]
    for buffer, block in zip(buffers, blocks.values(), strict=True):
        assert buffer == block + bytes(5)


def test_get_many_reports_each_key(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"12345")
    client.put(f"{home}/b", b"123")
    keys = [f"{home}/a", f"{home}/missing", home, f"{home}/a/x", f"{home}/b"]
    first, missing, directory, under, last = client.get_many(keys)
    assert (first, missing, under, last) == (b"12345", None, None, b"123")
    assert isinstance(directory, IsADirectory)
    small = client.get_many([f"{home}/a", f"{home}/b"], [bytearray(4), bytearray(4)])
    assert isinstance(small[0], TooLarge)
    assert small[1] == 3
    with pytest.raises(Invalid, match="2 keys need as many buffers, not 1"):
        client.get_many([f"{home}/a", f"{home}/b"], [bytearray(4)])
    assert client.get_many([]) == []


def test_many_keys_are_answered_as_each_alone(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/below/a", b"below", parents=True)
    client.put_many((f"{home}/{n}", b"%d" % n) for n in range(40))
    odd = ("/cache", "/", home, f"{home}/.", f"{home}/..", f"{home}/50%25", f"{home}/50%", "/no/a")
    more = (
        f"{home}/below/a",
        f"{home}/below/b",
        f"{home}/below",
        f"{home}/{'n' * 300}",
        f"{home}/1/a",
    )
    keys = [*odd, *(f"{home}/{n}" for n in reversed(range(42))), *more, f"{home}/7", f"{home}/7"]
    alone = [client.get_many([key])[0] for key in keys]
    assert list(map(repr, client.get_many(keys))) == list(map(repr, alone))
    assert alone[8:50] == [None, None, *(b"%d" % n for n in reversed(range(40)))]


def test_an_unsealed_file_is_not_cut_where_the_system_tells_an_old_size(
    client: kvfs.Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put_many((f"{home}/{n}", b"whole") for n in range(2))
    opened = FileSequence.open

    def open_as_before(sequence: FileSequence, above: str, name: str) -> tuple[int, int]:
        fd, _ = opened(sequence, above, name)
        return fd, 3

    monkeypatch.setattr(FileSequence, "open", open_as_before)
    keys = [f"{home}/{n}" for n in range(2)]
    assert client.get_many(keys) == [b"whole"] * 2
    buffers = [bytearray(5), bytearray(5)]
    assert client.get_many(keys, buffers) == [5, 5]
    assert buffers == [b"whole"] * 2


def test_a_file_without_readable_checksums_keeps_no_other_back(
    client: kvfs.Client, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"{home}/{n}" for n in range(3)]
    client.put_many((key, b"content") for key in keys)
    bad = client.stat(keys[1]).ino

    def of_many(_: StoredChecksums, found: Sequence[FoundInode]) -> list[bytes | None]:
        if bad in [each.ino for each in found]:
            raise Unavailable("the index cannot be read")
        return [None] * len(found)

    monkeypatch.setattr(StoredChecksums, "of_many", of_many)
    first, second, third = client.get_many(keys, verify=True)
    assert first == third == b"content"
    assert isinstance(second, Unavailable)


def test_a_file_object_for_reading(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"line 1\nline 2\n")
    with client.open(f"{home}/a") as file:
        assert file.readline() == b"line 1\n"
        assert os.pread(file.fileno(), 4, 7) == b"line"
        assert not file.writable()


def test_a_file_object_for_writing_appears_when_it_is_closed(
    client: kvfs.Client, home: str
) -> None:
    with client.open(f"{home}/d/a", "wb", parents=True) as file:
        assert file.write(b"hello") == 5
        assert file.write(memoryview(b" world")) == 6
        file.seek(0)
        file.write(b"J")
        assert client.exists([f"{home}/d/a"]) == [False]
    assert client.get(f"{home}/d/a") == b"Jello world"
    with pytest.raises(Exists):
        client.open(f"{home}/d/a", "xb")


def test_a_file_object_left_by_an_error_is_dropped(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"old")
    with pytest.raises(ZeroDivisionError), client.open(f"{home}/a", "wb") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert client.get(f"{home}/a") == b"old"
    file = client.open(f"{home}/a", "wb")
    file.write(b"new")
    with pytest.warns(ResourceWarning, match=f"{home}/a was opened for writing and never closed"):
        del file
    assert client.get(f"{home}/a") == b"old"


def test_files_are_not_changed_in_place(client: kvfs.Client, home: str) -> None:
    for mode in ("ab", "r+b", "w", "r"):
        with pytest.raises(NotSupported, match="through the mount"):
            client.open(f"{home}/a", mode)  # type: ignore[call-overload]


def test_a_closed_client_refuses(store: Path) -> None:
    client = kvfs.Client(store)
    client.close()
    client.close()
    with pytest.raises(Invalid, match="closed"):
        client.get("/cache/a")
    with pytest.raises(Invalid, match="closed"):
        client.put("/cache/a", b"")
    with pytest.raises(Invalid, match="closed"):
        client.exists(["/cache/a"])


def test_two_clients_of_a_process_share_the_store(store: Path, home: str) -> None:
    with kvfs.Client(store) as one, kvfs.Client(str(store)) as other:
        one.put(f"{home}/a", b"1")
        assert other.get(f"{home}/a") == b"1"
        other.put(f"{home}/a", b"2")
        assert one.get(f"{home}/a") == b"2"


def test_no_store_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no store"):
        kvfs.Client(tmp_path)


def test_the_configured_store_is_the_default(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_CONFIG", os.devnull)
    monkeypatch.setenv("KVFS_STORE", str(store))
    with kvfs.Client() as client:
        assert b"cache" in names(client, "/")
