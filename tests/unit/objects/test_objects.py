"""Objects in the engine: places of keys, conditions, versions, locks, directories that come and
go, and what the mount is told."""

import stat

import pytest

from kvfs.admin.fsck_records import RecordCheck
from kvfs.base.errors import Invalid, TooLarge
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag
from kvfs.objects import buckets, lookup, mutations, object_attributes, versions
from kvfs.objects.object_errors import (
    BucketNotEmpty,
    Locked,
    NoSuchKey,
    NoSuchVersion,
    PreconditionFailed,
)
from kvfs.objects.object_info import Facts
from kvfs.objects.object_keys import KeyPlace, check_key, joined, place_of
from kvfs.tree import etags, name_escaping, namespaces, tree
from tests.unit.object_space import ObjectSpace
from tests.unit.space import BOOT, new_inode

LONG = b"x" * 480


@pytest.fixture
def space() -> ObjectSpace:
    return ObjectSpace()


@pytest.mark.parametrize(
    ("key", "directories", "name"),
    [
        (b"a", (), b"a"),
        (b"a/", (b"a",), b""),
        (b"/", (b"",), b""),
        (b"a//b", (b"a", b""), b"b"),
        (b"../.", (b"..",), b"."),
        (LONG[:-1], (), LONG[:-1]),
        (LONG, (LONG + b"\0",), b""),
        (LONG + b"yz", (LONG + b"\0",), b"yz"),
        (LONG + b"y/z", (LONG + b"\0", b"y"), b"z"),
        (LONG * 2 + b"y", (LONG + b"\0", LONG + b"\0"), b"y"),
    ],
)
def test_the_place_of_a_key(key: bytes, directories: tuple[bytes, ...], name: bytes) -> None:
    assert place_of(key) == KeyPlace(directories, name)
    prefix = b""
    for each in directories:
        prefix = joined(prefix, each + b"/")
    assert prefix + name == key


@pytest.mark.parametrize("key", [b"", b"\0", b"a\0", b"\xc3", b"k" * 1025])
def test_what_is_no_key(key: bytes) -> None:
    with pytest.raises(Invalid):
        check_key(key)
    check_key(b"k" * 1024)


def test_later_versions_sort_first() -> None:
    times = [0, 1, 63, 64, 10**18, (1 << 64) - 1]
    made = [versions.make(each, null=bool(each & 1)) for each in times]
    assert made == sorted(made, reverse=True)
    assert [versions.time_of(each) for each in made] == times
    assert versions.is_valid(made[0])
    assert versions.outside(made[1]) == "null"
    assert not versions.is_valid(made[1])
    assert not versions.is_valid(b"/" * 22)


def test_a_put_leaves_one_name_and_a_delete_none(space: ObjectSpace) -> None:
    before = space.do(lambda t: dict(t.scan(b"e", b"y")))
    space.put(b"a/b/c", size=5000, metadata={"content-type": "a/b"})
    assert space.do(lambda t: namespaces.usage(t, space.bucket.id)).inodes == 3
    assert space.delete(b"a/b/c").found
    for ino, _ in space.changed.orphans:
        space.do(lambda t, ino=ino: tree.reap(t, ino))
    after = space.do(lambda t: dict(t.scan(b"e", b"y")))
    assert {key for key in after if key[:1] in b"ebxuwo"} == {
        key for key in before if key[:1] in b"ebxuwo"
    }
    usage = space.do(lambda t: namespaces.usage(t, space.bucket.id))
    assert (usage.inodes, usage.bytes) == (0, 0)


def test_an_object_has_the_buckets_owner(space: ObjectSpace) -> None:
    inode = space.put(b"d/k").inode
    assert (inode.uid, inode.gid, stat.S_IMODE(inode.mode)) == (7, 8, 0o640)
    directory = space.do(lambda t: tree.read_inode(t, inode.parent))
    assert (directory.uid, stat.S_IMODE(directory.mode)) == (7, 0o750)
    assert directory.flags & Flag.IMPLIED


def test_a_directory_that_somebody_made_stays(space: ObjectSpace) -> None:
    ino = space.do(lambda t: namespaces.allocate_inodes(t, space.bucket.id, 1))
    made = new_inode(stat.S_IFDIR, 0o755)
    space.do(lambda t: tree.add(t, space.bucket.root, b"d", ino, made))
    space.put(b"d/e/k")
    space.delete(b"d/e/k")
    assert space.do(lambda t: lookup.descend(t, space.bucket.root, [b"d"])) == ino
    assert space.do(lambda t: lookup.descend(t, space.bucket.root, [b"d", b"e"])) is None
    moment = space.moment()
    space.do(lambda t: buckets.remove(t, b"b", moment, space.changed))


