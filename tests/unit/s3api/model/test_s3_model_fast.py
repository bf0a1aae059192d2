"""The fast writers against the generic one."""

from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.parsers import create_parser
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.meta.records import Inode
from kvfs.objects.listing import ListedObject
from kvfs.objects.object_info import Facts
from s3api.model import frequent_answers
from s3api.model.serialising import serialise, url_encode
from tests.unit.s3api.model.s3_shapes import XML_TEXT, operation_model

KEYS = st.one_of(XML_TEXT.filter(bool), st.text("ab/ <>&\"'\r\t\n+%~\u20ac\x01", min_size=1))
OBJECTS = st.lists(
    st.builds(
        ListedObject,
        KEYS.map(str.encode),
        st.just(7),
        st.integers(0, 1 << 50),
        st.integers(0, 1 << 61).map(lambda ns: ns - ns % 1_000_000),
        st.just("d41d8cd98f00b204e9800998ecf8427e-1"),
    ),
    max_size=4,
)
OWNER = {"ID": "1&2", "DisplayName": "a<b"}
modest = settings(max_examples=60, deadline=None)


def members_of(found: ListedObject, url: bool, owner: dict[str, str] | None) -> dict[str, Any]:
    seconds, rest = divmod(found.mtime_ns, 1_000_000_000)
    key = found.key.decode()
    return {
        "Key": url_encode(key) if url else key,
        "LastModified": datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest // 1000),
        "ETag": f'"{found.etag}"',
        "Size": found.size,
        "StorageClass": "STANDARD",
        "Owner": owner,
    }


@pytest.mark.parametrize("url", [False, True])
@pytest.mark.parametrize("owner", [None, OWNER])
def test_contents_are_those_of_the_generic_writer(url: bool, owner: dict[str, str] | None) -> None:
    @modest
    @given(OBJECTS, st.lists(KEYS, max_size=3))
    def check(objects: list[ListedObject], prefixes: list[str]) -> None:
        names = [{"Prefix": url_encode(name) if url else name} for name in prefixes]
        generic = {"Contents": [members_of(each, url, owner) for each in objects]}
        _, _, document = serialise("ListObjectsV2", generic | {"CommonPrefixes": names})
        assert frequent_answers.contents(objects, url, owner) in document
        assert frequent_answers.common([name.encode() for name in prefixes], url) in document

    check()


@modest
@given(OBJECTS, st.lists(XML_TEXT.filter(bool).map(str.encode), max_size=3))
def test_botocore_reads_the_whole_list(objects: list[ListedObject], prefixes: list[bytes]) -> None:
    small = {"Name": "b", "Prefix": "p&", "MaxKeys": 9, "KeyCount": 3, "IsTruncated": True}
    status, headers, body = frequent_answers.list_answer(
        "ListObjectsV2", small, objects, prefixes, url=True
    )
    response = {"status_code": status, "headers": {}, "body": body, "context": {}}
    parsed = create_parser("rest-xml").parse(
        response, operation_model("ListObjectsV2").output_shape
    )
    assert headers == [(b"content-type", b"application/xml")]
    assert {name: parsed[name] for name in small} == small
    assert [each["Key"] for each in parsed.get("Contents", [])] == [
        url_encode(each.key.decode()) for each in objects
    ]
    assert len(parsed.get("CommonPrefixes", [])) == len(prefixes)


VERSIONS = st.lists(
    st.builds(
        lambda key, latest, marker, mtime_ns: Facts(
            key.encode(),
            7,
            Inode(
                mode=0,
                uid=0,
                gid=0,
                nlink=1,
                size=9,
                atime_ns=0,
                mtime_ns=mtime_ns,
                ctime_ns=0,
                parent=1,
                name=b"k",
            ),
            "" if marker else "d41d8cd98f00b204e9800998ecf8427e-1",
            {"owner": "a&b"} if latest else {},
            "null",
            latest,
            marker,
        ),
        XML_TEXT.filter(bool),
        st.booleans(),
        st.booleans(),
        st.integers(0, 1 << 61).map(lambda ns: ns - ns % 1_000_000),
    ),
    max_size=5,
)


@modest
@given(VERSIONS, st.lists(XML_TEXT.filter(bool), max_size=2))
def test_versions_are_read_as_those_of_the_generic_writer(
    versions: list[Facts], prefixes: list[str]
) -> None:
    small = {"Name": "b", "KeyMarker": "k", "VersionIdMarker": "", "IsTruncated": False}
    names = [each.encode() for each in prefixes]
    _, _, written = frequent_answers.versions_answer(small, versions, names, url=False, owner="me")
    generic = small | {
        "Versions": [_version(each) for each in versions if not each.delete_marker],
        "DeleteMarkers": [_version(each) for each in versions if each.delete_marker],
        "CommonPrefixes": [{"Prefix": name} for name in prefixes],
    }
    _, _, expected = serialise("ListObjectVersions", generic)
    shape = operation_model("ListObjectVersions").output_shape
    read = [
        create_parser("rest-xml").parse(
            {"status_code": 200, "headers": {}, "body": body, "context": {}}, shape
        )
        for body in (written, expected)
    ]
    assert read[0] == read[1]


def _version(facts: Facts) -> dict[str, Any]:
    seconds, rest = divmod(facts.mtime_ns, 1_000_000_000)
    who = facts.metadata.get("owner", "me")
    told = {
        "Key": facts.key.decode(),
        "VersionId": "null",
        "IsLatest": facts.latest,
        "LastModified": datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest // 1000),
        "Owner": {"ID": who, "DisplayName": who},
    }
    if facts.delete_marker:
        return told
    return told | {"ETag": f'"{facts.etag}"', "Size": 9, "StorageClass": "STANDARD"}


def test_headers_of_an_object() -> None:
    stored = {"content-type": "text/plain", "x-amz-meta-a": "b", "x-amz-meta-c": "\xe9"}
    generic = {
        "AcceptRanges": "bytes",
        "ETag": '"abc"',
        "LastModified": datetime(2020, 2, 3, 4, 5, 6, tzinfo=UTC),
        "ContentType": "text/plain",
        "Metadata": {"a": "b", "c": "\xe9"},
    }
    written = frequent_answers.object_headers("abc", 1_580_702_706_999_000_000, stored)
    for operation in ("GetObject", "HeadObject"):
        assert sorted(written) == sorted(serialise(operation, generic)[1])
