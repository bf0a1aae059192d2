"""Objects in a real store: with data files, other processes, and a node that starts meanwhile."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

import kvfs
from kvfs.base.errors import Conflict, Invalid, Unavailable
from kvfs.datastore.checksum import checksum
from kvfs.meta.engine import Transaction
from kvfs.objects import buckets, lookup
from kvfs.objects.multipart import upload_transactions
from kvfs.objects.multipart.upload_transactions import CompletedPart
from kvfs.objects.mutations import Deleted
from kvfs.objects.object_errors import (
    BucketExists,
    BucketNotEmpty,
    InvalidPart,
    Locked,
    MarkedDeleted,
    NoSuchBucket,
    NoSuchKey,
    NoSuchUpload,
    PartOrder,
    PartTooSmall,
    PreconditionFailed,
)
from kvfs.objects.object_info import Facts
from kvfs.objects.object_store import Doomed, ObjectStore
from kvfs.session.session import Session
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.vfs import seal
from tests.contract import client_store

B = b"bucket"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with client_store.sound(tmp_path / "store") as made:
        yield made


@pytest.fixture
def store(root: Path) -> Iterator[ObjectStore]:
    opened = ObjectStore(root)
    opened.buckets.create(B)
    yield opened
    opened.close()


def put(store: ObjectStore, key: bytes, data: bytes, etag: str = "tag", **options: object) -> Facts:
    draft = store.begin(B, key, len(data))
    os.pwrite(draft.fd, data, 0)
    return store.commit(draft, etag, {"content-type": "text/plain"}, **options)  # type: ignore[arg-type]


def read(store: ObjectStore, key: bytes, version: str = "") -> bytes:
    opened = store.open(B, key, version)
    try:
        assert opened.is_unchanged()
        return os.pread(opened.fd, opened.size + 1, 0)
    finally:
        os.close(opened.fd)


def test_what_is_read_beside_large_writes_in_place_is_one_of_them_or_known_to_be_none(
    store: ObjectStore,
) -> None:
    """Linux sets mtime at the beginning of a write alone, and these take some 20 ms each."""
    size, writes = 48 << 20, 12
    facts = put(store, b"k", bytes(size))
    path = store.session.files.path(facts.ino, facts.inode.version)
    begun = threading.Event()

    def write() -> None:
        with open(path, "r+b", buffering=0) as file:
            for number in range(1, writes + 1):
                content = bytes([number]) * size
                begun.set()
                assert os.pwrite(file.fileno(), content, 0) == size

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait()
    etags: dict[str, bytes] = {}
    goes_on = True
    while goes_on:
        goes_on = writer.is_alive()
        opened = store.open(B, b"k", "")
        try:
            first, last = os.pread(opened.fd, 1, 0), os.pread(opened.fd, 1, size - 1)
            if opened.is_unchanged():
                assert first == last, "a part of one write, taken for an object"
                assert etags.setdefault(opened.facts.etag, first) == first
        finally:
            os.close(opened.fd)
    writer.join()
    assert bytes([writes]) in etags.values()


def test_a_write_between_record_and_data_file_is_told_of(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ETag is that of the bytes: of a sealed file, too, that is opened for writing just now."""
    facts = put(store, b"k", b"old")
    session, files = store.session, store.session.files
    path, real = Path(files.path(facts.ino, facts.inode.version)), files.open
    stamped = facts.inode.mtime_ns

    def sealed(t: Transaction) -> None:
        assert lifecycle.seal(
            t,
            facts.ino,
            tree.read_inode(t, facts.ino),
            version=facts.inode.version,
            size=3,
            blocks=facts.inode.blocks,
            mtime_ns=stamped,
            ctime_ns=facts.inode.ctime_ns,
            checksum=bytes(16),
        )

    def opened_late(ino: int, version: int, flags: int) -> int:
        monkeypatch.undo()
        session.write(lambda t: lifecycle.reopen(t, ino))
        path.write_bytes(b"new")
        os.utime(path, ns=(stamped, stamped + 1_000_000_000))
        return real(ino, version, flags)

    session.write(sealed)
    monkeypatch.setattr(files, "open", opened_late)
    opened = store.open(B, b"k", "")
    try:
        assert os.pread(opened.fd, 9, 0) == b"new"
        assert opened.is_unchanged()
        assert opened.facts.etag not in ("tag", facts.etag)
        assert opened.facts.mtime_ns == stamped + 1_000_000_000
    finally:
        os.close(opened.fd)
    session.write(
        lambda t: lifecycle.publish(
            t,
            facts.ino,
            size=3,
            blocks=facts.inode.blocks,
            mtime_ns=stamped + 1_000_000_000,
            ctime_ns=time.time_ns(),
            boot=session.boot,
        )
    )


