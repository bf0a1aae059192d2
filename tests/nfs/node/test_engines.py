"""What inference engines do with files, replayed by clients of NFS: LMCache's fs connector, the
file back end of SGLang, vLLM's fs tier."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.files import Files, LibNfs, Raw41, exists, library

LACKING = ganesha.why_not() or ("" if library() else "not installed: libnfs (libnfs-utils)")
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
BLOCKS = 24


def block(number: int) -> bytes:
    """Of 256 KiB and a little more, of its number."""
    return hashlib.sha256(str(number).encode()).digest() * 8192 + b"%06d" % number


@pytest.fixture(params=[LibNfs, Raw41])
def clients(plain_door: Door, request: pytest.FixtureRequest) -> Iterator[list[Files]]:
    """Three of one kind."""
    made = [request.param(plain_door, "shared") for _ in range(3)]
    yield made
    for each in made:
        each.close()


def test_lmcache(clients: list[Files], home: Path) -> None:
    """put: a temporary file, then its name; get: the size, then all of it; exists; list; remove.
    What one engine is putting another never gets a part of."""
    writer, *readers = clients
    names = [f"{home.name}/model@4@0@{number:032x}@bfloat16.data" for number in range(BLOCKS)]

    def put(number: int) -> None:
        temporary = names[number].removesuffix(".data") + ".tmp"
        writer.write(temporary, block(number))
        writer.replace(temporary, names[number])

    def get_all(reader: Files) -> None:
        missing = set(range(BLOCKS))
        while missing:
            for number in sorted(missing):
                with contextlib.suppress(FileNotFoundError):
                    size = reader.size(names[number])
                    found = reader.read(names[number])
                    assert size == len(found)
                    assert found == block(number)
                    missing.discard(number)

    with ThreadPoolExecutor(len(readers)) as pool:
        reading = [pool.submit(get_all, each) for each in readers]
        for number in range(BLOCKS):
            assert not exists(writer, names[number])
            put(number)
        for each in reading:
            each.result()
    put(0)  # once more, over what is there
    assert readers[0].read(names[0]) == block(0)
    assert readers[0].names(home.name) == {each.rpartition("/")[2] for each in names}
    assert {each.name for each in home.iterdir()} == readers[0].names(home.name)
    readers[0].remove(names[1])
    assert not any(exists(each, names[1]) for each in clients)
    with pytest.raises(FileNotFoundError):
        readers[1].read(names[1])


def test_sglang(clients: list[Files], home: Path) -> None:
    """set: nothing where it exists, else the file in place; get: read into a page; exists of the
    longest prefix; clear: list and remove."""
    one, another, third = clients
    pages = [f"{home.name}/{number:064x}_model_1_0.bin" for number in range(BLOCKS)]

    def set_(files: Files, number: int) -> None:
        if not exists(files, pages[number]):
            files.write(pages[number], block(number))

    for number in range(BLOCKS // 2):
        set_(one, number)
        set_(another, number)
    hits = next(n for n in range(BLOCKS) if not exists(third, pages[n]))
    assert hits == BLOCKS // 2
    for number in range(hits):
        assert third.read(pages[number]) == (home / Path(pages[number]).name).read_bytes()
        assert third.read(pages[number]) == block(number)
    for name in another.names(home.name):
        another.remove(f"{home.name}/{name}")
    assert list(home.iterdir()) == []
    set_(third, 0)
    assert one.read(pages[0]) == block(0)


def test_vllm(clients: list[Files], home: Path) -> None:
    """Its tree of directories, made by whoever comes first; config.json beside; existence checks in
    batches; store: temporary, then replace, by two engines at once."""
    root = f"{home.name}/model_0123456789ab_r0"
    for each in clients:
        for path in (root, f"{root}/000", f"{root}/000/00_g0"):
            with contextlib.suppress(FileExistsError):
                each.mkdir(path)
    clients[0].write(f"{root}/config.json", json.dumps({"block_size": 16}).encode())
    names = [f"{root}/000/00_g0/{number:064x}.bin" for number in range(BLOCKS)]

    def store_all(at: int) -> None:
        for number in range(BLOCKS):
            temporary = f"{names[number]}.{at}.tmp"
            clients[at].write(temporary, block(number), new=True)
            clients[at].replace(temporary, names[number])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(store_all, range(2)))
    assert [exists(clients[2], each) for each in names] == [True] * BLOCKS
    assert not exists(clients[2], f"{root}/000/00_g0/{BLOCKS:064x}.bin")
    for number, name in enumerate(names):
        assert clients[2].read(name) == block(number)
    assert json.loads(clients[1].read(f"{root}/config.json")) == {"block_size": 16}
    assert len(clients[2].names(f"{root}/000/00_g0")) == BLOCKS
    assert not list(home.rglob("*.tmp"))
