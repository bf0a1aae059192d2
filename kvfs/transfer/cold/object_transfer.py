"""Moves the bytes of one object to and from a descriptor, in parts, by several threads.

An interrupted upload of several parts goes on with those that the store has, of the same number,
size and content (known by an MD5, or by the key if that names the content). A download goes on at
the byte where an answer broke off, as long as one of a few attempts in a row brings any.

Invariants
- A part is at most what four threads hold at once: 4 x 16 MiB, more only for files over 140 GiB.
- `step` is called with the bytes of each part moved; an exception of it ends the transfer at the
  next part, of all threads, and nothing is left running.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

from kvfs.base.errors import Conflict, NotFound, Unavailable
from kvfs.transfer.cold.endpoint import NOTHING_TOLD, ColdPart, Endpoint, Remote

Step = Callable[[int], None]
PART_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 9_000
_MIB: Final = 1 << 20
_THREADS: Final = 4
_READ_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 3
"""Attempts in a row without a byte."""


def upload(
    endpoint: Endpoint,
    key: str,
    fd: int,
    size: int,
    step: Step,
    *,
    trusted: bool = False,
    told: Mapping[str, str] = NOTHING_TOLD,
) -> None:
    """Makes an object of the first `size` bytes of a file. An interrupted upload of this key goes
    on, unless something is `told` with the object (`Endpoint.put`), which may be another thing by
    now; `trusted`: the key names the content, so that its parts need no comparison.

    Raises what Endpoint raises, Conflict if the file turned out shorter, OSError.
    """
    if size <= PART_BYTES:
        endpoint.put(key, _read(fd, 0, size), told)
        step(size)
        return
    begun = None if told else endpoint.begun(key)
    if begun is not None:
        try:
            _upload_parts(endpoint, key, begun, fd, size, step, trusted=trusted)
            return
        except NotFound:  # it was aborted meanwhile, by a lifecycle rule perhaps
            pass
    _upload_parts(endpoint, key, endpoint.begin(key, told), fd, size, step, trusted=trusted)


def download(
    endpoint: Endpoint, key: str, size: int, fd: int, step: Step, *, etag: str | None = None
) -> None:
    """Writes an object of this size into a file from its start on. Raises what Endpoint.reading
    raises, Conflict if it is shorter, OSError."""
    length = part_bytes(size)
    ended = threading.Event()

    def go_on(moved: int) -> None:
        if ended.is_set():
            raise Conflict(f"{key}: another part of it failed")
        step(moved)

    def one(start: int) -> None:
        _download_range(endpoint, key, start, min(length, size - start), fd, go_on, etag)

    _in_threads(one, range(0, size, length), ended)


def part_bytes(size: int) -> int:
    """Returns the size of the parts of a file of so many bytes: whole MiB, and never too many
    parts."""
    least = -(-size // _MOST_PARTS)
    return max(PART_BYTES, -(-least // _MIB) * _MIB)


def _upload_parts(
    endpoint: Endpoint, key: str, upload_id: str, fd: int, size: int, step: Step, *, trusted: bool
) -> None:
    length = part_bytes(size)
    there = {each.number: each for each in endpoint.parts(key, upload_id)}
    done: dict[int, ColdPart] = {}

    def one(number: int) -> None:
        start = (number - 1) * length
        data = _read(fd, start, min(length, size - start))
        old = there.get(number)
        if old is not None and _is_same(old, data, trusted=trusted):
            done[number] = old
        else:
            done[number] = endpoint.put_part(key, upload_id, number, data)
        step(len(data))

    _in_threads(one, range(1, -(-size // length) + 1), threading.Event())
    parts = [done[number] for number in sorted(done)]
    try:
        endpoint.complete(key, upload_id, parts)
    except NotFound:  # perhaps it was done, its answer was lost, and it was asked for again
        if not _is_made(endpoint.head(key), size, parts):
            raise


def _is_made(found: Remote | None, size: int, parts: Sequence[ColdPart]) -> bool:
    """Returns whether an object is of these parts, by the ETag that S3 makes of theirs."""
    try:
        sums = b"".join(bytes.fromhex(each.etag.strip('"')) for each in parts)
    except ValueError:  # those of an encrypted bucket, for one
        return False
    whole = hashlib.md5(sums, usedforsecurity=False).hexdigest()
    wanted = size, f"{whole}-{len(parts)}"
    return found is not None and (found.size, found.etag.strip('"')) == wanted


def _is_same(old: ColdPart, data: bytes, *, trusted: bool) -> bool:
    if old.size != len(data):
        return False
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest
    return trusted or old.etag.strip('"') == md5()


def _read(fd: int, start: int, size: int) -> bytes:
    data = os.pread(fd, size, start)
    while len(data) < size:
        more = os.pread(fd, size - len(data), start + len(data))
        if not more:
            raise Conflict("the file became shorter while it was sent")
        data += more
    return data


def _download_range(
    endpoint: Endpoint, key: str, start: int, size: int, fd: int, step: Step, etag: str | None
) -> None:
    at, end, failures = start, start + size, 0
    while at < end:
        before = at
        try:
            with endpoint.reading(key, at, end - at, etag) as body:
                while data := body.read(min(_READ_BYTES, end - at)):
                    _write(fd, data, at)
                    at += len(data)
                    step(len(data))
        except Unavailable:
            failures = 0 if at > before else failures + 1
            if failures >= _ATTEMPTS:
                raise
        else:
            if at < end:
                raise Conflict(f"{key}: the object is shorter than it was said to be")


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, at)
        at, view = at + count, view[count:]


def _in_threads(job: Callable[[int], None], items: Sequence[int], ended: threading.Event) -> None:
    """Does the job for each item by one of a few threads; the first error ends all, and is
    raised."""
    if len(items) == 1:
        job(items[0])
        return
    failures: list[BaseException] = []

    def guarded(item: int) -> None:
        if ended.is_set():
            return
        try:
            job(item)
        except BaseException as error:
            failures.append(error)
            ended.set()

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvfs-cold") as pool:
        try:
            wait([pool.submit(guarded, item) for item in items])
        finally:
            ended.set()
    if failures:
        raise failures[0]
