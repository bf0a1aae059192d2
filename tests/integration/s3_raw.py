"""Signed requests as a test wants them, that boto3 would not send."""

import hashlib
import http.client
from collections.abc import Mapping
from typing import NamedTuple
from xml.etree import ElementTree as ET

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.integration.s3 import REGION, S3


class Answer(NamedTuple):
    """What came back; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """Of an error's document."""
        return ET.fromstring(self.body).findtext("Code") or ""


def ask(
    s3: S3,
    method: str,
    target: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    user: str | None = "main",
    unsigned: Mapping[str, str | None] | None = None,
) -> Answer:
    """Send one request; `target` is the path and query as they go over the wire, `unsigned` are
    headers that are added after signing (None as value takes one away)."""
    request = AWSRequest(method, s3.endpoint + target, dict(headers or {}), body)
    request.headers["x-amz-content-sha256"] = hashlib.sha256(body).hexdigest()
    if user is not None:
        pair = s3.users[user]
        # Paths are signed as they stand.
        keys = Credentials(pair.access_key, pair.secret)
        S3SigV4Auth(keys, "s3", REGION).add_auth(request)
    fields: dict[str, str | None] = {**dict(request.headers.items()), **(unsigned or {})}
    connection = http.client.HTTPConnection(s3.host, s3.port, timeout=30)
    try:
        connection.putrequest(method, target, skip_host="Host" in fields, skip_accept_encoding=True)
        if (
            "Content-Length" not in fields
            and "Transfer-Encoding" not in fields
            and (body or method in ("PUT", "POST"))
        ):
            fields["Content-Length"] = str(len(body))
        for name, value in fields.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(body or None)
        response = connection.getresponse()
        told = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, told, response.read())
    finally:
        connection.close()
