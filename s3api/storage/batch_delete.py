"""Deletes one object for each of many requests.

In a bucket that waits for no disk, at once: a transaction takes less than a change of thread. In a
durable one for all requests that wait together, in one transaction and one sync for each bucket.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvfs.base.errors import KvfsError
from kvfs.objects.lookup import Bucket
from kvfs.objects.mutations import Deleted
from kvfs.objects.object_store import Doomed, ObjectStore
from kvfs.vfs.post_commit import Changed
from s3api.storage.batches import Together, in_a_thread
from s3api.storage.commit_notifier import Teller


class _How(NamedTuple):
    """The parameters that deletions of one transaction share."""

    bucket: bytes
    versioning: str
    bypass: bool


class Deleter:
    """The deleter of one worker. `run` must be running while any request waits."""

    def __init__(self, store: ObjectStore, teller: Teller) -> None:
        self._store = store
        self._teller = teller
        self._together: Together[tuple[_How, Doomed], Deleted] = Together(in_a_thread(self._delete))
        self.run = self._together.run

    async def delete(
        self, name: bytes, bucket: Bucket, doomed: Doomed, *, versioning: str, bypass: bool
    ) -> Deleted:
        """Deletes like ObjectStore.delete from the bucket of this name, which the request found as
        `bucket`; the node has been told. Raises what that raises,
        Unavailable, and what the check raises, which must be an error of the core. Cancelled: it is
        deleted all the same."""
        later: list[Changed] = []
        done = self._store.delete_now(bucket, doomed, later, versioning=versioning, bypass=bypass)
        if done is None:
            return await self._together.do((_How(name, versioning, bypass), doomed))
        await self._teller.tell(later)
        return done

    def _delete(self, batch: Sequence[tuple[_How, Doomed]]) -> list[Deleted | Exception]:
        places: dict[_How, list[int]] = {}
        for at, (how, _) in enumerate(batch):
            places.setdefault(how, []).append(at)
        later: list[Changed] = []
        results: dict[int, Deleted | Exception] = {}
        for how, numbers in places.items():
            doomed = [batch[at][1] for at in numbers]
            results |= zip(numbers, self._delete_in(how, doomed, later), strict=True)
        self._store.finish(*later)
        return [results[at] for at in range(len(batch))]

    def _delete_in(
        self, how: _How, doomed: Sequence[Doomed], later: list[Changed]
    ) -> Sequence[Deleted | KvfsError]:
        try:
            return self._store.delete_many(
                how.bucket, doomed, versioning=how.versioning, bypass=how.bypass, later=later
            )
        except KvfsError as error:  # of this bucket alone
            return [error] * len(doomed)
