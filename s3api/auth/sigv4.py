"""Signature version 4: verification of the Authorization header and of presigned queries.

Sources: "Authenticating Requests (AWS Signature Version 4)" of the S3 API reference. A request is
signed for a date, region and service (its scope), over method, path, query, the headers it names
and a digest of the body, or its substitute (`Payload`). All x-amz-* headers and the host must be
among the signed.
"""

import re
from collections.abc import Callable
from hmac import compare_digest
from operator import itemgetter
from typing import Final

import msgspec

from s3api.auth.canonical import (
    canonical_path,
    canonical_query,
    canonical_request,
    decode,
    is_canonical_path,
    parameters,
)
from s3api.auth.scope import (
    MAX_CREDENTIAL,
    MAX_NAMES,
    Credential,
    Names,
    parse_credential,
    short_credential,
    short_names,
)
from s3api.auth.signing import (
    ALGORITHM,
    EMPTY_SHA256,
    signing_key,
    string_to_sign,
)
from s3api.auth.signing_times import (
    BASIC_LENGTH,
    MAX_SKEW_S,
    basic,
    extended,
    parse_basic,
    parse_http,
    short_basic,
    too_skewed,
)
from s3api.auth.verified import PAYLOADS, AuthType, Payload, SecretOf, Verified
from s3api.http.s3_errors import S3Error, invalid_argument

MAX_EXPIRES_S: Final = 7 * 24 * 3600
SERVICES: Final = frozenset((b"s3", b"sts"))
_usual_form: Final = re.compile(
    rb"AWS4-HMAC-SHA256 Credential=([^\s,]{1,%d}), ?" % MAX_CREDENTIAL
    + rb"SignedHeaders=([^\s,]+), ?Signature=([^\s,]{64})"
).fullmatch
"""The Authorization header as clients send it: `_fields` takes it in any order."""
_is_digest: Final = re.compile(rb"[0-9a-fA-F]{64}").fullmatch
_MAX_DIGITS: Final = 10
# Looking a member up in its enumeration costs 0.1 us and more each time.
_DIGEST: Final = Payload.DIGEST
_UNSIGNED: Final = Payload.UNSIGNED.value
_HEADER: Final = AuthType.HEADER
_QUERY: Final = AuthType.QUERY
_name_and_value: Final = itemgetter(0, 2)
_REQUIRED: Final = (
    b"X-Amz-Algorithm",
    b"X-Amz-Credential",
    b"X-Amz-Signature",
    b"X-Amz-Date",
    b"X-Amz-SignedHeaders",
    b"X-Amz-Expires",
)


class SignableRequest(msgspec.Struct):
    """The signed parts of a request: `path` and `query` as they were sent, headers by lower-case
    name."""

    method: bytes
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]


class SignedRequest(msgspec.Struct):
    """A signature with everything needed to compute it."""

    auth_type: AuthType
    credential: Credential
    names: tuple[bytes, ...]
    """The names of the signed headers, in the order in which they are signed."""
    signed_headers: frozenset[bytes]
    signature: bytes
    timestamp: bytes
    signed_at: int
    valid_until: int
    payload: bytes
    token: bytes


def verify_header(
    request: SignableRequest, secret_of: SecretOf, now: float, body_sha256: bytes
) -> Verified:
    """Verifies the Authorization header (there must be one), of any region.

    `body_sha256` is used if the request need not name its body's digest (service `sts`). Raises
    S3Error.
    """
    headers = request.headers
    usual = _usual_form(headers[b"authorization"])
    if usual is not None:
        credential_text, names_text, signature = usual.groups()
    else:
        fields = _fields(headers[b"authorization"])
        credential_text, names_text = fields[b"Credential"], fields[b"SignedHeaders"]
        signature = fields[b"Signature"]
    credential = short_credential(credential_text) if usual is not None else None
    if credential is None or credential.service not in SERVICES:
        credential = _credential(credential_text, _header_malformed)
    timestamp = headers.get(b"x-amz-date", b"")
    signed_at = short_basic(timestamp) if len(timestamp) == BASIC_LENGTH else None
    if signed_at is None:
        timestamp, signed_at = _header_time(headers)
    if abs(now - signed_at) > MAX_SKEW_S:
        raise too_skewed(timestamp, now)
    if timestamp[:8] != credential.date:
        raise _header_malformed("the date of the credential is not that of the request")
    names, signed_headers = _names(names_text, headers, _header_malformed)
    payload = headers.get(b"x-amz-content-sha256")
    signed = SignedRequest(
        _HEADER,
        credential,
        names,
        signed_headers,
        signature,
        timestamp,
        signed_at,
        signed_at + MAX_SKEW_S,
        _unnamed_payload(credential.service, body_sha256)
        if payload is None
        else b" ".join(payload.split()),
        headers.get(b"x-amz-security-token", b""),
    )
    query = request.query and canonical_query(parameters(request.query))
    return _verify(request, query, signed, secret_of)


