"""ListObjects, ListObjectsV2 and ListObjectVersions as boto3 sees them."""

import re
from typing import Any

import pytest

from kvfs.objects.object_store import ObjectStore
from s3api.storage.bucket_settings import VERSIONING, pack
from tests.integration.s3 import S3, refused
from tests.integration.s3_raw import ask

KEYS = ("asdf", "boo/bar", "boo/baz/xyzzy", "cquux/thud", "cquux/bla")


@pytest.fixture
def fill(s3: S3, bucket: str) -> Any:
    """Puts empty objects; returns the bucket."""

    def put(*keys: str) -> str:
        for key in keys:
            s3.client().put_object(Bucket=bucket, Key=key, Body=b"")
        return bucket

    return put


def _keys(page: dict[str, Any]) -> list[str]:
    return [each["Key"] for each in page.get("Contents", [])]


def _prefixes(page: dict[str, Any]) -> list[str]:
    return [each["Prefix"] for each in page.get("CommonPrefixes", [])]


@pytest.fixture(params=["list_objects", "list_objects_v2"])
def listing(s3: S3, request: pytest.FixtureRequest) -> Any:
    return getattr(s3.client(), request.param)


def test_an_empty_bucket_has_no_contents(bucket: str, listing: Any) -> None:
    page = listing(Bucket=bucket)
    assert "Contents" not in page
    assert page["IsTruncated"] is False
    assert page["MaxKeys"] == 1000
    assert page["Name"] == bucket
    assert page["Prefix"] == ""
    assert "Delimiter" not in page


def test_a_missing_bucket_is_told(listing: Any) -> None:
    with refused(404, "NoSuchBucket"):
        listing(Bucket="never-made-bucket")


def test_what_is_said_of_an_object(s3: S3, fill: Any) -> None:
    bucket = fill("a")
    head = s3.client().head_object(Bucket=bucket, Key="a")
    (told,) = s3.client().list_objects(Bucket=bucket)["Contents"]
    assert told["ETag"] == head["ETag"]
    assert told["LastModified"].replace(microsecond=0) == head["LastModified"]
    assert (told["Size"], told["StorageClass"]) == (0, "STANDARD")
    assert told["Owner"] == {"ID": "main", "DisplayName": "main"}


def test_version_2_tells_the_owner_where_it_is_asked_to(s3: S3, fill: Any) -> None:
    bucket, client = fill("a"), s3.client()
    assert "Owner" not in client.list_objects_v2(Bucket=bucket)["Contents"][0]
    page = client.list_objects_v2(Bucket=bucket, FetchOwner=True)
    assert page["Contents"][0]["Owner"]["ID"] == "main"
    page = client.list_objects_v2(Bucket=bucket, FetchOwner=False)
    assert "Owner" not in page["Contents"][0]


def test_keys_are_in_the_order_of_their_bytes(fill: Any, listing: Any) -> None:
    keys = ("a", "a/b", "a//b", "a.b", "a!", "a/", "b", "\u00e9", "\U0001f600", "~", "A", "a/b/c")
    bucket = fill(*keys)
    page = listing(Bucket=bucket)
    assert _keys(page) == sorted(keys, key=str.encode)
    seen, after = [], ""
    while True:
        where = {"Marker": after} if "Marker" in listing(Bucket=bucket) else {"StartAfter": after}
        page = listing(Bucket=bucket, MaxKeys=1, **where)
        seen += _keys(page)
        if not page["IsTruncated"]:
            break
        after = seen[-1]
    assert seen == sorted(keys, key=str.encode)


