"""Carries out the lifecycle rules of all buckets, a few pages of a list at a time.

One of the workers does it, the one that holds the lock of the store; when that one dies, another
takes over. In a cluster one node does, the holder of the claim, as long as it lives. It is no task
of the daemon, which knows nothing of S3. At most a tenth of the time of one core goes into it.

A due version is checked again in the transaction that deletes it: one that was replaced meanwhile
stays. A locked one stays.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple, TypeVar

import trio

from kvfs.base.errors import Conflict, KvfsError
from kvfs.objects.mutations import Check, anything
from kvfs.objects.object_errors import NoSuchBucket
from kvfs.objects.object_info import Facts
from kvfs.objects.object_store import Doomed, ObjectStore
from s3api.model.addressing import is_bucket_name
from s3api.rules import lifecycle
from s3api.rules.lifecycle import Action, Rules, Version
from s3api.rules.tagging import parse_kept
from s3api.storage.bucket_settings import LIFECYCLE, Settings, SettingsReader

T = TypeVar("T")
_LOCK_NAME: Final = "s3-lifecycle.lock"
_JOB: Final = "s3-lifecycle"
_PAGE: Final = 200
_IDLE_SHARE: Final = 9
"""Seconds of rest for each second of work."""
_PASSES_A_DAY: Final = 24
_SHORTEST_S: Final = 1.0
_FIRST_S: Final = 60.0
"""Latest beginning of the first pass after the start."""
_RETRY_S: Final = 10.0
"""Pause between attempts to take over."""
log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """A version with the facts that rules use."""

    facts: Facts
    version: Version


class History:
    """Finds for each version in a list, newest first, its neighbours of the same key.

    Feed it a bucket's list in its order, then `end`."""

    def __init__(self) -> None:
        self._key: bytes | None = None
        self._newer = 0
        """Noncurrent versions of the key so far."""
        self._replaced_ns = 0
        """Time when the previous version was made: that ended the next one."""
        self._marker: Facts | None = None
        """The latest version of its key, and so far the only one."""

    def feed(self, versions: Iterable[Facts]) -> Iterator[_Found]:
        for facts in versions:
            if facts.key != self._key:
                yield from self.end()
                self._key, self._newer = facts.key, 0
                self._replaced_ns = facts.inode.ctime_ns
            if not facts.latest:
                self._marker = None
                yield _Found(facts, _version(facts, self._newer, self._replaced_ns))
                self._newer += 1
            elif facts.delete_marker:
                self._marker = facts
            else:
                yield _Found(facts, _version(facts))
            self._replaced_ns = facts.mtime_ns

    def end(self) -> Iterator[_Found]:
        """Yields the marker that was held back."""
        if self._marker is not None:
            yield _Found(self._marker, _version(self._marker))
            self._marker = None