def verify_query(request: SignableRequest, secret_of: SecretOf, now: float) -> Verified:
    """Verifies a presigned query, of any region. Raises S3Error."""
    sent = parameters(request.query)
    values: dict[bytes, bytes] = dict(map(_name_and_value, sent))
    _check_required(values)
    credential = _credential(values[b"X-Amz-Credential"], _query_malformed)
    timestamp = values[b"X-Amz-Date"]
    signed_at, valid_until = _check_period(values, credential, now)
    names, signed_headers = _names(
        values[b"X-Amz-SignedHeaders"], request.headers, _query_malformed
    )
    payload = values.get(b"X-Amz-Content-Sha256") or request.headers.get(b"x-amz-content-sha256")
    signed = SignedRequest(
        _QUERY,
        credential,
        names,
        signed_headers,
        values[b"X-Amz-Signature"],
        timestamp,
        signed_at,
        valid_until,
        payload or _UNSIGNED,
        decode(values.get(b"X-Amz-Security-Token", b""))
        or request.headers.get(b"x-amz-security-token", b""),
    )
    sent.remove((b"X-Amz-Signature", b"=", signed.signature))
    return _verify(request, canonical_query(sent), signed, secret_of)


def _verify(
    request: SignableRequest, query: bytes, signed: SignedRequest, secret_of: SecretOf
) -> Verified:
    credential, payload = signed.credential, signed.payload
    mode = PAYLOADS.get(payload, _DIGEST)
    if mode is _DIGEST and not _is_digest(payload):
        raise invalid_argument(
            "x-amz-content-sha256",
            payload.decode("ascii", "replace"),
            "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, STREAMING-UNSIGNED-PAYLOAD-TRAILER, "
            "STREAMING-AWS4-HMAC-SHA256-PAYLOAD, STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER or a "
            "valid sha256 value.",
        )
    token = signed.token.decode("latin-1")
    secret = secret_of(credential.access_key, token)
    if secret is None:
        raise unknown_key(credential.access_key)
    key = signing_key(secret, credential.date, credential.region, credential.service)
    path = request.path
    if not is_canonical_path(path):
        path = canonical_path(path)
    canonical = canonical_request(
        request.method, path, query, signed.names, request.headers, payload
    )
    text = string_to_sign(signed.timestamp, credential.scope, canonical)
    if not compare_digest(key.sign(text), signed.signature):
        raise mismatch(credential.access_key, text, signed.signature)
    return Verified(
        access_key=credential.access_key,
        auth_type=signed.auth_type,
        version=4,
        signed_at=signed.signed_at,
        session_token=token,
        service=credential.service,
        payload=mode,
        payload_sha256=payload.lower() if mode is _DIGEST else b"",
        signed_headers=signed.signed_headers,
        timestamp=signed.timestamp,
        scope=credential.scope,
        signing_key=key,
        signature=signed.signature,
        valid_from=signed.signed_at - MAX_SKEW_S,
        valid_until=signed.valid_until,
    )


def unknown_key(access_key: str) -> S3Error:
    return S3Error("InvalidAccessKeyId", extra={"AWSAccessKeyId": access_key})


def mismatch(access_key: str, text: bytes, signature: bytes) -> S3Error:
    """Returns SignatureDoesNotMatch with what we signed. The canonical request is left out: it may
    hold the keys of customers."""
    return S3Error(
        "SignatureDoesNotMatch",
        extra={
            "AWSAccessKeyId": access_key,
            "StringToSign": text.decode("utf-8", "replace"),
            "SignatureProvided": signature.decode("utf-8", "replace"),
        },
    )


def _header_malformed(reason: str) -> S3Error:
    return S3Error(
        "AuthorizationHeaderMalformed", f"The authorization header is malformed; {reason}."
    )


def _query_malformed(reason: str) -> S3Error:
    return S3Error(
        "AuthorizationQueryParametersError",
        f"The authorization parameters of the query are malformed; {reason}.",
    )


def _fields(header: bytes) -> dict[bytes, bytes]:
    fields = {}
    for part in header[len(ALGORITHM) :].split(b","):
        name, _, value = part.strip().partition(b"=")
        fields[name] = value
    if not (fields.get(b"Credential") and fields.get(b"SignedHeaders")):
        raise _header_malformed("the Credential or the SignedHeaders are missing")
    if len(fields.get(b"Signature", b"")) != 64:
        raise _header_malformed("the Signature is missing or has not 64 hexadecimal digits")
    return fields


