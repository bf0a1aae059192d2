"""The common part of `kvfs prefetch` and `kvfs replicate`: a job for each file below some paths,
polled until the files are in place."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cli import node_requests, open_store
from cli.presentation import progress
from kvfs.base.config import Config
from kvfs.base.errors import Busy

if TYPE_CHECKING:
    from kvfs.client import Client, Stat

_AT_ONCE: Final = 8
_AHEAD: Final = 4
_BUSY_S: Final = 0.5
_DEADLINE_S: Final = 30.0


class JobsOutcome(NamedTuple):
    """The outcome of the jobs for many files."""

    files: int
    size_bytes: int
    failures: list[str]

    @property
    def done(self) -> int:
        """The number of files without an error."""
        return self.files - len(self.failures)


def all_below(
    config: Config, paths: Sequence[str], title: str, job: Callable[[str, "Stat"], str]
) -> JobsOutcome:
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
    return JobsOutcome(files, size, failures)


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


def ask_until(
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
