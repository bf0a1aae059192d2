"""Lifecycle rules carried out in a real store."""

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.objects.object_store import ObjectStore
from s3api.server import lifecycle_worker
from s3api.server.lifecycle_worker import Expiring
from s3api.storage.bucket_settings import LIFECYCLE, VERSIONING, pack
from tests.contract import client_store

B = b"bucket"
KEYS = [b"a", b"b", b"c"]
PAST = datetime(2020, 1, 1, tzinfo=UTC)
RULES = [{"ID": "r", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Date": PAST}}]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """With objects that are due, each on a page of its own."""
    monkeypatch.setattr(lifecycle_worker, "_PAGE", 1)
    opened = ObjectStore(client_store.make(tmp_path / "store"))
    opened.buckets.create(B, settings={LIFECYCLE: pack(RULES)})
    for key in KEYS:
        draft = opened.begin(B, key, 1)
        os.pwrite(draft.fd, b"x", 0)
        opened.commit(draft, "tag", {})
    yield opened
    opened.close()


def one_pass(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, after_first: Callable[[], object]
) -> None:
    """`after_first` is called when the first page was deleted."""
    delete_many, list_all = store.delete_many, store.buckets.list_all
    deleted: list[Any] = []
    begun: list[Any] = []

    def deleting(*arguments: Any, **options: Any) -> Any:
        done = delete_many(*arguments, **options)
        if not deleted:
            after_first()
        deleted.append(done)
        return done

    async def main() -> None:
        with trio.fail_after(60), trio.CancelScope() as scope:

            def listing() -> Any:
                begun.append(True)
                if len(begun) > 1:
                    trio.from_thread.run_sync(scope.cancel)
                return list_all()

            monkeypatch.setattr(store.buckets, "list_all", listing)
            await Expiring(store, 1).run()

    monkeypatch.setattr(store, "delete_many", deleting)
    trio.run(main)


def left(store: ObjectStore) -> list[bytes]:
    return [each.key for each in store.list_objects(B).objects]


def test_all_that_is_due_goes(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    one_pass(store, monkeypatch, lambda: None)
    assert left(store) == []


def test_rules_that_are_taken_back_end_their_pass(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_pass(store, monkeypatch, lambda: store.buckets.delete_setting(B, LIFECYCLE))
    assert left(store) == KEYS[1:]


def test_versions_that_are_kept_meanwhile_stay(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = pack({"Status": "Enabled"})
    one_pass(store, monkeypatch, lambda: store.buckets.put_setting(B, VERSIONING, kept))
    assert left(store) == []
    stay = [each.key for each in store.list_versions(B).versions if not each.delete_marker]
    assert stay == KEYS[1:]
