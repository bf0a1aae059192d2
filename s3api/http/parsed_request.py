"""A request, parsed from its head alone: pure, so equal heads ask for the same.

The result is kept with its head, if the server says that equal heads are likely (`Head.memo`): the
client of a presigned URL sends the same head each time. The other facts that an answer depends on
(the time, the holder of the key, policies, the object) are looked up anew each time.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvfs.http.api import Head
from s3api.auth.authenticate import hoisted, is_presigned
from s3api.auth.verified import Verified
from s3api.model.addressing import address, split_target, with_hoisted
from s3api.model.routing import STS, route

_FORM: Final = b"application/x-www-form-urlencoded"


class Attested(msgspec.Struct):
    """A signature that was right for a secret."""

    verified: Verified
    secret: bytes

    def __repr__(self) -> str:
        return f"Attested({self.verified!r})"


class Asked(msgspec.Struct):
    """The request of one head, or of all that are equal. `bucket` and `key` are empty if it names
    none."""

    operation: str
    bucket: str
    key: str
    query: Mapping[str, str]
    fields: Mapping[bytes, bytes]
    """The same as `Call.fields`."""
    about_encryption: bool
    """Whether a header is about server-side encryption."""
    overrides: bool
    """Whether a parameter sets a header of the answer."""
    params: Mapping[str, Any] | None = None
    """The parameters of the operation, except its document; None: not parsed yet."""
    attested: Attested | None = None
    """None: not verified yet, or nobody signed it."""
    answered: object = None
    """See `response_cache`."""


def asked_of(head: Head, domains: tuple[str, ...]) -> Asked:
    """Returns the request of a head. Raises S3Error."""
    memo = head.memo
    if memo is None:
        return _asked(head, domains)
    if not isinstance(memo.value, Asked):
        memo.value = _asked(head, domains)
    return memo.value


def _asked(head: Head, domains: tuple[str, ...]) -> Asked:
    path, _, sent = head.target.partition(b"?")
    query: dict[str, str] = {}
    fields = head.fields
    if sent:
        _, query = split_target(head.target)
        if moved := hoisted(sent):
            for name in (b"content-type", b"content-md5"):
                if name in moved:  # a header now, and no operation has such a parameter
                    query.pop(name.decode(), None)
            fields = {**moved, **fields}
        if "X-Amz-Signature" in query and is_presigned(sent):
            fields = with_hoisted(fields, query)
    bucket, key = address(path, head.fields.get(b"host", b"").decode("latin-1"), domains)
    if bucket is None and _is_for_sts(head):
        operation = STS
    else:
        operation = route(head.method, bucket, key, query, fields)
    encrypted = b"-server-side-encryption" in b"".join(fields)
    overrides = "response-" in "\n".join(query) and any(
        name.startswith("response-") for name in query
    )
    return Asked(operation, bucket or "", key or "", query, fields, encrypted, overrides)


def _is_for_sts(head: Head) -> bool:
    """Returns whether a request to the service itself is one of STS."""
    content_type = head.get(b"content-type") or b""
    return head.method == "POST" and content_type.lower().startswith(_FORM)
