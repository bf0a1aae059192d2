"""The parts of an upload on this host, while it is completed: those that were put here, and those
that were put on other nodes.

A part with a file of its own is fetched as any file is. The bytes of an assembly elsewhere, which
only the node has that made it, are borrowed up to the last part: they lie in a body of their own
until the completion ends.
"""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvfs.base.errors import NotFound, Stale
from kvfs.objects import range_copy
from kvfs.objects.lookup import Bucket
from kvfs.objects.multipart.upload_transactions import UploadPart
from kvfs.objects.object_errors import InvalidPart
from kvfs.session.byte_transfer import Step
from kvfs.session.session import Session
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.stage import Draft, Drafts


class PartGathering:
    """The gathering of one completion; one thread. Leaving its block lets go of everything that was
    opened."""

    def __init__(
        self,
        session: Session,
        node: NodeClient,
        stage: Drafts,
        bucket: Bucket,
        parts: Sequence[UploadPart],
    ) -> None:
        self._session = session
        self._node = node
        self._stage = stage
        self._bucket = bucket
        self._parts = parts
        self._open: dict[int, int] = {}
        self._borrowed: list[Draft] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._stage.discard(self._borrowed)

    def copy(self, part: UploadPart, target: int, at: int, step: Step) -> None:
        """Copies a part's bytes into an open file. Raises InvalidPart, Unavailable (its node does
        not answer), Conflict (parts are put there all the time), NoSpace, OSError, what `step`
        raises."""
        fd = self._open.get(part.place.data)
        if fd is None:
            fd = self._open_data(part)
        moved = range_copy.copy_range(fd, part.place.offset, part.size, target, at, step)
        if moved != part.size:
            raise InvalidPart(f"part {part.number} is shorter than it was")
        if part.place.data == part.ino:
            os.close(self._open.pop(part.ino))  # no other part is in it

    def _open_data(self, part: UploadPart) -> int:
        fd = self._open_here(part)
        if fd is None:
            try:
                fd = self._open_elsewhere(part)
            except (NotFound, Stale):
                fd = None
        if fd is None:
            raise InvalidPart(f"part {part.number} is there no more")
        self._open[part.place.data] = fd
        return fd

    def _open_here(self, part: UploadPart) -> int | None:
        try:
            return self._session.files.open(part.place.data, part.version, os.O_RDONLY)
        except FileNotFoundError:
            return None

    def _open_elsewhere(self, part: UploadPart) -> int | None:
        if self._session.replica is None:
            return None
        if part.place.data == part.ino:
            return self._open_here(part) if self._node.bring(part.ino) else None
        return self._borrow(part.place.data)

    def _borrow(self, data: int) -> int | None:
        """Returns an assembly that another node has, as far as the parts reach."""
        size = max(each.place.offset + each.size for each in self._parts if each.place.data == data)
        body = self._stage.begin_one(self._bucket.new_file(size))
        self._borrowed.append(body)
        return os.dup(body.fd) if self._node.borrow(data, size, body.ino) else None