def _credential(text: bytes, malformed: Callable[[str], S3Error]) -> Credential:
    credential = parse_credential(text)
    if credential is None:
        raise malformed("the Credential must be KEY/YYYYMMDD/REGION/SERVICE/aws4_request")
    if credential.service not in SERVICES:
        raise malformed("the service of the Credential must be s3")
    return credential


def _header_time(headers: dict[bytes, bytes]) -> tuple[bytes, int]:
    timestamp = headers.get(b"x-amz-date")
    if timestamp is not None:
        signed_at = parse_basic(timestamp)
    else:
        signed_at = parse_http(headers.get(b"date", b""))
        timestamp = basic(signed_at or 0)
    if signed_at is None:
        raise S3Error(
            "AccessDenied", "AWS authentication requires a valid Date or x-amz-date header"
        )
    return timestamp, signed_at


def _names(text: bytes, headers: dict[bytes, bytes], malformed: Callable[[str], S3Error]) -> Names:
    """Returns the signed headers; raises if one that must be signed is not."""
    split = short_names(text) if len(text) <= MAX_NAMES else None
    if split is None:
        raise malformed("the SignedHeaders must be names in lower case with ';' between")
    names, signed = split
    missing = [] if b"host" in signed else [b"host"]
    for name in headers.keys() - signed:
        if name.startswith(b"x-amz-"):
            missing.append(name)  # noqa: PERF401 -- costs a call in each request
    if missing:
        raise S3Error(
            "AccessDenied",
            "There were headers present in the request which were not signed",
            extra={"HeadersNotSigned": b", ".join(sorted(missing)).decode("latin-1")},
        )
    return names, signed


def _unnamed_payload(service: bytes, body_sha256: bytes) -> bytes:
    if service == b"s3":
        raise S3Error(
            "InvalidRequest", "Missing required header for this request: x-amz-content-sha256"
        )
    return body_sha256 or EMPTY_SHA256


def _check_required(values: dict[bytes, bytes]) -> None:
    if not all(map(values.get, _REQUIRED)):
        raise _query_error(
            "Query-string authentication version 4 requires the X-Amz-Algorithm, X-Amz-Credential, "
            "X-Amz-Signature, X-Amz-Date, X-Amz-SignedHeaders, and X-Amz-Expires parameters."
        )
    if values[b"X-Amz-Algorithm"] != ALGORITHM:
        raise _query_error('X-Amz-Algorithm only supports "AWS4-HMAC-SHA256"')


def _check_period(
    values: dict[bytes, bytes], credential: Credential, now: float
) -> tuple[int, int]:
    """Returns when the URL was signed, and until when it is valid; raises if it is not valid
    now."""
    signed_at = parse_basic(values[b"X-Amz-Date"])
    if signed_at is None:
        raise _query_error("X-Amz-Date must be in the ISO8601 Long Format \"yyyyMMdd'T'HHmmss'Z'\"")
    if values[b"X-Amz-Date"][:8] != credential.date:
        raise _query_malformed("the date of the credential is not that of X-Amz-Date")
    expires_s = _expires(values[b"X-Amz-Expires"])
    if now > signed_at + expires_s:
        raise expired(signed_at + expires_s, now, {"X-Amz-Expires": str(expires_s)})
    if signed_at - now > MAX_SKEW_S:
        raise S3Error("AccessDenied", "Request is not valid yet")
    return signed_at, signed_at + expires_s


def expired(until: int, now: float, extra: dict[str, str]) -> S3Error:
    """Returns AccessDenied, for a presigned URL whose time is over."""
    times = {"Expires": extended(until), "ServerTime": extended(now)}
    return S3Error("AccessDenied", "Request has expired", extra=extra | times)


def _expires(text: bytes) -> int:
    """Parses the duration. Numbers out of range are refused with 403, which public suites expect,
    as expired ones."""
    if text.isdigit() and len(text) <= _MAX_DIGITS and 1 <= int(text) <= MAX_EXPIRES_S:
        return int(text)
    if text.startswith(b"-"):
        raise _query_error("X-Amz-Expires must be non-negative", 403)
    if not text.isdigit():
        raise _query_error("X-Amz-Expires should be a number")
    raise _query_error(
        f"X-Amz-Expires must be at least 1 and less than a week (in seconds): {MAX_EXPIRES_S}",
        403,
    )


def _query_error(message: str, status: int = 400) -> S3Error:
    return S3Error("AuthorizationQueryParametersError", message, status)
