"""The metadata's journal is damaged on the disk, and then the power goes: nothing that was
acknowledged is given up without a word, and a repair gives up no more than it must."""

import os
import random
import shutil
import struct
from pathlib import Path

import pytest

from kvfs.base.errors import Corrupt
from kvfs.meta.lmdb import checkpoints
from kvfs.meta.lmdb import journal as journal_file
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.journal import generations
from tests.cluster.waiting import wait_until
from tests.conftest import LONG, SEED
from tests.fault import engine_writer
from tests.fault.engine_writer import COUNT
from tests.fault.machine import Machine, machine, write
from tests.integration.harness import CannotStart, Node, kvfs
from tests.integration.several import several

_FILES = [f"file-{number}" for number in range(200)]


def journal(made: Machine) -> Path:
    return made.meta / f"journal.{generations(made.meta, 'journal')[-1]}"


def flip(path: Path, at: int) -> None:
    """One bit of the file."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))
        os.fsync(file.fileno())


def repair(made: Machine) -> str:
    done = kvfs("fsck", "--repair", "--store", str(made.node.store))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def left(made: Machine) -> set[str]:
    names = {each.name for each in made.models.iterdir() if each.name.startswith("file-")}
    assert all((made.models / name).read_bytes() == name.encode() for name in names)
    return names


def test_one_flipped_bit_costs_one_commit_at_most(tmp_path: Path) -> None:
    with machine(tmp_path, "ext4") as made:
        made.node.up()
        made.write_back()
        for name in _FILES:
            write(made.models / name, name.encode())
        data_files = set(made.data_files())
        made.lose_power()
        flip(journal(made), journal(made).stat().st_size // 2)
        with pytest.raises(CannotStart, match=r"journal\.\d+ is damaged.*commits follow.*fsck"):
            made.node.up()
        found = kvfs("fsck", "--store", str(made.node.store))
        assert found.returncode != 0
        assert "is damaged at byte" in found.stderr
        assert set(made.data_files()) == data_files

        assert "damaged_journal" in repair(made)
        assert set(made.data_files()) == data_files
        made.node.up()
        assert len(left(made)) >= len(_FILES) - 1
        (kept,) = made.node.status()["engine"]["damaged_metadata"]
        assert kept in kvfs("status", "--store", str(made.node.store)).stdout
        assert kept in kvfs("doctor", "--store", str(made.node.store)).stdout
        Path(kept).unlink()
        assert not made.node.status()["engine"]["damaged_metadata"]
        write(made.models / "file-more", b"file-more")
        made.lose_power()
        made.node.up()
        assert len(left(made)) >= len(_FILES)


def test_a_journal_that_was_cut_short_is_no_torn_end(tmp_path: Path) -> None:
    """The last commit alone may be missing without being missed."""
    with machine(tmp_path, "ext4") as made:
        made.node.up()
        for name in _FILES:
            write(made.models / name, name.encode())
        data_files = set(made.data_files())
        made.lose_power()
        os.truncate(journal(made), journal(made).stat().st_size * 3 // 4)
        with pytest.raises(CannotStart, match=r"journal\.\d+ is damaged.*it was on disk up to"):
            made.node.up()
        repair(made)
        made.node.up()
        assert 50 < len(left(made)) < len(_FILES)
        assert set(made.data_files()) == data_files


def count(node: Node, name: str) -> int:
    return int(node.status()["counters"][name])


def test_a_mirror_goes_back_to_the_damage_and_has_the_rest_from_its_engine(
    tmp_path: Path,
) -> None:
    with several(1) as cluster, machine(tmp_path, "ext4", flags=cluster.flags("cut")) as made:
        (other,), files = cluster.nodes, _FILES[:80]
        made.node.up()
        cached = {f"{number}": f"cached-{number}".encode() for number in range(20)}
        for number, name in enumerate(files):
            write((made.models, other.mount / "models")[number % 2] / name, name.encode())
        for name, content in cached.items():
            write(made.node.mount / "cache" / name, content)
        wait_until(lambda: count(made.node, "sealed_files") >= 60, "what it wrote is sealed")
        data_files, used_bytes = set(made.data_files()), made.node.status()["store"]["used_bytes"]
        made.write_back()
        made.lose_power()
        flip(journal(made), journal(made).stat().st_size // 2)
        with pytest.raises(CannotStart, match=r"journal\.\d+ is damaged.*commits follow.*fsck"):
            made.node.up()
        assert "damaged_journal" in repair(made)
        assert set(made.data_files()) == data_files
        made.node.up()
        assert set(os.listdir(made.models)) == set(files)
        for name in files[::2]:
            assert (made.models / name).read_bytes() == name.encode()
        for name, content in cached.items():
            assert (made.node.mount / "cache" / name).read_bytes() == content
        assert made.node.status()["quarantine"]["files"] == 0
        wait_until(
            lambda: made.node.status()["store"]["used_bytes"] >= used_bytes, "all counts again"
        )
        assert left(made) == set(files)
        write(made.models / "file-more", b"file-more")
        assert (other.mount / "models" / "file-more").read_bytes() == b"file-more"
        made.node.down()
        found = kvfs("fsck", "--checksums", "--store", str(made.node.store))
        assert found.returncode == 0, found.stdout


_COMMITS = 200
_CASES = 300 if LONG else 12


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine's files of which each commit was acknowledged by a sync; the journal alone came to
    the disk."""
    path = tmp_path_factory.mktemp("engine") / "meta"
    engine = EmbeddedEngine(path, boot=1)
    for n in range(1, _COMMITS + 1):
        engine_writer.commit(engine, n)
        engine.sync_now()
        if n == _COMMITS // 2:
            engine.rotate_now()
    copy = path.with_name("cut")
    shutil.copytree(path, copy)
    (copy / "data.mdb").unlink()
    engine.close()
    return copy


