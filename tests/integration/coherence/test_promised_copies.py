"""Closes that promise a copy on another host (`--acknowledge sync`), of files that are written in
place: by one host, by one after the other, and by both at the same time."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import Node
from tests.integration.harness import kvfs as command
from tests.integration.posix import refused
from tests.integration.several import Several, several

PROMISED = ("--replicas", "1", "--acknowledge", "sync")
NAMESPACES = {
    "seen-at-once": ("--kind", "durable", "--coherence", "strict"),
    "seen-later": ("--kind", "cache", "--coherence", "cache"),
}


PEER = ("--kind", "cache", "--coherence", "peer")


def takes_part(node: Node) -> bool:
    found = node.status()["cluster"]["names"]
    return found is not None and found["members"] == 2


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    with several(2) as cluster:
        store = str(cluster.nodes[0].store)
        for name, flags in NAMESPACES.items():
            made = command("namespace", "create", name, *flags, *PROMISED, "--store", store)
            assert made.returncode == 0, made.stderr
            for node in cluster.nodes:
                wait_until((node.mount / name).is_dir, "the namespace is known")
        made = command("namespace", "create", "own", *PEER, *PROMISED, "--store", store)
        assert made.returncode == 0, made.stderr
        for node in cluster.nodes:
            wait_until((node.mount / "own").is_dir, "the namespace is known")
            wait_until(lambda node=node: takes_part(node), "it sees the other")
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
    for name in os.listdir(mounts[0] / way):
        assert (mounts[0] / way / name).stat().st_size
        if space == "seen-at-once":
            found = [(mount / way / name).read_bytes() for mount in mounts]
            assert found[0] == found[1]


def test_a_copy_of_former_content_gives_way_to_what_another_host_closes(nodes: Several) -> None:
    """In a namespace whose names are each host's own."""
    a, b = (node.mount / "own" / "taken in turns" for node in nodes.nodes)
    for number in range(6):
        writer, reader = (a, b) if number % 3 else (b, a)
        content = b"%d" % number * 1000
        if number:
            wait_until(writer.is_file, "the name is known")
        write(writer, content)
        assert reader.read_bytes() == content


def test_a_close_that_can_have_no_copy_says_why(nodes: Several) -> None:
    first, second = nodes.nodes
    kept = os.open(first.mount / "own" / "kept", os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(kept, b"open, and not closed")
    with refused(errno.EIO):
        write(second.mount / "own" / "kept", b"of the other host")
    assert "other content has this name on node" in second.log
    assert (second.mount / "own" / "kept").read_bytes() == b"of the other host"
    with refused(errno.EIO):
        os.close(kept)
