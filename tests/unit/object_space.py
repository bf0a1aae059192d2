"""A bucket in an engine in memory, for the tests of objects: puts without data files."""

from collections.abc import Callable
from typing import TypeVar

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.objects import buckets, listing, lookup, mutations
from kvfs.objects.mutations import Check, Deleted, Moment, New, anything
from kvfs.objects.object_info import Facts
from kvfs.session.session import Author
from kvfs.tree import namespaces, reserved_inodes
from kvfs.vfs.post_commit import Changed
from kvfs.vfs.stage_records import WrittenData
from tests.contract.memory_engine import MemoryEngine
from tests.unit.space import BOOT

T = TypeVar("T")


class ObjectSpace:
    """One bucket `b`; every change is a transaction at a later time."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.now = 1_000
        self.do(lambda t: namespaces.format(t, 1, 0, 0))
        self.changed = Changed()
        author = Author(uid=7, gid=8, boot=BOOT, now=self.now)
        self.bucket = self.do(
            lambda t: buckets.create(t, b"b", "durable", 0o750, author, self.changed)
        )

    def do(self, fn: Callable[[Transaction], T]) -> T:
        return self.engine.transact_now(fn)

    def moment(self) -> Moment:
        self.now += 1
        return Moment(self.now, BOOT)

    def body(self, size: int = 0) -> WrittenData:
        ino = self.do(lambda t: reserved_inodes.reserve(t, self.bucket.id, 1))
        return WrittenData(ino, size, -(-size // 4096) * 8, self.now, self.now, synced=True)

    def put(
        self,
        key: bytes,
        *,
        size: int = 0,
        etag: str = "e",
        metadata: dict[str, str] | None = None,
        versioning: str = "",
        check: Check = anything,
    ) -> Facts:
        new = New(self.body(size), etag, metadata or {})
        moment = self.moment()
        return self.do(
            lambda t: mutations.put(
                t, self.bucket, key, new, versioning, check, moment, self.changed
            )
        )

    def delete(self, key: bytes, versioning: str = "", check: Check = anything) -> Deleted:
        moment = self.moment()
        return self.do(
            lambda t: mutations.delete(t, self.bucket, key, versioning, check, moment, self.changed)
        )

    def delete_version(self, key: bytes, version: str, *, bypass: bool = False) -> Deleted:
        moment = self.moment()
        return self.do(
            lambda t: mutations.delete_version(
                t, self.bucket, key, version, anything, moment, self.changed, bypass=bypass
            )
        )

    def find(self, key: bytes, version: str = "") -> Facts:
        return self.do(lambda t: lookup.find(t, self.bucket, key, version, BOOT))

    def list(
        self,
        prefix: bytes = b"",
        delimiter: bytes = b"",
        start_after: bytes = b"",
        max_keys: int = 1000,
    ) -> listing.ListingPage:
        return self.do(
            lambda t: listing.list_objects(
                t,
                self.bucket,
                prefix=prefix,
                delimiter=delimiter,
                start_after=start_after,
                max_keys=max_keys,
                boot=BOOT,
            )
        )

    def versions(
        self,
        prefix: bytes = b"",
        delimiter: bytes = b"",
        start_after: bytes = b"",
        start_version: str = "",
        max_keys: int = 1000,
    ) -> listing.VersionPage:
        return self.do(
            lambda t: listing.list_versions(
                t,
                self.bucket,
                prefix=prefix,
                delimiter=delimiter,
                start_after=start_after,
                start_version=start_version,
                max_keys=max_keys,
                boot=BOOT,
            )
        )

    def entries(self) -> int:
        """Names in the bucket, of any kind."""
        return sum(1 for _ in self.do(lambda t: list(t.scan(b"e" + b"\0\1", b"f"))))

    def is_listed(self, prefix: bytes) -> bool:
        return bool(self.do(lambda t: list(t.scan(prefix, keys.after(prefix)))))
