"""One request on its way: what it asks for, its caller, and the services that it may use."""

import functools
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec
import trio

from kvfs.base.detach import aside
from kvfs.http.api import Head, RequestBody, Response
from kvfs.objects.object_errors import NoSuchBucket
from kvfs.objects.object_info import Facts
from kvfs.objects.object_store import ObjectStore
from kvfs.objects.store_cache import NOW, Wanted
from kvfs.vfs.post_commit import Changed
from s3api.auth.authorization import Access, caller_of
from s3api.auth.credentials import KeyOwner
from s3api.auth.key_holders import Identities
from s3api.auth.verified import Verified
from s3api.http.buffer_pool import BufferPool
from s3api.http.outcome import Entries
from s3api.http.parsed_request import Asked
from s3api.http.s3_errors import S3Error
from s3api.http.side_digest import Hashing
from s3api.model.addressing import is_bucket_name
from s3api.rules.access.policy import Requester
from s3api.rules.conditions import ConditionTarget
from s3api.storage.batch_delete import Deleter
from s3api.storage.bucket_settings import Settings, SettingsReader
from s3api.storage.commit_notifier import Teller
from s3api.storage.read_consistency import Freshness

T = TypeVar("T")
_OF_CURRENT: Final = frozenset({"GetObject", "HeadObject"})
"""Operations that read an object, the current version unless they name another."""
_is_bucket_name: Final = functools.lru_cache(1024)(is_bucket_name)
new_request_id: Final[Callable[[], str]] = map(
    f"{secrets.randbits(32):08X}{{:08X}}".format, itertools.count(secrets.randbits(31))
).__next__
"""Sixteen hexadecimal digits, as S3's: a number of the process, and one of the request."""


@dataclass(slots=True)
class WorkerContext:
    """The services that all requests of a worker share."""

    store: ObjectStore
    identities: Identities
    access: Access
    buffers: BufferPool
    hashing: Hashing
    domains: tuple[str, ...]
    """Domains of the server: a host below one of them names the bucket."""
    region: str
    version_2: bool
    """Whether signatures of version 2 are accepted."""
    object_ownership: str
    """The object ownership of new buckets."""
    bucket_mode: int
    """Permissions of new buckets' directories."""
    encrypted: bool
    """Whether everything that the store lies on is encrypted."""
    threads: trio.CapacityLimiter
    """Threads for short steps."""
    lasting: trio.CapacityLimiter
    """Threads for steps whose time grows with their bytes."""
    teller: Teller
    deleter: Deleter
    freshness: Freshness
    settings: SettingsReader


