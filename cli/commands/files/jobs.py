"""`kvfs prefetch` and `kvfs replicate`: a job of the node for each file below some paths,
polled until the files are in place."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from cli import node_requests, open_store, settings_options
from cli.commands.admin import nodes
from cli.presentation import progress
from kvfs.base.config import Config
from kvfs.base.errors import Busy, NotFound, NotSupported, Unavailable
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.client import Client, Stat

_AT_ONCE: Final = 8
_AHEAD: Final = 4
_BUSY_S: Final = 0.5
_DEADLINE_S: Final = 30.0
_MOST_REPLICAS: Final = 15


class _Outcome(NamedTuple):
    """The outcome of the jobs for many files."""

    files: int
    size_bytes: int
    failures: list[str]

    @property
    def done(self) -> int:
        """The number of files without an error."""
        return self.files - len(self.failures)


def _all_below(
    config: Config, paths: Sequence[str], title: str, job: Callable[[str, "Stat"], str]
) -> _Outcome:
    """Runs a job for every named file and every file below a named directory, some at once; the job
    returns its error. Raises NotFound."""
    files = size = 0
    failures = []
    with open_store.client_of(config) as client, progress.shown(title, None) as step:
        for found, failure in _each(_files_below(client, paths), job):
            files += 1
            size += found.size
            step(size)
            if failure:
                failures.append(failure)
    return _Outcome(files, size, failures)


def _files_below(client: "Client", paths: Sequence[str]) -> Iterator[tuple[str, "Stat"]]:
    for path in paths:
        found = client.stat(os.fsencode(path))
        if found.is_file:
            yield path, found
        elif found.is_directory:
            yield from _below(client, os.fsencode(path).rstrip(b"/"))


def _below(client: "Client", directory: bytes) -> Iterator[tuple[str, "Stat"]]:
    for each in client.list(directory):
        path = directory + b"/" + each.name
        if each.is_file:
            yield os.fsdecode(path), each
        elif each.is_directory:
            yield from _below(client, path)


def _ask_until(
    config: Config, method: str, params: dict[str, Any], is_done: Callable[[Any], bool]
) -> Any:
    """Returns the node's answer once it satisfies `is_done`: the work goes on in between."""
    while True:
        try:
            answer = node_requests.ask(config, method, params, _DEADLINE_S)
        except Busy:
            time.sleep(_BUSY_S)
            continue
        if is_done(answer):
            return answer


def _each(
    files: Iterator[tuple[str, "Stat"]], job: Callable[[str, "Stat"], str]
) -> Iterator[tuple["Stat", str]]:
    """Runs a job for each file, some at once. Yields each file, when it is done, with the job's
    error."""
    waiting: dict[Future[str], Stat] = {}
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvfs-moving")
    try:
        for path, found in files:
            waiting[pool.submit(job, path, found)] = found
            if len(waiting) >= _AT_ONCE * _AHEAD:
                yield from _done(waiting)
        while waiting:
            yield from _done(waiting)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _done(waiting: "dict[Future[str], Stat]") -> Iterator[tuple["Stat", str]]:
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        yield waiting.pop(future), future.result()


@click.command("replicate")
@click.argument("paths", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PATH...")
@click.option(
    "--replicas",
    type=click.IntRange(1, _MOST_REPLICAS),
    required=True,
    metavar="N",
    help="Number of copies beside the first.",
)
@settings_options.configured("store")
def replicate(paths: tuple[str, ...], replicas: int, config: Config) -> None:
    """Make more copies of files on other nodes, now.

    For a directory, copies everything below it until N nodes besides one have it. Nodes are chosen
    as for the replicas of a namespace. Copies beyond those that the namespace asks for are the
    first to go when space is needed.
    """

    def job(path: str, found: "Stat") -> str:
        params = {"inode": found.ino, "copies": replicas + 1}
        answer = _ask_until(config, "replicate", params, _is_replicated)
        if answer["state"] != "done":
            return f"{path}: {answer['state']}"
        lacking = replicas + 1 - len(answer["nodes"])
        return f"{path}: {lacking} copies found no node" if lacking > 0 else ""

    outcome = _all_below(config, paths, "replicate", job)
    click.echo(f"{outcome.done} files have {replicas + 1} copies or more")
    if failures := outcome.failures:
        raise Unavailable(f"{len(failures)} have not: {failures[0]}")


def _is_replicated(answer: dict[str, Any]) -> bool:
    return bool(answer["state"] != "coming")


to_nodes: Final = click.option(
    "--to",
    "targets",
    multiple=True,
    metavar="NODE",
    help="Name or number of a node, or all; repeatable (default: the running node).",
)


@click.command("prefetch")
@click.argument("paths", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PATH...")
@to_nodes
@settings_options.configured("store")
def prefetch(paths: tuple[str, ...], targets: tuple[str, ...], config: Config) -> None:
    """Fetch the data of files to nodes before they are read.

    For a directory, fetches everything below it. Nodes fetch from each other, so many take hardly
    longer than one.
    """
    bring(config, paths, targets)


def bring(config: Config, paths: Sequence[str], targets: Sequence[str]) -> None:
    """Has files, and everything below directories, fetched to nodes (none: the asked node), and
    reports it. Raises NotFound, Unavailable."""
    numbers = _numbers(config, targets)

    def job(path: str, found: "Stat") -> str:
        params = {"inode": found.ino, "nodes": numbers}
        answer = _ask_until(config, "prefetch", params, _is_settled)
        failed = [f"{path}: {text}" for text in answer.values() if text != "done"]
        return "; ".join(failed)

    outcome = _all_below(config, paths, "prefetch", job)
    where, each = (f" to {len(numbers)} nodes", " each") if len(numbers) > 1 else ("", "")
    size = format_size(outcome.size_bytes)
    plural = "" if outcome.done == 1 else "s"
    click.echo(f"brought {outcome.done} file{plural}{where}, {size}{each}")
    if failures := outcome.failures:
        raise Unavailable(f"{len(failures)} are not everywhere: {failures[0]}")


def _is_settled(answer: dict[str, str]) -> bool:
    return all(state != "coming" for state in answer.values())


def _numbers(config: Config, targets: Sequence[str]) -> list[int]:
    """Returns the numbers of the named nodes; none: the asked node. Raises NotFound,
    NotSupported."""
    if not targets:
        return []
    try:
        members: list[dict[str, Any]] = nodes.of(config)["nodes"]
    except NotSupported:
        if "all" in targets:
            return []  # the node alone
        raise
    alive = [each for each in members if each["lease"] == "held"]
    if "all" in targets:
        return [each["number"] for each in alive]
    numbers = []
    for target in targets:
        found = [each for each in alive if target in (each["name"], str(each["number"]))]
        if not found:
            raise NotFound(f"no node {target} runs: `kvfs node list` shows those that do")
        numbers.append(found[0]["number"])
    return numbers
