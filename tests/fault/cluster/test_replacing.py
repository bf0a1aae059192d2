"""A file that takes the place of a durable one is on disk before the other one goes: the power goes
right after, and one of both is there, whole."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.fault.disks import cut
from tests.fault.machine import Machine, machine, write

_MIB = 1 << 20
OLD, FIRST, SECOND = (letter * _MIB for letter in (b"o", b"1", b"2"))


@pytest.fixture(params=["ext4", "xfs"])
def up(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path, request.param) as made:
        made.node.up()
        write(made.models / "target", OLD)
        yield made


def rewritten(path: Path, content: bytes) -> int:
    """A descriptor of what was written in place and not synced. It is not closed either: a close
    starts the writing to the disk."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, content)
    return fd


def after_a_power_cut(made: Machine, fd: int = -1) -> bytes:
    """What is under the name then; the rename itself had reached the disk. `fd` is closed after the
    cut."""
    write(made.models / "later", b"later")
    for each in made.disks:
        cut(each.mountpoint)
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)
    made.end()
    for each in made.disks:
        each.mount()
    made.node.up()
    assert (made.models / "later").read_bytes() == b"later"
    return (made.models / "target").read_bytes()


def test_what_was_synced_once_and_rewritten_since(up: Machine) -> None:
    write(up.models / "new", FIRST)
    fd = rewritten(up.models / "new", SECOND)
    os.rename(up.models / "new", up.models / "target")
    assert after_a_power_cut(up, fd) == SECOND


def test_what_a_client_renames(up: Machine) -> None:
    (up.models / "new").write_bytes(FIRST)
    with Client(up.node.store) as client:
        client.rename("/models/new", "/models/target")
    assert after_a_power_cut(up) == FIRST


def test_what_a_client_renames_and_was_rewritten(up: Machine) -> None:
    write(up.models / "new", FIRST)
    fd = rewritten(up.models / "new", SECOND)
    with Client(up.node.store) as client:
        client.rename("/models/new", "/models/target")
    assert after_a_power_cut(up, fd) == SECOND
