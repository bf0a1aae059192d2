"""A file being written through a file object: it appears whole when it is closed."""

import io
import os
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from kvfs.client.buffers import Buffer, readable
from kvfs.client.file_drafts import FileDraft, FileDrafts

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
