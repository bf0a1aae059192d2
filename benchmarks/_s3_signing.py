"""Headers of requests that are signed in their header, as clients do: those of botocore."""

import uuid
from typing import Final

from s3api.auth.canonical import canonical_request
from s3api.auth.signing import ALGORITHM, TERMINATOR, signing_key, string_to_sign
from s3api.auth.signing_times import basic
from s3api.auth.verified import Payload

REGION: Final = "us-east-1"
SKEW_S: Final = 600
"""Seconds that the times of requests may be apart for all of them to be taken for some minutes."""


def signed_headers(
    address: tuple[str, int], keys: tuple[str, str], method: str, path: str, now: float
) -> dict[str, str]:
    """The headers of a request for `path`, which needs no escapes; without Content-Length. `keys`
    are access key and secret, `now` is in seconds since the epoch."""
    access_key, secret = keys
    timestamp = basic(now)
    signed = {
        b"amz-sdk-invocation-id": str(uuid.uuid4()).encode(),
        b"amz-sdk-request": b"attempt=1",
        b"host": "{}:{}".format(*address).encode(),
        b"x-amz-content-sha256": Payload.UNSIGNED.value,
        b"x-amz-date": timestamp,
    }
    if method == "GET":
        signed[b"x-amz-checksum-mode"] = b"ENABLED"
    names = sorted(signed)
    scope = b"/".join((timestamp[:8], REGION.encode(), b"s3", TERMINATOR))
    request = canonical_request(
        method.encode(), path.encode(), b"", names, signed, Payload.UNSIGNED.value
    )
    signature = signing_key(secret.encode(), timestamp[:8], REGION.encode(), b"s3").sign(
        string_to_sign(timestamp, scope, request)
    )
    authorization = b"%b Credential=%b/%b, SignedHeaders=%b, Signature=%b" % (
        *(ALGORITHM, access_key.encode(), scope, b";".join(names), signature),
    )
    return {
        **{name.decode().replace("host", "Host"): v.decode() for name, v in signed.items()},
        "Accept-Encoding": "identity",
        "User-Agent": "Boto3/1.40 md/Botocore#1.40 ua/2.1",
        "Authorization": authorization.decode(),
    }
