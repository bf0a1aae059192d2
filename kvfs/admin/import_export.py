"""Whole trees from an object store into a namespace, and back: the work of `kvfs import` and `kvfs
export`.

Existing files are left alone by the rule of `aws s3 sync`: the same size, and not older than the
source. So a run after an interruption goes on where the last one was; a large export goes on within
a file. Files appear whole or not at all.

Left out and counted: keys that no path can be (`a//b`, `..`), and anything but regular files.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

import msgspec

from kvfs.base.errors import NotFound
from kvfs.client import Client, Stat
from kvfs.transfer.cold import object_transfer
from kvfs.transfer.cold.endpoint import ColdLocation, Endpoint, Remote

T = TypeVar("T")
U = TypeVar("U")
JOBS: Final = 8
_SHOWN: Final = 10
_AHEAD: Final = 4
"""Files chosen ahead for each that is under way: a listing of millions is never held."""


class Stopped(Exception):
    """The run has ended: raised in threads that still move a file."""


class Moved(msgspec.Struct):
    """The result of one run."""

    files: int = 0
    bytes: int = 0
    there: int = 0
    """Files that were there already."""
    left_out: list[str] = []
    """The first files that cannot be moved, and the reasons."""
    left_out_files: int = 0


class Trees:
    """Moves trees between one client's store and one endpoint. `step` is told of the bytes of each
    part as it is moved, by several threads; an exception of it ends the run."""

    def __init__(
        self, client: Client, endpoint: Endpoint, step: object_transfer.Step, *, jobs: int = JOBS
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._step = step
        self._jobs = jobs
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._moved = Moved()

    def import_(self, source: ColdLocation, target: bytes) -> Moved:
        """Makes files of objects: one object becomes the file `target` (or one in it, if that ends
        with a slash), all below a prefix become the tree `target`. Raises NotFound if there is
        nothing, and what Endpoint and Client raise."""
        single = self._endpoint.head(source.prefix) if source.prefix else None
        if single is not None:
            name = os.path.basename(os.fsencode(single.key)) if target.endswith(b"/") else b""
            self._each([(single, target + name)], self._import_one)
            return self._moved
        self._each(self._wanted(source, target.rstrip(b"/")), self._import_one)
        if not self._moved.files and not self._moved.there and not self._moved.left_out_files:
            raise NotFound(f"{source}: there is no such object, and none below it")
        return self._moved

    def export(self, source: bytes, target: ColdLocation) -> Moved:
        """Makes objects of files: a file becomes one object, a directory becomes objects below the
        prefix. Raises what `import_` raises."""
        source = b"/" + source.strip(b"/")
        found = self._client.stat(source)
        if not found.is_directory:
            key = target.prefix or os.fsdecode(found.name)
            self._each([(source, key)], self._export_one)
            return self._moved
        below = f"{target.prefix}/" if target.prefix else ""
        there = {each.key: each for each in self._endpoint.objects(below)}

        def send_missing(item: tuple[bytes, Stat], key: str) -> None:
            if _is_current(there.get(key), item[1]):
                self._count_there()
            else:
                self._export_one(item[0], key)

        self._each(self._files(source, below), send_missing)
        return self._moved

    def _wanted(self, source: ColdLocation, target: bytes) -> Iterator[tuple[Remote, bytes]]:
        below = f"{source.prefix}/" if source.prefix else ""
        for each in self._endpoint.objects(below):
            name = each.key[len(below) :]
            if _is_path(name):
                yield each, target + b"/" + name.encode()
            elif name and not (name.endswith("/") and each.size == 0):
                self._leave_out(each.key, "no path can be like this: reach it by S3")

    def _files(self, source: bytes, below: str) -> Iterator[tuple[tuple[bytes, Stat], str]]:
        """Yields every regular file below a directory, and its key; one open listing for each
        level."""
        for each in self._client.list(source):
            path = source.rstrip(b"/") + b"/" + each.name
            if not _is_text(each.name):
                self._leave_out(os.fsdecode(path), "a key is UTF-8")
            elif each.is_directory:
                yield from self._files(path, f"{below}{each.name.decode()}/")
            elif each.is_file:
                yield (path, each), below + each.name.decode()
            else:
                self._leave_out(os.fsdecode(path), "it is no regular file")

    def _import_one(self, source: Remote, target: bytes) -> None:
        if self._is_there(source, target):
            return
        with self._client.open(target, "wb", parents=True) as file:
            file.reserve(source.size)
            object_transfer.download(
                self._endpoint,
                source.key,
                source.size,
                file.fileno(),
                self._told,
                etag=source.etag,
            )
        self._count(source.size)

    def _is_there(self, source: Remote, target: bytes) -> bool:
        try:
            found = self._client.stat(target)
        except NotFound:
            return False
        modified = source.modified.timestamp()
        if not found.is_file or found.size != source.size or found.mtime_ns / 1e9 < modified:
            return False
        self._count_there()
        return True

    def _export_one(self, path: bytes, key: str) -> None:
        try:
            file = self._client.open(path)
        except NotFound:  # removed or evicted since it was listed
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            object_transfer.upload(self._endpoint, key, file.fileno(), size, self._told)
        self._count(size)

    def _each(self, items: Iterable[tuple[T, U]], job: Callable[[T, U], None]) -> None:
        """Runs `job` for each item in several threads, while the listing goes on. The first error
        ends all; an interrupted caller does not wait for the threads, which may be waiting for an
        answer."""
        waiting: set[Future[None]] = set()
        pool = ThreadPoolExecutor(self._jobs, thread_name_prefix="kvfs-tree")
        try:
            for item in items:
                waiting.add(pool.submit(job, *item))
                if len(waiting) >= self._jobs * _AHEAD:
                    waiting = _without_done(waiting)
            while waiting:
                waiting = _without_done(waiting)
        except BaseException as error:
            self._stopped.set()
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
            raise
        pool.shutdown()

    def _told(self, size: int) -> None:
        if self._stopped.is_set():
            raise Stopped("the run has ended")
        self._step(size)

    def _count(self, size: int) -> None:
        with self._lock:
            self._moved.files += 1
            self._moved.bytes += size

    def _count_there(self) -> None:
        with self._lock:
            self._moved.there += 1

    def _leave_out(self, what: str, why: str) -> None:
        with self._lock:
            self._moved.left_out_files += 1
            if len(self._moved.left_out) < _SHOWN:
                self._moved.left_out.append(f"{what}: {why}")


def _without_done(waiting: "set[Future[None]]") -> "set[Future[None]]":
    """Waits until one is done and returns those still under way. Raises the error of one that is
    done."""
    done, rest = wait(waiting, return_when=FIRST_COMPLETED)
    for each in done:
        each.result()
    return rest


def _is_current(there: Remote | None, found: Stat) -> bool:
    if there is None or there.size != found.size:
        return False
    return there.modified.timestamp() >= found.mtime_ns / 1e9


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_path(key: str) -> bool:
    return all(part not in ("", ".", "..") and "\0" not in part for part in key.split("/"))
