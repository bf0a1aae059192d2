"""`kvfs bench gds`: loads of weights on this machine, beside the limits of its disk and memory.

All ways are measured in each round, in turn, so that a disk whose speed changes is unfair to none;
medians are shown.
"""

import contextlib
import errno
import importlib.util
import itertools
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from cli import node_requests, settings_options
from cli.commands.files import mounted_path
from cli.commands.models.bench_file import LEAST_BYTES, test_file
from cli.commands.models.model_inspect import print_table
from cli.commands.models.model_load import require_torch
from cli.presentation import progress
from gds.format.checkpoint import shards_of
from gds.probe import machine_limits
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, NotFound, NotSupported, Unavailable
from kvfs.base.units import format_size, parse_size
from kvfs.client.mount.backing_file import open_backing

MIB: Final = 1 << 20
_THREADS: Final = (1, 4, 8)
_READS: Final = (2 * MIB, 16 * MIB)
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class ReadForm(NamedTuple):
    """The form of plain reads."""

    direct: bool
    threads: int
    read_bytes: int

    def __str__(self) -> str:
        kind = "O_DIRECT" if self.direct else "buffered"
        return f"{kind}, {self.threads} x {self.read_bytes // MIB} MiB"


_FORMS: Final = tuple(
    itertools.starmap(ReadForm, itertools.product((False, True), _THREADS, _READS))
)


