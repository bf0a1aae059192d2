"""What is refused, and what is taken though it looks odd. Well-formed requests: the round trip."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.model.documents import body_limit
from s3api.model.parsing import parse, parser
from s3api.model.service_model import service
from s3api.model.time_formats import http_date, iso8601, parse_timestamp
from s3api.model.xml import DEPTH_LIMIT, read_xml

XMLNS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def read(
    operation: str,
    query: dict[str, str] | None = None,
    headers: dict[bytes, bytes] | None = None,
    body: bytes = b"",
) -> dict[str, Any]:
    return parse(operation, "b", "k", query or {}, headers or {}, body)


def refused(
    operation: str,
    query: dict[str, str] | None = None,
    headers: dict[bytes, bytes] | None = None,
    body: bytes = b"",
) -> S3Error:
    with pytest.raises(S3Error) as caught:
        read(operation, query, headers, body)
    return caught.value


@pytest.mark.parametrize("value", ["blah", "-1", "1.5", "2147483648", "\n", "٣", "1" * 30])
def test_numbers_in_queries(value: str) -> None:
    error = refused("ListObjectsV2", {"max-keys": value})
    assert error.code == "InvalidArgument"
    assert error.extra == {"ArgumentName": "max-keys", "ArgumentValue": value}


def test_an_empty_number_is_absent_and_an_empty_string_is_not() -> None:
    assert read("ListObjectsV2", {"max-keys": "", "prefix": ""}) == {"Bucket": "b", "Prefix": ""}


@pytest.mark.parametrize(
    ("operation", "header", "value", "code"),
    [
        ("PutObject", b"x-amz-acl", b"everybody", "InvalidArgument"),
        ("PutObject", b"x-amz-storage-class", b"FLOPPY", "InvalidStorageClass"),
        ("PutObject", b"x-amz-sdk-checksum-algorithm", b"CRC7", "InvalidRequest"),
        ("PutObject", b"x-amz-object-lock-mode", b"abc", "InvalidArgument"),
        ("PutObject", b"x-amz-object-lock-retain-until-date", b"tomorrow", "InvalidArgument"),
        ("PutObject", b"x-amz-server-side-encryption-bucket-key-enabled", b"1", "InvalidArgument"),
        ("PutObject", b"content-length", b"x", "InvalidArgument"),
        ("CopyObject", b"x-amz-metadata-directive", b"MERGE", "InvalidArgument"),
        ("GetObjectAttributes", b"x-amz-object-attributes", b"ETag,Colour", "InvalidArgument"),
    ],
)
def test_values_that_s3_does_not_know(
    operation: str, header: bytes, value: bytes, code: str
) -> None:
    assert refused(operation, {}, {header: value, b"x-amz-copy-source": b"b/k"}).code == code


def test_values_that_are_taken_leniently() -> None:
    lenient = {
        b"if-modified-since": b"yesterday",
        b"x-amz-checksum-mode": b"MAYBE",
        b"x-unknown": b"1",
    }
    assert read("GetObject", {}, lenient) == {"Bucket": "b", "Key": "k", "ChecksumMode": "MAYBE"}
    crc = {b"x-amz-sdk-checksum-algorithm": b"crc32c"}
    assert read("PutObject", {}, crc)["ChecksumAlgorithm"] == "CRC32C"
    place = b"<LocationConstraint>mars</LocationConstraint>"
    body = b"<CreateBucketConfiguration>" + place + b"</CreateBucketConfiguration>"
    taken = read("CreateBucket", {}, {}, body)["CreateBucketConfiguration"]
    assert taken == {"LocationConstraint": "mars"}


def test_headers_are_the_bytes_that_came() -> None:
    metadata = read("PutObject", {}, {b"x-amz-meta-n": "é".encode()})["Metadata"]
    assert metadata["n"].encode("latin-1") == "é".encode()


def test_a_required_header_that_is_missing() -> None:
    assert refused("GetObjectAttributes").code == "InvalidRequest"


TAG = b"<Tagging><TagSet><Tag><Key>a</Key></Tag></TagSet></Tagging>"
STATUS = b"<VersioningConfiguration><Status>On</Status></VersioningConfiguration>"
DATE = b"<Retention><RetainUntilDate>x</RetainUntilDate></Retention>"
PART = b"<CompleteMultipartUpload><Part><PartNumber>x</PartNumber></Part></CompleteMultipartUpload>"


@pytest.mark.parametrize(
    ("operation", "body", "code"),
    [
        ("PutBucketTagging", b"", "MissingRequestBodyError"),
        ("PutBucketPolicy", b"", "MissingRequestBodyError"),
        ("PutBucketPolicy", b"\xff", "MalformedPolicy"),
        ("PutBucketTagging", b"<Tagging>", "MalformedXML"),
        ("PutBucketTagging", b"<Tagging/>", "MalformedXML"),
        ("PutBucketTagging", b"<Other><TagSet/></Other>", "MalformedXML"),
        ("PutBucketTagging", b"\xff\xfe", "MalformedXML"),
        ("PutBucketTagging", b'<?xml version="1.0" encoding="utf-7"?><Tagging/>', "MalformedXML"),
        ("PutBucketTagging", b'<?xml version="1.0" encoding="big5"?><Tagging/>', "MalformedXML"),
        ("PutBucketTagging", b"<Tagging><TagSet/><TagSet/></Tagging>", "MalformedXML"),
        ("PutBucketTagging", TAG, "MalformedXML"),
        ("DeleteObjects", b"<Delete/>", "MalformedXML"),
        ("DeleteObjects", b"<Delete><Object><Key><a/></Key></Object></Delete>", "MalformedXML"),
        ("PutBucketVersioning", STATUS, "MalformedXML"),
        ("PutObjectRetention", DATE, "MalformedXML"),
        ("CompleteMultipartUpload", PART, "MalformedXML"),
        ("PutObjectAcl", b"<AccessControlPolicy><Owner>", "MalformedACLError"),
        ("PutBucketAcl", b"<Other/>", "MalformedACLError"),
    ],
)
def test_documents_that_are_refused(operation: str, body: bytes, code: str) -> None:
    assert refused(operation, {"uploadId": "1"}, {}, body).code == code


def test_documents_that_are_taken() -> None:
    body = b"""<?xml version="1.0"?>
      <s3:Delete xmlns:s3="http://s3.amazonaws.com/doc/2006-03-01/">
        <!-- a comment --><s3:Quiet> True </s3:Quiet><s3:Unknown><s3:Key>x</s3:Key></s3:Unknown>
        <s3:Object><s3:Key> a&amp;&#x20;b </s3:Key></s3:Object>
        <s3:Object><s3:Key><![CDATA[<c>]]></s3:Key></s3:Object>
      </s3:Delete>"""
    members = read("DeleteObjects", {}, {}, body)["Delete"]
    assert members == {"Quiet": True, "Objects": [{"Key": " a& b "}, {"Key": "<c>"}]}
    plain = f"<Tagging {XMLNS}><TagSet></TagSet></Tagging>".encode()
    assert read("PutBucketTagging", {}, {}, plain)["Tagging"] == {"TagSet": []}


BOMB = b'<!DOCTYPE a [<!ENTITY a "%b"><!ENTITY b "&a;&a;">]>' % (b"x" * 99)


@pytest.mark.parametrize(
    "body",
    [
        BOMB + b"<Delete><Object><Key>&b;</Key></Object></Delete>",
        b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><Delete><Object><Key>a</Key></Object></Delete>',
        b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><Delete>&x;</Delete>',
        b"<!DOCTYPE Delete><Delete><Object><Key>a</Key></Object></Delete>",
        b"<Delete><Object><Key>&other;</Key></Object></Delete>",
        b"<Delete>" + b"<a>" * 100 + b"</a>" * 100 + b"</Delete>",
        b"<Delete>" + b"x<a/>" * 200_001 + b"</Delete>",
    ],
)
def test_bombs_do_not_go_off(body: bytes) -> None:
    assert refused("DeleteObjects", {}, {}, body).code == "MalformedXML"


def test_a_document_has_a_limit() -> None:
    for operation in ("DeleteObjects", "PutBucketTagging", "PutBucketPolicy"):
        body = b" " * (body_limit(operation) + 1)
        assert refused(operation, {}, {}, body).code == "MaxMessageLengthExceeded"
    deepest = b"<a>" * DEPTH_LIMIT + b"</a>" * DEPTH_LIMIT
    assert read_xml(deepest).name == "a"


PIECES = [
    *("<Delete>", "</Delete>", "<Delete/>", "<Object>", "<Key>", "</Key>", "<Tagging>", "<Tag"),
    *("<!", "<![CDATA[", "]]>", "<?xml version='1.0'?>", "\0", "&#0;", ">", "&", "a"),
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([n for n in service().operations if parser(n).payload is not None]),
    st.one_of(
        st.binary(max_size=60),
        st.lists(st.sampled_from(PIECES), max_size=8).map(lambda parts: "".join(parts).encode()),
    ),
)
def test_no_body_gets_through_as_another_error(operation: str, body: bytes) -> None:
    query = {"id": "1", "uploadId": "1"}
    try:
        read(operation, query, {}, body)
    except S3Error as error:
        assert error.status == 400


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(service().operations)),
    st.data(),
    st.dictionaries(
        st.binary(max_size=8).map(lambda raw: b"x-amz-meta-" + raw), st.binary(max_size=8)
    ),
)
def test_no_value_gets_through_as_another_error(
    operation: str, data: st.DataObject, extra: dict[bytes, bytes]
) -> None:
    known = parser(operation)
    query = {name: data.draw(st.text(max_size=12)) for name in known.query}
    headers = {name: data.draw(st.binary(max_size=12)) for name in known.headers}
    try:
        read(operation, query, headers | extra, b"")
    except S3Error as error:
        assert 400 <= error.status < 500


@pytest.mark.parametrize(
    "text",
    [
        "2009-10-12T17:50:30.000Z",
        "2009-10-12T17:50:30Z",
        "20091012T175030Z",
        "2009-10-12T19:50:30+02:00",
        "Mon, 12 Oct 2009 17:50:30 GMT",
        "Mon, 12 Oct 2009 17:50:30 +0000",
        "Monday, 12-Oct-09 17:50:30 GMT",
        "1255369830",
        " 1255369830.0 ",
    ],
)
def test_forms_of_time(text: str) -> None:
    assert parse_timestamp(text) == datetime(2009, 10, 12, 17, 50, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "text", ["", "now", "2009-13-12", "2009-10-12T25:00:00Z", "9" * 40, "Mon,"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError):
        parse_timestamp(text)


@given(st.text(max_size=30))
def test_any_text_is_a_time_or_a_value_error(text: str) -> None:
    try:
        assert parse_timestamp(text).tzinfo is UTC
    except ValueError:
        pass


@given(st.datetimes(timezones=st.just(UTC)))
def test_times_are_read_as_they_were_written(time: datetime) -> None:
    assert parse_timestamp(iso8601(time)) == time.replace(
        microsecond=time.microsecond // 1000 * 1000
    )
    if time.year >= 1900:
        assert parse_timestamp(http_date(time)) == time.replace(microsecond=0)
