"""Cross-origin requests: the rule of a bucket that allows one, and the headers that tell it.

A configuration is a list of rules in botocore's names (CORSRule). Rules and messages follow
https://docs.aws.amazon.com/AmazonS3/latest/userguide/ManageCorsUsing.html.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from s3api.http.s3_errors import S3Error
from s3api.rules.access.glob import literal, matches

_RULES: Final = 100
_ID_CHARACTERS: Final = 255
_METHODS: Final = frozenset({"GET", "PUT", "POST", "DELETE", "HEAD"})
_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'+.^_`|~-]+")
"""The name of a header (RFC 9110, 5.6.2), without the star."""
_VARY: Final = "Origin, Access-Control-Request-Headers, Access-Control-Request-Method"

Rules = Sequence[Mapping[str, Any]]


def validate(rules: Rules) -> None:
    """Raises MalformedXML or InvalidRequest if S3 would not accept the rules."""
    if not 0 < len(rules) <= _RULES:
        raise S3Error("MalformedXML")
    for rule in rules:
        _validate_rule(rule)


def preflight(
    rules: Rules | None, origin: str | None, method: str | None, headers: str | None
) -> dict[str, str]:
    """Returns the headers of the answer to OPTIONS with these `Origin`,
    `Access-Control-Request-Method` and `-Headers`; `rules` is None for a bucket without. Raises
    BadRequest, AccessForbidden."""
    if origin is None:
        raise S3Error("BadRequest", "Insufficient information. Origin request header needed.")
    if method not in _METHODS:
        raise S3Error("BadRequest", f"Invalid Access-Control-Request-Method: {method or 'null'}")
    if rules is None:
        raise S3Error("AccessForbidden", "CORSResponse: CORS is not enabled for this bucket.")
    asked = [each.strip().lower() for each in (headers or "").split(",") if each.strip()]
    for rule in rules:
        if _allows(rule, origin, method) and _allows_headers(rule, asked):
            answer = _answer(rule, origin)
            if asked:
                answer["access-control-allow-headers"] = ", ".join(asked)
            return answer
    raise S3Error(
        "AccessForbidden",
        "CORSResponse: This CORS request is not allowed. This is usually because the evaluation of"
        " Origin, request method / Access-Control-Request-Method or Access-Control-Request-Headers"
        " are not whitelisted by the resource's CORS spec.",
    )


def response_headers(rules: Rules, origin: str, method: str) -> dict[str, str]:
    """Returns the headers to add to the answer to any other request; none if no rule allows it."""
    for rule in rules:
        if _allows(rule, origin, method):
            return _answer(rule, origin)
    return {}


def _allows(rule: Mapping[str, Any], origin: str, method: str) -> bool:
    return method in rule["AllowedMethods"] and _origin(rule, origin) is not None


def _origin(rule: Mapping[str, Any], origin: str) -> str | None:
    """Returns the rule's origin that covers `origin`."""
    return next((each for each in rule["AllowedOrigins"] if _covers(each, origin)), None)


def _allows_headers(rule: Mapping[str, Any], asked: Iterable[str]) -> bool:
    allowed = [each.lower() for each in rule.get("AllowedHeaders", ())]
    return all(any(_covers(each, header) for each in allowed) for header in asked)


def _covers(pattern: str, text: str) -> bool:
    """Returns whether the pattern covers the text. The star is the only wildcard of CORS."""
    return matches("*".join(literal(part) for part in pattern.split("*")), text)


def _answer(rule: Mapping[str, Any], origin: str) -> dict[str, str]:
    anybody = _origin(rule, origin) == "*"
    answer = {
        "access-control-allow-origin": "*" if anybody else origin,
        "access-control-allow-methods": ", ".join(rule["AllowedMethods"]),
        "vary": _VARY,
    }
    if rule.get("ExposeHeaders"):
        answer["access-control-expose-headers"] = ", ".join(rule["ExposeHeaders"])
    if rule.get("MaxAgeSeconds") is not None:
        answer["access-control-max-age"] = str(rule["MaxAgeSeconds"])
    if not anybody:
        answer["access-control-allow-credentials"] = "true"
    return answer


def _validate_rule(rule: Mapping[str, Any]) -> None:
    if not rule.get("AllowedMethods") or not rule.get("AllowedOrigins"):
        raise S3Error("MalformedXML")
    if len(rule.get("ID", "")) > _ID_CHARACTERS or rule.get("MaxAgeSeconds", 0) < 0:
        raise S3Error("MalformedXML")
    for method in rule["AllowedMethods"]:
        if method not in _METHODS:
            raise _invalid(
                f"Found unsupported HTTP method in CORS config. Unsupported method is {method}"
            )
    for member, singular in (
        ("AllowedOrigins", "AllowedOrigin"),
        ("AllowedHeaders", "AllowedHeader"),
    ):
        for pattern in rule.get(member, ()):
            if pattern.count("*") > 1:
                raise _invalid(f'{singular} "{pattern}" can not have more than one wildcard.')
    for header in rule.get("ExposeHeaders", ()):
        if "*" in header:
            raise _invalid(
                f'ExposeHeader "{header}" contains wildcard. We currently do not support wildcard'
                " for ExposeHeader."
            )
        if not _NAME.fullmatch(header):
            raise _invalid(f'ExposeHeader "{header}" is no name of a header.')


def _invalid(message: str) -> S3Error:
    return S3Error("InvalidRequest", message)
