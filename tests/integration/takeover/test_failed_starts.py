"""Daemons that start in the place of one that was killed: before other programs, and if one cannot,
the mount waits on for another, and people are told why."""

import contextlib
import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.conftest import why_not
from tests.integration.harness import CannotStart, Node, best_mode, kvfs
from tests.integration.takeover.successor import WAIT

_UP = " is up\n"


class ConfiguredNode(Node):
    """A node with a configuration file."""

    @property
    def file(self) -> Path:
        return self.home / "config.toml"

    def die_of(self, setting: str) -> None:
        """Ends the daemon; those after it find another setting."""
        self.file.write_text(setting)
        self.kill()

    def come_back(self) -> None:
        """Takes that setting away, and returns when a daemon has come to serve."""
        ups = self.log.count(_UP)
        self.file.write_text("")
        wait_until(lambda: self.log.count(_UP) > ups, "a daemon serves")
        self.pid = self.status()["pid"]

    def says(self) -> str:
        return kvfs("status", "--store", str(self.store)).stderr


@pytest.fixture
def make() -> Iterator[Callable[..., ConfiguredNode]]:
    made: list[ConfiguredNode] = []

    def begin(*wait: str) -> ConfiguredNode:
        node = ConfiguredNode.make(best_mode(), *wait)
        assert isinstance(node, ConfiguredNode)
        made.append(node)
        node.flags += ("--config", str(node.file))
        node.file.write_text("")
        try:
            node.up()
        except CannotStart:
            pytest.skip(why_not(node))
        return node

    yield begin
    for each in made:
        each.remove()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program has."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.parametrize("obstacle", ["setting", "mount", "port"])
def test_another_start_goes_on_with_the_mount(
    make: Callable[..., ConfiguredNode], taken: int, obstacle: str
) -> None:
    node = make(*WAIT)
    setting, why = {
        "setting": ('mode = "none"\n', "mode"),  # found before the mount is taken
        "mount": ("suid = true\n", "settings of the mount are others"),  # after that
        "port": (f'admin = "127.0.0.1:{taken}"\n', "another program"),  # when it is served
    }[obstacle]
    with (node.mount / "models" / "file").open("w+b", buffering=0) as file:
        file.write(b"before")
        node.die_of(setting)
        told = re.compile(f"mount waits .* last start failed: .*{why}", re.DOTALL)
        wait_until(
            lambda: bool(told.search(node.says())), "status tells why no daemon has followed"
        )
        node.come_back()
        file.write(b" after")
    assert (node.mount / "models" / "file").read_bytes() == b"before after"
    node.down()


def test_the_mount_ends_if_none_can_start_in_time(
    make: Callable[..., ConfiguredNode], taken: int
) -> None:
    node = make("--takeover-s", "3")
    file = node.mount / "models" / "file"
    file.touch()
    node.die_of(f'admin = "127.0.0.1:{taken}"\n')
    with pytest.raises(OSError, match=r"not connected|connection abort") as refused:
        while True:  # while one that fails serves the mount for a moment, it answers
            file.touch()
    assert refused.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)


def test_the_next_daemon_goes_before_other_programs_from_its_first_moment(
    make: Callable[..., ConfiguredNode],
) -> None:
    node = make(*WAIT)
    groups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if node.status()["nice"] >= 0 or not (groups.exists() and groups.read_text().strip() == "1"):
        pytest.skip("a raised priority, and groups of sessions, are needed")
    ups = node.log.count(_UP)
    node.file.unlink()
    os.mkfifo(node.file)
    node.kill()
    with contextlib.ExitStack() as held:

        def reads_its_settings() -> bool:
            try:
                fd = os.open(node.file, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody has it open
                return False
            held.callback(os.close, fd)
            return True

        wait_until(reads_its_settings, "the next daemon reads its settings")
        starting = _with_words("--take-over", str(node.store))
        assert {os.getpriority(os.PRIO_PROCESS, each) for each in starting} == {-10}
        assert {Path(f"/proc/{each}/autogroup").read_text().split()[-1] for each in starting} == {
            "-10"
        }
        node.file.unlink()
        node.file.write_text("")
    wait_until(lambda: node.log.count(_UP) > ups, "a daemon serves")
    node.pid = node.status()["pid"]


def _with_words(*words: str) -> list[int]:
    """The processes whose command lines have all these words."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            given = each.read_bytes().split(b"\0")
            if all(os.fsencode(word) in given for word in words):
                found.append(int(each.parent.name))
    return found
