"""The freshness of the metadata that answer a request, beside a node of a cluster.

In a bucket with strict coherence the node's metadata replica catches up first: one round trip for
all requests of a worker that wait then. While the engine is away, what is read there may be as old
as that, and what would change is refused (`kvfs.meta.engine_absence`). In a cache, its content
counts for two seconds after the engine was last heard; then its objects are missing. An upload may
go on at another node at once, so requests about one wait there too. Objects of a peer namespace are
this node's own: nobody waits. Nobody waits for the bucket of another request.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import trio

from kvfs.base.errors import Unreached
from kvfs.meta.engine import Transaction
from kvfs.objects.object_store import ObjectStore
from kvfs.session.replica_transactions import ReplicaTransactions
from s3api.http.s3_errors import S3Error
from s3api.storage.batches import Lanes

_UNKNOWN: Final = 0
"""The names of namespaces, and all that is kept beside them."""
_CATCHING_UP: Final = 64
"""Threads that wait for the node to catch up with buckets."""
_READING: Final = 16
"""Threads that wait for it to read whole buckets: they take none of the others."""

_READS: Final = ("Get", "Head", "List")
"""The beginnings of the names of operations that change nothing."""
_OF_OBJECTS = ("GetObject", "HeadObject")
_OF_UPLOADS = frozenset(
    (
        "AbortMultipartUpload",
        "CompleteMultipartUpload",
        "ListMultipartUploads",
        "ListParts",
        "UploadPart",
        "UploadPartCopy",
    )
)


class _Wanted(NamedTuple):
    """A namespace with which the replica is to catch up."""

    namespace_id: int
    is_read: bool
    """Whether it is only read, so that an older state will do where the engine is away."""


class Freshness:
    """The freshness of one worker's reads. `run` must be running while any request waits."""

    def __init__(self, store: ObjectStore) -> None:
        self._session = store.session
        self._misses = store.misses
        self._replica = store.session.replica
        self._lanes: Lanes[_Wanted, None] = Lanes(partial(self._in_a_thread, _CATCHING_UP))
        self._reading: Lanes[_Wanted, None] = Lanes(partial(self._in_a_thread, _READING))
        self._threads = {each: trio.CapacityLimiter(each) for each in (_CATCHING_UP, _READING)}
        self.is_needed = self._replica is not None
        """Whether there are other nodes."""
        # It waits here, and not in the middle of something that holds up the whole worker.
        store.session.checks_itself = False

    async def run(self) -> None:
        """Catches up until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._lanes.run)
            nursery.start_soon(self._reading.run)

    async def before(
        self, bucket: bytes, operation: str, admits: Callable[[], bool] = lambda: True
    ) -> None:
        """Makes the bucket's metadata as fresh as they must be. Where the node does not have them
        at all it asks `admits`, which sees the settings and users of now, whether it is to begin to
        follow the bucket: that reads all of it, and may take long.

        Raises Unavailable; NoSuchKey if an object of a cache cannot be vouched for; what `admits`
        raises."""
        if self._replica is None or not bucket:
            return
        behind, is_lacking = self._behind(self._replica, bucket, operation)
        is_read = operation.startswith(_READS)
        if behind == _UNKNOWN or is_lacking:
            await self._lanes.do(_Wanted(_UNKNOWN, is_read))
            behind = self._lacking(self._replica, bucket)
            if behind is not None and admits():
                await self._reading.do(_Wanted(behind, is_read))
        elif behind is not None:
            await self._lanes.do(_Wanted(behind, is_read))

    def _behind(
        self, replica: ReplicaTransactions, bucket: bytes, operation: str
    ) -> tuple[int | None, bool]:
        """Returns the namespace with which the replica has to catch up (None: it need not), and
        whether it does not have all of it. Raises S3Error."""
        is_upload = operation in _OF_UPLOADS and not self._session.read(
            lambda t: replica.is_own(t, bucket)
        )
        behind = self._session.read(lambda t: replica.number(t, bucket)) if is_upload else None

        def look(t: Transaction) -> tuple[int | None, bool]:
            found = replica.must_catch_up(t, bucket)
            return found, found is not None and replica.lacking(t, bucket) is not None

        try:
            found, is_lacking = self._session.read(look)
        except Unreached as error:
            if operation in _OF_OBJECTS:
                self._misses.found_nothing(error)
                raise S3Error("NoSuchKey") from None
            return behind, False
        return (behind if found is None else found), is_lacking

    def _lacking(self, replica: ReplicaTransactions, bucket: bytes) -> int | None:
        return self._session.read(lambda t: replica.lacking(t, bucket))

    async def _in_a_thread(self, threads: int, wanted: _Wanted) -> None:
        assert self._replica is not None, "else nobody waits"
        step = partial(self._replica.catch_up, wanted.namespace_id, reading=wanted.is_read)
        await trio.to_thread.run_sync(step, limiter=self._threads[threads])
