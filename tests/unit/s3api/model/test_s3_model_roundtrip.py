"""Held against botocore both ways: it makes the request and we read it, we write the answer and it
reads that, for every operation of the model and members drawn by shape."""

from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.awsrequest import (
    AWSResponse,
    HeadersDict,
    create_request_object,
    prepare_request_dict,
)
from botocore.handlers import parse_get_bucket_location
from botocore.parsers import create_parser
from botocore.serialize import create_serializer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from urllib3.response import HTTPResponse

from s3api.model.addressing import address, split_target
from s3api.model.parsing import parse
from s3api.model.routing import route
from s3api.model.serialising import serialise
from s3api.model.service_model import service
from tests.unit.s3api.model.s3_shapes import members, operation_model

modest = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SERVED = [name for name, found in service().operations.items() if found.served]
# An event stream has a form of its own.
ANSWERING = [n for n in SERVED if service().operations[n].output and n != "SelectObjectContent"]


def sent(operation: str, params: dict[str, Any]) -> tuple[str, bytes, dict[bytes, bytes], bytes]:
    """Method, target, headers and body of botocore's request."""
    serialised = create_serializer("rest-xml", include_validation=False).serialize_to_request(
        params, operation_model(operation)
    )
    headers = {
        name.lower().encode(): value.encode() for name, value in serialised["headers"].items()
    }
    prepare_request_dict(serialised, endpoint_url="http://127.0.0.1:9000")
    url = urlsplit(create_request_object(serialised).prepare().url)
    target = url.path + ("?" + url.query if url.query else "")
    body = serialised["body"]
    return (
        serialised["method"],
        target.encode(),
        headers,
        body.encode() if isinstance(body, str) else body,
    )


@pytest.mark.parametrize("operation", SERVED)
def test_a_request_of_botocore_is_read_as_it_was_meant(operation: str) -> None:
    @modest
    @given(params=members(operation_model(operation).input_shape))
    def check(params: dict[str, Any]) -> None:
        if "Bucket" in params:
            params["Bucket"] = "bucket"
        method, target, headers, body = sent(operation, params)
        path, query = split_target(target)
        bucket, key = address(path, "127.0.0.1:9000", ("localhost",))
        assert route(method, bucket, key, query, headers) == operation
        assert parse(operation, bucket, key, query, headers, body) == params

    check()


@pytest.mark.parametrize("operation", ANSWERING)
def test_an_answer_is_read_by_botocore_as_it_was_meant(operation: str) -> None:
    shape = operation_model(operation).output_shape

    @modest
    @given(result=members(shape))
    def check(result: dict[str, Any]) -> None:
        status, headers, body = serialise(operation, result)
        response = {
            "status_code": status,
            "headers": HeadersDict({n.decode(): v.decode("latin-1") for n, v in headers}),
            "body": body,
            "context": {"operation_name": operation},
        }
        parsed = create_parser("rest-xml").parse(response, shape)
        del parsed["ResponseMetadata"]
        if operation == "GetBucketLocation":
            answer = AWSResponse("", status, {}, HTTPResponse(BytesIO(body), preload_content=False))
            parse_get_bucket_location(parsed, answer)
        parsed = {name: value for name, value in parsed.items() if not _streams(shape, name)}
        if shape.serialization.get("payload") not in result:
            # Of an answer without a document botocore makes an empty structure.
            parsed.pop(shape.serialization.get("payload"), None)
        assert _normal(parsed, operation) == _normal(result, operation)

    check()


def _streams(shape: Any, name: str) -> bool:
    return bool(shape.members[name].serialization.get("streaming"))


def _normal(result: dict[str, Any], operation: str) -> dict[str, Any]:
    return {n: v for n, v in result.items() if v is not None and (n, v) != ("Metadata", {})} | (
        {"LocationConstraint": result.get("LocationConstraint")}
        if operation == "GetBucketLocation"
        else {}
    )


@modest
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_any_key_arrives(key: str) -> None:
    _, target, _, _ = sent("HeadObject", {"Bucket": "bucket", "Key": key})
    path, _ = split_target(target)
    if len(key.encode()) <= 1024:
        assert address(path, "localhost", ("localhost",)) == ("bucket", key)
