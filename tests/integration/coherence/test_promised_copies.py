"""Closes that promise a copy on another host (`--acknowledge sync`), while programs of both hosts
write the same files in place."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs as command
from tests.integration.several import Several, several

PROMISED = ("--replicas", "1", "--acknowledge", "sync")
NAMESPACES = {
    "seen-at-once": ("--kind", "durable", "--coherence", "strict"),
    "seen-later": ("--kind", "cache", "--coherence", "cache"),
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    with several(2) as cluster:
        store = str(cluster.nodes[0].store)
        for name, flags in NAMESPACES.items():
            made = command("namespace", "create", name, *flags, *PROMISED, "--store", store)
            assert made.returncode == 0, made.stderr
            for node in cluster.nodes:
                wait_until((node.mount / name).is_dir, "the namespace is known")
        cluster.wait_for_room()
        yield cluster


def write(path: Path, content: bytes, flags: int = os.O_TRUNC) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)


@pytest.mark.parametrize("space", NAMESPACES)
@pytest.mark.parametrize("way", ["rewritten", "made", "appended"])
def test_hosts_that_write_one_file_in_place_have_their_copies(
    nodes: Several, space: str, way: str
) -> None:
    """What is asked for on behalf of one close may have been replaced by the next one."""
    rounds, failures = 12, list[str]()
    mounts = [node.mount / space for node in nodes.nodes]
    (mounts[0] / way).mkdir()
    flags = os.O_APPEND if way == "appended" else os.O_TRUNC

    def work(who: int) -> None:
        for number in range(rounds):
            name = str(number) if way == "made" else "file"
            try:
                write(mounts[who] / way / name, b"%d.%d\n" % (who, number) * 100, flags)
            except OSError as error:
                failures.append(f"{who} {number}: {error}")
                return

    wait_until((mounts[1] / way).is_dir, "the directory is known")
    threads = [threading.Thread(target=work, args=(who,)) for who in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
