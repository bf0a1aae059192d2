"""The metadata's base is damaged on the disk, and then the power goes: nothing is built on it in
silence, and what can be read of it is taken by a repair."""

import os
import random
import shutil
from pathlib import Path

import pytest

from kvfs.base.errors import Corrupt
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.journal import generations
from tests.conftest import LONG, SEED
from tests.contract.mirrors import Mirror, everything, in_redis
from tests.contract.redis_servers import RedisServer, killed
from tests.fault import engine_writer
from tests.fault.disk.test_damaged_journal import flip, left, repair
from tests.fault.engine_writer import COUNT
from tests.fault.machine import Machine, machine, write
from tests.integration.harness import CannotStart, kvfs

_FILES = [f"file-{number}" for number in range(200)]


def base(meta: Path) -> Path:
    return meta / f"base.{generations(meta, 'base')[-1]}"


def store_with_a_base(made: Machine) -> None:
    """Most of its files are in the base, the last ones in the journal alone."""
    made.node.up()
    for name in _FILES[:150]:
        write(made.models / name, name.encode())
    made.node.down()
    engine = EmbeddedEngine(made.meta)
    engine.rotate_now()
    engine.close()
    made.node.up()
    made.write_back()
    for name in _FILES[150:]:
        write(made.models / name, name.encode())


def test_one_flipped_bit_is_refused_and_costs_one_record_at_most(tmp_path: Path) -> None:
    with machine(tmp_path, "ext4") as made:
        store_with_a_base(made)
        data_files = set(made.data_files())
        made.lose_power()
        at = base(made.meta).read_bytes().index(b"file-77") + 5
        flip(base(made.meta), at)
        with pytest.raises(CannotStart, match=r"base\.\d+ is damaged.*fsck --repair"):
            made.node.up()
        found = kvfs("fsck", "--store", str(made.node.store))
        assert found.returncode != 0
        assert "is damaged: its pages are not those that were sealed" in found.stderr
        assert set(made.data_files()) == data_files

        assert "damaged_base" in repair(made)
        assert set(made.data_files()) == data_files
        made.node.up()
        assert len(left(made) & set(_FILES)) >= len(_FILES) - 1
        (kept,) = made.node.status()["engine"]["damaged_metadata"]
        assert kept in kvfs("status", "--store", str(made.node.store)).stdout
        assert kept in kvfs("doctor", "--store", str(made.node.store)).stdout
        Path(kept).unlink()
        made.lose_power()
        made.node.up()
        assert len(left(made) & set(_FILES)) >= len(_FILES) - 1


def test_the_base_of_a_store_that_is_whole_is_taken_anew(tmp_path: Path) -> None:
    with machine(tmp_path, "ext4") as made:
        made.node.up()
        write(made.models / "file-1", b"file-1")
        made.node.down()
        flip(base(made.meta), 5000)
        found = kvfs("fsck", "--store", str(made.node.store))
        assert found.returncode == 1
        assert "damaged_base" in found.stdout
        assert "damaged_base" in repair(made)
        assert kvfs("fsck", "--store", str(made.node.store)).returncode == 0
        made.node.up()
        made.lose_power()
        made.node.up()
        assert left(made) == {"file-1"}


_COMMITS = 300
_CASES = 200 if LONG else 10


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine's files, of which base and journal alone came to the disk; `older` has those of the
    generation before."""
    path = tmp_path_factory.mktemp("engine") / "meta"
    engine = EmbeddedEngine(path, boot=1)
    for n in range(1, _COMMITS + 1):
        engine_writer.commit(engine, n)
        if n == _COMMITS * 2 // 3:
            engine.sync_now()
            shutil.copytree(path, path.with_name("older"))
            engine.rotate_now()
    engine.sync_now()
    copy = path.with_name("cut")
    shutil.copytree(path, copy)
    (copy / "data.mdb").unlink()
    engine.close()
    return copy


@pytest.mark.parametrize("case", range(_CASES))
@pytest.mark.parametrize("damage", ["flip", "cut", "lost sector"])
def test_a_damaged_base_is_refused_wherever_it_is_damaged(
    synced: Path, tmp_path: Path, case: int, damage: str
) -> None:
    source = random.Random(f"{SEED} {case} {damage}")
    shutil.copytree(synced, path := tmp_path / "meta")
    size = base(path).stat().st_size
    at = source.randrange(size - 32)
    if damage == "flip":
        flip(base(path), at)
    elif damage == "cut":
        os.truncate(base(path), at)
    else:
        raw, start = bytearray(base(path).read_bytes()), at // 512 * 512
        raw[start : start + 512] = source.randbytes(512)
        base(path).write_bytes(raw[:size])
    before = {each: each.read_bytes() for each in path.iterdir() if each.name[0] in "bj"}
    with pytest.raises(Corrupt, match=r"base\.\d+ is damaged"):
        EmbeddedEngine(path, boot=2)
    assert {each: each.read_bytes() for each in before} == before
    try:
        engine = EmbeddedEngine(path, boot=2, past_damage=True)
    except Corrupt as error:  # of what leads to the pages
        assert "kvfs rebuild" in str(error)
        return
    assert engine.damage["damaged_base"]
    assert engine.read_now(lambda t: t.get(COUNT)) == b"%d" % _COMMITS
    if damage == "flip":
        there, whole = engine_writer.contents(engine), engine_writer.expected(_COMMITS)
        wrong = [key for key in whole if there.get(key) != whole[key]]
        assert len(wrong) <= len(whole) // 3, "what hangs on one page"
    engine_writer.commit(engine, 500)
    engine.close()
    again = EmbeddedEngine(path, boot=3)
    assert not again.damage
    assert again.read_now(lambda t: t.get(COUNT)) == b"500"
    again.close()


def test_the_base_before_it_and_all_journals_are_as_good(synced: Path, tmp_path: Path) -> None:
    """The power went before they were removed."""
    shutil.copytree(synced, path := tmp_path / "meta")
    flip(base(path), base(path).stat().st_size // 2)
    for each in (synced.with_name("older")).glob("[bj]*.*"):
        shutil.copy(each, path)
    engine = EmbeddedEngine(path, boot=2)
    assert "have all that it had" in engine.damage["damaged_base"]
    assert engine_writer.contents(engine) == engine_writer.expected(_COMMITS)
    assert not engine.find_base_damage()
    engine.close()


def test_a_journal_that_is_cut_before_the_base_is_missed(synced: Path, tmp_path: Path) -> None:
    """Of the older base alone nobody would know what the newest one had."""
    shutil.copytree(synced, path := tmp_path / "meta")
    flip(base(path), base(path).stat().st_size // 2)
    for each in (synced.with_name("older")).glob("[bj]*.*"):
        shutil.copy(each, path)
    first = path / f"journal.{generations(path, 'journal')[0]}"
    os.truncate(first, first.stat().st_size - 1)
    with pytest.raises(Corrupt, match=r"journal\.\d+ is damaged"):
        EmbeddedEngine(path, boot=2)


def test_a_mirror_whose_base_is_damaged_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "meta"
    with killed(RedisServer(tmp_path / "redis")) as server:
        mirror = Mirror(path, server.url)
        for n in range(50):
            mirror.transact_now(lambda t, n=n: t.put(b"key-%d" % n, b"value-%d" % n))
        mirror.local.rotate_now()
        mirror.close()
        (path / "data.mdb").unlink()
        flip(base(path), base(path).read_bytes().index(b"value-17"))
        EmbeddedEngine(path, past_damage=True).close()
        again = Mirror(path, server.url)
        assert everything(again) == in_redis(server.url)
        again.close()
