"""`kvfs backup verify` tells which objects of a place are damaged, and which files a restore would
leave out: a restore of the same place says the same."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.contract.small_node import SmallNode, small_node
from tests.integration.harness import kvfs

LARGE = 9 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path / "store") as made:
        yield made


@pytest.fixture
def place(node: SmallNode, tmp_path: Path) -> Path:
    """Two backups of small files and a large one, of which the second has one file more."""
    where, models = tmp_path / "backups", node.namespace("models", kind="durable")
    for number in range(3):
        node.write(models, f"small-{number}", b"%d" % number * 100)
    node.write(models, "large", os.urandom(LARGE))
    backup(node, where)
    node.write(models, "later", b"later")
    backup(node, where)
    return where


def backup(node: SmallNode, place: Path) -> None:
    trio.run(node.sealer.settle)
    made = kvfs("backup", "create", "--store", str(node.store.root), "--backup", str(place))
    assert made.returncode == 0, made.stderr


def verified(place: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    done = kvfs("backup", "verify", "--json", "--backup", str(place), *options)
    return done.returncode, json.loads(done.stdout)


def restored(place: Path, store: Path) -> dict[str, Any] | None:
    """The result of a restore of the newest backup; None: there is none to be had."""
    where = ("--backup", str(place), "--store", str(store))
    done = kvfs("backup", "restore", "--json", "--skip-damaged", *where)
    assert done.returncode in (0, 8), done.stderr
    return json.loads(done.stdout) if done.returncode == 0 else None


def spoil(path: Path, at: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def the(place: Path, kind: str) -> Path:
    """The largest object of a kind."""
    found = (each for each in (place / kind).rglob("*") if each.is_file())
    return max(found, key=lambda path: path.stat().st_size)


def test_backups_that_are_whole(place: Path) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    code, (second, first) = verified(place)
    assert (code, second["files"], first["files"]) == (0, 5, 4)
    assert [each["damaged"] for each in (first, second)] == [[], []]
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    said = kvfs("backup", "verify", "--backup", str(place)).stdout
    assert said.count("files, whole\n") == 2


def test_a_large_content(place: Path, tmp_path: Path) -> None:
    spoil(the(place, "large"), LARGE - 1)
    code, found = verified(place)
    assert code == 8
    for each in found:
        assert (each["restorable"], each["damaged_files"]) == (True, 1)
        assert each["paths"] == ["/models/large"]
        assert the(place, "large").name in each["damaged"][0]
    done = restored(place, tmp_path / "new")
    assert done is not None
    assert (done["files"], done["damaged_files"]) == (4, 1)
    said = kvfs("backup", "verify", "--backup", str(place)).stdout
    assert "lost in it: /models/large" in said


@pytest.mark.parametrize("how", ["spoilt", "short", "gone"])
def test_a_pack_loses_the_files_that_are_damaged_in_it(
    place: Path, tmp_path: Path, how: str
) -> None:
    pack = the(place, "packs")
    if how == "spoilt":
        spoil(pack, 150)
    elif how == "short":
        os.truncate(pack, 250)
    else:
        pack.unlink()
    lost = {"spoilt": ["1"], "short": ["2"], "gone": ["0", "1", "2"]}[how]
    code, (second, first) = verified(place)
    assert code == 8
    for each in (first, second):
        assert each["paths"] == [f"/models/small-{number}" for number in lost]
        assert each["damaged_files"] == len(lost)
    done = restored(place, tmp_path / "new")
    assert done is not None
    assert done["damaged_files"] == len(lost)


@pytest.mark.parametrize("kind", ["packs", "large"])
def test_a_damaged_object_that_was_removed_is_put_again(
    node: SmallNode, place: Path, kind: str
) -> None:
    spoil(the(place, kind))
    backup(node, place)
    assert verified(place)[1][0]["damaged"], "a backup does not read what there is"
    the(place, kind).unlink()
    backup(node, place)
    newest, *others = verified(place)[1]
    assert (newest["files"], newest["damaged"]) == (5, [])
    if kind == "large":
        assert not any(each["damaged"] for each in others)


def _manifest(place: Path) -> None:
    spoil(max((place / "backups").iterdir()), 100)


def _page(place: Path) -> None:
    """Of the metadata: it has more than the table of contents."""
    the(place, "pages").unlink()


def _contents(place: Path) -> None:
    newest = max((place / "backups").iterdir())
    (page,) = json.loads(newest.read_bytes().partition(b"\n")[2])["contents"]["pages"]
    spoil(place / "pages" / page[-2:] / page, 20)


@pytest.mark.parametrize("damage", [_manifest, _page, _contents])
def test_a_backup_of_which_there_is_no_restore(
    place: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(place)
    code, found = verified(place)
    assert code == 8
    broken = [each for each in found if not each["restorable"]]
    assert broken
    assert all(each["damaged"] for each in broken)
    newest = found[0]
    assert (restored(place, tmp_path / "new") is None) == (not newest["restorable"])
    assert "NO RESTORE can be made" in kvfs("backup", "verify", "--backup", str(place)).stdout


def test_one_of_them(place: Path) -> None:
    second, first = (each["name"] for each in verified(place)[1])
    _manifest(place)
    assert verified(place, "--at", first)[0] == 0
    assert verified(place, "--at", second)[0] == 8
    assert kvfs("backup", "verify", "--backup", str(place), "--at", "x").returncode == 2
