"""The buckets of one store and their settings: part of `object_store`, whose rules hold."""

from collections.abc import Mapping

from kvfs.meta.engine import Transaction
from kvfs.objects import buckets, lookup
from kvfs.objects.buckets import ListedBucket
from kvfs.objects.lookup import Bucket
from kvfs.objects.publish import Publisher
from kvfs.session.session import Session
from kvfs.vfs.post_commit import Changed


class Buckets:
    """Operations on buckets as a whole."""

    def __init__(self, opened: Session, publisher: Publisher) -> None:
        self._session = opened
        self._publisher = publisher

    def create(
        self,
        name: bytes,
        kind: str = "durable",
        settings: Mapping[str, bytes] | None = None,
        mode: int = 0o755,
    ) -> Bucket:
        """Makes a bucket, with settings from its beginning; `mode`: the permissions of its
        directory.

        Raises BucketExists, Invalid, NameTooLong, NoSpace."""
        author = self._session.author()

        def fn(t: Transaction, changed: Changed) -> Bucket:
            made = buckets.create(t, name, kind, mode, author, changed)
            for setting, value in (settings or {}).items():
                buckets.put_setting(t, made, setting, value)
            return made

        made = self._publisher.change(fn)
        self._session.sync()
        return made

    def delete(self, name: bytes) -> None:
        """Raises NoSuchBucket, BucketNotEmpty."""
        self._publisher.change(
            lambda t, changed: buckets.remove(t, name, self._publisher.moment(), changed)
        )
        self._session.sync()

    def head(self, name: bytes) -> ListedBucket:
        """Raises NoSuchBucket."""
        return self._session.read(lambda t: buckets.describe(t, name))

    def has_fast_etags(self, name: bytes) -> bool:
        """Returns whether the ETags of bodies that come by S3 need not be MD5s. Raises
        NoSuchBucket."""
        return self._session.read(lambda t: lookup.find_bucket(t, name)).etag == "fast"

    def list_all(self) -> list[ListedBucket]:
        """Returns all namespaces, in the order of their names."""
        return self._session.read(buckets.list_all)

    def get_setting(self, bucket: bytes, name: str) -> bytes | None:
        """Returns a setting of a bucket (policy, versioning ...) as it was put. Raises
        NoSuchBucket."""
        return self._session.read(
            lambda t: buckets.get_setting(t, lookup.find_bucket(t, bucket), name)
        )

    def put_setting(self, bucket: bytes, name: str, value: bytes) -> None:
        """Sets a setting; it is on disk when this returns. Raises NoSuchBucket."""
        self._session.write(
            lambda t: buckets.put_setting(t, lookup.find_bucket(t, bucket), name, value)
        )
        self._session.sync()

    def delete_setting(self, bucket: bytes, name: str) -> bool:
        """Deletes a setting; returns whether it was set. Raises NoSuchBucket."""
        found = self._session.write(
            lambda t: buckets.delete_setting(t, lookup.find_bucket(t, bucket), name)
        )
        self._session.sync()
        return found
