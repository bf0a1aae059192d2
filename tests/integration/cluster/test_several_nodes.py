"""One namespace on two nodes: what is done on one mount is seen on the other."""

import errno
import json
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.base.errors import Exists, NoSpace
from kvfs.client import Client
from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs
from tests.integration.posix import its_watch_ends, refused
from tests.integration.several import Several, has, several


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    with several(2) as cluster:
        yield cluster


@pytest.fixture
def a(nodes: Several) -> Path:
    return nodes.nodes[0].mount


@pytest.fixture
def b(nodes: Several) -> Path:
    return nodes.nodes[1].mount


def test_names_in_a_strict_namespace_are_seen_at_once(a: Path, b: Path) -> None:
    here, there = a / "models" / "names", b / "models" / "names"
    assert not there.exists()
    here.mkdir()
    assert there.is_dir()
    for number in range(20):
        assert not (there / f"f{number}").exists()
        (here / f"f{number}").write_bytes(b"x" * number)
        assert (there / f"f{number}").stat().st_size == number
    (here / "f1").rename(here / "moved")
    assert (there / "moved").exists()
    assert not (there / "f1").exists()
    (there / "f2").unlink()
    assert not (here / "f2").exists()
    (here / "link").symlink_to("f3")
    assert os.readlink(there / "link") == "f3"
    (here / "f3").chmod(0o600)
    assert (there / "f3").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(there)) == sorted(os.listdir(here))
    for each in here.iterdir():
        each.unlink()
    here.rmdir()
    assert not there.exists()


@pytest.mark.parametrize("namespace", ["models", "cache"])
def test_who_watches_a_file_is_told_that_another_node_removed_it(
    a: Path, b: Path, namespace: str
) -> None:
    here, there = a / namespace / "watched", b / namespace / "watched"
    for change in (there.unlink, lambda: there.with_name("other").rename(there)):
        here.write_bytes(b"watched")
        there.with_name("other").write_bytes(b"other")
        wait_until(there.exists, "it is there")
        its_watch_ends(here, change)
    wait_until(lambda: has(here, b"other"), "its place is another file's")
    (a / namespace / "directory").mkdir()
    wait_until((b / namespace / "directory").exists, "it is there")
    its_watch_ends(a / namespace / "directory", (b / namespace / "directory").rmdir)


def test_who_has_a_file_open_that_another_node_removed_is_told_its_attributes(
    nodes: Several, a: Path, b: Path
) -> None:
    """Also where that node dropped the record: it was the only holder that was known."""
    store = nodes.nodes[0].store / "data"
    (a / "models" / "open").mkdir()
    for number in range(5):
        here, there = (mount / "models" / "open" / str(number) for mount in (a, b))
        here.write_bytes(b"content")
        data = f"???/{here.stat().st_ino:016x}.*"
        with there.open("rb", buffering=0) as file:
            here.unlink()
            wait_until(lambda: not list(store.glob(data)), "its data are gone there")  # noqa: B023
            later = a / "models" / "open" / "later"
            later.write_bytes(b"x")
            data = f"???/{later.stat().st_ino:016x}.*"
            later.unlink()
            wait_until(lambda: not list(store.glob(data)), "the record before it too")  # noqa: B023
            wait_until(lambda: not there.exists(), "it is heard of")  # noqa: B023
            found = os.fstat(file.fileno())
            assert (found.st_size, found.st_nlink) == (7, 0)
            assert file.read() == b"content"


def test_a_namespace_is_there_for_all_at_once(a: Path, b: Path) -> None:
    assert not (b / "made").exists()
    (a / "made").mkdir()
    assert (b / "made").is_dir()
    (b / "made" / "inside").write_text("x")
    assert (a / "made" / "inside").exists()


def test_names_in_a_cache_are_seen_soon(a: Path, b: Path) -> None:
    for number in range(20):
        name = f"soon{number}"
        assert not (b / "cache" / name).exists()
        (a / "cache" / name).write_bytes(b"x")
        wait_until((b / "cache" / name).exists, "the other node shows the name")
    os.unlink(a / "cache" / "soon0")
    wait_until(lambda: not (b / "cache" / "soon0").exists(), "the name is gone there too")


def test_a_file_that_replaces_another_in_a_cache_waits_for_no_server(
    nodes: Several, a: Path, b: Path
) -> None:
    block, temporary = a / "cache" / "block", a / "cache" / "block.tmp"
    block.write_bytes(b"first")
    wait_until((b / "cache" / "block").exists, "the other node shows the name")
    data = f"???/{block.stat().st_ino:016x}.*"
    temporary.write_bytes(b"second")
    nodes.server.signal(signal.SIGSTOP)
    try:
        temporary.rename(block)
        assert block.read_bytes() == b"second"
        assert not temporary.exists()
        # Or a miss, where the server has been silent for too long to know.
        assert not has(b / "cache" / "block", b"second")
    finally:
        nodes.server.signal(signal.SIGCONT)
    wait_until(lambda: has(b / "cache" / "block", b"second"), "it is heard of")
    for node in nodes.nodes:
        wait_until(lambda: not list((node.store / "data").glob(data)), "its data go")  # noqa: B023
    assert nodes.nodes[0].status()["engine"]["unplaced_files"] == 0


