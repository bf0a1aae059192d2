"""Reads many files at once: one look-up for all, then runs of neighbours, each by one thread.

A file costs a run as few calls as there can be: an open that tells its size, one preadv into the
caller's memory, a close. Whatever is not as it nearly always is (data of another node, a lost or
torn data file, a buffer that is too small, an error of the disk) goes the way of a single file,
`Reader`, which alone decides about it. That may ask other nodes, so these are read last, one by
each thread.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Final

from kvfs.base.errors import KvfsError, NotADirectory, NotFound, Unavailable
from kvfs.client.reader import Parts, Reader
from kvfs.datastore.files import name_of
from kvfs.datastore.kernel.file_sequence import FileSequence
from kvfs.session import parallel
from kvfs.session.parallel import Step
from kvfs.session.paths import joined
from kvfs.session.session import Session
from kvfs.tree.published_view import FoundInode
from kvfs.vfs.touches import Touches

Result = bytearray | int | KvfsError | None
"""The content, or the bytes read into a buffer; an error; None: there is no such file."""
_ALONE_BYTES: Final = 1 << 20
"""Fewer bytes than this are read without the help of threads: waking one costs as much as reading
256 KiB."""
_RUN_BYTES: Final = 1 << 20
_RUN_FILES: Final = 32
"""A run is long enough that its thread seldom asks for the next one, and short enough that all
threads end at about the same time."""
_LONG_BYTES: Final = 64 << 20
"""Longer files are read in steps."""


class BatchReader:
    """Reads for one client; any thread."""

    def __init__(self, session: Session, touches: Touches, reader: Reader) -> None:
        self._session = session
        self._touches = touches
        self._reader = reader

    def read(
        self,
        paths: Sequence[Parts],
        buffers: Sequence[memoryview] | None,
        step: Step,
        *,
        verify: bool,
    ) -> list[Result]:
        """See `Client.get_many`; without buffers each file comes as a new bytearray."""
        return self._read(self._reader.find_many(paths), paths, buffers, step, verify=verify)

    def read_found(
        self,
        found: Sequence[FoundInode],
        paths: Sequence[Parts],
        buffers: Sequence[memoryview] | None,
        step: Step,
        *,
        verify: bool,
    ) -> list[Result]:
        """Like `read`, of these contents alone: one that is not here any more is a miss, whatever
        has its name now."""
        return self._read(found, paths, buffers, step, verify=verify, exact=True)

    def _read(
        self,
        found: Sequence[FoundInode | bytes | NotFound],
        paths: Sequence[Parts],
        buffers: Sequence[memoryview] | None,
        step: Step,
        *,
        verify: bool,
        exact: bool = False,
    ) -> list[Result]:
        there = {at: each for at, each in enumerate(found) if isinstance(each, FoundInode)}
        if len(there) < len(found):
            self._touches.missed([each for each in found if not isinstance(each, FoundInode)])
        batch = _Batch(self._session, self._reader, paths, there, buffers, verify, exact)
        runs, sizes = _runs(there)
        parallel.each(
            self._session,
            runs,
            batch.read_run,
            sizes=sizes,
            alone_below=_ALONE_BYTES,
            step=step,
        )
        self._touches.add(*[each.ino for at, each in there.items() if at in batch.quickly])
        rest = [at for at in there if at not in batch.quickly]
        if rest:
            done = sum(there[at].inode.size for at in batch.quickly)
            parallel.each(
                self._session,
                rest,
                batch.read_alone,
                sizes=[there[at].inode.size for at in rest],
                alone_below=0,
                step=lambda more: step(done + more),
            )
        return batch.results


def _runs(there: Mapping[int, FoundInode]) -> tuple[list[list[int]], list[int]]:
    """Returns the places of the files of each run, and its bytes. Neighbours by inode number lie
    together."""
    runs: list[list[int]] = []
    sizes: list[int] = []
    run: list[int] = []
    size = 0
    for _, at in sorted([(each.ino, at) for at, each in there.items()]):
        run.append(at)
        size += there[at].inode.size
        if size >= _RUN_BYTES or len(run) == _RUN_FILES:
            runs.append(run)
            sizes.append(size)
            run, size = [], 0
    if run:
        runs.append(run)
        sizes.append(size)
    return runs, sizes


def _open_next(
    sequences: Sequence[FileSequence], above: str, name: str
) -> tuple[FileSequence, int, int] | None:
    for each in sequences:
        try:
            return each, *each.open(above, name)
        except FileNotFoundError:
            continue
        except OSError:
            break
    return None


class _Batch:
    """The files of one call, by their places among the caller's keys. Any thread may read a run."""

    def __init__(
        self,
        session: Session,
        reader: Reader,
        paths: Sequence[Parts],
        there: Mapping[int, FoundInode],
        buffers: Sequence[memoryview] | None,
        verify: bool,
        exact: bool,
    ) -> None:
        self._session = session
        self._reader = reader
        self._paths = paths
        self._there = there
        self._buffers = buffers
        self._verify = verify
        self._open = reader.open_exactly if exact else reader.open
        self.results: list[Result] = [None] * len(paths)
        self.quickly: set[int] = set()
        """The places of files that were not read the way of a single one."""

    def read_run(self, run: Sequence[int]) -> None:
        """Puts the results of those of these files that can be read quickly in their places."""
        sequences = self._session.files.sequences()
        try:
            quickly = [at for at in run if self._read_next(sequences, at)]
        finally:
            for each in sequences:
                each.end()
        self.quickly.update(quickly)
        if self._verify:
            self._verify_all(quickly)

    def _read_next(self, sequences: Sequence[FileSequence], at: int) -> bool:
        """Returns whether the file was read; nothing is decided about one that was not."""
        ino, inode = self._there[at]
        if not stat.S_ISREG(inode.mode):
            return False
        opened = _open_next(sequences, *name_of(ino, inode.version))
        if opened is None:
            return False
        sequence, fd, size = opened
        try:
            try:
                return size == inode.size and self._fill(at, fd, size)
            finally:
                sequence.close(fd)
        except OSError:
            return False

    def _fill(self, at: int, fd: int, size: int) -> bool:
        """Returns whether all of the file was read."""
        if size > _LONG_BYTES:
            return False
        if self._buffers is None:
            data = bytearray(size)
            self.results[at] = data
            return os.preadv(fd, (data,), 0) == size
        view = self._buffers[at]
        self.results[at] = size
        return len(view) >= size and os.preadv(fd, (view[:size],), 0) == size

    def read_alone(self, at: int) -> None:
        """Puts the result of this file in its place, whatever is the matter with it."""
        path, buffers = self._paths[at], self._buffers
        self.results[at] = None
        try:
            opened = self._open(path, self._there[at])
            if buffers is None:
                self.results[at] = self._reader.read_opened(opened, path)
            else:
                self.results[at] = self._reader.read_opened_into(opened, path, buffers[at])
            if self._verify:
                sums = self._reader.sums
                sums.check(opened.found, sums.of(opened.found), self._content(at), path)
        except (NotFound, NotADirectory):
            pass
        except KvfsError as error:
            self.results[at] = error
        except OSError as error:
            self.results[at] = Unavailable(f"{joined(path)}: {error.strerror}")

    def _verify_all(self, run: Sequence[int]) -> None:
        """Puts an error in the place of content that is not what was stored."""
        sums = self._reader.sums
        try:
            stored = sums.of_many([self._there[at] for at in run])
        except KvfsError:
            stored = None  # each is asked for alone, so that only what fails bears the error
        for place, at in enumerate(run):
            found = self._there[at]
            try:
                chunks = sums.of(found) if stored is None else stored[place]
                sums.check(found, chunks, self._content(at), self._paths[at])
            except KvfsError as error:
                self.results[at] = error

    def _content(self, at: int) -> memoryview:
        """Returns what was read."""
        result = self.results[at]
        if self._buffers is None:
            assert isinstance(result, bytearray)
            return memoryview(result)
        assert isinstance(result, int)
        return self._buffers[at][:result]
