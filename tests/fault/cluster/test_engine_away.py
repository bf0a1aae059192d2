"""A node whose engine hangs, or is away: its mount answers, and says no where it cannot know."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs
from tests.integration.s3api.server.test_s3_serving import fetch
from tests.integration.several import has, members, several


def test_a_mount_answers_while_its_engine_hangs() -> None:
    with several(1) as cluster:
        node = cluster.nodes[0]
        mount = node.mount
        (mount / "models" / "lasting").write_text("x")
        with (mount / "cache" / "block").open("w") as block:
            block.write("x")
            block.flush()
            os.fsync(block.fileno())  # others know of it
        cluster.server.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: not (mount / "cache" / "block").exists(), "a cache's name is a miss")
            with ThreadPoolExecutor() as pool:  # each waits for the engine's deadline
                read = pool.submit((mount / "models" / "lasting").read_text)
                listed = pool.submit(os.listdir, mount / "models")
                made = pool.submit(fails_with, errno.EROFS, (mount / "models" / "new").mkdir)
                assert made.result()
                assert (read.result(), listed.result()) == ("x", ["lasting"])
            assert sorted(os.listdir(mount)) == ["cache", "models"]
            assert os.statvfs(mount).f_blocks > 0
            assert kvfs("status", "--store", str(node.store)).returncode == 0
            asked = kvfs("ls", "/models", "--store", str(node.store))
            assert asked.stdout.split() == ["lasting"]
            asked = kvfs("namespace", "create", "other", "--store", str(node.store))
            assert "did not answer" in asked.stderr
            node.down()
        finally:
            cluster.server.signal(signal.SIGCONT)
        node.up()
        assert (mount / "models" / "lasting").read_text() == "x"
        assert (mount / "cache" / "block").read_text() == "x"


def test_a_cache_stores_blocks_while_its_engine_is_silent() -> None:
    flags = ("--kind", "cache", "--without-engine", "wait")  # a slow machine may take ten seconds
    with several(2) as cluster:
        one, other = cluster.nodes
        made = kvfs("namespace", "create", "blocks", *flags, "--store", str(one.store))
        assert made.returncode == 0, made.stderr
        folder = one.mount / "blocks" / "model"
        folder.mkdir()
        (folder / "told").write_text("x")
        told_there = other.mount / "blocks" / "model" / "told"
        wait_until(told_there.exists, "the other node knows of a block")
        with ThreadPoolExecutor() as pool:
            cluster.server.signal(signal.SIGSTOP)
            try:
                (folder / "block.tmp").write_text("new")
                wait_until(lambda: not (folder / "told").exists(), "a block of before is a miss")
                assert (folder / "block.tmp").stat().st_size == len("new")
                renamed = pool.submit(os.rename, folder / "block.tmp", folder / "block")
            finally:
                cluster.server.signal(signal.SIGCONT)
            renamed.result()
        assert (folder / "block").read_text() == "new"
        there = other.mount / "blocks" / "model" / "block"
        wait_until(lambda: has(there, b"new"), "the other node has it")


def test_without_its_engine_a_node_is_not_ready_and_says_so() -> None:
    with several(1, "--admin", "127.0.0.1:0") as cluster:
        node = cluster.nodes[0]
        ready = f"{node.status()['admin']['endpoint']}/health/ready"
        assert fetch(ready)[0] == 200
        assert members(node)["n1"]["lease"] == "held"
        cluster.server.kill()
        wait_until(lambda: fetch(ready)[0] == 503, "it is not ready", 60)
        assert "does not answer" in fetch(ready)[1]
        assert members(node)["n1"]["lease"] == "unknown"
        shown = kvfs("status", "--store", str(node.store)).stdout
        assert "ENGINE DOES NOT ANSWER" in shown
        assert "it is not known how many files lack copies" in shown
        cluster.server.start()
        wait_until(lambda: fetch(ready)[0] == 200, "it is ready again", 60)
        assert members(node)["n1"]["lease"] == "held"
        assert "DOES NOT ANSWER" not in kvfs("status", "--store", str(node.store)).stdout


def test_a_mount_goes_on_when_its_engine_is_there_again() -> None:
    with several(1) as cluster:
        mount = cluster.nodes[0].mount
        (mount / "models" / "lasting").write_text("x")
        cluster.server.kill()
        assert fails_with(errno.EROFS, lambda: (mount / "models" / "new").mkdir())
        cluster.server.start()
        wait_until(lambda: can(lambda: (mount / "models" / "new").mkdir()), "it is heard again")
        assert (mount / "models" / "lasting").read_text() == "x"


def test_what_a_close_could_not_record_is_recorded_when_the_engine_is_there_again() -> None:
    old, new = b"o" * 1000, b"n" * 3000
    with several(2) as cluster:
        here, there = (node.mount / "models" for node in cluster.nodes)
        (here / "old").write_bytes(old)
        kinds = {"old": 0, "made": os.O_CREAT, "made alone": os.O_CREAT | os.O_EXCL}
        fds = [os.open(here / name, os.O_WRONLY | flags) for name, flags in kinds.items()]
        for fd in fds:
            os.pwrite(fd, new, 0)
        cluster.server.kill()
        with ThreadPoolExecutor() as pool:
            failed = pool.map(lambda fd: fails_with(errno.EIO, lambda: os.close(fd)), fds)
            assert list(failed) == [True] * len(fds)
        cluster.server.start()
        found: list[bytes] = []

        def are_there() -> bool:
            with contextlib.suppress(OSError):
                found.extend((there / name).read_bytes() for name in kinds)
                found.append((here / "old").read_bytes())
                return True
            return False

        wait_until(are_there, "what was written is recorded after all", 60)
        assert set(found) == {new}


def test_a_signal_does_not_fail_a_close_that_waits_for_the_engine() -> None:
    with several(1) as cluster:
        mount = cluster.nodes[0].mount
        paths = [mount / "models" / name for name in ("first", "second")]
        for path in paths:
            path.write_text("old")
        with closing(paths[0], "new") as first, closing(paths[1], "new") as second:
            cluster.server.signal(signal.SIGSTOP)
            try:
                for child in (first, second):  # the second waits for its turn
                    say(child)
                    assert heard(child) == "closing"
                    wait_until(lambda: state_of(child.pid) == "S", "its close waits")  # noqa: B023
                second.send_signal(signal.SIGUSR1)
                wait_until(lambda: state_of(second.pid) in "DZ", "the mount is told of the signal")
                os.statvfs(mount)  # asked after that
            finally:
                cluster.server.signal(signal.SIGCONT)
            assert [heard(first), heard(second)] == ["closed", "closed"]
        assert [path.read_text() for path in paths] == ["new", "new"]


def test_who_is_killed_after_another_signal_does_not_wait_for_the_engine() -> None:
    with several(1) as cluster:
        mount = cluster.nodes[0].mount
        paths = [mount / "models" / name for name in ("first", "second")]
        for path in paths:
            path.write_text("old")
        with closing(paths[0], "new") as first, closing(paths[1], "new") as second:
            cluster.server.signal(signal.SIGSTOP)
            try:
                for child in (first, second):
                    say(child)
                    assert heard(child) == "closing"
                    wait_until(lambda: asks_a_mount(child.pid), "its close waits")  # noqa: B023
                    if child is first:
                        cluster.nodes[0].status()  # its request has gone to the engine by then
                second.send_signal(signal.SIGUSR1)
                wait_until(lambda: state_of(second.pid) == "D", "the mount is told of the signal")
                second.kill()
                assert second.wait(60) == -signal.SIGKILL
                assert state_of(first.pid) == "S", "its close waits still"
            finally:
                cluster.server.signal(signal.SIGCONT)
            assert heard(first) == "closed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_waits_for_its_engine_until_it_is_told_to_end(tmp_path: Path, number: int) -> None:
    (tmp_path / "mnt").mkdir()
    command = (
        "from cli.main import main; main()",
        *("up", "--store", str(tmp_path / "store"), "--mount", str(tmp_path / "mnt")),
        *("--engine", f"unix://{tmp_path}/none", "--peer", "127.0.0.1:0", "--no-s3"),
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        starting = subprocess.Popen(
            [sys.executable, "-c", *command],
            cwd=Path(__file__).resolve().parents[3],
            stderr=output,
            stdout=subprocess.DEVNULL,
        )
    try:
        wait_until(lambda: "it is tried again" in log.read_text(), "it says that it waits")
        assert not os.path.ismount(tmp_path / "mnt")
        starting.send_signal(number)
        starting.wait(60)
    finally:
        starting.kill()
        starting.wait()
    assert "Traceback" not in log.read_text()
    assert log.read_text().count("it is tried again") == 1


def fails_with(number: int, step: Callable[[], object]) -> bool:
    try:
        step()
    except OSError as error:
        return error.errno == number
    raise AssertionError("nothing was refused")


@contextlib.contextmanager
def closing(path: Path, content: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that has written the file and closes it when it is told to."""
    command = [sys.executable, str(Path(__file__).parent.parent / "closing.py"), str(path), content]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert heard(child) == "written"
        yield child


def say(child: "subprocess.Popen[str]") -> None:
    assert child.stdin
    child.stdin.write("\n")
    child.stdin.flush()


def heard(child: "subprocess.Popen[str]") -> str:
    assert child.stdout
    return child.stdout.readline().strip()


def state_of(pid: int) -> str:
    """S: it sleeps; D: it waits, and no signal wakes it; Z: it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def asks_a_mount(pid: int) -> bool:
    """Whether it waits for the answer of a FUSE server."""
    return Path(f"/proc/{pid}/wchan").read_text() == "request_wait_answer"


def can(step: Callable[[], object]) -> bool:
    try:
        step()
    except FileExistsError:
        return True
    except OSError as error:
        assert error.errno in (errno.EIO, errno.EROFS)
        return False
    return True
