"""Backups that were changed by somebody: what they say is looked at before it is done."""

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from tests.contract.small_node import small_node
from tests.integration.harness import kvfs


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A backup of a store with one small file."""
    store, place = tmp_path / "store", tmp_path / "backups"
    with small_node(store) as node:
        node.write(node.namespace("models", kind="durable"), "file", b"content")
        trio.run(node.sealer.settle)
    backup(store, place)
    return place


def backup(store: Path, place: Path) -> None:
    made = kvfs("backup", "create", "--store", str(store), "--backup", str(place))
    assert made.returncode == 0, made.stderr


def restore(place: Path, store: Path) -> tuple[int, str]:
    done = kvfs("backup", "restore", "--backup", str(place), "--store", str(store))
    assert done.stderr.count("\n") == 1 or not done.returncode, done.stderr
    return done.returncode, done.stderr


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def rewrite(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest, with the right digest."""
    (path,) = (place / "backups").iterdir()
    found = json.loads(path.read_bytes().partition(b"\n")[2])
    change(found)
    text = json.dumps(found).encode()
    path.write_bytes(digest(text).encode() + b"\n" + text + b"\n")


def rewrite_rows(place: Path, table: str, change: Callable[[list[bytes]], None]) -> None:
    """Changes keys and values of a table with one page."""

    def fn(found: dict[str, Any]) -> None:
        (page,) = found[table]["pages"]
        path = place / "pages" / page[-2:] / page
        rows = msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=list[bytes])
        change(rows)
        packed = msgspec.msgpack.encode(rows)
        name = digest(packed)
        path = place / "pages" / name[-2:] / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(zlib.compress(packed))
        found[table]["pages"] = [name]

    rewrite(place, fn)


def _outside(found: dict[str, Any]) -> None:
    found["records"]["pages"][0] = "../../../outside"


def _other_source(found: dict[str, Any]) -> None:
    found["source"] = "../other"


def _no_key(found: dict[str, Any]) -> None:
    found["secret_key"] = "no key"


def _later(found: dict[str, Any]) -> None:
    found["schema"] = "99"


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (_outside, 8, "it names no objects"),
        (_other_source, 8, "it names no objects"),
        (_no_key, 8, "it names no objects"),
        (_later, 2, "schema 99"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused_before_a_store_is_made(
    place: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], code: int, says: str
) -> None:
    rewrite(place, change)
    found, said = restore(place, tmp_path / "new")
    assert (found, says in said) == (code, True), said
    assert not (tmp_path / "new").exists()


def _foreign_key(rows: list[bytes]) -> None:
    rows[:0] = [b"Zforeign", b""]


def _bad_record(rows: list[bytes]) -> None:
    for at in range(0, len(rows), 2):
        if rows[at][:1] == b"i":
            rows[at + 1] = b"\xc1"


def _pack_elsewhere(rows: list[bytes]) -> None:
    rows[1] = msgspec.msgpack.encode([7, "../../../secret", 0])


@pytest.mark.parametrize(
    ("table", "change"),
    [("records", _foreign_key), ("records", _bad_record), ("contents", _pack_elsewhere)],
)
def test_a_row_that_is_none_ends_a_restore_and_no_node_starts(
    place: Path, tmp_path: Path, table: str, change: Callable[[list[bytes]], None]
) -> None:
    (tmp_path / "secret").write_bytes(b"content")
    rewrite_rows(place, table, change)
    code, said = restore(place, tmp_path / "new")
    assert (code, "the backup" in said, "damaged" in said) == (8, True, True), said
    assert kvfs("engine", "copy", str(tmp_path / "new"), str(tmp_path / "copy")).returncode != 0


def test_what_is_no_file_or_too_large_is_damaged(place: Path, tmp_path: Path) -> None:
    (page,) = json.loads(manifest_of(place).read_bytes().partition(b"\n")[2])["records"]["pages"]
    path = place / "pages" / page[-2:] / page
    path.unlink()
    os.mkfifo(path)
    code, said = restore(place, tmp_path / "new")
    assert (code, f"{path} is damaged: it is no file" in said) == (8, True), said
    os.truncate(manifest_of(place), 1 << 40)
    listed = kvfs("backup", "list", "--backup", str(place), "--json")
    assert [each["damaged"] for each in json.loads(listed.stdout)] == [True]


def manifest_of(place: Path) -> Path:
    (found,) = (place / "backups").iterdir()
    return found


def test_a_page_that_is_gone_comes_back_with_the_next_backup(place: Path, tmp_path: Path) -> None:
    for page in (place / "pages").rglob("*"):
        if page.is_file():
            page.unlink()
    backup(tmp_path / "store", place)
    assert restore(place, tmp_path / "new")[0] == 0
    found = kvfs("fsck", "--checksums", "--store", str(tmp_path / "new"))
    assert (found.returncode, found.stdout) == (0, "the store is whole\n")
    assert kvfs("ls", "/models", "--store", str(tmp_path / "new")).stdout.split() == ["file"]


def test_a_backup_of_a_time_to_come_is_in_the_way_and_said(place: Path, tmp_path: Path) -> None:
    manifest = manifest_of(place)
    manifest.rename(manifest.with_name("29990101T000000.000000Z.json"))
    arguments = ("--store", str(tmp_path / "store"), "--backup", str(place), "--backup-keep", "1")
    made = kvfs("backup", "create", *arguments)
    assert (made.returncode, "set the clock, or delete" in made.stderr) == (4, True), made.stderr
    (place / "backups" / "29990101T000000.000000Z.json").unlink()
    (place / "backups" / "README").write_text("no backup")
    assert kvfs("backup", "create", *arguments).returncode == 0