def test_a_bucket_with_anything_in_it_stays(space: ObjectSpace) -> None:
    space.put(b"k", versioning="Enabled")
    gone = space.delete(b"k", "Enabled")
    moment = space.moment()
    for _ in range(2):
        with pytest.raises(BucketNotEmpty):
            space.do(lambda t: buckets.remove(t, b"b", moment, space.changed))
        for each in space.versions().versions[1:]:
            space.delete_version(b"k", each.version)
    space.delete_version(b"k", gone.version)
    space.do(lambda t: buckets.remove(t, b"b", moment, space.changed))


def test_what_is_not_published_is_no_object(space: ObjectSpace) -> None:
    ino = space.do(lambda t: namespaces.allocate_inodes(t, space.bucket.id, 1))
    space.do(lambda t: tree.add(t, space.bucket.root, b"made", ino, new_inode()))
    with pytest.raises(NoSuchKey):
        space.find(b"made")
    assert space.list().objects == []

    def must_be_free(there: Facts | None) -> None:
        assert there is None

    with pytest.raises(PreconditionFailed):
        space.put(b"made", check=must_be_free)
    space.put(b"made")
    assert [each.key for each in space.list().objects] == [b"made"]


def test_an_etag_is_believed_while_the_file_is_what_it_was(space: ObjectSpace) -> None:
    made = space.put(b"k", etag="given", size=3)
    packed = etags.packed("given", made.inode)
    assert etags.etag_of(packed, made.ino, made.inode) == "given"
    made.inode.size += 1
    other = etags.etag_of(packed, made.ino, made.inode)
    assert other.endswith("-1")
    assert len(other) == 34
    assert other == etags.etag_of(None, made.ino, made.inode)
    made.inode.mtime_ns += 1
    assert etags.etag_of(packed, made.ino, made.inode) not in ("given", other)


def test_metadata_are_kept_under_names_of_their_own(space: ObjectSpace) -> None:
    said = {"content-type": "a/b", "meta.x-ü": "ä", "retention": "COMPLIANCE 5", "tagging": "a=b"}
    made = space.put(b"k", metadata=said)
    assert space.find(b"k").metadata == said
    names = space.do(lambda t: object_attributes.read_raw(t, made.ino))
    assert b"trusted.s3.retention" in names
    assert b"user.s3.meta.x-\xc3\xbc" in names
    with pytest.raises(TooLarge):
        space.put(b"k", metadata={"meta." + "n" * 240: ""})
    with pytest.raises(TooLarge):
        space.put(b"k", metadata={"meta.n": "v" * 70_000})


def test_versions_of_one_moment_keep_their_order(space: ObjectSpace) -> None:
    made = []
    for _ in range(5):
        space.now = 5_000
        made.append(space.put(b"k", versioning="Enabled").version)
    listed = [each.version for each in space.versions().versions]
    assert listed == made[::-1]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("null", [False, True])
def test_a_list_goes_on_after_versions_that_are_deleted(
    space: ObjectSpace, marked: bool, null: bool
) -> None:
    space.put(b"k", versioning="" if null else "Enabled")
    space.put(b"k", versioning="Enabled")
    if marked:
        space.delete(b"k", "Enabled")
    for _ in range(3):
        space.put(b"k", versioning="Enabled")
    whole = space.versions().versions
    page = space.versions(max_keys=3)
    for each in page.versions:
        space.delete_version(b"k", each.version)
    rest = space.versions(start_after=page.following, start_version=page.following_version).versions
    assert [each.version for each in rest] == [each.version for each in whole[3:]]
    assert [each.latest for each in rest] == [True] + [False] * (len(rest) - 1)


def test_a_list_goes_on_after_a_null_version_that_is_deleted(space: ObjectSpace) -> None:
    kept = space.put(b"k", versioning="Enabled").version
    space.put(b"k", versioning="Suspended")
    page = space.versions(max_keys=1)
    assert page.following_version == "null"
    space.delete_version(b"k", "null")
    rest = space.versions(start_after=page.following, start_version="null").versions
    assert [each.version for each in rest] == [kept]


