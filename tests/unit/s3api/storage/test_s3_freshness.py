"""What is waited for before a request is answered from a mirror."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import trio

from kvfs.base.errors import NotFound, Unreached
from kvfs.objects.object_store import ObjectStore
from s3api.http.s3_errors import S3Error
from s3api.storage.read_consistency import Freshness


class Mirror:
    """A store, its session and its mirror, whose buckets are as `look` says."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self.session = self.mirrored = self
        self.checks_itself = True
        self.look = look
        self.caught_up = 0
        self.misses = self
        self.missed: list[NotFound] = []

    def found_nothing(self, error: NotFound) -> None:
        self.missed.append(error)

    def read(self, fn: Callable[[None], bool]) -> bool:
        return fn(None)

    def must_catch_up(self, _t: Any, _bucket: bytes) -> bool:
        return self.look()

    def catch_up(self) -> None:
        self.caught_up += 1


def _strict() -> bool:
    return True


def _cache() -> bool:
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


def test_a_caches_objects_are_those_of_the_mirror_while_it_hears() -> None:
    assert _caught_up(_strict, "GetObject") == 1
    assert _caught_up(_cache, "GetObject") == 0
    assert _caught_up(_unheard_cache, "ListObjectsV2") == 0
    with pytest.raises(S3Error) as refused:
        _caught_up(_unheard_cache, "GetObject")
    assert refused.value.code == "NoSuchKey"
