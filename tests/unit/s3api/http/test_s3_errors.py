"""Codes, documents, and that nothing is raised without a row."""

import ast
import errno
import inspect
from pathlib import Path
from xml.etree import ElementTree

import pytest
from botocore.parsers import create_parser
from hypothesis import example, given
from hypothesis import strategies as st

import s3api
from kvfs.base import errors
from kvfs.objects import object_errors
from s3api.http.error_map import CODES as MAPPED
from s3api.http.error_map import s3_error
from s3api.http.s3_errors import CODES, DECLARATION, S3Error, error_document, error_response
from tests.unit.s3api.model.s3_shapes import botocore_model, operation_model

DOMAIN = [
    kind
    for module in (errors, object_errors)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, errors.KvfsError) and kind is not errors.KvfsError
]


@pytest.mark.parametrize("kind", DOMAIN)
def test_every_domain_error_has_a_code(kind: type[errors.KvfsError]) -> None:
    assert MAPPED[kind] in CODES
    more = {"version": "v", "latest": True} if kind is object_errors.MarkedDeleted else {}
    found = s3_error(kind("/srv/secret", **more))
    assert found.code == MAPPED[kind]
    assert "secret" not in found.message


def test_which_bucket_and_which_part_are_told() -> None:
    assert s3_error(object_errors.NoSuchBucket("message")).extra == {}
    assert s3_error(object_errors.NoSuchBucket("message", "b")).extra == {"BucketName": "b"}
    assert s3_error(object_errors.InvalidPart("message")).extra == {}
    part = {"PartNumber": "2", "ETag": "abc"}
    assert s3_error(object_errors.InvalidPart("message", 2, "abc")).extra == part
    small = part | {"ProposedSize": "4", "MinSizeAllowed": "5242880"}
    assert s3_error(object_errors.PartTooSmall("message", 2, "abc", 4)).extra == small


def test_a_delete_marker_is_told_in_headers() -> None:
    found = s3_error(object_errors.MarkedDeleted("k", "7", latest=True))
    assert found.headers == {"x-amz-delete-marker": "true", "x-amz-version-id": "7"}


def test_other_errors_have_codes_too() -> None:
    assert s3_error(OSError(errno.ENOSPC, "full")).status == 507
    assert s3_error(ZeroDivisionError()).code == "InternalError"
    assert s3_error(S3Error("NoSuchKey")).code == "NoSuchKey"


def test_every_code_that_is_raised_has_a_row() -> None:
    root = Path(s3api.__file__).parent
    raised = {
        call.args[0].value
        for path in root.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "S3Error"
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and len(call.args) < 3  # with a status of its own it needs none
    }
    assert len(raised) > 10
    assert raised <= CODES.keys()


def test_statuses_are_those_of_the_model() -> None:
    shapes = botocore_model().shape_names
    named = [botocore_model().shape_for(name) for name in shapes if name in CODES]
    errors_named = [shape for shape in named if shape.metadata.get("exception")]
    assert len(errors_named) > 5
    for shape in errors_named:
        assert CODES[shape.name][0] == shape.metadata["error"]["httpStatusCode"]


@example("\0", "\ufffe\uffff\ud800")
@given(st.text(), st.text())
def test_any_text_makes_a_document(message: str, resource: str) -> None:
    error = S3Error("NoSuchKey", message, extra={"Key": resource})
    document = error_document(error, resource, "1", "2")
    assert document.startswith(DECLARATION)
    root = ElementTree.fromstring(document)
    assert [child.tag for child in root] == [
        "Code", "Message", "Key", "Resource", "RequestId", "HostId",
    ]  # fmt: skip


def test_botocore_reads_an_error() -> None:
    error = S3Error("NoSuchBucket", extra={"BucketName": "b<&"}, headers={"x-test": "1"})
    status, headers, body = error_response(error, "/b", "req", "host")
    response = {
        "status_code": status,
        "headers": {name.decode(): value.decode() for name, value in headers},
        "body": body,
        "context": {},
    }
    parsed = create_parser("rest-xml").parse(response, operation_model("GetObject").output_shape)
    assert parsed["Error"]["Code"] == "NoSuchBucket"
    assert parsed["Error"]["BucketName"] == "b<&"
    assert parsed["ResponseMetadata"]["HTTPStatusCode"] == 404
    assert headers == [(b"x-test", b"1"), (b"content-type", b"application/xml")]


def test_an_answer_without_body_has_none() -> None:
    assert error_response(S3Error("NotModified"), "/b", "1", "2") == (304, [], b"")


def test_a_code_that_is_not_known_needs_a_status() -> None:
    assert S3Error("Odd", "odd", 418).status == 418
    with pytest.raises(AssertionError):
        S3Error("Odd")
