"""Backups of a lone node's durable files: the first one, the next ones, their verification, and a
restore.

Beside them `tar` of the same files on the mount, and back into a plain directory, which keeps no
earlier state and compares nothing. Prints medians of the time that passes and of that of processors
(of the command, beside the node's), then one JSON object.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import _program
from kvfs.base import control

_say: Final = _program.teller("backup")
_MAIN: Final = "from cli.main import main; main()"
_CHANGED: Final = 1_000
_A_DIRECTORY: Final = 1_000
_WRITERS: Final = 4
_SEALED_S: Final = 600.0


def main() -> int:
    options = _options()
    files = 2_000 if options.quick else options.files
    rows: dict[str, list[Took]] = {}
    with _program.place(options.dir, _say) as place:
        node = _Node(place.base)
        place.stack.callback(node.down)
        place.guard.mount(node.mount)
        node.up()
        _say(f"{files:,} files of {options.size:,} bytes are made")
        node.fill(files, options.size)
        for number in range(options.rounds or (1 if options.quick else 3)):
            place.guard.watch(900.0)
            _round(node, place.base / f"round-{number}", files, rows)
    medians = {
        name: Took(*(round(statistics.median(each), 2) for each in zip(*values, strict=True)))
        for name, values in rows.items()
    }
    for name, took in medians.items():
        print(f"{name:<40}{took.wall_s:>8.2f} s {took.cpu_s:>8.2f} s of processors")
    result = {
        "benchmark": "backup",
        "files": files,
        "size_bytes": options.size,
        **{name: took._asdict() for name, took in medians.items()},
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result))
    return 0


class Took(NamedTuple):
    """How long a step took."""

    wall_s: float
    cpu_s: float


class _Node:
    """A node with a durable namespace."""

    def __init__(self, base: Path) -> None:
        self.store, self.mount = base / "store", base / "mnt"
        self.models = self.mount / "models"
        self.mount.mkdir()

    def up(self) -> None:
        kvfs("up", "--daemon", "--store", self.store, "--mount", self.mount, "--s3", "off")

    def down(self) -> None:
        kvfs("down", "--store", self.store, "--mount", self.mount)

    def fill(self, files: int, size: int) -> None:
        for number in range(-(-files // _A_DIRECTORY)):
            (self.models / f"{number:04}").mkdir()

        def write(number: int) -> None:
            path = self.models / f"{number // _A_DIRECTORY:04}" / f"{number:06}"
            path.write_bytes(os.urandom(size))

        with ThreadPoolExecutor(_WRITERS) as threads:
            for _ in threads.map(write, range(files)):
                pass
        self.wait_until_sealed()

    def change(self, number: int) -> None:
        for path in sorted((self.models / f"{number:04}").iterdir())[:_CHANGED]:
            path.write_bytes(os.urandom(path.stat().st_size))
        self.wait_until_sealed()

    def wait_until_sealed(self) -> None:
        end, before = time.monotonic() + _SEALED_S, -1
        while time.monotonic() < end:
            status = control.call(self.store / "run" / "control.sock", "status")
            if status["counters"]["sealed_files"] == before:
                return
            before = status["counters"]["sealed_files"]
            time.sleep(3)


def kvfs(*arguments: object) -> Any:
    """Runs a command; returns what it printed."""
    command = [sys.executable, "-c", _MAIN, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _round(node: _Node, base: Path, files: int, rows: dict[str, list[Took]]) -> None:
    base.mkdir()
    place = base / "backups"

    def backup(*arguments: object) -> Any:
        found = kvfs("backup", *arguments, "--backup", place, "--json")
        return json.loads(found)

    def timed(name: str, step: Callable[[], Any]) -> Any:
        os.sync()
        began, before = time.monotonic(), _processors_s()
        found = step()
        took = Took(time.monotonic() - began, _processors_s() - before)
        rows.setdefault(name, []).append(took)
        _say(f"{name}: {took.wall_s:.2f} s, {took.cpu_s:.2f} s of processors")
        return found

    create = ("create", "--store", node.store)
    made = timed("first backup", lambda: backup(*create))
    assert (made["files"], made["left_out"]) == (files, 0), made
    again = timed("next backup, nothing changed", lambda: backup(*create))
    assert again["added_bytes"] == 0
    node.change(0)
    again = timed("next backup, 1,000 files changed", lambda: backup(*create))
    assert 0 < again["added_bytes"] < made["bytes"] or files <= _CHANGED
    verified = timed("verify all three", lambda: backup("verify"))
    assert not any(each["damaged"] for each in verified)
    restored = timed("restore", lambda: backup("restore", "--store", base / "restored"))
    assert restored["files"] == files
    archive = base / "archive.tar"
    timed("tar of the mount", lambda: _tar("-cf", archive, "-C", node.models, "."))
    (base / "plain").mkdir()
    timed("tar into a directory", lambda: _tar("-xf", archive, "-C", base / "plain"))
    shutil.rmtree(base)


def _processors_s() -> float:
    """Of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tar(*arguments: object) -> None:
    subprocess.run(["tar", *map(str, arguments)], check=True)
    subprocess.run(["sync"], check=True)


def _options() -> argparse.Namespace:
    parser = _program.parser(
        "backup", __doc__, quick="2,000 files, one round", rounds="default 3, quick 1"
    )
    parser.add_argument("--files", type=int, default=100_000, help="default 100,000")
    parser.add_argument("--size", type=int, default=16_384, help="bytes of each; default 16,384")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
