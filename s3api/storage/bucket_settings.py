"""The settings of a bucket: policy, versioning, ACL and the like, as the engine keeps them.

Each setting is the MessagePack form of botocore's dict for it (policies are their own text), under
the name of its sub-resource.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

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

_REMEMBERED: Final = 1024


def pack(value: object) -> bytes:
    """The form in which a setting is kept."""
    return msgspec.msgpack.encode(value)


@functools.lru_cache(_REMEMBERED)
def _unpack(raw: bytes) -> Any:
    return msgspec.msgpack.decode(raw)


class Settings:
    """The settings of one bucket, as one transaction saw them. A value that `get` returns is
    shared: not to be changed."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Mapping[str, bytes]) -> None:
        self._raw = raw

    def get(self, name: str) -> Any:
        """The setting; None where it is not set."""
        raw = self._raw.get(name)
        return None if raw is None else _unpack(raw)

    def is_of(self, raw: Mapping[str, bytes]) -> bool:
        """Whether these are the settings, as the store tells the same while nothing changes."""
        return self._raw is raw

    @property
    def versioning(self) -> str:
        """`Enabled`, `Suspended`, or empty where versions were never kept."""
        status: str = (self.get(VERSIONING) or {}).get("Status", "")
        return status

    @property
    def ownership(self) -> str:
        """The rule for who owns objects. Buckets that S3 makes say it; of those that were made
        before they did, or whose owner took it away, the writer owns objects and ACLs count. A
        directory that was made on the mount has no ACLs unless somebody says so."""
        kept: str | None = self.get(OWNERSHIP)
        if kept is not None:
            return kept
        has_acls = OWNER in self._raw or ACL in self._raw
        return "ObjectWriter" if has_acls else "BucketOwnerEnforced"

    @property
    def has_lock(self) -> bool:
        """Whether the bucket was made for locked objects."""
        return OBJECT_LOCK in self._raw


class SettingsReader:
    """The settings of buckets, for one worker. Any thread."""

    def __init__(self, store: "ObjectStore") -> None:
        self._store = store
        self._seen: dict[bytes, Settings] = {}
        self.logged: Callable[[], None] = lambda: None
        """Called where a bucket is found that is logged."""

    def of(self, bucket: bytes) -> Settings:
        """As they are now; the same object as long as they are the same. Raises NoSuchBucket."""
        raw = self._store.buckets.get_settings(bucket)
        seen = self._seen.get(bucket)
        if seen is None or not seen.is_of(raw):
            if len(self._seen) >= _REMEMBERED:
                self._seen.clear()
            seen = self._seen[bucket] = Settings(raw)
            if LOGGING in raw:
                self.logged()
        return seen
