"""The parsers of S3 that see what anybody sends: signatures, XML, policies, forms, fields."""

import base64
import json
import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from s3api.auth import chunked, post_policy
from s3api.auth.authenticate import authenticate
from s3api.http.s3_errors import S3Error
from s3api.model import form_data
from s3api.model.addressing import address, split_target, with_hoisted
from s3api.model.parsing import parse, parser
from s3api.model.routing import OPTIONS_OBJECT, POST_OBJECT, route
from s3api.model.service_model import ShapeMember, service
from s3api.model.xml import read_xml
from s3api.rules import checksums, conditions, copy_source, ranges, tagging
from s3api.rules.access.policy import (
    AccessRequest,
    Decision,
    Requester,
    evaluate,
    is_public,
    parse_bucket_policy,
    parse_user_policy,
)
from tests.fuzz.campaign import Target
from tests.unit.s3api.auth.s3_signed import secret_of, signed

_REFUSED: Final = (S3Error,)
_LINE: Final = b"\n"
_NOW: Final = 1_900_000_000.0
_BOUNDARY: Final = b"xyz"


# --- signatures


@cache
def _signed_requests() -> list[bytes]:
    """Requests as botocore signs them: method, target and a line for each header."""
    found = []
    for signer in ("v4", "v4-query", "sts", "v2", "v2-query"):
        for token in (None, "a-token"):
            for path in ("/bucket/key", "/bucket/%C3%A9?versionId=1&acl", "/b?list-type=2"):
                method, target, headers = signed(signer, path=path, token=token)
                lines = [b"%b %b" % (method.encode(), target)]
                lines += [name + b": " + value for name, value in headers]
                found.append(_LINE.join(lines))
    return found


def _head(data: bytes) -> tuple[str, bytes, list[tuple[bytes, bytes]]]:
    """As the HTTP server gives it: names in lower case, no line ends within a value."""
    first, *lines = data.split(_LINE)
    method, _, target = first.partition(b" ")
    pairs = [line.partition(b":")[::2] for line in lines if b":" in line]
    headers = [(name.strip().lower(), value.strip()) for name, value in pairs]
    return method.decode("latin-1"), target, headers


def _authenticate(data: bytes) -> object:
    method, target, headers = _head(data)
    for now in (time.time(), _NOW):
        found = authenticate(method, target, headers, secret_of, now, version_2=True)
    return found


def _chunked_body(draw: random.Random) -> bytes:
    pieces = [draw.randbytes(draw.randrange(1, 40)) for _ in range(draw.randrange(4))]
    sign = draw.random() < 0.5
    end = b";chunk-signature=" + b"0a" * 32 if sign else b""
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(each), end, each) for each in pieces)
    return body + b"0" + end + b"\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"


def _decode_chunks(data: bytes) -> object:
    decoder = chunked.Decoder(40, frozenset({b"x-amz-checksum-crc32"}))
    taken = b"".join(bytes(each) for each in decoder.feed(memoryview(data)))
    assert len(taken) <= 40
    return decoder.done


# --- addresses, XML, fields


def _address(data: bytes) -> object:
    method, target, headers = _head(data)
    path, query = split_target(target)
    host = dict(headers).get(b"host", b"").decode("latin-1")
    bucket, key = address(path, host, ("localhost", "s3.example.org"))
    fields = with_hoisted(dict(headers), query)
    operation = route(method, bucket, key, query, fields)
    if operation in (OPTIONS_OBJECT, POST_OBJECT):
        return operation
    return parser(operation).parse(bucket, key, query, fields)


def _target(draw: random.Random) -> bytes:
    names = ("acl", "policy", "uploads", "uploadId=1&partNumber=2", "versionId=v", "tagging")
    query = "&".join(draw.sample(names, draw.randrange(3)))
    path = draw.choice(("/", "/bucket", "/bucket/", "/bucket/a/b%20c", "/b/%E2%82%AC"))
    method = draw.choice(("GET", "PUT", "POST", "DELETE", "HEAD"))
    fields = (
        *("content-type: multipart/form-data; boundary=x", "x-amz-copy-source: /b/k"),
        *("range: bytes=0-1", "x-amz-meta-a: b", "content-length: 3", "x-amz-acl: private"),
    )
    lines = ["host: " + draw.choice(("localhost", "bucket.localhost:9000", "[::1]"))]
    lines += draw.sample(fields, draw.randrange(3))
    return "\n".join([f"{method} {path}?{query}", *lines]).encode()


