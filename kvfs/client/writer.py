"""A file being written through a file object: it appears whole when it is closed."""

import io
import os
import warnings
from types import TracebackType
from typing import Final

from kvfs.client.buffers import Buffer, readable
from kvfs.client.drafts import Draft, Drafts
from kvfs.client.placing import Options

_PART_BYTES: Final = 1 << 30


class Writer(io.FileIO):
    """Unbuffered and seekable, not readable. `close` puts the file under its name; leaving a `with`
    block by an exception, `abort` and being forgotten without `close` drop it.

    numpy and others that write to `fileno()` may do so. Writing raises NoSpace where the namespace
    or the store is full.
    """

    def __init__(self, drafts: Drafts, draft: Draft, options: Options, path: str) -> None:
        # A descriptor of its own, so that whatever happens to this object, each is closed once.
        super().__init__(os.dup(draft.fd), "w")
        self._drafts = drafts
        self._draft: Draft | None = draft
        self._options = options
        self._path = path

    def write(self, data: Buffer) -> int:
        """Write all of it; the number of bytes."""
        view = readable(data)
        draft = self._draft
        if draft is not None:
            self._drafts.grow(draft, self.tell() + len(view))
        done = 0
        try:
            while done < len(view):
                done += super().write(view[done : done + _PART_BYTES])
        except OSError as error:
            raise self._drafts.failed(error) from error
        return done

    def reserve(self, size: int) -> None:
        """Space for a file of so many bytes, before it is written through `fileno()`. Raises
        NoSpace."""
        if self._draft is not None:
            self._drafts.grow(self._draft, size)

    def close(self) -> None:
        """Publish the file; durable ones are on disk then. Idempotent. Raises as `Client.put`, and
        then the file is dropped."""
        draft, self._draft = self._draft, None
        try:
            if draft is not None:
                self._publish(draft)
        finally:
            super().close()

    def abort(self) -> None:
        """Drop the file: what was under its name stays."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self._drafts.discard([draft])
        super().close()

    def _publish(self, draft: Draft) -> None:
        try:
            self._drafts.sync(draft)
            self._drafts.publish([draft], self._options)
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
