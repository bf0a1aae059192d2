"""The fast writers against the generic one."""

from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.parsers import create_parser
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.objects.listing import Listed
from s3api.model import fast
from s3api.model.serialising import serialise, url_encode
from tests.unit.s3_shapes import XML_TEXT, operation_model

KEYS = st.one_of(XML_TEXT.filter(bool), st.text("ab/ <>&\"'\r\t\n+%~\u20ac\x01", min_size=1))
OBJECTS = st.lists(
    st.builds(
        Listed,
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


def members_of(found: Listed, url: bool, owner: dict[str, str] | None) -> dict[str, Any]:
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
    def check(objects: list[Listed], prefixes: list[str]) -> None:
        names = [{"Prefix": url_encode(name) if url else name} for name in prefixes]
        generic = {"Contents": [members_of(each, url, owner) for each in objects]}
        _, _, document = serialise("ListObjectsV2", generic | {"CommonPrefixes": names})
        assert fast.contents(objects, url, owner) in document
        assert fast.common([name.encode() for name in prefixes], url) in document

    check()


@modest
@given(OBJECTS, st.lists(XML_TEXT.filter(bool).map(str.encode), max_size=3))
def test_botocore_reads_the_whole_list(objects: list[Listed], prefixes: list[bytes]) -> None:
    small = {"Name": "b", "Prefix": "p&", "MaxKeys": 9, "KeyCount": 3, "IsTruncated": True}
    status, headers, body = fast.list_answer("ListObjectsV2", small, objects, prefixes, url=True)
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


def test_headers_of_an_object() -> None:
    stored = {"content-type": "text/plain", "x-amz-meta-a": "b", "x-amz-meta-c": "\xe9"}
    generic = {
        "AcceptRanges": "bytes",
        "ETag": '"abc"',
        "LastModified": datetime(2020, 2, 3, 4, 5, 6, tzinfo=UTC),
        "ContentType": "text/plain",
        "Metadata": {"a": "b", "c": "\xe9"},
    }
    written = fast.object_headers("abc", 1_580_702_706_999_000_000, stored)
    for operation in ("GetObject", "HeadObject"):
        assert sorted(written) == sorted(serialise(operation, generic)[1])