@cache
def _documents() -> list[tuple[str, bytes]]:
    """Operations that take a document, with the skeleton of one."""
    model = service()
    found = []
    for name, operation in sorted(model.operations.items()):
        shape = operation.input
        if shape.payload and model.shapes[shape.members[shape.payload].shape].members:
            found.append((name, _skeleton(shape.payload, shape.members[shape.payload], 0)))
    assert found
    return found


def _skeleton(name: str, member: ShapeMember, depth: int) -> bytes:
    """An element with one of each that may be in it."""
    shapes = service().shapes
    shape = shapes[member.shape]
    if depth > 6:
        return b""
    if shape.member is not None:
        inner = _skeleton("member", shape.member, depth + 1)
    elif shape.members:
        inner = b"".join(_skeleton(each, found, depth + 1) for each, found in shape.members.items())
    else:
        inner = b"1" if shape.type in ("integer", "long") else min(shape.enum, default="a").encode()
    tag = (member.location_name or name).encode()
    return b"<%b>%b</%b>" % (tag, inner, tag)


def _document(draw: random.Random) -> bytes:
    name, body = draw.choice(_documents())
    return name.encode() + _LINE + body


def _parse_document(data: bytes) -> object:
    name, _, body = data.partition(_LINE)
    operation = name.decode("latin-1")
    if operation not in service().operations:
        return read_xml(data)
    required = {b"x-amz-object-attributes": b"ETag", b"x-amz-copy-source": b"b/k"}
    return parse(operation, "b", "k", {"uploadId": "1", "partNumber": "1"}, required, body)


def _field_line(draw: random.Random) -> bytes:
    return draw.choice(
        (
            *(b"range bytes=0-9", b"range bytes=-5", b"copyrange bytes=1-2", b"tags a=b&c=d%20e"),
            *(
                b"source /bucket/key?versionId=1",
                b"source b/%C3%A9",
                b"md5 1B2M2Y8AsgTpgAmY7PhCfg==",
            ),
            *(b"date Tue, 15 Nov 1994 12:45:26 GMT", b"sum AAAAAA=="),
        )
    )


def _parse_field(data: bytes) -> object:
    kind, _, raw = data.partition(b" ")
    text = raw.decode("latin-1")
    if kind == b"range":
        found = ranges.parse_range(text, 100)
        assert found is None or 0 <= found.offset < found.offset + found.length <= 100
        return found
    if kind == b"copyrange":
        part = ranges.parse_copy_range(text, 100)
        assert 0 <= part.offset < part.offset + part.length <= 100
        return part
    readers: dict[bytes, Callable[[str], object]] = {
        b"tags": tagging.parse_header,
        b"source": copy_source.parse_copy_source,
        b"md5": checksums.content_md5,
        b"date": conditions.http_date,
        b"sum": lambda value: checksums.decode(value, 4),
    }
    return readers.get(kind, conditions.http_date)(text)


# --- policies and forms


def _statement(draw: random.Random) -> dict[str, Any]:
    operators = ("StringLike", "IpAddress", "NumericLessThan", "DateGreaterThan", "Bool", "Null")
    condition_keys = ("aws:SourceIp", "s3:prefix", "aws:SecureTransport", "aws:CurrentTime")
    found: dict[str, Any] = {
        "Effect": draw.choice(("Allow", "Deny")),
        draw.choice(("Action", "NotAction")): draw.choice(("s3:*", ["s3:Get*", "s3:PutObject"])),
        draw.choice(("Resource", "NotResource")): draw.choice(
            ("arn:aws:s3:::b/*", ["arn:aws:s3:::b", "arn:aws:s3:::b/${aws:username}/*"])
        ),
    }
    if draw.random() < 0.6:
        found["Principal"] = draw.choice(("*", {"AWS": "*"}, {"AWS": ["arn:aws:iam::1:user/ann"]}))
    if draw.random() < 0.6:
        value = draw.choice(("10.0.0.0/8", "7", "true", "2030-01-01T00:00:00Z", ["a*", "b?"]))
        found["Condition"] = {draw.choice(operators): {draw.choice(condition_keys): value}}
    if draw.random() < 0.2:
        odd: tuple[Any, ...] = (
            None,
            5,
            [],
            {},
            "",
            [""],
            {"AWS": []},
            {"StringLike": {}},
            [[]],
            "arn:aws:s3:::b/?*",
        )
        found[draw.choice(sorted(found))] = draw.choice(odd)
    return found


