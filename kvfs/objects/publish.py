"""Commits changes of objects, tells them to the node, and puts them on disk."""

import os
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from kvfs.base.clock import file_time_ns
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_of
from kvfs.objects import lookup
from kvfs.objects.lookup import Bucket
from kvfs.objects.mutations import Moment, TooOld
from kvfs.session import session
from kvfs.vfs.post_commit import Changed, Finisher
from kvfs.vfs.stage import Draft, Drafts
from kvfs.vfs.stage_records import WrittenData

T = TypeVar("T")


class Publisher:
    """The publisher of one store. The functions that it commits may be run more than once."""

    def __init__(self, opened: session.Session, finisher: Finisher, stage: Drafts) -> None:
        self._session = opened
        self._finisher = finisher
        self._stage = stage
        self.change: Final = finisher.change

    def publish(
        self,
        body: Draft,
        fn: Callable[[Transaction, WrittenData, Changed], T],
        later: list[Changed] | None = None,
    ) -> T:
        """Does `Drafts.publish` for one body, by `fn`, in the order of the versions
        (`in_order`)."""

        def place(written: Sequence[WrittenData], t: Transaction, changed: Changed) -> T:
            try:
                return fn(t, written[0], changed)
            except TooOld as error:
                return fn(t, self._dated(written[0], error), changed)

        return self._stage.publish([body], place, later)

    def change_synced(self, bucket: Bucket, fn: Callable[[Transaction, Changed], T]) -> T:
        """Like `change`; in a durable bucket the change is on disk before anybody is told."""
        later: list[Changed] = []
        result = self.change(fn, later)
        if bucket.durable:
            self._session.sync()
        self._finisher.finish(*later)
        return result

    def in_order(self, written: WrittenData, put: Callable[[WrittenData], T]) -> T:
        """Puts a body in a transaction; if it was written before the version that it follows, which
        others committed meanwhile, its file is given that one's mtime first. Raises what `put`
        raises, OSError."""
        try:
            return put(written)
        except TooOld as error:
            return put(self._dated(written, error))

    def _dated(self, written: WrittenData, error: TooOld) -> WrittenData:
        mtime_ns = error.mtime_ns
        fd = self._session.files.open(written.ino, 0, os.O_RDWR)
        try:
            os.utime(fd, ns=(os.fstat(fd).st_atime_ns, mtime_ns))
            if written.synced:
                os.fsync(fd)
        finally:
            os.close(fd)
        return msgspec.structs.replace(written, mtime_ns=mtime_ns)

    def sync_if_durable(self, ino: int) -> None:
        """Puts everything committed so far on disk, if that inode's bucket is durable."""
        if self._session.read(lambda t: lookup.bucket_of(t, namespace_of(ino))).durable:
            self._session.sync()

    def moment(self) -> Moment:
        """Returns the present time, in this boot."""
        return Moment(file_time_ns(), self._session.boot)