@pytest.mark.parametrize("size", [1, 2 << 20])
def test_versions_are_no_older_than_those_before_them(store: ObjectStore, size: int) -> None:
    """However bodies that are written at once come to be committed."""
    drafts = []
    for number in range(3):
        draft = store.begin(B, b"k", size)
        os.pwrite(draft.fd, b"%d" % number, size - 1)
        os.utime(draft.fd, ns=(0, 1_000_000_000 * (number + 1)))
        drafts.append(draft)
    made = [
        store.commit(draft, "tag", {}, versioning="Enabled").version for draft in reversed(drafts)
    ]
    found = store.list_versions(B).versions
    assert [each.version for each in found] == made[::-1]
    times = [each.mtime_ns for each in found]
    assert times == sorted(times, reverse=True)
    assert {each.etag for each in found} == {"tag"}
    assert read(store, b"k")[-1:] == b"0"


def must_be_new(there: Facts | None) -> None:
    if there is not None:
        raise PreconditionFailed("it is there already")


def settings_of(store: ObjectStore) -> dict[str, bytes]:
    return store.session.read(lambda t: buckets.settings(t, lookup.find_bucket(t, B)))


def test_a_bucket_and_its_settings(store: ObjectStore) -> None:
    with pytest.raises(BucketExists):
        store.buckets.create(B)
    assert B in [each.name for each in store.buckets.list_all()]
    assert abs(store.buckets.head(B).created_ns - time.time_ns()) < 60_000_000_000
    assert store.buckets.get_setting(B, "policy") is None
    store.buckets.put_setting(B, "policy", b"{}")
    store.buckets.put_setting(B, "cors", b"<a/>")
    assert settings_of(store) == {"cors": b"<a/>", "policy": b"{}"}
    assert store.buckets.delete_setting(B, "cors")
    assert not store.buckets.delete_setting(B, "cors")
    put(store, b"a/b", b"1")
    with pytest.raises(BucketNotEmpty):
        store.buckets.delete(B)
    store.delete(B, b"a/b")
    store.buckets.delete(B)
    with pytest.raises(NoSuchBucket):
        store.buckets.get_setting(B, "policy")
    store.buckets.create(B)
    assert settings_of(store) == {}


def test_what_was_put_is_read_with_what_was_said_about_it(store: ObjectStore) -> None:
    put(store, b"a//b/", b"data")
    assert read(store, b"a//b/") == b"data"
    found = store.find(B, b"a//b/", "")
    assert (found.etag, found.size) == ("tag", 4)
    assert found.metadata == {"content-type": "text/plain"}
    assert [each and each.size for each in store.find_many(B, [b"a//b/", b"a"])] == [4, None]
    for missing in (b"a", b"a/", b"a//b", b"a//b//"):
        with pytest.raises(NoSuchKey):
            store.find(B, missing, "")


@pytest.mark.parametrize("key", [b"", b"a\0b", b"\xff", b"k" * 1025])
def test_what_cannot_be_a_key(store: ObjectStore, key: bytes) -> None:
    with pytest.raises(Invalid):
        store.begin(B, key, 0)


