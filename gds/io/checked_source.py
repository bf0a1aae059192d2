"""A file whose bytes are compared with the store's checksums as they are read.

    step        |......[ chunk ][ chunk ]...|    whole chunks: read to their place, and hashed
    chunks   [ chunk ][ chunk ][ chunk ][ chunk ]    parts of one: it is read aside, hashed, copied

Invariants
- Each byte that is handed over was hashed, in the thread that read it, in its place or where it was
  copied from.
- A chunk that differs is read once more past the page cache; damage in memory alone is thereby
  repaired, for all readers of the file.
- A file that was written to meanwhile is a Conflict, whatever its bytes.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from gds.format.safetensors import Header, TensorInfo
from gds.io.memory import allocate
from gds.io.source import SourceFile
from gds.io.timings import Stage, during
from gds.plan.pages import page_down, page_up
from kvfs.base.errors import AccessDenied, Corrupt, NotSupported, Unavailable
from kvfs.client.mount.backing_file import BackingFile
from kvfs.datastore.checksum import CHUNK_BYTES, DIGEST_BYTES, chunk_sums, wrong_in

_NAMED: Final = 3


class Damaged(Corrupt):
    """Bytes differ from what was stored. It names the tensors that have them."""


class CheckedSource(SourceFile):
    """One open file; reads come from any thread."""

    def __init__(self, fd: int, where: str, sums: bytes) -> None:
        """`sums`: the xxh3-128 of each chunk, one after the other. The rest is as in
        `SourceFile`."""
        super().__init__(fd, where)
        self._sums = sums
        self._tensors: Sequence[TensorInfo] = ()

    def check_header(self, header: Header) -> None:
        """Checks the header; to be called once it has been read. Raises Damaged, Conflict,
        OSError."""
        self._tensors = header.tensors
        count = -(-header.data_begin // CHUNK_BYTES)
        if chunk_sums(self.fd, self.size, 0, count) != self._sums[: count * DIGEST_BYTES]:
            self.check_unchanged()
            raise Damaged(f"{self.where}: its header, or what follows it, is not what was stored")

    def read_into(self, page: memoryview, begin: int, end: int, *, is_cached: bool = False) -> None:
        """See `SourceFile.read_into`. Raises Damaged and Conflict as well."""
        base = page_down(begin)
        first = min(-(-begin // CHUNK_BYTES) * CHUNK_BYTES, end)
        last = end if end == self.size else max(end // CHUNK_BYTES * CHUNK_BYTES, first)
        with during(Stage.COPY, first - begin + end - last):
            self._copy(page[begin - base : first - base], begin)
            if first < last:
                whole = page[first - base : page_up(last) - base]
                super().read_into(whole, first, last, is_cached=is_cached)
                self._check(page[first - base : last - base], first)
            self._copy(page[last - base : end - base], last)

    def read_pieces(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        """See `SourceFile.read_pieces`. Raises Damaged and Conflict as well."""
        with during(Stage.COPY, sum(len(view) for view, _ in pieces)):
            for view, offset in pieces:
                self._copy(view, offset)

    def _check(self, data: memoryview, begin: int) -> None:
        """Checks whole chunks that were read."""
        while (wrong := self._wrong_in(data, begin)) is not None:
            skip = wrong * CHUNK_BYTES - begin
            end = min(skip + CHUNK_BYTES, len(data))
            data[skip:end] = self._chunk(wrong)
            data, begin = data[end:], begin + end

    def _wrong_in(self, data: memoryview, begin: int) -> int | None:
        """Returns the number of the first chunk that differs, of those that begin at `begin`."""
        with during(Stage.CHECK, len(data)):
            return wrong_in(data, self._sums, begin // CHUNK_BYTES)

    def _copy(self, view: memoryview, offset: int) -> None:
        """Copies the bytes from `offset` on, out of chunks that are read whole."""
        done = 0
        while done < len(view):
            number, skip = divmod(offset + done, CHUNK_BYTES)
            part = self._chunk(number)[skip : skip + len(view) - done]
            view[done : done + len(part)] = part
            done += len(part)

    def _chunk(self, number: int) -> memoryview:
        """Returns the chunk's verified bytes, valid until this thread asks for another."""
        begin = number * CHUNK_BYTES
        end = min(begin + CHUNK_BYTES, self.size)
        if _aside.holds is not self or _aside.number != number:
            _aside.holds = None
            self._read_chunk(_aside.memory[: end - begin], begin)
            _aside.holds, _aside.number = self, number
        return _aside.memory[: end - begin]

    def _read_chunk(self, memory: memoryview, begin: int) -> None:
        for _ in range(2):
            with during(Stage.READ, len(memory)):
                self._fill(self.fd, memory, begin, len(memory))
            if self._wrong_in(memory, begin) is None:
                return
            os.posix_fadvise(self.fd, begin, len(memory), os.POSIX_FADV_DONTNEED)
        self.check_unchanged()
        end = begin + len(memory)
        raise Damaged(
            f"{self.where}: {self._named(begin, end)}: what lies from byte {begin} to {end} is not "
            "what was stored: its checksum differs"
        )

    def _named(self, begin: int, end: int) -> str:
        names = [repr(name) for name in self._within(begin, end)]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"tensor {', '.join(names[:_NAMED])}{more}"

    def _within(self, begin: int, end: int) -> Iterator[str]:
        for tensor in self._tensors:
            if tensor.begin < end and begin < tensor.end:
                yield tensor.name


class _Aside(threading.local):
    """A thread's buffer for one chunk, and the chunk's number."""

    def __init__(self) -> None:
        self.memory = allocate(CHUNK_BYTES)
        self.holds: CheckedSource | None = None
        self.number = -1


_aside: Final = _Aside()


def sums_of(backing: BackingFile, path: Path) -> bytes:
    """Returns the checksums that a file is verified against. Raises NotSupported, AccessDenied,
    Unavailable."""
    if backing.store is None:
        raise NotSupported(
            f"{path}: it is on no mount of KVFS, so nothing has checksums of it: load it without "
            "verify"
        )
    if backing.sums is not None:
        return backing.sums
    if not os.access(backing.store / "meta", os.R_OK | os.X_OK, effective_ids=True):
        raise AccessDenied(
            f"{path}: its checksums are in {backing.store}, where you may not enter: be root, or "
            "the user of the node, or load it without verify"
        )
    raise Unavailable(
        f"{path}: it has no checksums yet: its node makes them some seconds after it was written: "
        "load it again then, or without verify"
    )
