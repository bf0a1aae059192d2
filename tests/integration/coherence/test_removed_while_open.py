"""Files that one host removes while another one has them open for writing."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs
from tests.integration.several import Several, several

KINDS = ("durable", "cache")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    with several(2) as cluster:
        for kind in KINDS:
            place = ("--kind", kind, "--store", str(cluster.nodes[0].store))
            made = kvfs("namespace", "create", f"of-{kind}", *place)
            assert made.returncode == 0, made.stderr
        yield cluster


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_copy", [False, True])
def test_what_another_host_removed_is_written_to_as_any_file_without_a_name(
    nodes: Several, kind: str, has_copy: bool
) -> None:
    """Where this host has no copy of it, the other one forgets it wholly."""
    here, there = (node.mount / f"of-{kind}" / f"removed-{has_copy}" for node in nodes.nodes)
    wait_until(there.parent.exists, "both hosts know the namespace")
    there.write_bytes(b"theirs")
    wait_until(here.exists, "both hosts know it")
    if has_copy:
        assert here.read_bytes() == b"theirs"
    fd = os.open(here, os.O_RDWR | os.O_TRUNC)
    there.unlink()
    wait_until(lambda: not here.exists(), "both hosts know that it has gone")
    wait_until(lambda: not os.fstat(fd).st_nlink, "so does who has it open")
    os.write(fd, b"written and cut")
    os.ftruncate(fd, 7)
    os.fchmod(fd, 0o600)
    os.utime(fd, ns=(5_000_000_000, 6_000_000_000))
    os.fsync(fd)
    found = os.fstat(fd)
    assert (found.st_size, found.st_mode & 0o777) == (7, 0o600)
    assert found.st_mtime_ns == 6_000_000_000
    assert os.pread(fd, 20, 0) == b"written"
    os.pwrite(fd, b"W", 0)
    os.close(fd)
    _check_data_gone(nodes, found.st_ino)


def _check_data_gone(nodes: Several, ino: int) -> None:
    for node in nodes.nodes:
        data = (node.store / "data").glob
        wait_until(partial(_is_empty, data, f"???/{ino:016x}.*"), "its data have gone")


def _is_empty(data: Callable[[str], Iterable[Path]], pattern: str) -> bool:
    return not list(data(pattern))