class Expiring:
    """The expiry of one worker; `run` is its task."""

    def __init__(self, store: ObjectStore, day_s: int) -> None:
        """`day_s`: seconds that a day of the rules lasts."""
        self._store = store
        self._reader = SettingsReader(store)
        self._day_s = day_s
        self._limiter = trio.CapacityLimiter(1)

    async def run(self) -> None:
        """Expires objects until cancelled: a step that has begun is done first."""
        path = self._store.session.store.run / _LOCK_NAME
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _lock(fd):
                await trio.sleep(min(_RETRY_S, self._day_s))
            period = max(_SHORTEST_S, self._day_s / _PASSES_A_DAY)
            await trio.sleep(min(period, _FIRST_S))
            while True:
                if await self._step(self._is_ours):
                    await self._pass()
                await trio.sleep(period)
        finally:
            os.close(fd)

    def _is_ours(self) -> bool:
        """Returns whether no other node of the cluster does it."""
        replica = self._store.session.replica
        try:
            return replica is None or replica.claim(_JOB)
        except KvfsError as error:
            log.warning("whether lifecycle rules are to be carried out here: %s", error)
            return False

    async def _pass(self) -> None:
        """Handles all buckets once. A failure with one is logged, and tried again in the next
        pass."""
        for bucket in await self._step(self._store.buckets.list_all):
            if not is_bucket_name(bucket.name.decode("utf-8", "replace")):
                continue
            try:
                await self._bucket(bucket.name)
            except NoSuchBucket:
                continue
            except (KvfsError, OSError) as error:
                log.warning("lifecycle of %s: %s", bucket.name.decode(), ascii(str(error)))

    async def _bucket(self, bucket: bytes) -> None:
        rules = (await self._settings(bucket)).get(LIFECYCLE)
        if rules is None:
            return
        if any("AbortIncompleteMultipartUpload" in rule for rule in rules):
            await self._uploads(bucket, rules)
        history, after, version = History(), b"", ""
        while True:
            page = await self._step(
                partial(
                    self._store.list_versions,
                    bucket,
                    start_after=after,
                    start_version=version,
                    max_keys=_PAGE,
                )
            )
            found = list(history.feed(page.versions))
            if not page.truncated:
                found += history.end()
            doomed = self._doomed(rules, found)
            if doomed:
                # A pass may take hours: who takes its rules back meanwhile wants it to end.
                settings = await self._settings(bucket)
                if settings.get(LIFECYCLE) != rules:
                    return
                await self._delete(bucket, doomed, settings.versioning)
            if not page.truncated:
                return
            after, version = page.following, page.following_version

    async def _settings(self, bucket: bytes) -> Settings:
        return await self._step(partial(self._reader.of, bucket))

    def _doomed(self, rules: Rules, found: Iterable[_Found]) -> list[Doomed]:
        now = datetime.now(UTC)
        doomed: list[Doomed] = []
        for facts, version in found:
            action = lifecycle.due(rules, version, now, self._day_s)
            if action is Action.EXPIRE:
                doomed.append(Doomed(facts.key, "", _only(facts)))
            elif action is not None:
                doomed.append(Doomed(facts.key, facts.version, anything))
        return doomed

    async def _delete(self, bucket: bytes, doomed: list[Doomed], versioning: str) -> None:
        results = await self._step(
            partial(self._store.delete_many, bucket, doomed, versioning=versioning, expired=True)
        )
        failed = [each for each in results if isinstance(each, KvfsError)]
        log.info(
            "lifecycle of %s: %d ended, %d kept",
            bucket.decode(),
            len(doomed) - len(failed),
            len(failed),
        )

    async def _uploads(self, bucket: bytes, rules: Rules) -> None:
        store, now = self._store, datetime.now(UTC)
        after, upload_id = b"", ""
        while True:
            page = await self._step(
                partial(
                    store.uploads.list_all,
                    bucket,
                    start_after=after,
                    start_id=upload_id,
                    max_uploads=_PAGE,
                )
            )
            if (await self._settings(bucket)).get(LIFECYCLE) != rules:
                return
            for each in page.uploads:
                begun = _moment(each.begun_ns)
                if lifecycle.is_upload_due(rules, each.key.decode(), begun, now, self._day_s):
                    await self._step(partial(store.uploads.abort, bucket, each.key, each.id))
            if not page.truncated:
                return
            after, upload_id = page.following, page.following_id

    async def _step(self, step: Callable[[], T]) -> T:
        """Runs the step in a thread, and then rests in proportion."""
        begun = trio.current_time()
        result = await trio.to_thread.run_sync(step, limiter=self._limiter)
        await trio.sleep((trio.current_time() - begun) * _IDLE_SHARE)
        return result


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _only(facts: Facts) -> Check:
    """Returns the check that the present version is still the one that was due."""
    seen = facts.ino, facts.mtime_ns, facts.metadata.get("tagging")

    def check(found: Facts | None) -> None:
        if found is None or (found.ino, found.mtime_ns, found.metadata.get("tagging")) != seen:
            raise Conflict("it is another object now")

    return check


def _version(facts: Facts, newer: int = 0, replaced_ns: int = 0) -> Version:
    """Returns the version for the rules. `replaced_ns` is 0 for the latest version."""
    return Version(
        key=facts.key.decode(),
        size=facts.size,
        modified=_moment(facts.mtime_ns),
        tags=parse_kept(facts.metadata.get("tagging", "")),
        is_delete_marker=facts.delete_marker,
        noncurrent_since=_moment(replaced_ns) if replaced_ns else None,
        newer_noncurrent=newer,
        alone=facts.latest,
    )


def _moment(time_ns: int) -> datetime:
    return datetime.fromtimestamp(time_ns / 1e9, UTC)
