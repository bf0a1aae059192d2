"""Data files in several places: found wherever they lie, by processes that know of none, too."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.base.errors import ConfigError, Invalid, Unavailable
from kvfs.base.media import Place
from kvfs.datastore import places
from kvfs.datastore.files import name_of
from kvfs.datastore.layout import Store, create_store
from kvfs.datastore.tiered_files import TieredFiles
from kvfs.meta.records import namespace_root

NAMESPACE = 3
INO = namespace_root(NAMESPACE) + 5
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return create_store(tmp_path / "store")


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    return Place("ssd", str(tmp_path / "disk"), 1 << 30)


@pytest.fixture
def files(store: Store, disk: Place) -> Iterator[TieredFiles]:
    places.prepare(store, [disk], "")
    made = TieredFiles(store)
    yield made
    made.close()


def write(files: TieredFiles, ino: int, content: bytes) -> None:
    fd = files.create(ino, 0)
    os.write(fd, content)
    os.close(fd)


def read(files: TieredFiles, ino: int) -> bytes:
    fd = files.open(ino, 0, os.O_RDONLY)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def test_a_file_is_found_where_it_was_made(files: TieredFiles, disk: Place) -> None:
    write(files, INO, b"own")
    files.use({NAMESPACE: disk.root})
    write(files, INO + 1, b"disk")
    write(files, INO + (1 << 48), b"another namespace")
    assert files.path(INO + 1, 0).startswith(disk.root)
    assert files.path(INO, 0).startswith(files.root)
    assert files.path(INO + (1 << 48), 0).startswith(files.root)
    assert [read(files, INO), read(files, INO + 1)] == [b"own", b"disk"]
    assert files.stat(INO + 1, 0).st_size == 4
    assert sorted(files.scan()) == [(INO, 0), (INO + 1, 0), (INO + (1 << 48), 0)]
    assert list(files.strangers()) == []
    files.add_version(INO + 1, 0, 1)
    assert files.unlink(INO + 1, 0)
    assert not files.unlink(INO + 1, 0)
    assert files.stat(INO + 1, 1).st_size == 4
    with pytest.raises(FileNotFoundError):
        files.open(INO + 1, 0, os.O_RDONLY)


def test_many_files_are_opened_in_turn_where_they_are(files: TieredFiles, disk: Place) -> None:
    write(files, INO, b"own")
    files.use({NAMESPACE: disk.root})
    write(files, INO + (1 << 20), b"disk")
    own, other = files.sequences()
    for sequence, ino, content in ((own, INO, b"own"), (other, INO + (1 << 20), b"disk")):
        fd, size = sequence.open(*name_of(ino, 0))
        assert os.pread(fd, 100, 0) == content
        assert size == len(content)
        assert not os.get_inheritable(fd)
        sequence.close(fd)
    for sequence, ino in ((own, INO + (1 << 20)), (other, INO)):
        with pytest.raises(FileNotFoundError):
            sequence.open(*name_of(ino, 0))
        sequence.end()


def test_a_place_that_is_away_takes_nothing(files: TieredFiles, disk: Place) -> None:
    files.use({NAMESPACE: disk.root + "-gone"})
    write(files, INO, b"own")
    assert files.path(INO, 0).startswith(files.root)


def test_a_disk_that_is_not_mounted_is_no_new_one(store: Store, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounts need root")
    below = tmp_path / "mounted"
    below.mkdir()
    place = Place("ssd", str(below / "tier"), 1 << 30)

    def mount() -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", below], check=True)

    mount()
    try:
        places.prepare(store, [place], "")
        subprocess.run(["umount", below], check=True)
        with pytest.raises(Unavailable, match=r"nothing is mounted at .*/mounted, .*--tier ssd="):
            places.prepare(store, [place], "")
        assert os.listdir(below) == []
        mount()  # a new one, which has nothing
        places.prepare(store, [place], "")
    finally:
        subprocess.run(["umount", below], check=True)
    places.prepare(store, [], "")  # it is given up
    places.prepare(store, [place], "")


def test_another_process_puts_files_where_the_node_says(
    store: Store, files: TieredFiles, disk: Place
) -> None:
    places.write_targets(store, {NAMESPACE: disk.root})
    script = (
        "import sys; from pathlib import Path\n"
        "from kvfs.datastore.layout import open_store\n"
        "from kvfs.datastore.tiered_files import TieredFiles\n"
        "files = TieredFiles(open_store(Path(sys.argv[1])))\n"
        f"files.create({INO}, 0); files.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, store.root], check=True, cwd=ROOT, timeout=60)
    assert files.path(INO, 0).startswith(disk.root)


def test_a_process_finds_files_in_a_place_that_came_after_it(store: Store, disk: Place) -> None:
    early = TieredFiles(store)
    places.prepare(store, [disk], "")
    late = TieredFiles(store)
    late.use({NAMESPACE: disk.root})
    write(late, INO, b"late")
    assert read(early, INO) == b"late"
    early.close()
    late.close()


def test_a_place_belongs_to_one_store(store: Store, disk: Place, tmp_path: Path) -> None:
    places.prepare(store, [disk], "")
    places.prepare(store, [disk], "")
    other = create_store(tmp_path / "other")
    with pytest.raises(Invalid, match="another store"):
        places.prepare(other, [disk], "")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    with pytest.raises(Invalid, match="notes"):
        places.prepare(store, [Place("ssd", str(tmp_path / "full"), 1 << 30)], "")


def test_a_shared_store_belongs_to_one_cluster(store: Store, tmp_path: Path) -> None:
    flash = Place("shared:flash", str(tmp_path / "flash"))
    places.prepare(store, [flash], "us")
    places.prepare(create_store(tmp_path / "second"), [flash], "us")
    with pytest.raises(Invalid, match="another store"):
        places.prepare(create_store(tmp_path / "third"), [flash], "them")


def test_a_place_with_data_is_not_forgotten(store: Store, files: TieredFiles, disk: Place) -> None:
    files.use({NAMESPACE: disk.root})
    write(files, INO, b"x")
    with pytest.raises(ConfigError, match=r"name it again \(--tier ssd="):
        places.prepare(store, [], "")
    files.unlink(INO, 0)
    places.prepare(store, [], "")
    assert places.known(store) == []


def test_memory_is_memory(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not in memory"):
        places.prepare(store, [Place("ram", str(tmp_path / "ram"), 1 << 20)], "")
