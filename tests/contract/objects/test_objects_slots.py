"""Parts that are received into their place: whole, or not there, whoever is killed and whoever
writes late."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.objects import range_copy
from kvfs.objects.multipart import part_assembly, upload_transactions
from kvfs.objects.multipart.upload_transactions import CompletedPart, Upload
from kvfs.objects.object_drafts import ObjectDraft
from kvfs.objects.object_errors import NoSuchKey, NoSuchUpload, PreconditionFailed
from kvfs.objects.object_info import Facts
from kvfs.objects.object_store import ObjectStore
from tests.contract import client_store

B: Final = b"bucket"
K: Final = b"d/k"
SIZE: Final = 1 << 16


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_assembly, "MIN_STRIDE", SIZE)
    monkeypatch.setattr(upload_transactions, "MIN_PART_BYTES", 1)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with client_store.sound(tmp_path / "store") as made:
        yield made


@pytest.fixture(params=["durable", "cache"])
def store(root: Path, request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    opened = ObjectStore(root)
    opened.buckets.create(B, request.param)
    yield opened
    opened.close()


def data_of(number: int, size: int = SIZE) -> bytes:
    return bytes([number]) * size


def begin(store: ObjectStore, upload: Upload, number: int, size: int = SIZE) -> ObjectDraft:
    return store.uploads.begin_part(B, K, upload.id, number, size)


def put(
    store: ObjectStore, upload: Upload, number: int, data: bytes | None = None, tag: str = "e"
) -> ObjectDraft:
    data = data_of(number) if data is None else data
    draft = begin(store, upload, number, len(data))
    os.pwrite(draft.fd, data, draft.offset)
    store.uploads.commit_part(draft, tag, {})
    return draft


def complete(store: ObjectStore, upload: Upload, *numbers: int, tag: str = "e") -> Facts:
    wanted = [CompletedPart(number, tag) for number in numbers]
    found, parts = store.uploads.choose_parts(B, K, upload.id, wanted)
    return store.uploads.complete(B, found, parts, "whole", {})


def read(store: ObjectStore, key: bytes = K) -> bytes:
    opened = store.open(B, key, "")
    try:
        assert opened.is_unchanged()
        return os.pread(opened.fd, opened.size + 1, 0)
    finally:
        os.close(opened.fd)


def forbid_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("bytes were moved")

    monkeypatch.setattr(range_copy, "copy_range", refuse)


@pytest.mark.parametrize("last", [SIZE, 1, SIZE - 4097])
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_nothing_is_moved(
    store: ObjectStore,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: int,
    order: tuple[int, ...],
) -> None:
    upload = store.uploads.create(B, K, {})
    bodies = {1: data_of(1), 2: data_of(2), 3: data_of(3, last)}
    for number in order:
        put(store, upload, number, bodies[number])
    if last == SIZE or order[0] != 3:
        forbid_copies(monkeypatch)
    before = client_store.data_files(root)
    made = complete(store, upload, 1, 2, 3)
    assert read(store) == b"".join(bodies.values())
    assert made.size == 2 * SIZE + last
    assert client_store.data_files(root) <= before
    assert made.etag == store.find(B, K, "").etag == "whole"
    store.delete(B, K)
    store.buckets.delete(B)


def test_one_part_becomes_the_object(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_copies(monkeypatch)
    for size in (0, 5, SIZE, 3 * SIZE):
        upload = store.uploads.create(B, K, {})
        put(store, upload, 1, data_of(1, size))
        assert complete(store, upload, 1).metadata == {}
        assert read(store) == data_of(1, size)


def test_bytes_that_were_recorded_are_not_written_again(store: ObjectStore) -> None:
    upload = store.uploads.create(B, K, {})
    places = {number: put(store, upload, number).offset for number in (1, 2)}
    assert places == {1: 0, 2: SIZE}
    again = begin(store, upload, 2)
    assert again.offset == 0
    os.pwrite(again.fd, data_of(9), again.offset)
    store.discard(again)
    put(store, upload, 3)
    complete(store, upload, 1, 2, 3)
    assert read(store) == data_of(1) + data_of(2) + data_of(3)


def test_a_part_sent_again_counts(store: ObjectStore) -> None:
    upload = store.uploads.create(B, K, {})
    for number in (1, 2, 3):
        put(store, upload, number)
    put(store, upload, 2, data_of(8), "new")
    put(store, upload, 2, data_of(9), "new")
    found, parts = store.uploads.choose_parts(
        B, K, upload.id, [CompletedPart(1, "e"), CompletedPart(2, "new"), CompletedPart(3, "e")]
    )
    store.uploads.complete(B, found, parts, "whole", {})
    assert read(store) == data_of(1) + data_of(9) + data_of(3)


def test_who_still_writes_an_earlier_attempt_harms_nothing(store: ObjectStore) -> None:
    upload = store.uploads.create(B, K, {})
    put(store, upload, 1)
    stalled = begin(store, upload, 2)
    assert stalled.offset == SIZE
    os.pwrite(stalled.fd, b"half", stalled.offset)
    assert put(store, upload, 2).offset == 0
    complete(store, upload, 1, 2)
    os.pwrite(stalled.fd, data_of(7), stalled.offset)
    assert read(store) == data_of(1) + data_of(2)
    with pytest.raises(NoSuchUpload):
        store.uploads.commit_part(stalled, "e", {})
    store.discard(stalled)
    assert read(store) == data_of(1) + data_of(2)


def test_a_writer_that_comes_late_finds_no_upload(store: ObjectStore) -> None:
    upload = store.uploads.create(B, K, {})
    put(store, upload, 1)
    complete(store, upload, 1)
    with pytest.raises(NoSuchUpload):
        begin(store, upload, 2)
    assert read(store) == data_of(1)


def test_a_refused_completion_changes_nothing(store: ObjectStore) -> None:
    upload = store.uploads.create(B, K, {})
    for number in (1, 2):
        put(store, upload, number)

    def refuse(_: Facts | None) -> None:
        raise PreconditionFailed("no")

    found, parts = store.uploads.choose_parts(
        B, K, upload.id, [CompletedPart(1, "e"), CompletedPart(2, "e")]
    )
    with pytest.raises(PreconditionFailed):
        store.uploads.complete(B, found, parts, "whole", {}, check=refuse)
    put(store, upload, 3)
    complete(store, upload, 1, 2, 3)
    assert read(store) == data_of(1) + data_of(2) + data_of(3)


def test_parts_that_are_left_out(store: ObjectStore) -> None:
    for numbers in ((1, 2), (1, 3), (2, 3), (3,)):
        upload = store.uploads.create(B, K, {})
        for number in (1, 2, 3):
            put(store, upload, number)
        complete(store, upload, *numbers)
        assert read(store) == b"".join(data_of(number) for number in numbers)


def test_sizes_of_all_kinds(store: ObjectStore) -> None:
    sizes = [SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE, 4 * SIZE, 5 * SIZE, 6 * SIZE, 1, SIZE, 7]
    upload = store.uploads.create(B, K, {})
    for number, size in enumerate(sizes, 1):
        put(store, upload, number, data_of(number, size))
    complete(store, upload, *range(1, len(sizes) + 1))
    assert read(store) == b"".join(data_of(n, size) for n, size in enumerate(sizes, 1))


def test_an_aborted_upload_leaves_no_data(store: ObjectStore, root: Path) -> None:
    before = client_store.data_files(root)
    upload = store.uploads.create(B, K, {})
    for number in (1, 2, 1, 5):
        put(store, upload, number)
    stalled = begin(store, upload, 3)
    store.uploads.abort(B, K, upload.id)
    with pytest.raises(NoSuchUpload):
        store.uploads.commit_part(stalled, "e", {})
    store.discard(stalled)
    store.close = lambda: None  # type: ignore[method-assign]
    ObjectStore.close(store)
    assert client_store.data_files(root) <= before


def test_many_threads_and_one_answer(store: ObjectStore) -> None:
    upload = store.uploads.create(B, K, {})
    threads = [
        threading.Thread(target=put, args=(store, upload, 1 + number % 20)) for number in range(60)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    complete(store, upload, *range(1, 21))
    assert read(store) == b"".join(data_of(number) for number in range(1, 21))


def test_an_upload_goes_on_after_a_restart(root: Path) -> None:
    store = ObjectStore(root)
    store.buckets.create(B)
    upload = store.uploads.create(B, K, {})
    for number in (1, 3):
        put(store, upload, number)
    store.close()
    client_store.restart(root)
    assert client_store.problems(root) == []
    store = ObjectStore(root)
    put(store, upload, 2)
    complete(store, upload, 1, 2, 3)
    assert read(store) == data_of(1) + data_of(2) + data_of(3)
    store.close()


def test_a_node_does_not_seal_what_is_still_received(root: Path) -> None:
    store = ObjectStore(root)
    store.buckets.create(B)
    upload = store.uploads.create(B, K, {})
    put(store, upload, 1)
    with client_store.running_node(root):
        put(store, upload, 2)
        complete(store, upload, 1, 2)
    store.close()
    client_store.restart(root)
    store = ObjectStore(root)
    assert read(store) == data_of(1) + data_of(2)
    assert store.find(B, K, "").etag == "whole"
    store.close()


_KILLED: Final = """
import os, signal, sys
from pathlib import Path
from kvfs.objects import object_store
from kvfs.objects.multipart import part_assembly, part_slots, upload_transactions
from kvfs.objects.multipart.upload_transactions import CompletedPart
part_assembly.MIN_STRIDE, upload_transactions.MIN_PART_BYTES = 1 << 16, 1
where, upload = sys.argv[2:4]
store = object_store.ObjectStore(Path(sys.argv[1]))
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
def dies_after(owner, name):
    real = getattr(owner, name)
    def then(*a, **k):
        real(*a, **k)
        die()
    setattr(owner, name, then)
