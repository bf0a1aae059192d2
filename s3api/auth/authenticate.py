"""Authentication of a request: finds the signature that it carries, and verifies it. The only
entrance for requests.

Forms (POST) carry theirs in the body: `post_policy`.
"""

from s3api.auth import sigv2, sigv4
from s3api.auth.canonical import Headers, by_name
from s3api.auth.sigv4 import SignableRequest
from s3api.auth.verified import SecretOf, Verified
from s3api.http.s3_errors import S3Error


def authenticate(
    method: str,
    target: bytes,
    headers: Headers,
    secret_of: SecretOf,
    now: float,
    *,
    version_2: bool = False,
    host_bucket: bytes = b"",
    body_sha256: bytes = b"",
) -> Verified | None:
    """Returns the signer of the request; None: nobody, it is anonymous.

    `target` is path and query as sent, `headers` have lower-case names, `now` is in seconds since
    the epoch. The region may be any. `version_2` allows signature version 2, for which
    `host_bucket` is the bucket that the host names (b"": the path does). `body_sha256`
    (hexadecimal) is for requests of STS, whose headers do not have it. Raises S3Error.
    """
    path, _, query = target.partition(b"?")
    fields = dict(headers)
    if len(fields) != len(headers):
        fields = by_name(headers)
    request = SignableRequest(method.encode(), path, query, fields)
    authorization = fields.get(b"authorization")
    if query and is_presigned(query):
        if authorization:
            raise _not_single()
        return sigv4.verify_query(request, secret_of, now)
    if query and _is_version_2(query):
        if authorization:
            raise _not_single()
        _check_allowed(version_2)
        return sigv2.verify_query(request, secret_of, now, host_bucket)
    if not authorization:
        return None
    if authorization.startswith(b"AWS4-HMAC-SHA256 "):
        return sigv4.verify_header(request, secret_of, now, body_sha256)
    if authorization.startswith(b"AWS "):
        _check_allowed(version_2)
        return sigv2.verify_header(request, secret_of, now, host_bucket)
    raise _unsupported(authorization)


def hoisted(query: bytes) -> dict[bytes, bytes]:
    """Returns the headers that presigning of version 2 moved into a query: those that
    `authenticate` verifies as headers, and nothing if it verifies no such query. Raises
    InvalidArgument."""
    if _is_version_2(query) and not is_presigned(query):
        return sigv2.hoisted(query)
    return {}


def is_presigned(query: bytes) -> bool:
    """Returns whether `authenticate` verifies a signature of version 4 in the query: by names as
    they are sent, since no client escapes these."""
    return b"X-Amz-" in query and (
        b"X-Amz-Algorithm=" in query
        or b"X-Amz-Signature=" in query
        or b"X-Amz-Credential=" in query
    )


def _is_version_2(query: bytes) -> bool:
    return b"Signature=" in query and b"AWSAccessKeyId=" in query


def _not_single() -> S3Error:
    return S3Error(
        "InvalidArgument",
        "Only one auth mechanism allowed; only the X-Amz-Algorithm query parameter, Signature "
        "query string parameter or the Authorization header should be specified",
        extra={"ArgumentName": "Authorization"},
    )


def _check_allowed(version_2: bool) -> None:
    if not version_2:
        raise S3Error(
            "InvalidRequest",
            "The authorization mechanism you have provided is not supported. Please use "
            "AWS4-HMAC-SHA256.",
        )


def _unsupported(authorization: bytes) -> S3Error:
    if authorization.startswith(b"AWS4-"):
        return S3Error("UnsupportedSignature")
    return S3Error(
        "InvalidArgument",
        "Unsupported Authorization Type",
        extra={"ArgumentName": "Authorization"},
    )
