"""One request on its way: what it asks for, who asks, and what it may use."""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import trio

from kvfs.objects.finding import Facts
from kvfs.objects.store import ObjectStore
from kvfs.wire.http import Body, Head, Response
from s3api.access import Access
from s3api.auth.credentials import Known
from s3api.auth.verified import Verified
from s3api.identities import Identities
from s3api.receiving import Buffers
from s3api.rules.conditions import Target
from s3api.rules.policy import Caller
from s3api.settings import OWNER, Settings

T = TypeVar("T")


@dataclass(slots=True)
class Service:
    """What all requests of a worker share."""

    store: ObjectStore
    identities: Identities
    access: Access
    buffers: Buffers
    domains: tuple[str, ...]
    """Names of the server: a host below one of them names the bucket."""
    region: str
    version_2: bool
    """Whether signatures of version 2 are taken."""
    threads: trio.CapacityLimiter


@dataclass(slots=True)
class Call:
    """One request. `bucket` and `key` are empty where it names none."""

    service: Service
    head: Head
    body: Body
    operation: str
    bucket: str
    key: str
    query: dict[str, str]
    fields: Mapping[bytes, bytes]
    """The headers, and those that presigning moved into the query; lower-case names."""
    verified: Verified | None
    known: Known | None
    """Who signed it; None: nobody."""
    caller: Caller
    now: datetime
    request_id: str
    params: dict[str, Any] = field(default_factory=dict)
    """As botocore names them."""
    _settings: Settings | None = None

    @property
    def store(self) -> ObjectStore:
        return self.service.store

    @property
    def raw_bucket(self) -> bytes:
        return self.bucket.encode()

    @property
    def raw_key(self) -> bytes:
        return self.key.encode()

    @property
    def version(self) -> str:
        """The version that is asked for; empty: the current one."""
        version: str = self.params.get("VersionId") or ""
        return version

    @property
    def settings(self) -> Settings:
        """Of the bucket. Raises NoSuchBucket."""
        if self._settings is None:
            self._settings = Settings(self.store.get_settings(self.raw_bucket))
        return self._settings

    @property
    def owner(self) -> str:
        """The name of the bucket's owner; a bucket made on the mount is the administrator's."""
        return self.settings.get(OWNER) or self.service.identities.administrator

    @property
    def is_anonymous(self) -> bool:
        return self.caller.name is None

    def headers(self) -> dict[str, str]:
        """The headers as rules take them: names in lower case, values read as UTF-8."""
        return {
            name.decode("latin-1"): value.decode("utf-8", "replace")
            for name, value in self.fields.items()
        }

    async def blocking(self, step: Callable[[], T]) -> T:
        """Run what may wait for a disk, a lock or the node in a thread. Cancelled: when it is
        done."""
        return await trio.to_thread.run_sync(step, limiter=self.service.threads)


Handler = Callable[[Call], Awaitable[Response]]


def target(facts: Facts) -> Target:
    """What conditions are held against."""
    return Target(facts.etag, moment(facts.mtime_ns), facts.size)


def moment(time_ns: int) -> datetime:
    """A time of the engine (ns since the epoch) as S3 shows it."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC)


def new_request_id() -> str:
    """Sixteen hexadecimal digits, as S3's."""
    return secrets.token_hex(8).upper()
