"""The store directory: made, opened again, refused, locked, left in order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.base.errors import Busy, Corrupt, Invalid, NotFound, NotSupported, ReadOnly
from kvfs.datastore.layout import create_store, open_store, remove_unused


def test_a_store_keeps_its_identity(tmp_path: Path) -> None:
    first = create_store(tmp_path / "a" / "store")
    again = create_store(tmp_path / "a" / "store")
    assert first.identity == again.identity == open_store(tmp_path / "a" / "store").identity
    assert {"format", "meta", "data", "run"} == set(os.listdir(first.root))


def test_everything_is_private(tmp_path: Path) -> None:
    store = create_store(tmp_path / "store")
    for path in (store.root, store.meta, store.data, store.run):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (store.root / "format").stat().st_mode & 0o777 == 0o600


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(Invalid, match=r"thesis\.tex.*--store"):
        create_store(tmp_path)
    with pytest.raises(Invalid, match=r"thesis\.tex"):
        open_store(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Invalid, match="not a directory"):
        create_store(tmp_path / "file")


def test_a_creation_cut_short_is_taken_up_again(tmp_path: Path) -> None:
    (tmp_path / ".format.new").write_text("{")
    (tmp_path / "lost+found").mkdir()
    create_store(tmp_path)
    assert open_store(tmp_path)


def test_a_store_that_never_held_a_file_can_be_taken_away(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    store.lock()
    remove_unused(tmp_path)
    assert open_store(tmp_path), "somebody uses it"
    store.unlock()
    block = store.data / "000" / "1.0"
    block.parent.mkdir()
    block.touch()
    remove_unused(tmp_path)
    assert block.exists()
    block.unlink()
    (tmp_path / "lost+found").mkdir()
    remove_unused(tmp_path)
    assert os.listdir(tmp_path) == ["lost+found"]
    remove_unused(tmp_path / "nothing")


def test_no_store_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="kvfs up --store"):
        open_store(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"", b"garbage", b'{"format": "one"}'])
def test_a_damaged_format_file(tmp_path: Path, content: bytes) -> None:
    store = create_store(tmp_path)
    (store.root / "format").write_bytes(content)
    with pytest.raises(Corrupt, match="backup"):
        create_store(tmp_path)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    raw = (store.root / "format").read_bytes()
    (store.root / "format").write_bytes(raw.replace(b'"format":1', b'"format":99'))
    with pytest.raises(NotSupported, match="format 99"):
        open_store(tmp_path)


def test_a_path_below_a_file_is_invalid(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Invalid):
        create_store(tmp_path / "file" / "store")


def test_no_permission_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)  # root is never refused by mode bits
    with pytest.raises(ReadOnly, match="permission"):
        create_store(tmp_path / "store")


def test_one_daemon_at_a_time(tmp_path: Path) -> None:
    first = create_store(tmp_path)
    first.lock()
    with pytest.raises(Busy, match=f"process {os.getpid()}.*kvfs down"):
        open_store(tmp_path).lock()
    first.unlock()
    second = open_store(tmp_path)
    second.lock()
    second.unlock()


def test_the_lock_ends_with_the_process(tmp_path: Path) -> None:
    create_store(tmp_path)
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kvfs.datastore.layout import open_store\n"
        "open_store(Path(sys.argv[1])).lock(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path])
    store = open_store(tmp_path)
    store.lock()
    store.unlock()


def test_the_clean_mark_is_taken_once(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    assert not store.take_clean()
    store.mark_clean()
    assert open_store(tmp_path).take_clean()
    assert not store.take_clean()
