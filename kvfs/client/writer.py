"""Files in the making as a client names them, by the paths under which they are to appear; and one
that is written through a file object: it appears whole when it is closed."""

import errno
import io
import os
import warnings
from collections.abc import Callable, Sequence
from itertools import repeat
from types import TracebackType
from typing import Final, NamedTuple

from kvfs.base.errors import NoSpace
from kvfs.client.buffers import Buffer, readable
from kvfs.datastore.layout import translate
from kvfs.meta.engine import Transaction
from kvfs.session.session import Session
from kvfs.vfs import stage_records
from kvfs.vfs.post_commit import Changed
from kvfs.vfs.stage import SMALL_BYTES, Draft, Drafts
from kvfs.vfs.stage_records import NewFile, Options, StagingTarget, WrittenData

_SMALL_TOGETHER_BYTES: Final = 4 << 20
"""More bytes than this are reserved before the first is written, however small the files are."""
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))


class FileDraft(NamedTuple):
    """One file in the making."""

    target: StagingTarget
    options: Options
    body: Draft


class FileDrafts:
    """Makes, publishes and discards drafts for one client; any thread."""

    def __init__(self, session: Session, stage: Drafts) -> None:
        self._session = session
        self._stage = stage

    def begin(
        self, wanted: Sequence[tuple[StagingTarget, int]], options: Options, *, grows: bool = False
    ) -> list[FileDraft]:
        """Returns drafts of these files of so many bytes. Errors that can be foreseen are raised
        here. `grows`: they may well get longer.

        Raises NotFound, NotADirectory, IsADirectory, Exists, NotPermitted, NameTooLong, Invalid,
        NoSpace, ReadOnly, Unavailable, OSError; then nothing is left.
        """
        targets, sizes = zip(*wanted, strict=True)
        small = max(sizes) <= SMALL_BYTES and sum(sizes) <= _SMALL_TOGETHER_BYTES

        def check(t: Transaction) -> list[NewFile]:
            walked: stage_records.Walked = {}
            return [
                stage_records.check(t, target, size, options, walked)
                for target, size in zip(targets, sizes, strict=True)
            ]

        try:
            bodies = self._begin_small(check) if small and not grows else self._stage.begin(check)
        except (NoSpace, OSError) as error:
            raise self._full(error, targets) from None
        return list(map(FileDraft, targets, repeat(options), bodies))

    def _begin_small(self, check: Callable[[Transaction], list[NewFile]]) -> list[Draft]:
        files = self._session.foresee(check)
        if any(file.namespace != files[0].namespace for file in files[1:]):
            return self._stage.begin(check)
        return self._stage.begin_small(files)

    def publish(self, drafts: Sequence[FileDraft]) -> None:
        """Puts the files under their names, all in one transaction; then the drafts are spent, even
        after an error. Raises what `begin` raises, and Conflict; Unavailable also when all is done
        but the node did not answer in time."""
        author = self._session.author()

        def place(written: Sequence[WrittenData], t: Transaction, changed: Changed) -> None:
            known: dict[tuple[bytes, ...], int] = {}
            for draft, file in zip(drafts, written, strict=True):
                stage_records.place(t, draft.target, file, draft.options, author, changed, known)

        self._stage.publish([draft.body for draft in drafts], place)

    def discard(self, drafts: Sequence[FileDraft]) -> None:
        """Undoes `begin`, except for drafts that were published."""
        self._stage.discard([draft.body for draft in drafts])

    def grow(self, draft: FileDraft, size: int) -> None:
        """Reserves space before the file grows beyond its reservation. Raises NoSpace,
        Unavailable."""
        if size > draft.body.reserved:
            try:
                self._stage.grow(draft.body, size)
            except NoSpace as error:
                raise self._full(error, [draft.target]) from None

    def sync(self, draft: FileDraft) -> None:
        """Makes a durable file's data survive power loss. Raises OSError."""
        self._stage.sync(draft.body)

    def failed(self, draft: FileDraft, error: OSError) -> Exception:
        """Returns the error to raise for the system's error on its data file."""
        return self._meant(error, str(draft.target))

    def _meant(self, error: OSError, shown: str) -> Exception:
        if error.errno not in _FULL:
            return error
        meant = translate(error, self._session.store.root)
        return type(meant)(f"{shown}: {meant}")

    def _full(self, error: NoSpace | OSError, targets: Sequence[StagingTarget]) -> Exception:
        """Returns the same error for lack of space, with the targets named."""
        others = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
        shown = f"{targets[0]}{others}"
        if isinstance(error, OSError):
            return self._meant(error, shown)
        return NoSpace(f"{shown}: {error}")


_PART_BYTES: Final = 1 << 30


class Writer(io.FileIO):
    """Unbuffered and seekable, not readable. `close` puts the file under its name; leaving a `with`
    block by an exception, `abort` and forgetting it without `close` drop it.

    numpy and others that write to `fileno()` may do so. Writing raises NoSpace if the namespace or
    the store is full.
    """

    def __init__(self, drafts: FileDrafts, draft: FileDraft, path: str) -> None:
        # A descriptor of its own, so that whatever happens to this object, each is closed once.
        super().__init__(os.dup(draft.body.fd), "w")
        self._drafts = drafts
        self._draft: FileDraft | None = draft
        self._path = path

    def write(self, data: Buffer) -> int:
        """Writes all of it; returns the number of bytes."""
        view = readable(data)
        draft = self._draft
        if draft is not None:
            self._drafts.grow(draft, self.tell() + len(view))
        done = 0
        try:
            while done < len(view):
                done += super().write(view[done : done + _PART_BYTES])
        except OSError as error:
            raise error if draft is None else self._drafts.failed(draft, error) from error
        return done

    def reserve(self, size: int) -> None:
        """Reserves space for a file of so many bytes, before it is written through `fileno()`.
        Raises NoSpace."""
        if self._draft is not None:
            self._drafts.grow(self._draft, size)

    def finish(self) -> None:
        """Gives the descriptor back: no more is written. `close` or `publish_together` publishes
        the file. Idempotent."""
        super().close()

    def close(self) -> None:
        """Publishes the file; durable ones are on disk then. Idempotent. Raises what `Client.put`
        raises, and then the file is dropped."""
        draft, self._draft = self._draft, None
        try:
            if draft is not None:
                self._publish(draft)
        finally:
            super().close()

    def abort(self) -> None:
        """Drops the file: the previous content of its name stays."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self._drafts.discard([draft])
        super().close()

    def _publish(self, draft: FileDraft) -> None:
        try:
            self._drafts.publish([draft])
        except BaseException:
            self._drafts.discard([draft])
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if getattr(self, "_draft", None) is not None:
            warnings.warn(
                f"{self._path} was opened for writing and never closed: it was dropped",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
            self.abort()


def publish_together(writers: Sequence[Writer]) -> None:
    """Closes several writers of one client: their files appear in one transaction, or none does.
    Closed ones are ignored. Raises what `Writer.close` raises, and then all files are dropped."""
    drafts = [writer._draft for writer in writers if writer._draft is not None]
    if not drafts:
        return
    maker = writers[0]._drafts
    for writer in writers:
        writer._draft = None
    try:
        maker.publish(drafts)
    except BaseException:
        maker.discard(drafts)
        raise
    finally:
        for writer in writers:
            writer.close()
