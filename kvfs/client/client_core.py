"""The common core of both clients: the parts on one store, and the transfers with a `step` in each.

Each method is one step after the other, in the caller's thread; `step` is called between parts of a
transfer, by that thread.
"""

import io
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path as LocalPath
from typing import Final, TypeVar

from kvfs.base import config
from kvfs.base.errors import Invalid, KvfsError, NotSupported
from kvfs.client.batch_reader import BatchReader
from kvfs.client.buffers import Buffer, readable, writable
from kvfs.client.local_files import Destination, Source, opened_source, written_destination
from kvfs.client.match import Match, Matcher
from kvfs.client.name_operations import NameOperations
from kvfs.client.reader import OpenedFile, Reader
from kvfs.client.writer import FileDraft, FileDrafts, Writer
from kvfs.session import byte_transfer, parallel, paths, session
from kvfs.session.parallel import Step, nothing
from kvfs.session.paths import Path
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.post_commit import Finisher
from kvfs.vfs.space_reservation import SpaceReservation
from kvfs.vfs.stage import Drafts
from kvfs.vfs.stage_records import Options, StagingTarget
from kvfs.vfs.touches import Touches

T = TypeVar("T")
_PART_BYTES: Final = 64 << 20
_ALONE_BYTES: Final = 1 << 20
_BLOCK: Final = 512


