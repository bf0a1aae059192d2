"""Signature version 2: presigned queries, and the Authorization header `AWS KEY:SIGNATURE`.

Source: "Authenticating Requests (AWS Signature Version 2)" of the S3 user guide. boto3 still
presigns so for custom endpoints. It signs the method, MD5 and type of the body, a date, the x-amz-*
headers, and the path with those parameters of the query that name another thing (sub-resources) or
change the answer. Neither the body nor other parameters are protected: parameters that could make
another operation of the request are refused.
"""

import re
from base64 import b64encode
from hmac import compare_digest, digest
from typing import Final

import msgspec

from s3api.auth.canonical import decode
from s3api.auth.signing_times import MAX_SKEW_S, parse_basic, parse_http, too_skewed
from s3api.auth.sigv4 import SignableRequest, expired, mismatch, unknown_key
from s3api.auth.verified import AuthType, SecretOf, Verified
from s3api.http.s3_errors import S3Error, invalid_argument
from s3api.model.routing import routes

SUBRESOURCES: Final = frozenset(
    b"accelerate acl analytics cors defaultObjectAcl delete inventory lifecycle location logging "
    b"metrics notification object-lock partNumber policy replication requestPayment "
    b"response-cache-control response-content-disposition response-content-encoding "
    b"response-content-language response-content-type response-expires restore select select-type "
    b"storageClass tagging torrent uploadId uploads versionId versioning versions website".split()
)
UNSIGNED: Final = frozenset(
    b"AWSAccessKeyId Expires Signature content-md5 content-type continuation-token delimiter "
    b"encoding-type fetch-owner id key-marker list-type marker max-buckets max-keys max-parts "
    b"max-uploads part-number-marker prefix start-after upload-id-marker "
    b"version-id-marker".split()
)
"""Parameters that limit a list or hold the signature; others that are not signed must mean
nothing."""
_MAX_DIGITS: Final = 18
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NAME: Final = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")  # of a header (RFC 9110, 5.6.2)
Query = list[tuple[bytes, bytes | None]]
"""Names as sent with decoded values; None if there is no `=`."""


def verify_query(
    request: SignableRequest, secret_of: SecretOf, now: float, bucket: bytes
) -> Verified:
    """Verifies a presigned query (AWSAccessKeyId, Expires, Signature). `bucket` is the one that the
    host names, b"" if the path does. Raises S3Error."""
    query = _query(request.query)
    values = {name: value or b"" for name, value in query}
    access_key, expires = values.get(b"AWSAccessKeyId", b""), values.get(b"Expires", b"")
    signature = values.get(b"Signature", b"")
    if not (access_key and expires and signature):
        raise S3Error(
            "AccessDenied",
            "Query-string authentication requires the Signature, Expires and AWSAccessKeyId "
            "parameters",
        )
    if not expires.isdigit() or len(expires) > _MAX_DIGITS:
        shown = expires.decode("ascii", "replace")
        raise S3Error("AccessDenied", f"Invalid date (should be seconds since epoch): {shown}")
    if now > int(expires):
        raise expired(min(int(expires), int(now)), now, {})
    headers = hoisted(request.query) | request.headers
    texts = _strings_to_sign(request, query, headers, expires, bucket)
    token = headers.get(b"x-amz-security-token", b"")
    verified = _verify(AuthType.QUERY, access_key, signature, texts, token, 0, secret_of)
    return msgspec.structs.replace(verified, valid_until=int(expires))


def verify_header(
    request: SignableRequest, secret_of: SecretOf, now: float, bucket: bytes
) -> Verified:
    """Verifies `Authorization: AWS KEY:SIGNATURE`; `bucket` as in `verify_query`. Raises
    S3Error."""
    headers = request.headers
    value = headers[b"authorization"]
    access_key, colon, signature = value.removeprefix(b"AWS ").strip().partition(b":")
    if not colon:
        raise invalid_argument(
            "Authorization",
            "AWS",
            "AWS authorization header is invalid. Expected AwsAccessKeyId:signature",
        )
    amazon_date = headers.get(b"x-amz-date")
    sent = headers.get(b"date", b"") if amazon_date is None else amazon_date
    signed_at = parse_http(sent) or parse_basic(sent)
    if signed_at is None:
        raise S3Error(
            "AccessDenied", "AWS authentication requires a valid Date or x-amz-date header"
        )
    if abs(now - signed_at) > MAX_SKEW_S:
        raise too_skewed(sent, now)
    date = sent if amazon_date is None else b""
    texts = _strings_to_sign(request, _query(request.query), headers, date, bucket)
    token = headers.get(b"x-amz-security-token", b"")
    return _verify(AuthType.HEADER, access_key, signature, texts, token, signed_at, secret_of)