@click.command("gds")
@click.argument("path", type=click.Path(), required=False)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory for a test file, which is removed again, as are those of killed runs (default: "
    "in a durable namespace of the running node).",
)
@click.option("--size", default="1GiB", show_default=True, help="Size of the test file.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of rounds."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options.configured("store")
def command(
    path: str | None,
    directory: Path | None,
    size: str,
    rounds: int,
    as_json: bool,
    config: Config,
) -> None:
    """Measure loads of weights against the disk and the memory.

    PATH is a safetensors file, or a checkpoint, whose largest file is measured; without it a test
    file is made. The file is dropped from the page cache for cold figures; if that cannot be
    proven, there are none. Needs torch (pip install 'kvfs[torch]').
    """
    require_torch()
    if path is not None and directory is not None:
        raise Invalid("PATH and --directory exclude each other: a test file is made, or is not")
    with contextlib.ExitStack() as stack:
        if path is not None:
            file = _largest(Path(mounted_path.find(config, path)))
        else:
            place = directory or _namespace(config)
            file = stack.enter_context(test_file(place, parse_size(size)))
        fd = open_backing(file).fd
        stack.callback(os.close, fd)
        figures = _Figures(file, fd)
        figures.measure(rounds)
    if as_json:
        click.echo(json.dumps(figures.described(rounds)))
    else:
        figures.show()


def _largest(path: Path) -> Path:
    """Raises NotFound, Invalid."""
    file = max((shard.path for shard in shards_of(path)), key=lambda each: each.stat().st_size)
    if file.stat().st_size < LEAST_BYTES:
        raise Invalid(f"{file} has {format_size(file.stat().st_size)}: too little to measure")
    return file


def _namespace(config: Config) -> Path:
    """Returns the first durable namespace. Raises Unavailable, NotFound."""
    try:
        status = node_requests.ask(config, "status")
    except Unavailable:
        status = {"mount": None}
    if status["mount"] is None:
        raise Unavailable("no node with a mount runs: name a file, or a --directory")
    for each in status["namespaces"]:
        if each["kind"] == "durable":
            return Path(status["mount"]["mountpoint"], each["name"])
    raise NotFound("there is no durable namespace to make a test file in: name a --directory")


class _Figures:
    """The figures measured of one file, in bytes a second."""

    def __init__(self, file: Path, fd: int) -> None:
        self._file = file
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._rates: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._not_cold = ""
        """The reason why there are no cold figures."""

    def measure(self, rounds: int) -> None:
        """Measures. Raises KvfsError, OSError, MemoryError. Interrupted, it leaves no thread."""
        ways = self._ways()
        steps = rounds * (len(_FORMS) + 2 * len(ways) + 1) + len(ways)
        with progress.shown("bench gds", steps * self._size) as step:
            done = 0

            def one(state: str, name: str, way: Callable[[], float]) -> None:
                nonlocal done
                self._one(state, name, way)
                done += self._size
                step(done)

            for way in ways.values():  # what is imported, and set up once
                way()
            for _ in range(rounds):
                for form in _FORMS:
                    one("read", str(form), lambda form=form: self._read(form))  # type: ignore[misc]
                for name, way in ways.items():
                    one("cold", name, way)
                one("memory", "copy", lambda: machine_limits.copy_rate(self._size, max(_THREADS)))
                for name, way in ways.items():
                    one("warm", name, way)

    def _one(self, state: str, name: str, way: Callable[[], float]) -> None:
        if state in ("read", "cold"):
            if self._not_cold:
                return
            try:
                machine_limits.drop_cached(self._fd)
            except NotSupported as error:
                self._not_cold = str(error)
                return
        elif state == "warm":
            machine_limits.cache(self._fd)
        try:
            self._rates[state, name].append(way())
        except OSError as error:
            if state != "read" or error.errno not in _NO_DIRECT:
                raise

    def _read(self, form: ReadForm) -> float:
        return machine_limits.read_rate(self._fd, **form._asdict())

    def _ways(self) -> dict[str, Callable[[], float]]:
        from gds import load

        ways: dict[str, Callable[[], object]] = {
            "gds.load_file": lambda: load.load_file(self._file)
        }
        if importlib.util.find_spec("safetensors") is not None:
            ways["safetensors, mapped"] = lambda: _by_safetensors(f"/proc/self/fd/{self._fd}")
        return {
            name: lambda load=load: self._rate(load)  # type: ignore[misc]
            for name, load in ways.items()
        }

    def _rate(self, load: Callable[[], object]) -> float:
        machine_limits.back_memory(self._size)
        began = time.perf_counter()
        found = load()
        elapsed = time.perf_counter() - began
        del found
        return self._size / elapsed

    # ---- what came of it

    def _median(self, state: str, name: str) -> float | None:
        found = self._rates.get((state, name))
        return statistics.median(found) if found else None

    def _best(self) -> tuple[str, float] | None:
        """Returns the form of plain reads with the best median."""
        rates = {name: self._median(state, name) for state, name in self._rates if state == "read"}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        best = max(known, key=lambda name: known[name], default=None)
        return None if best is None else (best, known[best])

    def _rows(self) -> list[tuple[str, str, float, float | None]]:
        """Returns state, name, rate, and its ratio to the best possible rate."""
        limits = {"read": None, "memory": None, "cold": self._best()}
        limits["warm"] = ("copy", self._median("memory", "copy") or 0.0)
        rows = []
        for state, name in self._rates:
            rate, limit = self._median(state, name), limits[state]
            if rate is not None:
                ratio = rate / limit[1] if limit is not None and limit[1] else None
                rows.append((state, name, rate, ratio))
        return rows

    def described(self, rounds: int) -> dict[str, Any]:
        best = self._best()
        return {
            "file": str(self._file),
            "size_bytes": self._size,
            "rounds": rounds,
            "best_read": best[0] if best else None,
            "no_cold_figures": self._not_cold or None,
            "rows": [
                {"state": state, "name": name, "bytes_per_s": round(rate), "of_limit": ratio}
                for state, name, rate, ratio in self._rows()
            ],
        }

    def show(self) -> None:
        best = self._best()
        click.echo(f"{self._file}: {format_size(self._size)}")
        rows = []
        for state, name, rate, ratio in self._rows():
            mark = "the best" if best is not None and (state, name) == ("read", best[0]) else ""
            of = {"cold": "of the best read", "warm": "of the copy"}.get(state, "")
            rows.append(
                (
                    _STATES[state],
                    name,
                    f"{rate / 1e9:.2f} GB/s",
                    f"{ratio:.2f} {of}" if ratio else mark,
                )
            )
        print_table(("STATE", "WAY", "RATE", ""), rows)
        if self._not_cold:
            click.echo(f"no cold figures: {self._not_cold}")


_STATES: Final = {
    "read": "cold, plain",
    "cold": "cold, load",
    "memory": "memory",
    "warm": "warm, load",
}


def _by_safetensors(path: str) -> object:
    """Loads with safetensors, which maps the file: touching every page is the reading."""
    from safetensors import safe_open

    found = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  no dict
            found[name] = file.get_tensor(name)
            found[name].view(-1)[::4096].sum()
    return found
