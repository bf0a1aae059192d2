"""Presigned URLs of signature version 4: requests that any holder of the URL may make."""

from collections.abc import Iterable
from typing import Final

from s3api.auth.canonical import canonical_query, canonical_request, encode, encode_path
from s3api.auth.signing import ALGORITHM, TERMINATOR, signing_key, string_to_sign
from s3api.auth.signing_times import basic
from s3api.auth.sigv4 import MAX_EXPIRES_S
from s3api.auth.verified import Payload

_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


def presign(
    method: str,
    endpoint: str,
    path: bytes,
    access_key: str,
    secret: str,
    *,
    region: str,
    now: float,
    expires_s: int,
    query: Iterable[tuple[bytes, bytes]] = (),
    headers: Iterable[tuple[str, str]] = (),
    session_token: str = "",
) -> str:
    """Returns the URL.

    `endpoint` is `https://host[:port]`; `path` is /bucket/key, not encoded, as are the parameters
    of `query`; `headers` (lower-case names) must be sent with the request as they are signed. `now`
    is in seconds since the epoch. Raises ValueError if `expires_s` is not in 1..604800.
    """
    if not 1 <= expires_s <= MAX_EXPIRES_S:
        raise ValueError(f"a presigned URL is valid for 1 to {MAX_EXPIRES_S} s, not {expires_s}")
    scheme, _, host = endpoint.rstrip("/").partition("://")
    signed = {name.encode(): value.encode() for name, value in headers}
    signed[b"host"] = host.removesuffix(_DEFAULT_PORTS.get(scheme, "")).encode()
    names = sorted(signed)
    timestamp = basic(now)
    scope = b"/".join((timestamp[:8], region.encode(), b"s3", TERMINATOR))
    parameters = [
        *query,
        (b"X-Amz-Algorithm", ALGORITHM),
        (b"X-Amz-Credential", access_key.encode() + b"/" + scope),
        (b"X-Amz-Date", timestamp),
        (b"X-Amz-Expires", b"%d" % expires_s),
        (b"X-Amz-SignedHeaders", b";".join(names)),
    ]
    if session_token:
        parameters.append((b"X-Amz-Security-Token", session_token.encode()))
    encoded = canonical_query((encode(name), b"=", encode(value)) for name, value in parameters)
    quoted = encode_path(path)
    request = canonical_request(
        method.encode(), quoted, encoded, names, signed, Payload.UNSIGNED.value
    )
    key = signing_key(secret.encode(), timestamp[:8], region.encode(), b"s3")
    signature = key.sign(string_to_sign(timestamp, scope, request))
    url = b"%b?%b&X-Amz-Signature=%b" % (quoted, encoded, signature)
    return f"{scheme}://{host}{url.decode()}"
