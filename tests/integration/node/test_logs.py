"""The log with fields: every line, of whichever process, is an object; what the journal gets."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvfs.base import log_lines
from tests.integration import harness
from tests.integration.harness import Node, best_mode

DEADLINE_S = 60.0


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node.make(best_mode(), "--log-format", "json", "--s3", "127.0.0.1:0", "--admin", "off")
    yield made
    made.remove()


def test_each_line_is_an_object_to_the_watchdog_s_last(node: Node) -> None:
    node.up()
    worker = node.status()["s3"]["workers"][0]
    os.kill(worker, signal.SIGKILL)
    end = time.monotonic() + DEADLINE_S
    while "s3api" not in node.log:  # the supervisor tells of its worker's end
        assert time.monotonic() < end
        time.sleep(0.02)
    assert node.pid is not None
    node.kill()
    while "watchdog" not in node.log:
        assert time.monotonic() < end
        time.sleep(0.02)
    lines = [json.loads(line) for line in node.log.splitlines()]
    for line in lines:
        assert set(line) - {"exception"} == {
            *("time", "level", "logger", "message", "pid", "process")
        }
    assert [line["process"] for line in lines if "has died" in line["message"]] == ["watchdog"]
    assert lines[0]["message"].startswith("kvfs ")
    assert lines[0]["level"] == "info"


def test_names_forge_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("a.b", logging.ERROR, "", 0, "file %s", ("x\ny",), None)
    assert "\n" not in log_lines.formatter("", is_journal=False).format(record)
    monkeypatch.setenv(log_lines.VARIABLE, "json")
    line = log_lines.formatter("s3[1] ", is_journal=False).format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["message"], told["process"]) == ("file x\ny", "s3[1]")


def test_each_line_for_the_journal_has_its_priority() -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        record = logging.LogRecord("a.b", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    lines = log_lines.formatter("", is_journal=True).format(record).splitlines()
    assert lines[0] == "<3>ERROR a.b: failed"
    assert len(lines) > 2
    assert all(line.startswith("<3>") for line in lines)


def test_the_journal_is_told_by_its_file() -> None:
    program = (
        "import logging, os; from kvfs.base import log_lines; found = os.fstat(2);"
        "os.environ['JOURNAL_STREAM'] = f'{found.st_dev}:{found.st_ino}';"
        "log_lines.begin('info'); logging.getLogger('a').warning('said')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=harness.ROOT, capture_output=True, text=True
    )
    assert done.stderr == "<4>WARNING a: said\n"