@pytest.mark.parametrize(
    ("asked", "keys", "prefixes"),
    [
        ({"Delimiter": "/"}, ["asdf"], ["boo/", "cquux/"]),
        ({"Delimiter": "/", "Prefix": "boo/"}, ["boo/bar"], ["boo/baz/"]),
        ({"Delimiter": "", "Prefix": ""}, sorted(KEYS), []),
        ({"Delimiter": "none"}, sorted(KEYS), []),
        ({"Delimiter": "\n"}, sorted(KEYS), []),
        ({"Delimiter": "oo/ba"}, ["asdf", "cquux/bla", "cquux/thud"], ["boo/ba"]),
        ({"Prefix": "boo"}, ["boo/bar", "boo/baz/xyzzy"], []),
        ({"Prefix": "boo/bar"}, ["boo/bar"], []),
        ({"Prefix": "none"}, [], []),
        ({"Prefix": "\n"}, [], []),
        ({"Prefix": "boo", "Delimiter": "z"}, ["boo/bar"], ["boo/baz"]),
        ({"Prefix": "/"}, [], []),
    ],
)
def test_prefix_and_delimiter(
    fill: Any, listing: Any, asked: dict[str, str], keys: list[str], prefixes: list[str]
) -> None:
    page = listing(Bucket=fill(*KEYS), **asked)
    assert _keys(page) == keys
    assert _prefixes(page) == prefixes
    assert page.get("Delimiter", "") == asked.get("Delimiter", "")
    assert page["Prefix"] == asked.get("Prefix", "")
    if "KeyCount" in page:
        assert page["KeyCount"] == len(keys) + len(prefixes)


@pytest.mark.parametrize("delimiter", ["%", ".", " ", "a", "é", "\n"])
def test_delimiters_of_any_kind(fill: Any, listing: Any, delimiter: str) -> None:
    bucket = fill(f"b{delimiter}r", f"b{delimiter}z", f"c{delimiter}b", "foo")
    page = listing(Bucket=bucket, Delimiter=delimiter)
    assert _keys(page) == ["foo"]
    assert _prefixes(page) == [f"b{delimiter}", f"c{delimiter}"]
    assert page["Delimiter"] == delimiter


def test_pages_with_a_delimiter(s3: S3, fill: Any) -> None:
    bucket, client = fill(*KEYS), s3.client()
    asked: dict[str, Any] = {"Bucket": bucket, "Delimiter": "/", "MaxKeys": 1}
    first = client.list_objects(**asked)
    assert (_keys(first), _prefixes(first), first["NextMarker"]) == (["asdf"], [], "asdf")
    second = client.list_objects(**asked, Marker="asdf")
    assert (_keys(second), _prefixes(second), second["NextMarker"]) == ([], ["boo/"], "boo/")
    third = client.list_objects(**asked, Marker="boo/")
    assert (_prefixes(third), third["IsTruncated"]) == (["cquux/"], False)
    assert "NextMarker" not in third
    pages = [*client.get_paginator("list_objects_v2").paginate(**asked)]
    assert [(_keys(page), _prefixes(page)) for page in pages] == [
        (["asdf"], []),
        ([], ["boo/"]),
        ([], ["cquux/"]),
    ]


def test_without_a_delimiter_there_is_no_next_marker(s3: S3, fill: Any) -> None:
    page = s3.client().list_objects(Bucket=fill("a", "b"), MaxKeys=1)
    assert page["IsTruncated"] is True
    assert "NextMarker" not in page


def test_tokens_and_starts(s3: S3, fill: Any) -> None:
    bucket, client = fill("bar", "baz", "foo", "quxx"), s3.client()
    page = client.list_objects_v2(Bucket=bucket, StartAfter="bar", MaxKeys=1)
    assert page["StartAfter"] == "bar"
    token = page["NextContinuationToken"]
    page = client.list_objects_v2(Bucket=bucket, StartAfter="bar", ContinuationToken=token)
    assert page["ContinuationToken"] == token
    assert page["StartAfter"] == "bar"
    assert _keys(page) == ["foo", "quxx"]
    assert "NextContinuationToken" not in page
    page = client.list_objects_v2(Bucket=bucket, ContinuationToken="")
    assert page["ContinuationToken"] == ""
    assert len(_keys(page)) == 4
    with refused(400, "InvalidArgument"):
        client.list_objects_v2(Bucket=bucket, ContinuationToken="no token!")
    page = client.list_objects_v2(Bucket=bucket, StartAfter="\n")
    assert (page["StartAfter"], len(_keys(page))) == ("\n", 4)
    assert _keys(client.list_objects_v2(Bucket=bucket, StartAfter="zzz")) == []


@pytest.mark.parametrize(
    ("marker", "keys"),
    [("", ["bar", "baz"]), ("\n", ["bar", "baz"]), ("barr", ["baz"]), ("zzz", []), ("baz", [])],
)
def test_markers(s3: S3, fill: Any, marker: str, keys: list[str]) -> None:
    page = s3.client().list_objects(Bucket=fill("bar", "baz"), Marker=marker)
    assert page["Marker"] == marker
    assert _keys(page) == keys


