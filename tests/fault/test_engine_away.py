"""A node whose engine hangs, or is away: its mount answers, and says no where it cannot know."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs
from tests.integration.several import several


def test_a_mount_answers_while_its_engine_hangs() -> None:
    with several(1) as cluster:
        node = cluster.nodes[0]
        mount = node.mount
        (mount / "models" / "lasting").write_text("x")
        (mount / "cache" / "block").write_text("x")
        cluster.server.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: not (mount / "cache" / "block").exists(), "a cache's name is a miss")
            assert fails_with(errno.EIO, lambda: (mount / "models" / "lasting").read_text())
            assert fails_with(errno.EIO, lambda: (mount / "models" / "new").mkdir())
            assert fails_with(errno.EIO, lambda: os.listdir(mount / "models"))
            assert sorted(os.listdir(mount)) == ["cache", "models"]
            assert os.statvfs(mount).f_blocks > 0
            assert kvfs("status", "--store", str(node.store)).returncode == 0
            asked = kvfs("ls", "/models", "--store", str(node.store))
            assert "did not answer" in asked.stderr
            node.down()
        finally:
            cluster.server.signal(signal.SIGCONT)
        node.up()
        assert (mount / "models" / "lasting").read_text() == "x"
        assert (mount / "cache" / "block").read_text() == "x"


def test_a_mount_goes_on_when_its_engine_is_there_again() -> None:
    with several(1) as cluster:
        mount = cluster.nodes[0].mount
        (mount / "models" / "lasting").write_text("x")
        cluster.server.kill()
        assert fails_with(errno.EIO, lambda: (mount / "models" / "new").mkdir())
        cluster.server.start()
        wait_until(lambda: can(lambda: (mount / "models" / "new").mkdir()), "it is heard again")
        assert (mount / "models" / "lasting").read_text() == "x"


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
            cwd=Path(__file__).resolve().parent.parent.parent,
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
    with pytest.raises(OSError) as raised:
        step()
    return raised.value.errno == number


def can(step: Callable[[], object]) -> bool:
    try:
        step()
    except FileExistsError:
        return True
    except OSError as error:
        assert error.errno == errno.EIO
        return False
    return True
