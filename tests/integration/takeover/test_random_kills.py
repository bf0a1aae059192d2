"""Random kills of a lone node's daemon, under programs that only wait: no call of theirs fails, and
what was acknowledged to them is there.

Two kills each time; with LONG two hundred, a third of them right after the last, or of a daemon
that is still starting. The seed is printed.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import LONG
from tests.integration.clients import environments, examples
from tests.integration.conftest import why_not
from tests.integration.harness import CannotStart, Node, kvfs, wait_for_exit
from tests.integration.takeover import programs
from tests.integration.takeover.programs import PROGRAMS
from tests.integration.takeover.successor import DEADLINE_S, WAIT, follow

pytestmark = pytest.mark.timeout(7_200)
KILLS: Final = 200 if LONG else 2
_LONGEST_PAUSE_S: Final = 4.0 if LONG else 0.5
Begun = dict[str, "subprocess.Popen[str]"]
"""Programs that run, by name."""
_MOST, _WITHIN_S = 26, 62.0
"""So many daemons end within that time at most: a mount ends where 30 do within a minute."""


@pytest.fixture(params=["passthrough", "relay"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node.make(request.param, *WAIT)
    try:
        try:
            made.up()
        except CannotStart:
            pytest.skip(why_not(made))
        yield made
    finally:
        made.remove()


def _begun(node: Node) -> Begun:
    """The programs, each in a directory of its own."""
    begun = {}
    for namespace in ("models", "cache"):
        for name in PROGRAMS:
            if name in ("fio", "git") and shutil.which(name) is None:
                continue
            directory = node.mount / namespace / name
            directory.mkdir()
            words = [name, str(directory), str(node.home / "until")]
            begun[f"{namespace} {name}"] = subprocess.Popen(
                [sys.executable, programs.__file__, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        if not LONG:
            break
    return begun


def _end(begun: Begun, until: Path) -> dict[str, str]:
    """Has the programs end; returns what each says, of those that failed only."""
    until.touch()
    failed = {}
    for name, process in begun.items():
        said, _ = process.communicate(timeout=600)
        print(f"{name}: {said.strip()}")
        if process.returncode:
            failed[name] = said
    return failed


def _lock_holder(node: Node) -> int:
    return int((node.store / "lock").read_text())


def _kill(pid: int) -> None:
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # a start that failed
    try:
        os.kill(pid, signal.SIGKILL)
        wait_for_exit(watch)
    finally:
        os.close(watch)


def _kill_the_starting_one(node: Node, dead: int, draw: random.Random) -> int:
    """Kills the daemon that follows, at some moment of its start."""
    end = time.monotonic() + DEADLINE_S
    while (pid := _lock_holder(node)) == dead:
        assert time.monotonic() < end, f"no daemon has followed:\n{node.log}"
        time.sleep(0.002)
    time.sleep(draw.choice((0.0, draw.uniform(0, 0.1), draw.uniform(0, 0.6))))
    _kill(pid)
    return pid


def _restart(node: Node) -> None:
    done = kvfs("restart", "--store", str(node.store), timeout_s=DEADLINE_S)
    assert done.returncode == 0, f"{done.stderr}\n{node.log[-8000:]}"
    node.pid = node.status()["pid"]


def _spare(ends: list[float]) -> None:
    """Waits until the mount may lose another two daemons."""
    if len(ends) >= _MOST:
        time.sleep(max(0.0, ends[-_MOST] + _WITHIN_S - time.monotonic()))


def _kill_at_random(node: Node, begun: Begun, seed: int) -> None:
    """Kills daemons while the programs run, has these end, and looks whether all of it held."""
    draw, done = random.Random(seed), Counter[str]()
    began, ends = time.monotonic(), list[float]()
    try:
        while done["deaths"] < KILLS:
            soon = draw.random() < 1 / 3
            time.sleep(draw.uniform(0, 0.05 if soon else _LONGEST_PAUSE_S))
            _spare(ends)
            gone = [name for name, each in begun.items() if each.poll() is not None]
            if gone:
                break
            if draw.random() < 0.1:
                _restart(node)
                done["restarts"] += 1
                ends.append(time.monotonic())
                continue
            assert node.pid is not None
            dead = [node.pid]
            _kill(node.pid)
            if draw.random() < 0.2:
                dead.append(_kill_the_starting_one(node, node.pid, draw))
                done["kills of a start"] += 1
            done["deaths"] += len(dead)
            ends += [time.monotonic()] * len(dead)
            follow(node, dead)
    finally:
        print(f"{dict(done)} in {time.monotonic() - began:.0f} s")
        failed = _end(begun, node.home / "until")
    assert not failed, f"{failed}\n{node.log[-20000:]}"
    node.down()
    checked = kvfs("fsck", "--store", str(node.store))
    assert checked.returncode == 0, checked.stdout


def test_programs_only_wait(node: Node, seed: int) -> None:
    _kill_at_random(node, _begun(node), seed)


@pytest.mark.skipif(not LONG, reason="--long runs it")
def test_lmcache_only_waits(node: Node, seed: int) -> None:
    interpreter = environments.lmcache()
    env = examples.environ(interpreter.parent.parent, LMCACHE_TRACK_USAGE="false")
    begun = {
        namespace: examples.start(
            interpreter,
            "lmcache_waits.py",
            *(node.mount / namespace / "lmcache", node.home / "until"),
            env=env,
        )
        for namespace in ("models", "cache")
    }
    _kill_at_random(node, begun, seed)
