"""What is set for a bucket: policy, versioning, ACL and the like, as the engine keeps it.

Each setting is the MessagePack form of botocore's dict for it (policies are their own text), under
the name of its sub-resource.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from kvfs.objects.store import ObjectStore

OWNER: Final = "owner"
VERSIONING: Final = "versioning"
POLICY: Final = "policy"
CORS: Final = "cors"
LIFECYCLE: Final = "lifecycle"
TAGGING: Final = "tagging"
ACL: Final = "acl"
OWNERSHIP: Final = "ownership"
PUBLIC_ACCESS: Final = "public-access-block"
OBJECT_LOCK: Final = "object-lock"

_REMEMBERED: Final = 1024


def pack(value: object) -> bytes:
    """The form in which a setting is kept."""
    return msgspec.msgpack.encode(value)


@functools.lru_cache(_REMEMBERED)
def _unpack(raw: bytes) -> Any:
    return msgspec.msgpack.decode(raw)


class Settings:
    """Of one bucket, as one transaction saw them. What `get` returns is shared: not to be
    changed."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Mapping[str, bytes]) -> None:
        self._raw = raw

    def get(self, name: str) -> Any:
        """The setting; None where it is not set."""
        raw = self._raw.get(name)
        return None if raw is None else _unpack(raw)

    def is_same(self, raw: Mapping[str, bytes]) -> bool:
        """Whether these are the same settings."""
        return self._raw == raw

    @property
    def versioning(self) -> str:
        """`Enabled`, `Suspended`, or empty where versions were never kept."""
        status: str = (self.get(VERSIONING) or {}).get("Status", "")
        return status

    @property
    def ownership(self) -> str:
        """The rule for who owns objects; by default the writer does, and ACLs count."""
        return self.get(OWNERSHIP) or "ObjectWriter"

    @property
    def has_lock(self) -> bool:
        """Whether the bucket was made for locked objects."""
        return OBJECT_LOCK in self._raw


class SettingsReader:
    """The settings of buckets, for one worker. Any thread.

    Nothing stale is told: what was read counts for the generation of the engine before which it was
    read, and any commit, of whichever process, begins another.
    """

    def __init__(self, store: "ObjectStore") -> None:
        self._store = store
        self._seen: dict[bytes, tuple[int, Settings]] = {}

    def of(self, bucket: bytes) -> Settings:
        """As they are now; the same object as long as they are the same. Raises NoSuchBucket."""
        generation = self._store.session.generation()
        seen = self._seen.get(bucket)
        if seen is not None and seen[0] == generation:
            return seen[1]
        raw = self._store.get_settings(bucket)
        settings = seen[1] if seen is not None and seen[1].is_same(raw) else Settings(raw)
        if len(self._seen) >= _REMEMBERED:
            self._seen.clear()
        self._seen[bucket] = generation, settings
        return settings