def test_of_all_who_make_a_name_exclusively_one_wins(a: Path, b: Path) -> None:
    won: list[tuple[int, Path]] = []

    def make(root: Path) -> None:
        for number in range(30):
            try:
                os.close(os.open(root / "models" / f"one{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            won.append((number, root))

    threads = [threading.Thread(target=make, args=(root,)) for root in (a, b)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(number for number, _ in won) == list(range(30))


def test_what_is_being_written_is_on_its_own_mount_alone(a: Path, b: Path) -> None:
    with open(a / "models" / "growing", "xb") as file:
        file.write(b"half")
        file.flush()
        assert (a / "models" / "growing").stat().st_size == 4
        assert not (b / "models" / "growing").exists()
        assert "growing" not in os.listdir(b / "models")
        file.write(b" and half")
    assert (b / "models" / "growing").stat().st_size == 13


def test_both_make_names_in_one_directory_at_once(a: Path, b: Path) -> None:
    (a / "models" / "busy").mkdir()

    def fill(root: Path, prefix: str) -> None:
        for number in range(50):
            (root / "models" / "busy" / f"{prefix}{number}").write_bytes(b"x")

    threads = [threading.Thread(target=fill, args=each) for each in ((a, "a"), (b, "b"))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    names = {f"{prefix}{number}" for prefix in "ab" for number in range(50)}
    assert set(os.listdir(a / "models" / "busy")) == set(os.listdir(b / "models" / "busy")) == names


def test_a_node_that_was_killed_finds_all_that_was_done_without_it(nodes: Several) -> None:
    first, second = nodes.nodes
    (second.mount / "models" / "before").write_text("x")
    number = second.status()["cluster"]["node"]
    second.kill()
    (first.mount / "models" / "meanwhile").mkdir()
    (first.mount / "models" / "before").rename(first.mount / "models" / "after")
    second.up()
    assert second.status()["cluster"]["node"] == number
    assert (second.mount / "models" / "meanwhile").is_dir()
    assert (second.mount / "models" / "after").exists()
    assert not (second.mount / "models" / "before").exists()


def test_the_store_of_a_member_is_no_lone_nodes(nodes: Several) -> None:
    node = nodes.add()
    node.down()
    refused = kvfs("up", "--daemon", *node.place())
    assert refused.returncode != 0
    assert "--engine" in refused.stderr
    other = f"{nodes.server.url}?prefix=other"
    refused = kvfs("up", "--daemon", *node.place(), "--engine", other, "--node-name", "n3")
    assert refused.returncode != 0
    assert "kvfs rebuild" in refused.stderr
    node.up()
    assert (node.mount / "models").is_dir()


def test_clients_change_names_through_the_node(nodes: Several, a: Path, b: Path) -> None:
    first, second = (Client(store=each.store) for each in nodes.nodes[:2])
    with first, second:
        first.mkdir("/models/clients")
        assert stat.S_ISDIR(second.stat("/models/clients").mode)
        assert not (b / "models" / "clients" / "put").exists()
        first.put("/models/clients/put", b"content")
        assert (a / "models" / "clients" / "put").read_bytes() == b"content"
        assert second.exists(["/models/clients/put", "/models/clients/none"]) == [True, False]
        assert (b / "models" / "clients" / "put").stat().st_size == 7
        with pytest.raises(Exists):
            second.put("/models/clients/put", b"other", exclusive=True)
        second.rename("/models/clients/put", "/models/clients/moved")
        assert not (a / "models" / "clients" / "put").exists()
        assert first.stat("/models/clients/moved").size == 7
        first.put_many([(f"/cache/many{number}", b"x" * 10) for number in range(300)])
        assert len([name for name in os.listdir(a / "cache") if name.startswith("many")]) == 300
        second.remove("/models/clients/moved")
        assert not (a / "models" / "clients" / "moved").exists()


def test_policies_are_set_through_any_node(nodes: Several, a: Path) -> None:
    first, second = nodes.nodes[:2]
    done = kvfs("namespace", "create", "fast", "--coherence", "cache", "--store", str(first.store))
    assert done.returncode == 0, done.stderr
    assert (second.mount / "fast").is_dir()
    done = kvfs("namespace", "show", "fast", "--json", "--store", str(second.store))
    assert json.loads(done.stdout)["coherence"] == "cache"
    done = kvfs("namespace", "set", "fast", "--coherence", "strict", "--store", str(second.store))
    assert done.returncode == 0, done.stderr
    (a / "fast" / "seen").mkdir()
    assert (second.mount / "fast" / "seen").is_dir()


def test_a_name_that_another_node_reserved_is_busy_until_it_is_closed(a: Path, b: Path) -> None:
    with open(a / "models" / "reserved", "xb") as file:
        with refused(errno.EBUSY):
            (b / "models" / "reserved").write_bytes(b"other")
        file.write(b"mine")
    assert (b / "models" / "reserved").stat().st_size == 4


def test_what_another_node_has_takes_no_room_from_clients_here() -> None:
    with several(2, "--capacity", "16MiB") as cluster:
        here, there = cluster.nodes
        with Client(here.store) as one, Client(there.store) as other:
            one.put("/models/a", bytes(12 << 20))
            assert other.exists(["/models/a"]) == [True]
            other.put("/models/b", bytes(8 << 20))
            with pytest.raises(NoSpace, match=r"the store is full \(16.0 MiB\)"):
                other.put("/models/c", bytes(12 << 20))
            with pytest.raises(NoSpace, match=r"the store is full \(16.0 MiB\)"):
                one.put("/models/c", bytes(8 << 20))
            other.put("/models/c", bytes(4 << 20))