def test_the_client_sees_it_and_the_other_way_round(store: ObjectStore, root: Path) -> None:
    with kvfs.Client(root) as client:
        put(store, b"d/a", b"by an object")
        assert client.get("/bucket/d/a") == b"by an object"
        client.put("/bucket/d/b", b"by the client")
        assert read(store, b"d/b") == b"by the client"
        etag = store.find(B, b"d/b", "").etag
        assert etag.endswith("-1")
        assert [each.etag for each in store.list_objects(B).objects] == ["tag", etag]


def test_one_of_many_creators_wins(store: ObjectStore, root: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from kvfs.objects.object_errors import PreconditionFailed
from kvfs.objects.object_store import ObjectStore
from tests.contract.objects.test_objects_store import must_be_new
store = ObjectStore(Path(sys.argv[1]))
won = 0
for number in range(50):
    draft = store.begin(b"bucket", b"race/%d" % number, 3)
    os.pwrite(draft.fd, sys.argv[2].encode(), 0)
    try:
        store.commit(draft, sys.argv[2], {}, check=must_be_new)
        won += 1
    except PreconditionFailed:
        pass
store.close()
print(won)
"""
    others = [client_store.python(program, str(root), f"p{each}") for each in range(3)]
    wins = []

    def race(name: str) -> None:
        for number in range(50):
            try:
                put(store, b"race/%d" % number, name.encode(), name, check=must_be_new)
                wins.append(name)
            except PreconditionFailed:
                pass

    threads = [threading.Thread(target=race, args=(f"t{each}",)) for each in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = len(wins)
    for other in others:
        output, _ = other.communicate(timeout=120)
        assert other.returncode == 0
        total += int(output)
    assert total == 50
    for each in store.list_objects(B).objects:
        assert read(store, each.key) == each.etag.encode()


def test_who_reads_goes_on_when_it_is_replaced_or_deleted(store: ObjectStore) -> None:
    put(store, b"k", b"old")
    opened = store.open(B, b"k", "")
    put(store, b"k", b"newer")
    assert os.pread(opened.fd, 9, 0) == b"old"
    store.delete(B, b"k")
    assert os.pread(opened.fd, 9, 0) == b"old"
    assert opened.is_unchanged()
    os.close(opened.fd)
    with pytest.raises(NoSuchKey):
        store.open(B, b"k", "")


def test_a_change_in_place_is_noticed(store: ObjectStore) -> None:
    put(store, b"k", b"old")
    opened = store.open(B, b"k", "")
    data = store.session.files.path(opened.facts.ino, 0)
    Path(data).write_bytes(b"new and longer")
    assert not opened.is_unchanged()
    os.close(opened.fd)
    again = store.open(B, b"k", "")
    assert again.size == 14
    assert again.facts.etag != "tag"
    os.close(again.fd)


def test_a_discarded_draft_leaves_nothing(store: ObjectStore, root: Path) -> None:
    before = client_store.data_files(root)
    for hint in (10, 10 << 20):
        draft = store.begin(B, b"k", hint)
        os.pwrite(draft.fd, b"x" * 10, 0)
        store.discard(draft)
        store.discard(draft)
    assert client_store.data_files(root) == before
    with pytest.raises(PreconditionFailed):
        put(store, b"k", b"1")
        put(store, b"k", b"2", check=must_be_new)
    assert client_store.data_files(root) == before + 1
    assert read(store, b"k") == b"1"


@pytest.mark.parametrize("size", [100, 3 << 20])
def test_a_node_that_starts_meanwhile_takes_no_draft_away(
    store: ObjectStore, root: Path, size: int
) -> None:
    draft = store.begin(B, b"k", size)
    os.pwrite(draft.fd, b"x" * size, 0)
    run = "import sys; from pathlib import Path; from tests.contract import client_store\n"
    client_store.run(run + "client_store.restart(Path(sys.argv[1]))", str(root))
    store.commit(draft, "tag", {})
    assert read(store, b"k") == b"x" * size


def test_copies(store: ObjectStore) -> None:
    put(store, b"a", b"data" * 1000)
    made = store.copy((B, b"a", ""), (B, b"b"))
    assert (made.etag, made.metadata) == ("tag", {"content-type": "text/plain"})
    assert read(store, b"b") == b"data" * 1000
    before = store.find(B, b"a", "")
    again = store.copy((B, b"a", ""), (B, b"a"), metadata={"meta.x": "y"})
    assert (again.ino, again.etag, again.metadata) == (before.ino, "tag", {"meta.x": "y"})
    found = store.find(B, b"a", "")
    assert found.mtime_ns > before.mtime_ns
    assert (found.etag, found.metadata) == ("tag", {"meta.x": "y"})
    assert read(store, b"a") == b"data" * 1000


def test_a_copy_comes_whole_whatever_parts_its_source_came_in(store: ObjectStore) -> None:
    kept = {"parts": "5*1000", "parts.1": "7", "part-checksums": "a", "meta.x": "y"}
    draft = store.begin(B, b"a", 4)
    os.pwrite(draft.fd, b"data", 0)
    store.commit(draft, "tag", kept)
    assert store.copy((B, b"a", ""), (B, b"b")).metadata == {"meta.x": "y"}


def test_versions(store: ObjectStore) -> None:
    put(store, b"k", b"null")
    first = put(store, b"k", b"first", versioning="Enabled")
    second = put(store, b"k", b"second", versioning="Enabled")
    gone = store.delete(B, b"k", versioning="Enabled")
    with pytest.raises(MarkedDeleted) as caught:
        store.open(B, b"k", "")
    assert caught.value.version == gone.version
    listed = store.list_versions(B).versions
    ids = [gone.version, second.version, first.version, "null"]
    assert [each.version for each in listed] == ids
    assert [each.latest for each in listed] == [True, False, False, False]
    assert read(store, b"k", first.version) == b"first"
    assert read(store, b"k", "null") == b"null"
    store.delete(B, b"k", version=gone.version)
    assert read(store, b"k") == b"second"
    store.delete(B, b"k", version=second.version)
    assert read(store, b"k") == b"first"
    with pytest.raises(BucketNotEmpty):
        store.buckets.delete(B)
    for each in (first.version, "null"):
        store.delete(B, b"k", version=each)
    store.buckets.delete(B)


def test_locks(store: ObjectStore) -> None:
    made = put(store, b"k", b"1", versioning="Enabled")
    until = int(time.time()) + 1000

    def lock(mode: str) -> None:
        said = {"retention": f"{mode} {until}"}
        store.update(B, b"k", made.version, lambda _: (said, ()))

    lock("COMPLIANCE")
    with pytest.raises(Locked):
        store.delete(B, b"k", version=made.version, bypass=True)
    lock("GOVERNANCE")
    with pytest.raises(Locked):
        store.delete(B, b"k", version=made.version)
    store.update(B, b"k", made.version, lambda _: ({"legal-hold": "ON"}, ()))
    with pytest.raises(Locked):
        store.delete(B, b"k", version=made.version, bypass=True)
    store.update(B, b"k", made.version, lambda _: ({}, ["legal-hold"]))
    assert store.delete(B, b"k", version=made.version, bypass=True).found


def test_many_are_deleted_at_once(store: ObjectStore, root: Path) -> None:
    before = client_store.data_files(root)
    for number in range(300):
        put(store, b"d/%03d" % number, b"x")
    doomed = [Doomed(b"d/%03d" % number) for number in range(300)] + [Doomed(b"missing")]
    results = store.delete_many(B, doomed)
    assert [isinstance(each, Deleted) and each.found for each in results] == [True] * 300 + [False]
    assert client_store.data_files(root) == before
    store.buckets.delete(B)


def part(store: ObjectStore, key: bytes, upload: str, number: int, data: bytes) -> None:
    draft = store.uploads.begin_part(B, key, upload, number, len(data))
    os.pwrite(draft.fd, data, 0)
    store.uploads.commit_part(draft, f"p{number}", {"checksum.crc32": f"c{number}"})


def test_an_upload_in_parts(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_transactions, "MIN_PART_BYTES", 1 << 20)
    upload = store.uploads.create(B, b"d/k", {"content-type": "a/b"})
    id_ = upload.id
    part(store, b"d/k", id_, 1, b"a" * (1 << 20))
    part(store, b"d/k", id_, 7, b"wrong")
    part(store, b"d/k", id_, 7, b"end")
    assert store.list_objects(B).objects == []
    assert [each.id for each in store.uploads.list_all(B).uploads] == [id_]
    _, parts, more = store.uploads.list_parts(B, b"d/k", id_, limit=1)
    assert ([each.number for each in parts], more) == ([1], True)
    one, seven = CompletedPart(1, "p1"), CompletedPart(7, "p7", ("checksum.crc32", "c7"))
    for wanted, problem in (
        ([seven, one], PartOrder),
        ([one, CompletedPart(2, "p2")], InvalidPart),
        ([CompletedPart(1, "p2")], InvalidPart),
        ([CompletedPart(1, "p1", ("checksum.crc32", "c2"))], InvalidPart),
        ([], Invalid),
    ):
        with pytest.raises(problem):
            store.uploads.choose_parts(B, b"d/k", id_, wanted)
    found, chosen = store.uploads.choose_parts(B, b"d/k", id_, [one, seven])
    assert found.metadata == {"content-type": "a/b"}
    made = store.uploads.complete(B, found, chosen, "whole-2", found.metadata)
    assert read(store, b"d/k") == b"a" * (1 << 20) + b"end"
    assert (made.etag, made.metadata) == ("whole-2", {"content-type": "a/b"})
    with pytest.raises(NoSuchUpload):
        store.uploads.find(B, b"d/k", id_)
    assert store.uploads.completed(B, b"d/k", id_) == ("whole-2", "null")
    assert store.uploads.completed(B, b"d/other", id_) is None
    store.delete(B, b"d/k")
    store.buckets.delete(B)


def test_a_part_that_is_too_small(store: ObjectStore) -> None:
    upload = store.uploads.create(B, b"k", {})
    for number in (1, 2):
        part(store, b"k", upload.id, number, b"small")
    with pytest.raises(PartTooSmall):
        store.uploads.choose_parts(
            B, b"k", upload.id, [CompletedPart(1, "p1"), CompletedPart(2, "p2")]
        )
    with pytest.raises(BucketNotEmpty):
        store.buckets.delete(B)
    store.uploads.abort(B, b"k", upload.id)
    with pytest.raises(NoSuchUpload):
        store.uploads.abort(B, b"k", upload.id)
    store.buckets.delete(B)


def test_a_part_replaced_while_the_upload_is_completed(store: ObjectStore) -> None:
    upload = store.uploads.create(B, b"k", {})
    part(store, b"k", upload.id, 1, b"one")
    found, chosen = store.uploads.choose_parts(B, b"k", upload.id, [CompletedPart(1, "p1")])
    part(store, b"k", upload.id, 1, b"two")
    with pytest.raises((InvalidPart, Conflict)):
        store.uploads.complete(B, found, chosen, "e", {})
    with pytest.raises(NoSuchKey):
        store.find(B, b"k", "")
    store.uploads.abort(B, b"k", upload.id)


def test_a_part_is_copied_from_a_range(store: ObjectStore) -> None:
    put(store, b"source", bytes(range(200)))
    upload = store.uploads.create(B, b"k", {})
    draft = store.uploads.begin_part(B, b"k", upload.id, 1, 50)
    with pytest.raises(Invalid):
        store.uploads.copy_part((B, b"source", ""), draft, 190, 11)
    store.uploads.copy_part((B, b"source", ""), draft, 100, 50)
    store.uploads.commit_part(draft, "p1", {})
    found, chosen = store.uploads.choose_parts(B, b"k", upload.id, [CompletedPart(1, "p1")])
    store.uploads.complete(B, found, chosen, "e", {})
    assert read(store, b"k") == bytes(range(100, 150))


def test_uploads_are_listed_in_order(store: ObjectStore) -> None:
    ids = {key: store.uploads.create(B, key, {}).id for key in (b"b", b"a/1", b"a/2", b"c")}
    second = store.uploads.create(B, b"b", {}).id
    page = store.uploads.list_all(B, delimiter=b"/", max_uploads=2)
    assert ([each.id for each in page.uploads], page.prefixes) == ([ids[b"b"]], [b"a/"])
    rest = store.uploads.list_all(
        B, delimiter=b"/", start_after=page.following, start_id=page.following_id
    )
    assert [each.id for each in rest.uploads] == [second, ids[b"c"]]
    assert not rest.truncated


def test_a_child_of_a_fork_shares_no_data_file_with_its_parent(store: ObjectStore) -> None:
    put(store, b"before", b"0")
    child = os.fork()
    for number in range(100):
        put(store, b"%d/%d" % (child == 0, number), b"%d %d" % (child == 0, number))
    if child == 0:
        store.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    for whose in (0, 1):
        for number in range(100):
            assert read(store, b"%d/%d" % (whose, number)) == b"%d %d" % (whose, number)


_KILLED = """
import os, signal, sys
from pathlib import Path
from kvfs.objects.object_store import ObjectStore
where = sys.argv[2]
store = ObjectStore(Path(sys.argv[1]))
size = int(sys.argv[3])
draft = store.begin(b"bucket", b"d/k", size)
os.pwrite(draft.fd, b"n" * size, 0)
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
if where == "before": die()
if where == "inside": store._session._engine.commit = die
if where == "after": store._finisher.finish = die
store.commit(draft, "new", {})
"""


@pytest.mark.parametrize("size", [10, 2 << 20])
@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_a_kill_leaves_the_old_or_the_new_object_and_nothing_else(
    store: ObjectStore, root: Path, where: str, size: int
) -> None:
    put(store, b"d/k", b"old")
    client_store.run_killed(_KILLED, str(root), where, str(size))
    assert read(store, b"d/k") == (b"n" * size if where == "after" else b"old")
    store.close()
    client_store.restart(root)
    assert client_store.problems(root) == []
    assert client_store.data_files(root) == 1
    again = ObjectStore(root)
    assert [each.key for each in again.list_objects(B).objects] == [b"d/k"]
    store.__dict__.update(again.__dict__)


def test_who_knows_of_no_versions_destroys_none(store: ObjectStore) -> None:
    begun = store.begin(B, b"k", 3)  # versions were not kept yet then
    kept = put(store, b"k", b"kept", versioning="Enabled")
    os.pwrite(begun.fd, b"new", 0)
    assert store.commit(begun, "tag", {}).version == "null"
    assert (read(store, b"k"), read(store, b"k", kept.version)) == (b"new", b"kept")
    again = put(store, b"k", b"again", versioning="Enabled")
    assert store.delete(B, b"k").version == "null"
    with pytest.raises(MarkedDeleted):
        store.open(B, b"k", "")
    found = [each.version for each in store.list_versions(B).versions]
    assert found == ["null", again.version, kept.version]


def test_an_etag_that_no_seal_can_give_in_time_is_kept(store: ObjectStore, root: Path) -> None:
    """Where no node runs nothing is sealed: the ETag that is told then is one for life."""

    def look() -> Facts:
        return store.find(B, b"k", "")

    def awaited(facts: Facts) -> dict[int, str]:
        return {facts.ino: facts.etag} if store.seals.is_awaited(B, facts) else {}

    store.session.write(
        lambda t: namespaces.set_policy(t, namespaces.by_name(t, B)[0], now=0, etag="md5-all")
    )
    with kvfs.Client(root) as client:
        client.put("/bucket/k", b"content")
    assert store.seals.is_awaited(B, look())
    told = store.seals.settled(look, awaited)
    assert told.etag.endswith("-1")
    assert not store.seals.is_awaited(B, look())
    assert look().etag == told.etag
    put(store, b"k", b"by S3", etag="given")
    assert not store.seals.is_awaited(B, look())
    assert store.seals.settled(look, awaited).etag == "given"


def test_an_object_that_is_sealed_while_it_is_restated_keeps_its_etag(store: ObjectStore) -> None:
    """The sealer has read it, with its times of before."""
    facts = put(store, b"k", b"content", etag="given")
    fd = store.session.files.open(facts.ino, facts.inode.version, os.O_RDONLY)
    try:
        found, stat = checksum(fd, 7), os.fstat(fd)
        assert found is not None
        seen = seal.SealRead(
            facts.ino, facts.inode.version, fd, stat, found, stat.st_blocks, seal.stamp(stat)
        )
        named = (B, b"k", ""), (B, b"k")
        restated = store.copy(*named, metadata={"meta.a": "b"})
        assert restated.mtime_ns > facts.mtime_ns
        assert not store.session.write(lambda t: seal.changed(t, [seen]))
        assert store.session.write(lambda t: seal.seal_all(t, [seen])) == [False]
        assert store.find(B, b"k", "").etag == "given"
        seen = seen._replace(stat=(now := os.fstat(fd)), stamp=seal.stamp(now))
        assert store.session.write(lambda t: seal.seal_all(t, [seen])) == [True]
        told = store.find(B, b"k", "")
        assert (told.etag, told.metadata) == (restated.etag, restated.metadata)
        store.session.write(lambda t: lifecycle.reopen(t, facts.ino))  # no index has its checksum
        store.delete(B, b"k")
        assert store.session.write(lambda t: seal.seal_all(t, [seen])) == [False]
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [100, 2 << 20])
def test_a_put_whose_answer_is_lost_keeps_its_data(
    store: ObjectStore, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a node of a cluster the mirror may not have such a commit yet."""
    draft = store.begin(B, b"k", size)
    os.pwrite(draft.fd, b"x" * size, 0)
    with lost_answer(store.session, monkeypatch), pytest.raises(Unavailable):
        store.commit(draft, "tag", {})
    assert read(store, b"k") == b"x" * size


@pytest.mark.parametrize(("size", "heard"), [(7, 1), (2 << 20, 2)])
def test_a_clients_put_whose_answer_is_lost_keeps_its_data(
    store: ObjectStore, root: Path, size: int, heard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvfs.Client(root) as client:
        with lost_answer(store.session, monkeypatch, heard=heard), pytest.raises(Unavailable):
            client.put("/models/f", b"c" * size)
        assert client.get("/models/f") == b"c" * size


@contextlib.contextmanager
def lost_answer(
    session: Session, monkeypatch: pytest.MonkeyPatch, heard: int = 0
) -> Iterator[None]:
    """A commit takes place, after so many that are heard of, and nobody hears of it: what is read
    is from before."""
    write, read = session.write, session.read
    before: dict[bytes, bytes] = {}
    lost: list[bool] = []

    def remember(t: Transaction) -> None:
        before.update(t.scan(b"", b"\xff"))

    def write_unheard(fn: Callable[[Transaction], object]) -> object:
        nonlocal heard
        heard -= 1
        if lost or heard >= 0:
            return write(fn)
        read(remember)
        write(fn)
        lost.append(True)
        raise Unavailable("the engine did not answer")

    def read_before(fn: Callable[[Transaction], object]) -> object:
        return fn(cast("Transaction", before)) if lost else read(fn)

    with monkeypatch.context() as patched:
        patched.setattr(session, "write", write_unheard)
        patched.setattr(session, "read", read_before)
        yield
