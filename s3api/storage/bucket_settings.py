"""The settings of a bucket: policy, versioning, ACL and the like, as the engine keeps them.

Each setting is the MessagePack form of botocore's dict for it (policies are their own text), under
the name of its sub-resource.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvfs.meta.engine import Transaction
from kvfs.objects import buckets, lookup
from kvfs.objects.lookup import Bucket
from kvfs.objects.store_cache import NOW, Wanted

if TYPE_CHECKING:
    from kvfs.objects.object_store import ObjectStore

OWNER: Final = "owner"
VERSIONING: Final = "versioning"
POLICY: Final = "policy"
CORS: Final = "cors"
LIFECYCLE: Final = "lifecycle"
TAGGING: Final = "tagging"
ACL: Final = "acl"
OWNERSHIP: Final = "ownership"
PUBLIC_ACCESS: Final = "public-access-block"
ENCRYPTION: Final = "encryption"
LOGGING: Final = "logging"
OBJECT_LOCK: Final = "object-lock"


def pack(value: object) -> bytes:
    """Returns the form in which a setting is kept."""
    return msgspec.msgpack.encode(value)


class Settings:
    """The settings of one bucket, as one transaction saw them. A value that `get` returns is shared
    and must not be changed."""

    __slots__ = (
        *("_raw", "_values", "bucket", "has_acl", "has_lifecycle", "has_lock", "has_policy"),
        *("owner", "ownership", "versioning"),
    )

    def __init__(self, bucket: Bucket, raw: Mapping[str, bytes]) -> None:
        self.bucket = bucket
        """The bucket itself, and its kind."""
        self._raw = raw
        self._values: dict[str, Any] = {}
        self.owner: str = self.get(OWNER) or ""
        """The name of the bucket's owner; empty: it was made on the mount."""
        self.has_policy = POLICY in raw
        self.has_acl = ACL in raw
        self.has_lifecycle = LIFECYCLE in raw
        self.has_lock = OBJECT_LOCK in raw
        """Whether the bucket was made for locked objects."""
        self.versioning: str = (self.get(VERSIONING) or {}).get("Status", "")
        """`Enabled`, `Suspended`, or empty if versions were never kept."""
        has_acls = OWNER in raw or self.has_acl
        kept: str | None = self.get(OWNERSHIP)
        self.ownership = kept or ("ObjectWriter" if has_acls else "BucketOwnerEnforced")
        """The rule for the ownership of objects. Buckets that S3 makes have it; in older ones, or
        if their owner removed it, the writer owns objects and ACLs count. A directory that was made
        on the mount has no ACLs unless they are set."""

    def get(self, name: str) -> Any:
        """Returns the setting; None if it is not set."""
        raw = self._raw.get(name)
        if raw is None:
            return None
        if name not in self._values:
            self._values[name] = msgspec.msgpack.decode(raw)
        return self._values[name]


class SettingsReader:
    """The settings of buckets, for one worker. Any thread."""

    def __init__(self, store: "ObjectStore") -> None:
        self._cache = store.cache
        self.logged: Callable[[], None] = lambda: None
        """Called when a logged bucket is found."""

    def of(self, bucket: bytes, generation: int = NOW) -> Settings:
        """Returns the settings as of that generation or newer; the same object as long as they are
        the same. Raises NoSuchBucket."""
        entry = self._cache.entry(bucket)
        if entry is not None and entry.generation >= generation:
            known: Settings = entry.value
            return known
        found: Settings = self._cache.get(*self.wanted(bucket), generation)
        return found

    def wanted(self, bucket: bytes) -> Wanted:
        """Returns the settings, for `StoreCache.look`."""

        def read(t: Transaction) -> Settings:
            found = lookup.find_bucket(t, bucket)
            raw = buckets.settings(t, found)
            if LOGGING in raw:
                self.logged()
            return Settings(found, raw)

        return bucket, read
