"""Whatever is asked, in whatever combination, is answered as S3 answers, and never by a bug."""

from collections.abc import Iterator
from urllib.parse import quote
from xml.etree import ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s3api.model.service_model import service
from tests.integration.s3 import S3
from tests.integration.s3_raw import Answer, ask

SUBRESOURCES = [
    *("acl", "attributes", "cors", "delete", "encryption", "legal-hold", "lifecycle", "location"),
    *("logging", "notification", "object-lock", "ownershipControls", "policy", "policyStatus"),
    *("publicAccessBlock", "renameObject", "replication", "requestPayment", "restore", "retention"),
    *("select", "tagging", "torrent", "uploads", "versioning", "versions", "website", "unknown"),
]
PARAMETERS = [
    *("continuation-token", "delimiter", "encoding-type", "fetch-owner", "key-marker", "list-type"),
    *("marker", "max-keys", "max-parts", "max-uploads", "part-number-marker", "partNumber"),
    *("prefix", "response-content-type", "response-expires", "start-after", "upload-id-marker"),
    *("uploadId", "version-id-marker", "versionId", "x-id", "select-type"),
]
HEADERS = [
    *("content-md5", "content-type", "expires", "if-match", "if-modified-since", "if-none-match"),
    *("if-unmodified-since", "range", "x-amz-acl", "x-amz-bypass-governance-retention"),
    *("x-amz-checksum-algorithm", "x-amz-checksum-crc32", "x-amz-checksum-mode"),
    *("x-amz-checksum-type", "x-amz-copy-source", "x-amz-copy-source-if-match"),
    *("x-amz-copy-source-range", "x-amz-decoded-content-length", "x-amz-expected-bucket-owner"),
    *("x-amz-grant-read", "x-amz-meta-a", "x-amz-metadata-directive", "x-amz-mp-object-size"),
    *("x-amz-object-attributes", "x-amz-object-lock-legal-hold", "x-amz-object-lock-mode"),
    *("x-amz-object-lock-retain-until-date", "x-amz-sdk-checksum-algorithm"),
    *("x-amz-storage-class", "x-amz-tagging", "x-amz-tagging-directive", "x-amz-trailer"),
    *("x-amz-website-redirect-location", "x-amz-write-offset-bytes", "origin"),
]
VALUES = st.one_of(
    st.sampled_from(
        [
            *("", "0", "1", "-1", "9" * 30, "a", "a=b", "a=b&a=c", "*", '"a"', "null", "true"),
            *("bytes=0-0", "bytes=-1", "bytes=5-1", "url", "CRC32", "COMPOSITE", "ENABLED", "COPY"),
            *("REPLACE", "private", "id=main", "GOVERNANCE", "ON", "2", "ETag,ObjectParts"),
            *("Thu, 01 Jan 1970 00:00:00 GMT", "2099-01-01T00:00:00Z", "{bucket}/key", "é", "/"),
        ]
    ),
    st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=12),
)
ROOTS = sorted(
    {each.body_root for each in service().operations.values() if each.body_root}
    | {"Tagging", "Delete", "AccessControlPolicy", "VersioningConfiguration", "Retention"}
)
BODIES = st.one_of(
    st.just(b""),
    st.binary(max_size=40),
    st.sampled_from(ROOTS).map(lambda root: f"<{root}></{root}>".encode()),
    st.sampled_from(ROOTS).map(lambda root: f"<{root}><Key>a</Key><Status>X".encode()),
)
KEYS = st.sampled_from(["", "/", "/key", "/a/b", "/none", "/key/", "/%20", "/~"])


@pytest.fixture(scope="module")
def place(s3: S3) -> Iterator[str]:
    name = s3.new_bucket()
    s3.client().put_object(Bucket=name, Key="key", Body=b"content")
    yield name
    s3.remove_bucket(name)


def check(answer: Answer) -> None:
    """An answer of S3's: no 5xx but NotImplemented, and errors as documents."""
    assert answer.status < 500 or answer.status == 501, answer
    if answer.status >= 400 and answer.body:
        told = ET.fromstring(answer.body)
        assert told.tag == "Error"
        assert told.findtext("Code") not in (None, "", "InternalError")
        assert told.findtext("RequestId") == answer.headers["x-amz-request-id"]


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "PUT", "POST", "DELETE", "HEAD"]),
    key=KEYS,
    resource=st.just("") | st.sampled_from(SUBRESOURCES),
    query=st.dictionaries(st.sampled_from(PARAMETERS), VALUES, max_size=2),
    headers=st.dictionaries(st.sampled_from(HEADERS), VALUES, max_size=3),
    body=BODIES,
    user=st.sampled_from(["main", "alt", None]),
)
def test_any_request_is_answered(
    s3: S3,
    place: str,
    method: str,
    key: str,
    resource: str,
    query: dict[str, str],
    headers: dict[str, str],
    body: bytes,
    user: str | None,
) -> None:
    fields = [f"{name}={quote(value, safe='~')}" for name, value in query.items()]
    named = "&".join([resource, *fields] if resource else fields)
    target = f"/{place}{key}" + (f"?{named}" if named else "")
    sent = {
        name: value.replace("{bucket}", place).strip().encode().decode("latin-1")
        for name, value in headers.items()
    }
    check(ask(s3, method, target, body, sent, user=user))


def test_no_worker_died_of_it(s3: S3) -> None:
    assert s3.node.status()["s3"]["restarts"] == 0