def _policy_document(draw: random.Random) -> bytes:
    statements = [_statement(draw) for _ in range(draw.randrange(1, 3))]
    version = draw.choice(("2012-10-17", "2008-10-17"))
    return json.dumps({"Version": version, "Statement": statements}).encode()


def _judge(data: bytes) -> object:
    values = {
        "aws:SourceIp": ("10.1.2.3",),
        "aws:username": ("ann",),
        "aws:SecureTransport": ("true",),
        "aws:CurrentTime": ("2030-06-01T00:00:00Z",),
        "s3:prefix": ("ab",),
    }
    request = AccessRequest(
        Requester("ann", "123456789012", "c"), "s3:GetObject", "arn:aws:s3:::b/k", values
    )
    try:
        found = parse_bucket_policy(data)
    except S3Error:
        found = parse_user_policy(data)
    is_public(found)
    decision = evaluate([found], request)
    assert isinstance(decision, Decision)
    return decision.name


def _form(draw: random.Random) -> bytes:
    conditions_ = [["starts-with", "$key", ""], {"bucket": "b"}, ["content-length-range", 0, 9]]
    policy = {"expiration": "2035-01-01T00:00:00Z", "conditions": conditions_}
    encoded = base64.b64encode(json.dumps(policy).encode()).decode()
    credential = "AKIAIOSFODNN7EXAMPLE/20300101/us-east-1/s3/aws4_request"
    fields = {
        "key": draw.choice(("a", "${filename}")),
        "policy": encoded,
        "x-amz-algorithm": "AWS4-HMAC-SHA256",
        "x-amz-credential": credential,
        "x-amz-date": "20300101T000000Z",
        "x-amz-signature": "0" * 64,
    }
    if draw.random() < 0.3:
        fields = {"key": "a", "policy": encoded, "awsaccesskeyid": "A", "signature": "AAAA"}
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        % (_BOUNDARY, name.encode(), value.encode())
        for name, value in fields.items()
    ]
    head = b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    return b"".join([*parts, b"--" + _BOUNDARY + b"\r\n", head, b"data\r\n--" + _BOUNDARY + b"--"])


def _read_form(data: bytes) -> object:
    fields = form_data.Fields(_BOUNDARY)
    at = fields.feed(bytearray(data), len(data))
    assert at is None or 0 < at <= len(data)
    form_data.put_file_name(fields.found.get("key", ""), fields.file_name)
    return post_policy.verify(fields.found, "b", secret_of, _NOW, version_2=True)


TARGETS: Final = (
    Target("signature", lambda draw: draw.choice(_signed_requests()), _authenticate, _REFUSED),
    Target("signed chunks", _chunked_body, _decode_chunks, _REFUSED, (b"chunk-signature=",)),
    Target("request address", _target, _address, _REFUSED, (b"%2F", b"..", b"?acl", b"+")),
    Target(
        "document",
        _document,
        _parse_document,
        _REFUSED,
        (b"<a>", b"</a>", b"<![CDATA[", b"<!DOCTYPE a>"),
    ),
    Target("field", _field_line, _parse_field, _REFUSED, (b"bytes=", b"versionId=")),
    Target(
        "policy", _policy_document, _judge, _REFUSED, (b"${aws:username}", b"[]", b"{}", b"null")
    ),
    Target("form", _form, _read_form, _REFUSED, (b'name="file"', b"--xyz", b"filename*=")),
)