def test_a_journal_without_its_first_sector_is_refused(synced: Path, tmp_path: Path) -> None:
    """With it goes the mark that says how far the journal was on disk."""
    shutil.copytree(synced, path := tmp_path / "meta")
    (journal,) = path.glob("journal.*")
    with journal.open("r+b") as file:
        file.write(bytes(512))
    with pytest.raises(Corrupt, match="is damaged at byte"):
        EmbeddedEngine(path, boot=2)
    engine = EmbeddedEngine(path, boot=2, past_damage=True)
    assert engine.damage
    engine.close()


@pytest.mark.parametrize("case", range(_CASES))
@pytest.mark.parametrize("damage", ["flip", "cut", "lost sector"])
def test_the_journal_is_whole_or_refused_or_told(
    synced: Path, tmp_path: Path, case: int, damage: str
) -> None:
    """Wherever it is damaged: the last sync alone may go without a refusal, since a power cut in it
    looks the same; with more behind it, it is told."""
    source = random.Random(f"{SEED} {case} {damage}")
    shutil.copytree(synced, path := tmp_path / "meta")
    (journal,) = path.glob("journal.*")
    size = journal.stat().st_size
    at = source.randrange(size)
    if damage == "flip":
        flip(journal, at)
    elif damage == "cut":
        os.truncate(journal, at)
    else:
        with journal.open("r+b") as file:
            file.seek(at // 512 * 512)
            file.write(bytes(min(512, size - at // 512 * 512)))
    try:
        engine = EmbeddedEngine(path, boot=2)
    except Corrupt as error:
        assert "is damaged at byte" in str(error)
        before = sorted(journal.parent.iterdir())
        engine = EmbeddedEngine(path, boot=2, past_damage=True)
        assert engine.damage
        assert [each for each in before if each.name.startswith("base") and not each.exists()]
    else:
        found = int(engine.read_now(lambda t: t.get(COUNT)) or b"0")
        assert found >= _COMMITS - 1
        assert engine_writer.contents(engine) == engine_writer.expected(found)
    if damage == "flip":
        last = int(engine.read_now(lambda t: t.get(COUNT)) or b"0")
        assert last >= _COMMITS - 1
        keys = {key for n in (last, _COMMITS) for key in engine_writer.expected(n)}
        missing = keys - set(engine_writer.contents(engine))
        assert len(missing) <= 8, "what one commit wrote"
    engine_writer.commit(engine, 500)
    engine.close()
    again = EmbeddedEngine(path, boot=3)
    assert again.read_now(lambda t: t.get(COUNT)) == b"500"
    again.close()


def test_a_journal_of_an_earlier_version_is_read_and_replaced(tmp_path: Path) -> None:
    """It has no mark: records follow its header."""
    path = tmp_path / "meta"
    engine = EmbeddedEngine(path, boot=1)
    position = checkpoints.read_position(engine.environment)
    former = struct.pack("<8sQQ8s", b"KVFSJRN1", *position[::2], position.digest)
    (path / "journal.1").write_bytes(former)
    packed = journal_file.pack_position(position._replace(end=len(former)))
    with engine.environment.begin(write=True) as transaction:
        transaction.put(journal_file.POSITION_KEY, packed)
    with engine.environment.begin() as transaction, (path / "base").open("wb") as base:
        engine.environment.copyfd(base.fileno(), compact=True, txn=transaction)
    (path / "base").rename(path / "base.1")
    for n in range(1, 20):
        engine_writer.commit(engine, n)
        engine.sync_now()
    shutil.copytree(path, copy := tmp_path / "copy")
    engine.close()
    (copy / "data.mdb").unlink()
    again = EmbeddedEngine(copy, boot=2)
    assert engine_writer.contents(again) == engine_writer.expected(19)
    again.rotate_now()
    again.close()
