"""What is behind a path of a mount: the data file in the store, as it is while it is open."""

import os
from pathlib import Path

import pytest

from kvfs.client.mount.backing_file import open_backing
from tests.integration.conftest import Place
from tests.integration.posix import as_user


@pytest.fixture
def name(here: Path) -> Path:
    (here / "blocks").mkdir()
    path = here / "blocks" / "one"
    path.write_bytes(b"x" * 10_000)
    return path


def test_the_data_file_lies_in_the_store(place: Place, name: Path) -> None:
    if place.node is None:
        pytest.skip("a plain directory has no store behind it")
    backing = open_backing(name)
    try:
        assert backing.store == place.node.store
        assert Path(os.readlink(f"/proc/self/fd/{backing.fd}")).is_relative_to(place.node.store)
        name.unlink()
        assert os.pread(backing.fd, 20_000, 0) == b"x" * 10_000
    finally:
        os.close(backing.fd)


def test_who_may_not_enter_the_store_has_the_mounts_descriptor(place: Place, name: Path) -> None:
    if place.node is None:
        pytest.skip("a plain directory has no store behind it")
    name.chmod(0o644)
    name.parent.chmod(0o755)
    with as_user(1234):
        backing = open_backing(name)
    assert backing.store == place.node.store
    assert os.pread(backing.fd, 20_000, 0) == b"x" * 10_000
    os.close(backing.fd)


def test_what_is_not_closed_yet_is_read_through_the_mount(here: Path) -> None:
    with open(here / "open", "wb") as file:
        file.write(b"z" * 5_000)
        file.flush()
        backing = open_backing(here / "open")
        assert os.pread(backing.fd, 9_000, 0) == b"z" * 5_000
        os.close(backing.fd)


def test_a_symbolic_link_leads_to_the_same_data_file(name: Path) -> None:
    link = name.parent / "link"
    link.symlink_to(name.name)
    one, other = open_backing(name), open_backing(link)
    try:
        assert os.fstat(one.fd).st_ino == os.fstat(other.fd).st_ino
        assert os.fstat(one.fd).st_dev == os.fstat(other.fd).st_dev
    finally:
        os.close(one.fd)
        os.close(other.fd)


def test_a_path_beside_the_mount_is_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(b"y")
    backing = open_backing(path)
    assert backing.store is None
    assert os.pread(backing.fd, 9, 0) == b"y"
    os.close(backing.fd)


def test_what_is_not_there_is_said(here: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_backing(here / "nothing")
