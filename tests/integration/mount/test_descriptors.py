"""Files that programs hold open on the mount, and the descriptors that the node has for them."""

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.posix import ALICE, BOB, as_user, refused, touch

FEW = 1024
CAP_SYS_RESOURCE = 24
MAY_NOT_RAISE = ("setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource")


@pytest.fixture
def limited() -> Iterator[Callable[..., Node]]:
    """Starts a node that begins with FEW descriptors, or with `nofile` (soft:hard), below the given
    commands."""
    nodes: list[Node] = []

    def make(*inside: str, nofile: str = f"{FEW}:{FEW}") -> Node:
        node = Node.make(best_mode())
        node.inside = ("prlimit", f"--nofile={nofile}", *inside)
        nodes.append(node)
        return node.up()

    yield make
    for node in nodes:
        print(node.log[-5000:])
        node.remove()


@contextmanager
def many_descriptors(count: int) -> Iterator[None]:
    """This process may have so many."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(count, before[1])))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def opened(directory: Path, count: int, *, by: int) -> Iterator[list[int]]:
    """Up to `count` files, open, as many as the mount gives this user."""
    held: list[int] = []
    try:
        with as_user(by):
            held.extend(open_many(directory / str(by), count))
        yield held
    finally:
        for fd in held:
            os.close(fd)


def open_many(prefix: Path, count: int) -> Iterator[int]:
    for number in range(count):
        try:
            yield os.open(f"{prefix}.{number}", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            assert error.errno == errno.EMFILE
            return


def work(directory: Path, name: str) -> None:
    """What a program does to have new content on disk."""
    draft, path = directory / f".{name}", directory / name
    touch(path)
    with draft.open("wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    assert path.read_bytes() == b"x"


def shared_directory(node: Node) -> Path:
    directory = node.mount / "models" / "all"
    directory.mkdir()
    directory.chmod(0o777)
    return directory


def test_a_node_takes_all_the_descriptors_that_it_may_have(limited: Callable[..., Node]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    node = limited(nofile=f"{FEW}:{hard}")
    directory = shared_directory(node)
    with many_descriptors(4096), opened(directory, 1500, by=0) as held:
        assert len(held) == 1500
        work(directory, "new")
    assert node.status()["descriptors"]["limit"] >= hard


def doctor(node: Node) -> dict[str, object]:
    done = kvfs("doctor", "--json", "--store", str(node.store))
    (line,) = (each for each in json.loads(done.stdout)["paths"] if each["name"] == "descriptors")
    assert isinstance(line, dict)
    return line


def test_root_raises_its_limit_of_descriptors(limited: Callable[..., Node]) -> None:
    if not may_raise():
        pytest.skip("raising a hard limit needs CAP_SYS_RESOURCE")
    node = limited()
    limit = node.status()["descriptors"]["limit"]
    assert limit > FEW
    line = doctor(node)
    assert (line["active"], line["reason"]) == (True, f"the node has {limit:,}")


def test_who_may_not_go_past_the_hard_limit_goes_as_far(limited: Callable[..., Node]) -> None:
    node = limited(*MAY_NOT_RAISE, nofile=f"{FEW // 2}:{FEW}")
    assert node.status()["descriptors"]["limit"] == FEW
    line = doctor(node)
    assert line["active"] is False
    assert str(line["reason"]).startswith(f"the node has {FEW:,}, its hard limit, of ")
    assert "LimitNOFILE=" in str(line["remedy"])


def may_raise() -> bool:
    with open("/proc/self/status", encoding="ascii") as status:
        (mask,) = (int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    return bool(mask >> CAP_SYS_RESOURCE & 1)


def test_a_user_who_holds_too_many_files_is_refused_alone(limited: Callable[..., Node]) -> None:
    node = limited(*MAY_NOT_RAISE)
    directory = shared_directory(node)
    with many_descriptors(4096):
        with opened(directory, 1500, by=ALICE) as held:
            assert 200 < len(held) < FEW
            for flags in (os.O_RDONLY, os.O_WRONLY | os.O_TRUNC):
                with as_user(ALICE):
                    os.close(os.open(directory / f"{ALICE}.0", flags))  # it is open anyway
            with as_user(ALICE), refused(errno.EMFILE):
                os.open(directory / "not there", os.O_RDWR | os.O_CREAT)
            assert not (directory / "not there").exists()
            work(directory, "root")
            with as_user(BOB):
                work(directory, "bob")
            with opened(directory, 100, by=BOB) as others:
                assert len(others) == 100
            status = node.status()
            assert status["engine"]["journal_failure"] is None
            assert status["descriptors"]["files"] >= len(held)
            assert status["counters"]["refused_open_files"] >= 2
        with opened(directory, 200, by=ALICE) as again:
            assert len(again) == 200
    work(directory, "after")