def test_how_many(fill: Any, listing: Any) -> None:
    bucket = fill("a", "b")
    page = listing(Bucket=bucket, MaxKeys=0)
    assert (page["MaxKeys"], page["IsTruncated"], _keys(page)) == (0, False, [])
    page = listing(Bucket=bucket, MaxKeys=5000)
    assert (page["MaxKeys"], len(_keys(page))) == (1000, 2)
    with refused(400, "InvalidArgument"):
        listing(Bucket=bucket, MaxKeys=-1)


@pytest.mark.parametrize("value", ["blah", "-1", "1.5", "99999999999"])
def test_no_number_of_keys(s3: S3, bucket: str, value: str) -> None:
    told = ask(s3, "GET", f"/{bucket}?max-keys={value}")
    assert (told.status, told.code) == (400, "InvalidArgument")


def test_parameters_may_be_empty(s3: S3, bucket: str) -> None:
    query = "list-type=2&prefix=&delimiter=&max-keys=&start-after=&encoding-type=&fetch-owner="
    told = ask(s3, "GET", f"/{bucket}?{query}")
    assert told.status == 200
    assert b"<MaxKeys>1000</MaxKeys>" in told.body


@pytest.mark.parametrize("version", ["", "list-type=2&"])
def test_a_list_in_no_order_is_one_in_order(s3: S3, fill: Any, version: str) -> None:
    bucket = fill("b", "a/b", "c")
    told = ask(s3, "GET", f"/{bucket}?{version}allow-unordered=true")
    assert re.findall(rb"<Key>(.*?)</Key>", told.body) == [b"a/b", b"b", b"c"]
    told = ask(s3, "GET", f"/{bucket}?{version}allow-unordered=true&delimiter=%2F")
    assert (told.status, told.code) == (400, "InvalidArgument")


def test_names_in_urls(s3: S3, fill: Any) -> None:
    keys = ("a b", "a+b", "a%41", "a/b&c", "a\x01b", "<a>", "\u00e9", "a\rb", "a\nb", "a?b#c")
    bucket = fill(*keys)
    page = s3.client().list_objects_v2(Bucket=bucket)  # boto3 asks for encoding-type=url
    assert _keys(page) == sorted(keys, key=str.encode)
    page = s3.client().list_objects_v2(Bucket=bucket, EncodingType="url")
    assert "a%20b" in _keys(page)
    assert "a%2Bb" in _keys(page)
    with refused(400, "InvalidArgument"):
        s3.client().list_objects(Bucket=bucket, EncodingType="base64")


def test_what_the_store_keeps_is_not_listed(s3: S3, fill: Any) -> None:
    bucket, client = fill("a", "b"), s3.client()
    client.create_multipart_upload(Bucket=bucket, Key="upload")
    assert _keys(client.list_objects_v2(Bucket=bucket)) == ["a", "b"]
    for prefix in ("\0", "\0uploads/", "\0uploads"):
        page = client.list_objects_v2(Bucket=bucket, Prefix=prefix)
        assert (_keys(page), _prefixes(page)) == ([], [])
        page = client.list_objects_v2(Bucket=bucket, Prefix=prefix, Delimiter="/")
        assert (_keys(page), _prefixes(page)) == ([], [])
        page = client.list_objects_v2(Bucket=bucket, StartAfter=prefix)
        assert _keys(page) == ["a", "b"]
        assert _keys(client.list_objects_v2(Bucket=bucket, StartAfter="a" + prefix)) == ["b"]


def test_files_of_the_mount_are_listed(s3: S3, bucket: str) -> None:
    (s3.mount / bucket / "dir").mkdir()
    (s3.mount / bucket / "dir" / "file").write_bytes(b"abc")
    page = s3.client().list_objects_v2(Bucket=bucket)
    assert [(each["Key"], each["Size"]) for each in page["Contents"]] == [("dir/file", 3)]
    (s3.mount / bucket / "dir" / "file").unlink()
    page = s3.client().list_objects_v2(Bucket=bucket, Delimiter="/")
    assert (_keys(page), _prefixes(page)) == ([], [])


