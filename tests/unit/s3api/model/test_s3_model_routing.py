"""Which operation a request asks for. That each of botocore's finds its own: the round trip."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.model.routing import route, routes
from s3api.model.service_model import service
from s3api.operations.documented import SUPPORTED, markdown_table, operations_table

COPY = {b"x-amz-copy-source": b"b/k"}


def asked(
    method: str, target: str, query: str = "", headers: dict[bytes, bytes] | None = None
) -> str:
    bucket, _, key = target.partition("/")
    names = dict(field.partition("=")[::2] for field in query.split("&") if field)
    return route(method, bucket or None, key or None, names, headers or {})


@pytest.mark.parametrize(
    ("method", "target", "query", "headers", "operation"),
    [
        ("GET", "", "", {}, "ListBuckets"),
        ("GET", "b", "", {}, "ListObjects"),
        ("GET", "b", "list-type=2&prefix=x", {}, "ListObjectsV2"),
        ("GET", "b", "fetch-owner=true", {}, "ListObjects"),
        ("GET", "b", "lifecycle", {}, "GetBucketLifecycleConfiguration"),
        ("GET", "b", "notification", {}, "GetBucketNotificationConfiguration"),
        ("GET", "b", "inventory", {}, "ListBucketInventoryConfigurations"),
        ("GET", "b", "inventory&id=1", {}, "GetBucketInventoryConfiguration"),
        ("GET", "b/k", "v=2&utm_source=x", {}, "GetObject"),
        ("GET", "b/k", "acl&unknown", {}, "GetObjectAcl"),
        ("PUT", "b/k", "content-type=x", {}, "PutObject"),
        ("POST", "b", "v=2", {b"content-type": b"multipart/form-data; boundary=x"}, "PostObject"),
        ("GET", "b/k", "x-id=GetObject&x-trace=1&response-expires=x", {}, "GetObject"),
        ("GET", "b/k", "partNumber=1&versionId=2", {}, "GetObject"),
        ("HEAD", "b/k", "partNumber=1", {}, "HeadObject"),
        ("GET", "b/k", "uploadId=1&part-number-marker=2", {}, "ListParts"),
        ("GET", "b/k", "AWSAccessKeyId=a&Expires=1&Signature=s", {}, "GetObject"),
        ("GET", "b/k", "X-Amz-Signature=s&X-Amz-Date=d", {}, "GetObject"),
        ("PUT", "b/k", "", {}, "PutObject"),
        ("PUT", "b/k", "", COPY, "CopyObject"),
        ("PUT", "b/k", "partNumber=1&uploadId=2", {}, "UploadPart"),
        ("PUT", "b/k", "partNumber=1&uploadId=2", COPY, "UploadPartCopy"),
        ("PUT", "b/k", "tagging", COPY, "PutObjectTagging"),
        ("POST", "b/k", "uploads", {}, "CreateMultipartUpload"),
        ("POST", "b/k", "uploadId=1", {}, "CompleteMultipartUpload"),
        ("POST", "b", "delete", {}, "DeleteObjects"),
        ("POST", "b", "", {b"content-type": b"multipart/form-data; boundary=x"}, "PostObject"),
        ("OPTIONS", "b/k", "", {}, "OptionsObject"),
        ("DELETE", "b/k", "uploadId=1", {}, "AbortMultipartUpload"),
        ("DELETE", "b/k", "versionId=1", {}, "DeleteObject"),
        ("PUT", "b/k", "tagging&versionId=1", {}, "PutObjectTagging"),
        ("HEAD", "b/k", "versionId=1&response-expires=x", {}, "HeadObject"),
    ],
)
def test_neighbours_are_told_apart(
    method: str, target: str, query: str, headers: dict[bytes, bytes], operation: str
) -> None:
    assert asked(method, target, query, headers) == operation


@pytest.mark.parametrize(
    ("method", "target", "query", "code"),
    [
        ("PUT", "b/k", "append&position=0", "NotImplemented"),
        ("GET", "b/k", "versioning", "NotImplemented"),
        ("DELETE", "b", "uploadId=1", "NotImplemented"),
        ("DELETE", "b/k", "acl", "MethodNotAllowed"),
        ("HEAD", "b/k", "tagging", "MethodNotAllowed"),
        ("HEAD", "b", "versions", "MethodNotAllowed"),
        ("POST", "b/k", "", "MethodNotAllowed"),
        ("POST", "", "", "MethodNotAllowed"),
        ("PATCH", "b/k", "", "MethodNotAllowed"),
        ("get", "b/k", "", "MethodNotAllowed"),
        ("GET", "b/k", "acl&tagging", "InvalidArgument"),
        ("GET", "b", "list-type=3", "InvalidArgument"),
        ("PUT", "b/k", "partNumber=1", "InvalidArgument"),
        ("PUT", "b/k", "uploadId=1", "InvalidArgument"),
        ("POST", "b", "", "PreconditionFailed"),
        ("PUT", "b/k", "versionId=1", "InvalidArgument"),
        ("PUT", "b/k", "versionId", "InvalidArgument"),
        ("PUT", "b/k", "partNumber=1&uploadId=2&versionId=1", "InvalidArgument"),
        ("POST", "b/k", "uploads&versionId=1", "InvalidArgument"),
        ("DELETE", "b/k", "uploadId=1&versionId=1", "InvalidArgument"),
        ("GET", "b", "versionId=1", "InvalidArgument"),
        ("PUT", "b/k", "response-expires=x", "InvalidArgument"),
        ("DELETE", "b/k", "versionId=1&response-content-type=x", "InvalidArgument"),
        ("GET", "b/k", "response-else=x", "InvalidArgument"),
    ],
)
def test_no_request_gets_what_it_did_not_ask_for(
    method: str, target: str, query: str, code: str
) -> None:
    with pytest.raises(S3Error) as caught:
        asked(method, target, query)
    assert caught.value.code == code


SUBRESOURCES = sorted(
    {name for found in service().operations.values() for name in found.query}
    | {"uploadId", "partNumber"}
)


@given(
    st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"]),
    st.sampled_from(["", "b", "b/k"]),
    st.dictionaries(
        st.sampled_from([*SUBRESOURCES, "id", "prefix", "?"]), st.sampled_from(["", "2"])
    ),
    st.booleans(),
)
def test_an_operation_knows_every_subresource_that_is_asked_for(
    method: str, target: str, query: dict[str, str], copies: bool
) -> None:
    bucket, _, key = target.partition("/")
    try:
        name = route(method, bucket or None, key or None, query, COPY if copies else {})
    except S3Error as error:
        assert error.status >= 400
        return
    found = service().operations.get(name)
    if found is not None:
        members = found.input.members.values()
        known = {m.location_name for m in members if m.location == "querystring"}
        assert query.keys() & set(SUBRESOURCES) <= found.query.keys() | known
        assert found.query.keys() <= query.keys()


def test_every_operation_has_a_fate() -> None:
    rows = dict(operations_table(["GetObject", "PostObject"], {"CreateSession": "InvalidRequest"}))
    assert rows["GetObject"] == rows["PostObject"] == SUPPORTED
    assert rows["CreateSession"] == "InvalidRequest"
    assert rows["GetObjectTorrent"] == "NotImplemented"
    assert set(rows) >= set(service().operations)
    for name, fate in rows.items():
        found = service().operations.get(name)
        assert found is None or found.served != (fate.startswith("never") or "Method" in fate)
    assert "| `GetObject` | supported |" in markdown_table(list(rows.items()))
    with pytest.raises(ValueError, match="PutThing"):
        operations_table(["PutThing"])


def test_the_table_is_made_once() -> None:
    assert routes() is routes()
