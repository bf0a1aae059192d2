"""Requests signed by botocore, in the form in which a server sees them."""

import re
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from botocore.auth import (
    HmacV1Auth,
    HmacV1QueryAuth,
    S3SigV4Auth,
    S3SigV4QueryAuth,
    SigV4Auth,
)
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from s3api.auth.authenticate import authenticate
from s3api.auth.verified import Verified

ACCESS_KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
HOST = "s3.example.org:9000"
Sent = tuple[str, bytes, list[tuple[bytes, bytes]]]
"""Method, target, headers."""


def secret_of(access_key: str, _token: str) -> bytes | None:
    return SECRET.encode() if access_key == ACCESS_KEY else None


def sent(request: AWSRequest) -> Sent:
    """A signed request as it goes over the wire."""
    prepared = request.prepare()
    parts = urlsplit(prepared.url)
    target = parts.path.encode() + (b"?" + parts.query.encode() if parts.query else b"")
    headers = [(b"host", parts.netloc.encode())]
    for name, value in prepared.headers.items():
        data = value if isinstance(value, bytes) else value.encode()
        headers.append((name.lower().encode(), data))
    return request.method, target, headers


def signed(
    signer: str,
    method: str = "GET",
    path: str = "/bucket/key",
    headers: dict[str, str] | None = None,
    token: str | None = None,
    body: bytes = b"",
    region: str = "us-east-1",
) -> Sent:
    """A request signed by botocore's `signer`."""
    request = AWSRequest(method, f"http://{HOST}{path}", headers=headers or {}, data=body)
    credentials = Credentials(ACCESS_KEY, SECRET, token)
    make: dict[str, Callable[[], object]] = {
        "v4": lambda: S3SigV4Auth(credentials, "s3", region).add_auth(request),
        "v4-query": lambda: S3SigV4QueryAuth(credentials, "s3", region, 600).add_auth(request),
        "sts": lambda: SigV4Auth(credentials, "sts", region).add_auth(request),
        "v2": lambda: HmacV1Auth(credentials).add_auth(request),
        "v2-query": lambda: HmacV1QueryAuth(credentials, 600).add_auth(request),
    }
    make[signer]()
    if signer == "v2":
        # http.client sends the date that was signed.
        assert re.search("GMT", request.headers["Date"])
    return sent(request)


def check(request: Sent, now: float | None = None, version_2: bool = True) -> Verified | None:
    method, target, headers = request
    return authenticate(
        method,
        target,
        headers,
        secret_of,
        time.time() if now is None else now,
        version_2=version_2,
    )
