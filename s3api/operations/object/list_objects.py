"""ListObjects, ListObjectsV2, ListObjectVersions: keys in the order of their bytes."""

import base64
import binascii
import re
from functools import partial
from typing import Any, Final

from kvfs.http.api import Response
from kvfs.objects.listing import ListedObject, ListingPage
from kvfs.tree.name_escaping import NUL
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error, invalid_argument
from s3api.model import frequent_answers
from s3api.model.serialising import url_encode
from s3api.operations.object.object_version import settled

KEYS_LIMIT: Final = 1000
_is_same_decoded: Final = re.compile(r"[^%+\x00-\x08\x0b-\x1f\x7f\ufffe\uffff]*").fullmatch


async def list_objects(call: Call) -> Response:
    """Lists by the first version of the operation. `NextMarker` is told only with a delimiter, as
    S3 does: without one it is the last key."""
    asked = _Asked(call)
    marker = call.params.get("Marker", "")
    page = await _page(call, asked, _after(marker))
    members = asked.members | {"Marker": asked.shown(marker), "IsTruncated": page.truncated}
    members["Prefix"] = _prefix_of_v1(members["Prefix"], call.params.get("Prefix", ""))
    if page.truncated and asked.delimiter:
        members["NextMarker"] = asked.shown(page.following.decode())
    return _answer(call, members, page.objects, page.prefixes, asked, owned=True)


async def list_objects_v2(call: Call) -> Response:
    """Lists by the second version, which continues by an opaque token."""
    asked = _Asked(call)
    token, start_after = call.params.get("ContinuationToken"), call.params.get("StartAfter")
    start = _from_token(token) if token else _after(start_after or "")
    page = await _page(call, asked, start)
    members = asked.members | {
        "IsTruncated": page.truncated,
        "KeyCount": len(page.objects) + len(page.prefixes),
        "ContinuationToken": token,
    }
    if start_after is not None:
        members["StartAfter"] = asked.shown(start_after)
    if page.truncated:
        members["NextContinuationToken"] = _to_token(page.following)
    owned = bool(call.params.get("FetchOwner"))
    return _answer(call, members, page.objects, page.prefixes, asked, owned=owned)


async def list_object_versions(call: Call) -> Response:
    """Lists versions and delete markers in one order: by key, those of a key newest first."""
    asked = _Asked(call)
    marker, version = call.params.get("KeyMarker", ""), call.params.get("VersionIdMarker", "")
    if version and not marker:
        message = "A version-id marker cannot be specified without a key marker."
        raise invalid_argument("version-id-marker", version, message)
    look = partial(
        call.store.list_versions,
        call.raw_bucket,
        prefix=asked.prefix,
        delimiter=asked.delimiter,
        start_after=_after(marker),
        start_version=version,
        max_keys=asked.limit,
    )
    page = await call.blocking(look)
    if page.awaited:
        page = await settled(call, look, lambda page: page.awaited)
    members = asked.members | {
        "KeyMarker": asked.shown(marker),
        "VersionIdMarker": version,
        "IsTruncated": page.truncated,
    }
    if page.truncated:
        members["NextKeyMarker"] = asked.shown(page.following.decode())
        members["NextVersionIdMarker"] = page.following_version or None
    return Response(
        *frequent_answers.versions_answer(
            members, page.versions, page.prefixes, url=asked.url, owner=call.owner
        )
    )


class _Asked:
    """The parameters that the three have in common, and their form in the answer."""

    def __init__(self, call: Call) -> None:
        params = call.params
        self.url = params.get("EncodingType") == "url"
        self.limit = min(params.get("MaxKeys", KEYS_LIMIT), KEYS_LIMIT)
        self.prefix: bytes = params.get("Prefix", "").encode()
        self.delimiter: bytes = params.get("Delimiter", "").encode()
        if self.delimiter and call.query.get("allow-unordered") == "true":
            message = "allow-unordered cannot be specified with a delimiter."
            raise invalid_argument("allow-unordered", "true", message)
        if NUL in self.prefix:
            self.limit = 0  # no key holds one; what the store keeps beside objects does
        self.members: dict[str, Any] = {
            "Name": call.bucket,
            "Prefix": self.shown(params.get("Prefix", "")),
            "Delimiter": self.shown(params.get("Delimiter", "")) or None,
            "MaxKeys": min(params.get("MaxKeys", KEYS_LIMIT), KEYS_LIMIT),
            "EncodingType": params.get("EncodingType"),
        }

    def shown(self, text: str) -> str:
        """Returns a name as the client wants it written."""
        return url_encode(text) if self.url else text


def _answer(
    call: Call,
    members: dict[str, Any],
    objects: list[ListedObject],
    prefixes: list[bytes],
    asked: _Asked,
    *,
    owned: bool,
) -> Response:
    owner = {"DisplayName": call.owner, "ID": call.owner} if owned else None
    return Response(
        *frequent_answers.list_answer(
            call.operation, members, objects, prefixes, url=asked.url, owner=owner
        )
    )


def _prefix_of_v1(encoded: str, plain: str) -> str:
    """Returns the prefix for this version, which some clients decode and some (botocore) do not: it
    is encoded if decoding would change it, or XML cannot hold it."""
    return plain if _is_same_decoded(plain) else encoded


async def _page(call: Call, asked: _Asked, start_after: bytes) -> ListingPage:
    look = partial(
        call.store.list_objects,
        call.raw_bucket,
        prefix=asked.prefix,
        delimiter=asked.delimiter,
        start_after=start_after,
        max_keys=asked.limit,
    )
    page = await call.blocking(look)
    return await settled(call, look, lambda page: page.awaited) if page.awaited else page


def _after(marker: str) -> bytes:
    """Returns the start of a list; for a marker that no key can be, the last one that is not beyond
    it."""
    return marker.encode().partition(NUL)[0]


def _to_token(following: bytes) -> str:
    return base64.urlsafe_b64encode(following).decode()


def _from_token(token: str) -> bytes:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise S3Error(
            "InvalidArgument",
            "The continuation token provided is incorrect",
            extra={"ArgumentName": "continuation-token"},
        ) from None


HANDLERS: Final[dict[str, Handler]] = {
    "ListObjectVersions": list_object_versions,
    "ListObjects": list_objects,
    "ListObjectsV2": list_objects_v2,
}
