"""Delivers server access logs into buckets, as PutBucketLogging asks for.

Each worker gathers the lines of logged buckets, and puts those of one bucket as an object into its
target now and then. As with S3 it is done at best effort: a killed worker loses the lines it has
gathered, one that ends in order delivers first. Deliveries are no requests, and are not logged.
"""

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import trio

from kvfs.base.errors import KvfsError, NotFound
from kvfs.http.api import Head
from kvfs.objects.object_store import ObjectStore
from s3api.http.outcome import RequestOutcome
from s3api.http.request_context import Call
from s3api.server.access_log import entries_of, line, line_of
from s3api.storage.bucket_settings import LOGGING, OWNER, Settings, SettingsReader

_MOST_BYTES: Final = 8 << 20
"""Most bytes gathered in a worker, and as much again of failed deliveries; beyond it lines are
lost, which its log reports."""
_SOON_BYTES: Final = 1 << 20
"""Gathered bytes that are delivered without waiting for the next time."""
_LAST_S: Final = 5.0
"""Deadline of the last delivery of a worker that ends."""
log = logging.getLogger(__name__)


class _Gathered:
    """Lines by bucket. One bucket has no more than is left for the others, so none makes another
    lose its own."""

    def __init__(self) -> None:
        self.lines: dict[bytes, list[str]] = {}
        self.bytes = 0
        self._of_bucket: dict[bytes, int] = {}

    def add(self, bucket: bytes, lines: list[str]) -> int:
        """Adds the lines, and returns for how many of them there was no room."""
        own = self._of_bucket.get(bucket, 0)
        for at, each in enumerate(lines):
            own += len(each)
            if own > _MOST_BYTES - self.bytes - len(each):
                return len(lines) - at
            self._of_bucket[bucket] = own
            self.bytes += len(each)
            self.lines.setdefault(bucket, []).append(each)
        return 0


class LogDelivery:
    """The delivery of one worker; `run` is its task, `record` is told of each response."""

    def __init__(
        self, store: ObjectStore, settings: SettingsReader, region: str, administrator: str
    ) -> None:
        self._store = store
        self._settings = settings
        self._region = region
        self._administrator = administrator
        self._fresh = _Gathered()
        self._failed = _Gathered()
        """Lines whose delivery failed: they take no room from fresh ones."""
        self._lost = 0
        self._limiter = trio.CapacityLimiter(1)
        self._is_due = trio.Event()

    def record(self, head: Head | None, status: int, sent_bytes: int, seconds: float) -> None:
        """Gathers the lines of one response, if its bucket is logged, and those of its further
        effects if theirs are."""
        outcome = None if head is None else head.handled
        if head is None or not isinstance(outcome, RequestOutcome) or outcome.call is None:
            return
        now, call = time.time(), outcome.call
        if call.bucket and self._is_logged(call.raw_bucket, call):
            self._gather(call.raw_bucket, line(head, status, sent_bytes, seconds, now))
        for entry in entries_of(head):
            bucket = entry.bucket.encode()
            if self._is_logged(bucket, call if bucket == call.raw_bucket else None):
                self._gather(bucket, line_of(entry, head, now))

    def _is_logged(self, bucket: bytes, call: Call | None) -> bool:
        """Returns whether the bucket is logged. `call`: one that has read its settings."""
        try:
            settings = self._settings.of(bucket) if call is None else call.settings
        except KvfsError:
            return False  # there is no such bucket
        return settings.get(LOGGING) is not None

    def _gather(self, bucket: bytes, told: str) -> None:
        self._lost += self._fresh.add(bucket, [told])
        if self._fresh.bytes >= _SOON_BYTES:
            self._is_due.set()

    async def run(self, period_s: float) -> None:
        """Delivers every so often, until cancelled."""
        while True:
            with trio.move_on_after(period_s):
                await self._is_due.wait()
            self._is_due = trio.Event()
            await self.deliver()

    async def finish(self) -> None:
        """Delivers the rest, within a few seconds."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _LAST_S):
            await self.deliver()

    async def deliver(self) -> None:
        """Puts the gathered lines into their targets. A delivery that fails is tried again, unless
        the target is gone or another's; it is logged."""
        failed, fresh = self._failed.lines, self._fresh.lines
        self._failed, self._fresh = _Gathered(), _Gathered()
        if self._lost:
            log.warning("%d lines of buckets' access logs were lost: too many came", self._lost)
            self._lost = 0
        for bucket in failed | fresh:
            lines = [*failed.get(bucket, ()), *fresh.get(bucket, ())]
            try:
                put = partial(self._put, bucket, lines)
                await trio.to_thread.run_sync(put, limiter=self._limiter)
            except NotFound:
                log.warning("access log of %s: its target is gone", bucket.decode())
            except (KvfsError, OSError) as error:
                log.warning("access log of %s: %s", bucket.decode(), ascii(str(error)))
                self._lost += self._failed.add(bucket, lines)

    def _put(self, source: bytes, lines: list[str]) -> None:
        of_source = self._settings.of(source)
        wanted = of_source.get(LOGGING)
        if wanted is None:
            return  # it was switched off meanwhile
        target = wanted["TargetBucket"].encode()
        of_target, owner = self._settings.of(target), self._owner_of(of_source)
        if self._owner_of(of_target) != owner:
            log.warning("access log of %s: its target is another's now", source.decode())
            return
        data = "".join(lines).encode()
        key = key_of(wanted, owner, self._region, source.decode(), time.time())
        draft = self._store.begin(target, key.encode(), len(data))
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(draft.fd, data[done:], done)
            tag = hashlib.md5(data, usedforsecurity=False).hexdigest()
            said = {"content-type": "text/plain"}
            self._store.commit(draft, tag, said, versioning=of_target.versioning)
        finally:
            self._store.discard(draft)

    def _owner_of(self, settings: Settings) -> str:
        return settings.get(OWNER) or self._administrator


def key_of(
    wanted: Mapping[str, Any],
    owner: str,
    region: str,
    bucket: str,
    now: float,
) -> str:
    """Returns the key of a log object, in one of S3's two forms."""
    unique = secrets.token_hex(8).upper()
    moment, prefix = time.gmtime(now), str(wanted["TargetPrefix"])
    partitioned = (wanted.get("TargetObjectKeyFormat") or {}).get("PartitionedPrefix")
    if partitioned is None:
        return prefix + time.strftime("%Y-%m-%d-%H-%M-%S-", moment) + unique
    by_event = partitioned.get("PartitionDateSource") == "EventTime"
    stamp = time.strftime("%Y-%m-%d-00-00-00-" if by_event else "%Y-%m-%d-%H-%M-%S-", moment)
    day = time.strftime("%Y/%m/%d", moment)
    return f"{prefix}{owner}/{region}/{bucket}/{day}/{stamp}{unique}"
