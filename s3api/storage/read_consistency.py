"""The freshness of the metadata that answer a request, beside a node of a cluster.

In a bucket with strict coherence the node's metadata replica catches up first: one round trip for
all requests of a worker that wait then. In a cache, its content counts for two seconds after the
engine was last heard; then its objects are missing. An upload may go on at another node at once, so
requests about one wait there too.
"""

from collections.abc import Sequence

from kvfs.base.errors import Unreached
from kvfs.objects.object_store import ObjectStore
from s3api.http.s3_errors import S3Error
from s3api.storage.batches import Together

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


class Freshness:
    """The freshness of one worker's reads. `run` must be running while any request waits."""

    def __init__(self, store: ObjectStore) -> None:
        self._session = store.session
        self._misses = store.misses
        self._mirrored = store.session.mirrored
        self._together: Together[None, None] = Together(self._catch_up)
        self.run = self._together.run
        self.is_needed = self._mirrored is not None
        """Whether there are other nodes."""
        # It waits here, and not in the middle of something that holds up the whole worker.
        store.session.checks_itself = False

    async def before(self, bucket: bytes, operation: str) -> None:
        """Makes the bucket's metadata as fresh as they must be. Raises Unavailable; NoSuchKey if an
        object of a cache cannot be vouched for."""
        mirrored = self._mirrored
        if mirrored is None or not bucket:
            return
        behind = operation in _OF_UPLOADS
        try:
            behind |= self._session.read(lambda t: mirrored.must_catch_up(t, bucket))
        except Unreached as error:
            if operation in _OF_OBJECTS:
                self._misses.found_nothing(error)
                raise S3Error("NoSuchKey") from None
        if behind:
            await self._together.do(None)

    def _catch_up(self, batch: Sequence[None]) -> list[None]:
        assert self._mirrored is not None, "else nobody waits"
        self._mirrored.catch_up()
        return list(batch)