class Call(msgspec.Struct, eq=False):
    """One request. `bucket` and `key` are empty if it names none."""

    service: WorkerContext
    store: ObjectStore
    head: Head
    body: RequestBody
    asked: Asked
    """The part of the request that its head tells by itself; shared by equal heads."""
    operation: str
    bucket: str
    key: str
    query: Mapping[str, str]
    fields: Mapping[bytes, bytes]
    """The headers, and those that presigning moved into the query; lower-case names."""
    caller: Requester
    now: datetime
    request_id: str
    verified: Verified | None = None
    known: KeyOwner | None = None
    """The signer; None: nobody."""
    params: dict[str, Any] = {}
    """The parameters, as botocore names them."""
    generation: int = NOW
    """The generation of the metadata when the request came: reads for it are as of that or
    newer."""
    is_again: bool = False
    """An equal head came before, and was signed."""
    by_acl: bool = False
    """Whether an ACL allowed a part of it that nothing else did."""
    entries: Entries | None = None
    """Its further effects, for access logs; None: none."""
    _settings: Settings | None = None

    @property
    def raw_bucket(self) -> bytes:
        return self.bucket.encode()

    @property
    def raw_key(self) -> bytes:
        return self.key.encode()

    @property
    def version(self) -> str:
        """The requested version; empty: the current one."""
        version: str = self.params.get("VersionId") or ""
        return version

    @property
    def settings(self) -> Settings:
        """The settings of the bucket. Raises NoSuchBucket, also for a directory on the mount whose
        name is illegal for a bucket."""
        settings = self._settings
        if settings is None:
            if not _is_bucket_name(self.bucket):
                raise NoSuchBucket(f"{self.bucket} is no legal name of a bucket")
            read = self.service.settings
            self._settings = settings = read.of(self.bucket.encode(), self.generation)
        return settings

    def look_again(self) -> None:
        """Updates the generation after a step that may have taken long: the metadata may be others
        by now. Any thread may call it. Raises what `Session.generation` raises."""
        now = self.service.store.cache.generation()
        if now != self.generation:
            self.generation, self._settings = now, None

    @property
    def owner(self) -> str:
        """The name of the bucket's owner; a bucket made on the mount is the administrator's."""
        return self.settings.owner or self.service.identities.administrator

    @property
    def owner_if_known(self) -> str:
        """The owner, if the bucket's settings have been read; else empty."""
        return "" if self._settings is None else self.owner

    @property
    def is_owner(self) -> bool:
        """Whether the bucket is the caller's."""
        return self.caller.name is not None and self.caller.name == self.owner

    @property
    def is_anonymous(self) -> bool:
        return self.caller.name is None

    def headers(self) -> dict[str, str]:
        """Returns the headers as rules take them: names in lower case, values read as UTF-8."""
        return {
            name.decode("latin-1"): value.decode("utf-8", "replace")
            for name, value in self.fields.items()
        }

    def sign(self, verified: Verified) -> None:
        """Takes over the signer of the request from what came after its head. Raises
        InvalidAccessKeyId."""
        self.look_again()
        found = self.service.identities.find(
            verified.access_key, verified.session_token, self.generation
        )
        if found is None:
            raise S3Error("InvalidAccessKeyId")
        self.take_signer(verified, found)

    def look_up(self, access_key: str, session_token: str) -> KeyOwner | None:
        """Returns the holder of a key. What else the request asks the metadata for is read in the
        same transaction. Raises S3Error (ExpiredToken, InvalidToken)."""
        service, bucket = self.service, self.bucket
        cache, generation = service.store.cache, self.generation
        seen = cache.entry((access_key, session_token))
        if seen is not None and seen.generation >= generation:
            known: KeyOwner | None = seen.value
            if known is not None and not known.expires:
                return known
        elif bucket:
            wanted: list[Wanted] = [
                service.identities.wanted(access_key, session_token),
                service.settings.wanted(bucket.encode()),
            ]
            if self.operation in _OF_CURRENT and "versionId" not in self.query:
                wanted.append(service.store.wanted(bucket.encode(), self.key.encode()))
            cache.look(generation, wanted)
        return service.identities.find(access_key, session_token, generation)

    def secret_of(self, access_key: str, session_token: str) -> bytes | None:
        """Does what `auth.verified.SecretOf` describes, and takes over the holder of the key."""
        self.known = known = self.look_up(access_key, session_token)
        return None if known is None else known.secret

    def take_signer(self, verified: Verified, known: KeyOwner) -> None:
        """Takes over the signer when the holder of the key is known."""
        self.verified, self.known, self.caller = verified, known, caller_of(known.user)
        session = self.head.session
        if session is not None and not session.proven:
            session.prove()

    async def blocking(self, step: Callable[[], T]) -> T:
        """Runs a step that may wait for a disk, a lock or the node in a thread. Cancelled: when it
        is done."""
        await aside()
        return await trio.to_thread.run_sync(step, limiter=self.service.threads)

    async def committing(self, step: Callable[[list[Changed]], T], *, waits: bool = True) -> T:
        """Runs a step that commits, in a thread unless it waits for no disk, and tells the node;
        `step` hands the list that it is given to the store (`later`). Raises what `step` raises,
        Unavailable."""
        later: list[Changed] = []
        result = await self.blocking(lambda: step(later)) if waits else step(later)
        await self.service.teller.tell(later)
        return result


Handler = Callable[[Call], Awaitable[Response]]


def target(facts: Facts) -> ConditionTarget:
    """Returns the target of conditions."""
    return ConditionTarget(facts.etag, moment(facts.mtime_ns), facts.size)


def moment(time_ns: int) -> datetime:
    """Returns a time of the engine (ns since the epoch) as S3 shows it."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC)
