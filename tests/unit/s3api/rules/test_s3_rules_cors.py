"""Cross-origin rules."""

from typing import Any

import pytest

from s3api.http.s3_errors import S3Error
from s3api.rules.cors import preflight, response_headers, validate

RULES: list[dict[str, Any]] = [
    {
        "AllowedMethods": ["PUT", "POST"],
        "AllowedOrigins": ["http://*.example.com"],
        "AllowedHeaders": ["x-amz-*", "Content-Type"],
        "ExposeHeaders": ["ETag", "x-amz-request-id"],
        "MaxAgeSeconds": 3000,
    },
    {"AllowedMethods": ["GET"], "AllowedOrigins": ["*"]},
]


def refused(*arguments: Any) -> tuple[str, int]:
    with pytest.raises(S3Error) as caught:
        preflight(*arguments)
    return caught.value.code, caught.value.status


def test_preflight() -> None:
    origin = "http://www.example.com"
    assert preflight(RULES, origin, "PUT", "X-Amz-Date, content-type") == {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "PUT, POST",
        "access-control-allow-headers": "x-amz-date, content-type",
        "access-control-expose-headers": "ETag, x-amz-request-id",
        "access-control-max-age": "3000",
        "access-control-allow-credentials": "true",
        "vary": "Origin, Access-Control-Request-Headers, Access-Control-Request-Method",
    }
    anywhere = preflight(RULES, "http://elsewhere", "GET", None)
    assert anywhere["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in anywhere


def test_refused_preflights() -> None:
    origin = "http://www.example.com"
    assert refused(RULES, None, "GET", None) == ("BadRequest", 400)
    assert refused(RULES, origin, None, None) == ("BadRequest", 400)
    assert refused(RULES, origin, "PATCH", None) == ("BadRequest", 400)
    assert refused(None, origin, "GET", None) == ("AccessForbidden", 403)
    assert refused(RULES, origin, "DELETE", None) == ("AccessForbidden", 403)
    assert refused(RULES, origin, "PUT", "x-other") == ("AccessForbidden", 403)
    assert refused(RULES, "http://example.org", "PUT", None) == ("AccessForbidden", 403)


def test_other_requests() -> None:
    found = response_headers(RULES, "http://www.example.com", "PUT")
    assert found["access-control-allow-origin"] == "http://www.example.com"
    assert response_headers(RULES, "http://example.org", "PUT") == {}
    assert response_headers([], "http://example.org", "GET") == {}


@pytest.mark.parametrize(
    ("pattern", "origin", "covered"),
    [
        ("*suffix", "foo.suffix", True),
        ("*suffix", "foo.suffix.get", False),
        ("start*end", "startend", True),
        ("start*end", "start1end", True),
        ("start*end", "xstart1end", False),
        ("prefix*", "prefix.suffix", True),
        ("prefix*", "bla.prefix", False),
        ("http://a?b", "http://axb", False),
        ("${*}", "*", False),
    ],
)
def test_origins(pattern: str, origin: str, covered: bool) -> None:
    rules = [{"AllowedMethods": ["GET"], "AllowedOrigins": [pattern]}]
    assert bool(response_headers(rules, origin, "GET")) is covered


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"AllowedMethods": []}, "MalformedXML"),
        ({"AllowedOrigins": []}, "MalformedXML"),
        ({"AllowedMethods": ["PATCH"]}, "InvalidRequest"),
        ({"AllowedMethods": ["get"]}, "InvalidRequest"),
        ({"AllowedOrigins": ["http://*.*"]}, "InvalidRequest"),
        ({"AllowedHeaders": ["*-*"]}, "InvalidRequest"),
        ({"ExposeHeaders": ["x-*"]}, "InvalidRequest"),
        ({"ExposeHeaders": ["x\r\nset-cookie: a"]}, "InvalidRequest"),
        ({"ExposeHeaders": ["x, y"]}, "InvalidRequest"),
        ({"ExposeHeaders": [""]}, "InvalidRequest"),
        ({"ID": "x" * 256}, "MalformedXML"),
        ({"MaxAgeSeconds": -1}, "MalformedXML"),
    ],
)
def test_validation(change: dict[str, Any], code: str | None) -> None:
    rules = [RULES[0] | change]
    if code is None:
        validate(rules)
        return
    with pytest.raises(S3Error) as caught:
        validate(rules)
    assert caught.value.code == code


def test_number_of_rules() -> None:
    validate(RULES * 50)
    for rules in ([], RULES * 51):
        with pytest.raises(S3Error) as caught:
            validate(rules)
        assert caught.value.code == "MalformedXML"