class Core:
    """The parts on one store, until closed. Raises what `Client` raises."""

    def __init__(
        self, store: str | bytes | os.PathLike[str] | None, *, reads_known: bool = False
    ) -> None:
        """`reads_known`: files read here are open on the mount as well, so that the node need not
        be told (a round trip of some milliseconds, when it is closed)."""
        root = config.load()[0].store if store is None else LocalPath(os.fsdecode(store))
        self._session: session.Session | None = session.acquire(root)
        opened = self._session
        self._node = node = NodeClient(opened.store.socket)
        self._finisher = Finisher(opened, node)
        self._touches = Touches(opened, node, known=reads_known)
        room = SpaceReservation(opened.files.root, node, self._finisher.flush)
        self._stage = Drafts(opened, room, self._finisher)
        self._drafts = FileDrafts(opened, self._stage)
        self._reader = Reader(opened, self._touches, node)
        self._batches = BatchReader(opened, self._touches, self._reader)
        self._matcher = Matcher(opened, self._touches, self._reader)
        self._names = NameOperations(opened, self._touches, self._finisher, node)

    def close(self) -> None:
        """See `Client.close`."""
        held, self._session = self._session, None
        if held is not None:
            self._stage.give_back()
            self._touches.flush()
            self._finisher.close()
            self._node.close()
            session.release(held)

    @property
    def session(self) -> session.Session:
        """Raises Invalid when closed."""
        if self._session is None:
            raise Invalid("this client is closed")
        return self._session

    @property
    def names(self) -> NameOperations:
        """Raises Invalid when closed."""
        self._require_open()
        return self._names

    def open(self, path: Path, mode: str, *, parents: bool) -> io.BufferedReader | Writer:
        """See `Client.open`."""
        if mode == "rb":
            return io.BufferedReader(io.FileIO(self.open_file(path).fd, "r"))
        if mode not in ("wb", "xb"):
            raise NotSupported(
                f"a client opens a file with 'rb', 'wb' or 'xb', not {mode!r}: change it in place "
                "through the mount"
            )
        options = Options(exclusive=mode == "xb", parents=parents)
        target = target_of(path)
        (draft,) = self._begin([(target, 0)], options, grows=True)
        return Writer(self._drafts, draft, str(target))

    def put(self, path: Path, data: Buffer, options: Options, step: Step) -> None:
        view = readable(data)
        drafts = self._begin([(target_of(path), len(view))], options)
        try:
            self._write(drafts[0], view, step)
            self._drafts.publish(drafts)
        except BaseException:
            self._drafts.discard(drafts)
            raise

    def put_many(self, items: Iterable[tuple[Path, Buffer]], options: Options, step: Step) -> None:
        wanted = {target_of(path): readable(data) for path, data in items}
        if not wanted:
            return
        views = list(wanted.values())
        sizes = [len(view) for view in views]
        drafts = self._begin(list(zip(wanted, sizes, strict=True)), options)

        def job(at: int) -> None:
            self._write(drafts[at], views[at], nothing)

        durable = any(draft.body.durable for draft in drafts)
        try:
            parallel.each(
                self.session,
                range(len(drafts)),
                job,
                sizes=sizes,
                alone_below=0 if durable else _ALONE_BYTES,
                step=step,
            )
            self._drafts.publish(drafts)
        except BaseException:
            self._drafts.discard(drafts)
            raise

    def put_file(self, source: Source, path: Path, options: Options, step: Step) -> int:
        with opened_source(source) as fd:
            found = os.fstat(fd)
            expected = min(found.st_size, found.st_blocks * _BLOCK)
            (draft,) = drafts = self._begin([(target_of(path), expected)], options, grows=True)
            target = draft.body.fd

            def moved(size: int) -> None:
                if size > draft.body.reserved:
                    self._drafts.grow(draft, os.fstat(target).st_blocks * _BLOCK)
                step(size)

            try:
                size = self._translated(draft, lambda: byte_transfer.copy(fd, target, moved))
                self._translated(draft, lambda: self._drafts.sync(draft))
                self._drafts.publish(drafts)
            except BaseException:
                self._drafts.discard(drafts)
                raise
            return size

    def get(
        self, path: Path, into: Buffer | None, offset: int, size: int | None, step: Step
    ) -> bytearray | int:
        self._require_open()
        parts = paths.parse(path)
        if into is None:
            return self._reader.read(parts, offset, size, step)
        return self._reader.read_into(parts, writable(into), offset, size, step)

    def get_many(
        self,
        keys: Sequence[Path] | Match,
        buffers: Sequence[Buffer] | None,
        step: Step,
        *,
        verify: bool,
    ) -> Sequence[bytearray | int | KvfsError | None]:
        self._require_open()
        found = None
        if isinstance(keys, Match):
            found, wanted = keys.contents(self.session)
        else:
            wanted = paths.parse_all(keys)
        if buffers is not None and len(buffers) != len(wanted):
            raise Invalid(f"{len(wanted)} keys need as many buffers, not {len(buffers)}")
        views = None if buffers is None else [writable(buffer) for buffer in buffers]
        if found is not None:
            return self._batches.read_found(found, wanted, views, step, verify=verify)
        return self._batches.read(wanted, views, step, verify=verify)

    def match(self, keys: Sequence[Path], lease_s: float) -> Match:
        self._require_open()
        return self._matcher.match(keys, lease_s)

    def sums_of(self, opened: OpenedFile) -> bytes | None:
        """Returns the xxh3-128 of each of its chunks, one after the other; None if the store has
        none. Raises what `Client.open` raises."""
        return self._reader.sums.of(opened.found)

    def is_written(self, opened: OpenedFile) -> bool:
        """Returns whether the file is open for writing on a mount of this host. Raises
        Unavailable."""
        return self._node.is_written(opened.found.ino)

    def get_file(self, path: Path, destination: Destination, step: Step) -> int:
        opened = self.open_file(path)
        try:
            with written_destination(destination) as fd:
                return byte_transfer.copy(opened.fd, fd, step)
        finally:
            os.close(opened.fd)

    def open_file(self, path: Path) -> OpenedFile:
        """Returns a descriptor for reading, which the caller closes. Raises what `Client.open`
        raises."""
        self._require_open()
        return self._reader.open(paths.parse(path))

    def _begin(
        self, wanted: Sequence[tuple[StagingTarget, int]], options: Options, *, grows: bool = False
    ) -> list[FileDraft]:
        self._require_open()
        return self._drafts.begin(wanted, options, grows=grows)

    def _write(self, draft: FileDraft, view: memoryview, step: Step) -> None:
        """Does step 3 of a put."""

        def write() -> None:
            done = 0
            while done < len(view):
                done += os.pwrite(draft.body.fd, view[done : done + _PART_BYTES], done)
                step(done)
            self._drafts.sync(draft)

        self._translated(draft, write)

    def _translated(self, draft: FileDraft, step: Callable[[], T]) -> T:
        try:
            return step()
        except OSError as error:
            raise self._drafts.failed(draft, error) from error

    def _require_open(self) -> None:
        assert self.session


def target_of(path: Path) -> StagingTarget:
    """Returns the place of a new file or directory. Raises Invalid for `/`."""
    return StagingTarget(*paths.parse_name(path))
