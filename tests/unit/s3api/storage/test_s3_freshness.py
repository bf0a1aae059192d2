"""What is waited for before a request is answered from a mirror."""

import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import trio
import trio.testing

from kvfs.base.errors import NotFound, Unreached
from kvfs.objects.object_store import ObjectStore
from s3api.http.s3_errors import S3Error
from s3api.storage.read_consistency import Freshness


class Mirror:
    """A store, its session and its mirror, whose buckets are as `look` says."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self.session = self.replica = self
        self.checks_itself = True
        self.look = look
        self.caught_up = 0
        self.misses = self
        self.missed: list[NotFound] = []

    def found_nothing(self, error: NotFound) -> None:
        self.missed.append(error)

    def read(self, fn: Callable[[None], bool]) -> bool:
        return fn(None)

    def is_own(self, _t: Any, _bucket: bytes) -> bool:
        return self.look is _own

    def number(self, _t: Any, _bucket: bytes) -> int:
        return 1

    def must_catch_up(self, _t: Any, _bucket: bytes) -> int | None:
        return 1 if self.look() else None

    def lacking(self, _t: Any, _bucket: bytes) -> int | None:
        return None

    def catch_up(self, _namespace_id: int, *, reading: bool) -> None:  # noqa: ARG002
        self.caught_up += 1


def _strict() -> bool:
    return True


def _cache() -> bool:
    return False


def _own() -> bool:
    return False


def _unheard_cache() -> bool:
    raise Unreached("the engine is not heard")


def _caught_up(look: Callable[[], bool], operation: str) -> int:
    """How often the mirror caught up before it was answered; raises what refuses it."""
    mirror = Mirror(look)
    freshness = Freshness(cast(ObjectStore, mirror))
    refused: list[S3Error] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(freshness.run)
            try:
                await freshness.before(b"bucket", operation)
            except S3Error as error:
                refused.append(error)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert len(mirror.missed) == len(refused), "each miss is counted, by its reason"
    if refused:
        assert isinstance(mirror.missed[0], Unreached)
        raise refused[0]
    return mirror.caught_up


@pytest.mark.parametrize("look", [_strict, _cache, _unheard_cache])
@pytest.mark.parametrize("operation", ["UploadPart", "ListParts", "CompleteMultipartUpload"])
def test_an_upload_may_have_gone_on_elsewhere(look: Callable[[], bool], operation: str) -> None:
    assert _caught_up(look, operation) == 1


def test_objects_that_are_this_nodes_own_wait_for_nobody() -> None:
    assert _caught_up(_own, "UploadPart") == _caught_up(_own, "GetObject") == 0


def test_a_caches_objects_are_those_of_the_mirror_while_it_hears() -> None:
    assert _caught_up(_strict, "GetObject") == 1
    assert _caught_up(_cache, "GetObject") == 0
    assert _caught_up(_unheard_cache, "ListObjectsV2") == 0
    with pytest.raises(S3Error) as refused:
        _caught_up(_unheard_cache, "GetObject")
    assert refused.value.code == "NoSuchKey"


class Site(Mirror):
    """A mirror with the buckets `ready`, and those that have to be read first: they take until
    `is_read` is set."""

    def __init__(self) -> None:
        super().__init__(_strict)
        self.is_read = threading.Event()
        self.followed: list[int] = []

    def number(self, _t: Any, bucket: bytes) -> int:
        return bucket[0] if bucket != b"unknown" else 0

    def must_catch_up(self, t: Any, bucket: bytes) -> int | None:
        return self.number(t, bucket)

    def lacking(self, t: Any, bucket: bytes) -> int | None:
        number = self.number(t, bucket)
        return number if number and bucket != b"ready" and number not in self.followed else None

    def catch_up(self, namespace_id: int, *, reading: bool) -> None:  # noqa: ARG002
        if namespace_id in (0, b"ready"[0]):
            return
        assert self.is_read.wait(60), "nobody waits for its end"
        self.followed.append(namespace_id)


def _asked(site: Site, asks: Callable[[Freshness], Awaitable[None]]) -> None:
    freshness = Freshness(cast(ObjectStore, site))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(freshness.run)
            with trio.fail_after(60):
                await asks(freshness)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_nobody_waits_for_a_bucket_that_others_ask_for() -> None:
    """However many of them have to be read first."""
    site = Site()

    async def asks(freshness: Freshness) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(freshness.before, bytes([number + 1]), "GetObject")
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(2):
                await freshness.before(b"ready", "GetObject")
            assert not site.followed
            site.is_read.set()

    _asked(site, asks)
    assert sorted(site.followed) == [*range(1, 101)]


def test_a_bucket_is_read_once_for_all_who_wait() -> None:
    site = Site()

    async def asks(freshness: Freshness) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(freshness.before, b"large", "GetObject")
            await trio.testing.wait_all_tasks_blocked()
            site.is_read.set()

    _asked(site, asks)
    assert 1 <= len(site.followed) <= 2


def test_a_request_that_would_be_refused_has_no_bucket_read() -> None:
    site = Site()

    def refuses() -> bool:
        raise S3Error("AccessDenied")

    async def asks(freshness: Freshness) -> None:
        with pytest.raises(S3Error):
            await freshness.before(b"large", "GetObject", refuses)
        await freshness.before(b"large", "OPTIONS", lambda: False)
        await freshness.before(b"ready", "GetObject", refuses)  # it is refused behind this
        await freshness.before(b"unknown", "GetObject", refuses)

    _asked(site, asks)
    assert not site.followed