def test_a_suspended_bucket_has_one_null_version(space: ObjectSpace) -> None:
    space.put(b"k", size=1)
    kept = space.put(b"k", size=2, versioning="Enabled").version
    space.put(b"k", size=3, versioning="Suspended")
    space.put(b"k", size=4, versioning="Suspended")
    listed = [(each.version, each.size) for each in space.versions().versions]
    assert listed == [("null", 4), (kept, 2)]
    assert space.delete(b"k", "Suspended").version == "null"
    found = [(each.version, each.delete_marker) for each in space.versions().versions]
    assert found == [("null", True), (kept, False)]
    with pytest.raises(NoSuchVersion):
        space.find(b"k", "x" * 22)


def test_a_lock_holds_until_its_end(space: ObjectSpace) -> None:
    space.now = 10**9
    said = {"retention": "GOVERNANCE 2"}
    version = space.put(b"k", metadata=said, versioning="Enabled").version
    with pytest.raises(Locked):
        space.delete_version(b"k", version)
    assert space.delete(b"k", "Enabled").delete_marker
    space.now = 3 * 10**9
    assert space.delete_version(b"k", version).found


def test_the_mount_is_told_of_the_names_it_shows(space: ObjectSpace) -> None:
    root = space.bucket.root
    space.changed.changes.clear()
    space.put(b"a//b")
    assert [each.name for each in space.changed.changes] == [b"a", b"%", b"%%", b"b"]
    space.changed.changes.clear()
    space.put(b"a")
    assert [(each.parent, each.name) for each in space.changed.changes] == [
        (root, b"a"),
        (root, b"a%"),
    ]
    space.changed.changes.clear()
    old = space.put(b"a", versioning="Enabled").ino
    space.delete_version(b"a", "null")
    assert old not in [each.ino for each in space.changed.changes]
    assert [each.name for each in space.changed.changes] == [b"a", b"a%", b""]


def test_an_odd_form_leads_to_what_it_is_shown_for(space: ObjectSpace) -> None:
    names = [b"/x", b"./x", b".", b"..", b"../x", b"f", b"f/x", b"y" * 256, b"y" * 256 + b"/x"]
    for key in [*names, b"z" * 500]:
        space.put(key)
    root = space.bucket.root
    children = space.do(lambda t: tree.list_children(t, root, b"", 99))
    assert len({each.name for each in children}) == len(children) == 10
    for each in children:
        assert space.do(lambda t, each=each: tree.lookup(t, root, each.name))[0] == each.ino
        assert not name_escaping.is_odd(each.name)
    for name in (b"%", b"%2E%", b"f%"):
        assert name in [each.name for each in children]
    for name in (b"%%", b"f%%", b"g%", b"%2E%%", b"y" * 200 + b"%" + b"0" * 16):
        assert space.do(lambda t, name=name: tree.find(t, root, name)) is None


def test_a_name_of_255_bytes_is_ordinary(space: ObjectSpace) -> None:
    space.put(b"y" * 255 + b"/" + b"z" * 255)
    root = space.bucket.root
    (child,) = space.do(lambda t: tree.list_children(t, root, b"", 9))
    assert child.name == b"y" * 255
    below = space.do(lambda t: tree.list_children(t, child.ino, b"", 9))
    assert [each.name for each in below] == [b"z" * 255]


def test_self_copies_change_the_time_and_what_is_said(space: ObjectSpace) -> None:
    before = space.put(b"k", etag="e", metadata={"meta.a": "1"})
    moment = space.moment()

    def fn(t: Transaction) -> Facts:
        found = lookup.find(t, space.bucket, b"k", "", BOOT)
        return mutations.restate(t, found, {"meta.b": "2"}, moment, space.changed)

    space.do(fn)
    after = space.find(b"k")
    assert (after.ino, after.etag, after.metadata) == (before.ino, "e", {"meta.b": "2"})
    assert after.mtime_ns == moment.now


def test_the_check_counts_links_whatever_number_a_directory_has(space: ObjectSpace) -> None:
    """A key that ends with '/' has a directory of which its object has no name."""
    directories = set()
    for number in range(300):
        made = space.put(b"d%d/" % number)
        directories.add(space.do(lambda t, ino=made.ino: tree.read_inode(t, ino)).parent % 256)
        if number % 3 == 0:
            space.put(b"f%d" % number)
    assert ord("/") in directories
    assert [each.detail for each in RecordCheck(space.engine).problems()] == []