def put(number):
    draft = store.uploads.begin_part(b"bucket", b"d/k", upload, number, 1 << 16)
    os.pwrite(draft.fd, bytes([number + 100]) * (1 << 16), draft.offset)
    return draft
if where == "begun": part_assembly.make = die
if where == "made": part_slots.Slots._open = die
if where == "opened": dies_after(part_slots.Slots, "_open")
if where == "reserved": dies_after(part_slots.Slots, "_reserve")
draft = put(2)
if where == "written": die()
if where == "synced": dies_after(part_slots.Slots, "sync")
if where == "committing": store._session._engine.commit = die
store.uploads.commit_part(draft, "e", {})
if where == "recorded": die()
if where == "joined": dies_after(part_slots.Slots, "_put_together")
if where == "completing": store._session._engine.commit = die
if where == "completed": store._finisher.finish = die
wanted = [CompletedPart(1, "e"), CompletedPart(2, "e")]
found, parts = store.uploads.choose_parts(b"bucket", b"d/k", upload, wanted)
store.uploads.complete(b"bucket", found, parts, "new", {})
die()
"""
_STEPS: Final = {
    "begun": "before",
    "made": "before",
    "opened": "before",
    "reserved": "before",
    "written": "before",
    "synced": "before",
    "committing": "before",
    "recorded": "part",
    "joined": "part",
    "completing": "part",
    "completed": "object",
    "end": "object",
}
_NEVER: Final = ("begun", True)


@pytest.mark.parametrize("node", [False, True])
@pytest.mark.parametrize(
    ("step", "first"),
    [(step, first) for step in _STEPS for first in (False, True) if (step, first) != _NEVER],
)
def test_a_kill_at_each_step(
    store: ObjectStore, root: Path, step: str, first: bool, node: bool
) -> None:
    """`first`: the upload has an assembly; `node`: it is in order without a restart, else after."""
    upload = store.uploads.create(B, K, {})
    if first or _STEPS[step] != "before":
        put(store, upload, 1)
    client_store.run_killed(_KILLED, str(root), step, upload.id)
    if not node:
        kind = store.buckets.head(B).kind
        store.close = lambda: None  # type: ignore[method-assign]
        ObjectStore.close(store)
        client_store.restart(root)
        assert client_store.problems(root) == []
        store = ObjectStore(root)
        assert store.buckets.head(B).kind == kind
    try:
        _judge(store, upload, _STEPS[step])
    finally:
        store.close()


def _judge(store: ObjectStore, upload: Upload, state: str) -> None:
    if state == "object":
        assert read(store) == data_of(1) + data_of(102)
        assert store.uploads.completed(B, K, upload.id) == ("new", "null")
        return
    with pytest.raises(NoSuchKey):
        store.find(B, K, "")
    there = {each.number for each in store.uploads.list_parts(B, K, upload.id)[1]}
    assert (2 in there) == (state == "part")
    if state == "before":
        for number in {1, 2} - there:
            put(store, upload, number, data_of(1 if number == 1 else 102))
    complete(store, upload, 1, 2)
    assert read(store) == data_of(1) + data_of(102)
