"""How a change of objects is committed, told to the node, and put on disk."""

import os
from collections.abc import Callable
from typing import Final, TypeVar

from kvfs.base.errors import Conflict, Unavailable
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_of
from kvfs.objects import lookup
from kvfs.objects.lookup import Bucket
from kvfs.objects.mutations import Moment, TooOld
from kvfs.objects.staged_files import Bodies, StagedBody
from kvfs.session import session
from kvfs.vfs.post_commit import Changed, Finisher
from kvfs.vfs.stage_records import Dropped, WrittenData

T = TypeVar("T")
_ATTEMPTS: Final = 3


class Publisher:
    """The publisher of one store. The functions that it commits may be run more than once."""

    def __init__(self, opened: session.Session, finisher: Finisher, bodies: Bodies) -> None:
        self._session = opened
        self._finisher = finisher
        self._bodies = bodies

    def publish(
        self,
        body: StagedBody,
        fn: Callable[[Transaction, WrittenData, Changed], T],
        later: list[Changed] | None = None,
    ) -> T:
        """Commit what `fn` does with a body: its file is on disk before, where the bucket is
        durable, and gone where anything is raised. `later`: the node is not told, but `finish` can
        be. Raises what `fn` raises, NoSpace, ReadOnly, Unavailable, Conflict, OSError."""
        try:
            self._bodies.sync(body)
            result, changed = self._place(body, fn)
        except BaseException as error:
            self._bodies.discard(body, in_doubt=_is_in_doubt(error))
            raise
        self._bodies.close(body)
        body.ino = 0
        if body.bucket.durable:
            self._session.sync()
        if later is None:
            self._finisher.finish(changed)
        else:
            later.append(changed)
        return result

    def _place(
        self, body: StagedBody, fn: Callable[[Transaction, WrittenData, Changed], T]
    ) -> tuple[T, Changed]:
        for _ in range(_ATTEMPTS):
            written = self._bodies.written(body)

            def step(t: Transaction, written: WrittenData = written) -> tuple[T, Changed]:
                changed = Changed()
                self._finisher.clear(t)
                result = self.in_order(written, lambda w: fn(t, w, changed))
                self._finisher.post(t, changed, session.now_ns())
                return result, changed

            try:
                return self._session.write(step)
            except Dropped:
                self._bodies.rescue(body)
        raise Conflict("starting nodes dropped the new file again and again: try once more")

    def change(
        self, fn: Callable[[Transaction, Changed], T], later: list[Changed] | None = None
    ) -> T:
        """Commit what `fn` does. `later`: as for `publish`. Raises what `fn` raises, NoSpace,
        ReadOnly, Unavailable."""

        def step(t: Transaction) -> tuple[T, Changed]:
            changed = Changed()
            self._finisher.clear(t)
            result = fn(t, changed)
            if changed.changes:
                self._finisher.post(t, changed, session.now_ns())
            return result, changed

        result, changed = self._session.write(step)
        if changed.changes and later is None:
            self._finisher.finish(changed)
        elif changed.changes and later is not None:
            later.append(changed)
        return result

    def change_synced(self, bucket: Bucket, fn: Callable[[Transaction, Changed], T]) -> T:
        """As `change`, and of a durable bucket on disk before anybody is told."""
        later: list[Changed] = []
        result = self.change(fn, later)
        if bucket.durable:
            self._session.sync()
        self._finisher.finish(*later)
        return result

    def in_order(self, written: WrittenData, put: Callable[[WrittenData], T]) -> T:
        """Put a body in a transaction; where it was written before the version that it follows,
        which others committed meanwhile, its file is given that one's mtime first. Raises what
        `put` raises, OSError."""
        try:
            return put(written)
        except TooOld as error:
            mtime_ns = error.mtime_ns
        fd = self._session.files.open(written.ino, 0, os.O_RDWR)
        try:
            os.utime(fd, ns=(os.fstat(fd).st_atime_ns, mtime_ns))
            if written.synced:
                os.fsync(fd)
        finally:
            os.close(fd)
        return put(written._replace(mtime_ns=mtime_ns))

    def sync_if_durable(self, ino: int) -> None:
        """Has everything committed so far on disk when it returns, if that inode's bucket is
        durable."""
        if self._session.read(lambda t: lookup.bucket_of(t, namespace_of(ino))).durable:
            self._session.sync()

    def moment(self) -> Moment:
        """Now, in this boot."""
        return Moment(session.now_ns(), self._session.boot)


def _is_in_doubt(error: BaseException) -> bool:
    """Whether a commit that ended so may have taken place."""
    return isinstance(error, Unavailable) or not isinstance(error, Exception)
