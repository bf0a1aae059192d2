"""The file objects of `kvfs://`: buffers of Python's own around the data file.

Large reads and writes go past the buffer: the kernel reads into the bytes that the caller gets, and
writes from the caller's own.
"""

import io
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol

from gateway.fsspec.raising import os_errors
from kvfs.client.writer import Writer, publish_together

READ_BUFFER_BYTES: Final = 128 << 10
WRITE_BUFFER_BYTES: Final = 1 << 20


class ReadFile(io.BufferedReader):
    """A data file, as it was when it was opened; it may be mapped, sent and pickled."""

    def __init__(self, raw: io.FileIO, path: str, fs: Any, buffer_bytes: int | None) -> None:
        super().__init__(raw, buffer_bytes or READ_BUFFER_BYTES)
        self.path = path
        self.fs = fs
        self.size = os.fstat(raw.fileno()).st_size

    @property
    def name(self) -> str:
        return self.path

    def __reduce__(self) -> tuple[Callable[..., "ReadFile"], tuple[Any, str, int]]:
        return _reopened, (self.fs, self.path, self.tell())


def _reopened(fs: Any, path: str, position: int) -> ReadFile:
    file: ReadFile = fs.open(path, "rb")
    file.seek(position)
    return file


class _Droppable(Protocol):
    def discard(self) -> None: ...

    def close(self) -> None: ...


class _Whole:
    """A file that appears whole or not at all. It precedes Python's own class among the bases."""

    def __exit__(
        self: _Droppable,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        """Does nothing, in place of a `close` by which half a file would appear: the writer, which
        is forgotten next, reports and drops it."""


class _Around(_Whole):
    """A file that writes into another one."""

    _file: "WriteFile | CompressedFile"

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def writer(self) -> Writer:
        return self._file.writer


class WriteFile(_Whole, io.BufferedWriter):
    """A file that appears when it is closed or, in a transaction, when that ends. Leaving a `with`
    block by an exception drops it, and so does forgetting it without `close`.

    Writing and closing raise OSErrors that name the path; if closing does, nothing appeared."""

    def __init__(self, writer: Writer, path: str, buffer_bytes: int | None, autocommit: bool):
        super().__init__(writer, buffer_bytes or WRITE_BUFFER_BYTES)
        self.path = path
        self.writer = writer
        self._autocommit = autocommit

    @property
    def name(self) -> str:
        return self.path

    def write(self, data: Any) -> int:
        with os_errors(self.path):
            return super().write(data)

    def flush(self) -> None:
        with os_errors(self.path):
            super().flush()

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
        except BaseException:
            self.discard()
            raise
        if self._autocommit:
            self.commit()
        else:
            self.writer.finish()

    def commit(self) -> None:
        """Makes the file appear, at once. Idempotent."""
        with os_errors(self.path):
            self.writer.close()

    def discard(self) -> None:
        """Drops the file: the previous content of its name stays. Idempotent."""
        self.writer.abort()


class CompressedFile(_Around, io.RawIOBase):
    """Compresses into a `WriteFile` and closes it: compressors themselves leave their file open."""

    def __init__(self, compressor: Any, file: WriteFile) -> None:
        self._compressor = compressor
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return int(self._compressor.write(data))

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            self._compressor.close()
        except BaseException:
            self._file.discard()
            raise
        self._file.close()

    def discard(self) -> None:
        """See `WriteFile`."""
        self._file.discard()
        super().close()


class TextFile(_Around, io.TextIOWrapper):
    """Text into a file that appears when it is closed, and not where `WriteFile` would not."""

    def __init__(self, file: WriteFile | CompressedFile, **options: Any) -> None:
        super().__init__(file, **options)  # type: ignore[arg-type]
        self._file = file

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
        except BaseException:
            self.discard()
            raise
        super().close()

    def discard(self) -> None:
        """See `WriteFile`."""
        self._file.discard()


Written = WriteFile | CompressedFile | TextFile


def commit_together(files: Sequence[Written]) -> None:
    """Makes all files that are closed and were not dropped appear in one transaction, or none.
    Raises OSError."""
    if files:
        with os_errors(files[0].path):
            publish_together([file.writer for file in files])