def test_who_may_list(s3: S3, bucket: str, listing: Any) -> None:
    for other in ("alt", None):
        with refused(403, "AccessDenied"):
            getattr(s3.client(other), listing.__name__)(Bucket=bucket)


# --- versions


@pytest.fixture
def versioned(s3: S3, bucket: str) -> str:
    """A bucket that keeps versions."""
    set_versioning(s3, bucket, "Enabled")
    return bucket


def set_versioning(s3: S3, bucket: str, status: str) -> None:
    store = ObjectStore(s3.node.store)
    store.buckets.put_setting(bucket.encode(), VERSIONING, pack({"Status": status}))
    store.close()


def _shown(page: dict[str, Any]) -> list[tuple[str, str, bool, bool]]:
    found = [(each, False) for each in page.get("Versions", [])]
    found += [(each, True) for each in page.get("DeleteMarkers", [])]
    return [
        (each["Key"], each["VersionId"], each["IsLatest"], is_marker) for each, is_marker in found
    ]


def test_versions_newest_first(s3: S3, versioned: str) -> None:
    client = s3.client()
    ids = [
        client.put_object(Bucket=versioned, Key="k", Body=b"%d" % n)["VersionId"] for n in range(3)
    ]
    marker = client.delete_object(Bucket=versioned, Key="k")["VersionId"]
    client.put_object(Bucket=versioned, Key="j", Body=b"")
    page = client.list_object_versions(Bucket=versioned)
    assert [each["Key"] for each in page["Versions"]] == ["j", "k", "k", "k"]
    assert [each["VersionId"] for each in page["Versions"]][1:] == ids[::-1]
    assert [each["IsLatest"] for each in page["Versions"]] == [True, False, False, False]
    (told,) = page["DeleteMarkers"]
    assert (told["Key"], told["VersionId"], told["IsLatest"]) == ("k", marker, True)
    assert told["Owner"]["ID"] == "main"
    assert [each["Size"] for each in page["Versions"]] == [0, 1, 1, 1]
    assert page["KeyMarker"] == page["VersionIdMarker"] == ""


def test_pages_of_versions(s3: S3, versioned: str) -> None:
    client = s3.client()
    for key in ("a", "b/1", "b/2", "c"):
        for n in range(3):
            client.put_object(Bucket=versioned, Key=key, Body=b"%d" % n)
    client.delete_object(Bucket=versioned, Key="a")
    whole = _shown(client.list_object_versions(Bucket=versioned))
    paginator = client.get_paginator("list_object_versions")
    for size in (1, 2, 5):
        pages = paginator.paginate(Bucket=versioned, PaginationConfig={"PageSize": size})
        found = [each for page in pages for each in _shown(page)]
        assert sorted(found) == sorted(whole), size
    page = client.list_object_versions(Bucket=versioned, Delimiter="/", Prefix="")
    assert _prefixes(page) == ["b/"]
    assert {each[0] for each in _shown(page)} == {"a", "c"}
    page = client.list_object_versions(Bucket=versioned, Prefix="b/", MaxKeys=2)
    assert page["IsTruncated"] is True
    assert (page["NextKeyMarker"], len(page["Versions"])) == ("b/1", 2)
    assert page["NextVersionIdMarker"] == page["Versions"][-1]["VersionId"]


def test_versions_and_markers_stand_in_one_order(s3: S3, versioned: str) -> None:
    client = s3.client()
    for _ in range(2):
        client.put_object(Bucket=versioned, Key="k", Body=b"")
        client.delete_object(Bucket=versioned, Key="k")
    raw = ask(s3, "GET", f"/{versioned}?versions").body
    order = [raw.find(name) for name in (b"<DeleteMarker>", b"<Version>")]
    assert 0 < order[0] < order[1] < raw.rfind(b"<DeleteMarker>") < raw.rfind(b"<Version>")


def test_versions_of_a_bucket_that_kept_none(s3: S3, fill: Any) -> None:
    page = s3.client().list_object_versions(Bucket=fill("a"))
    assert _shown(page) == [("a", "null", True, False)]


def test_a_version_marker_needs_a_key_marker(s3: S3, bucket: str) -> None:
    with refused(400, "InvalidArgument"):
        s3.client().list_object_versions(Bucket=bucket, VersionIdMarker="null")