def hoisted(query: bytes) -> dict[bytes, bytes]:
    """Returns the headers that a presigned query holds, by lower-case name. They are signed as
    headers are, and one that was sent replaces its namesake here: the signature is compared with
    the one sent, so that a header that differs from the signed one is refused.

    Raises InvalidArgument for a value that no header could have.
    """
    found: dict[bytes, bytes] = {}
    for part in query.split(b"&"):
        raw_name, _, raw_value = part.partition(b"=")
        name = decode(raw_name).lower()
        if name.startswith(b"x-amz-") or name in (b"content-type", b"content-md5"):
            # The last of one name counts, here and so both for the signature and for the operation.
            found[name] = value = decode(raw_value).strip()
            # A line break, or a colon in a name, would let what was signed as one value be taken
            # for other lines, or for the value of another name.
            if _NAME.fullmatch(name) is None or _CONTROL.search(value):
                shown = raw_name.decode("ascii", "backslashreplace")
                raise invalid_argument(shown, "", "No header has such a name, or such a value")
    return found


def sign(secret: bytes, text: bytes) -> bytes:
    """Returns base64 of the HMAC-SHA1."""
    return b64encode(digest(secret, text, "sha1"))


def _verify(
    auth_type: AuthType,
    access_key: bytes,
    signature: bytes,
    texts: list[bytes],
    token: bytes,
    signed_at: int,
    secret_of: SecretOf,
) -> Verified:
    name, session_token = access_key.decode("latin-1"), token.decode("latin-1")
    secret = secret_of(name, session_token)
    if secret is None:
        raise unknown_key(name)
    if not any(compare_digest(sign(secret, text), signature) for text in texts):
        raise mismatch(name, texts[0], signature)
    return Verified(
        access_key=name,
        auth_type=auth_type,
        version=2,
        signed_at=signed_at,
        session_token=session_token,
    )


def _query(query: bytes) -> Query:
    """Returns the parameters. Raises InvalidRequest for one that this version would not protect, or
    that would be signed as several."""
    parts = [part.partition(b"=") for part in query.split(b"&") if part]
    for name, _, _ in parts:
        shown = decode(name).decode("utf-8", "replace")
        if not (name in SUBRESOURCES or name in UNSIGNED) and routes().knows(shown):
            raise S3Error(
                "InvalidRequest",
                f"Signature version 2 does not cover the parameter '{shown}'. Please use "
                "AWS4-HMAC-SHA256.",
            )
    query_ = [(name, decode(value) if equals else None) for name, equals, value in parts]
    for name, value in query_:
        further = (value or b"").split(b"&")[1:]
        if name in SUBRESOURCES and any(x.partition(b"=")[0] in SUBRESOURCES for x in further):
            raise S3Error(
                "InvalidRequest",
                f"Signature version 2 cannot tell the value of '{name.decode()}' from further"
                " parameters. Please use AWS4-HMAC-SHA256.",
            )
    return query_


def _strings_to_sign(
    request: SignableRequest, query: Query, headers: dict[bytes, bytes], date: bytes, bucket: bytes
) -> list[bytes]:
    """Returns the strings that may have been signed: botocore signs `/bucket/` when it sends
    `/bucket`."""
    path = request.path or b"/"
    found = [_string_to_sign(request, path, query, headers, date, bucket)]
    if not bucket and path.find(b"/", 1) < 0 and path != b"/":
        found.append(_string_to_sign(request, path + b"/", query, headers, date, bucket))
    return found


def _string_to_sign(
    request: SignableRequest,
    path: bytes,
    query: Query,
    headers: dict[bytes, bytes],
    date: bytes,
    bucket: bytes,
) -> bytes:
    amazon = sorted(item for item in headers.items() if item[0].startswith(b"x-amz-"))
    resource = (b"/" + bucket if bucket else b"") + path
    chosen = sorted(
        ((name, value) for name, value in query if name in SUBRESOURCES),
        key=lambda each: (each[0], each[1] or b""),
    )
    parts = [name if value is None else b"%b=%b" % (name, value) for name, value in chosen]
    lines = (
        request.method,
        headers.get(b"content-md5", b"").strip(),
        headers.get(b"content-type", b"").strip(),
        date.strip(),
        *(b"%b:%b" % (name, value.strip()) for name, value in amazon),
        b"?".join((resource, b"&".join(parts))) if parts else resource,
    )
    return b"\n".join(lines)
