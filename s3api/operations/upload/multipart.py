"""Uploads in parts: begin, list, abort."""

from typing import Any, Final
from urllib.parse import quote

from kvfs.http.api import Response
from kvfs.objects.multipart.upload_transactions import Upload, UploadPart
from s3api.auth.authorization import INITIATOR
from s3api.http.request_context import Call, Handler, moment
from s3api.http.s3_errors import invalid_argument
from s3api.model.serialising import url_encode
from s3api.operations.answers import answer
from s3api.operations.object.put_object import said_of_new
from s3api.rules import checksums, lifecycle
from s3api.rules.checksums import Algorithm
from s3api.storage.bucket_settings import LIFECYCLE

_MOST: Final = 1000
"""Parts or uploads in one answer."""
_ALGORITHM: Final = "upload.algorithm"
_TYPE: Final = "upload.type"
_OWN: Final = "upload."


async def create_multipart_upload(call: Call) -> Response:
    """Begins an upload. The metadata in the request are those of the final object."""
    asked, type_ = call.params.get("ChecksumAlgorithm"), call.params.get("ChecksumType")
    algorithm, type_ = checksums.multipart_type(asked, type_)
    said = said_of_new(call)
    said[INITIATOR] = call.caller.name or ""
    if asked is not None:
        said |= {_ALGORITHM: algorithm.name, _TYPE: type_}
    upload = await call.blocking(
        lambda: call.store.uploads.create(call.raw_bucket, call.raw_key, said)
    )
    result = {"Bucket": call.bucket, "Key": call.key, "UploadId": upload.id}
    return answer(call, result | told_checksum(upload) | _told_end(call, upload))


async def abort_multipart_upload(call: Call) -> Response:
    """Drops the upload with all its parts; a part that still comes is dropped at its end."""
    upload_id = call.params["UploadId"]
    await call.blocking(lambda: call.store.uploads.abort(call.raw_bucket, call.raw_key, upload_id))
    return answer(call)


async def list_parts(call: Call) -> Response:
    limit = min(call.params.get("MaxParts", _MOST), _MOST)
    after = call.params.get("PartNumberMarker", 0)
    after = _whole("part-number-marker", after)
    upload, parts, more = call.store.uploads.list_parts(
        call.raw_bucket, call.raw_key, call.params["UploadId"], after, limit
    )
    result: dict[str, Any] = {
        "Bucket": call.bucket,
        "Key": call.key,
        "UploadId": upload.id,
        "PartNumberMarker": after,
        "NextPartNumberMarker": parts[-1].number if parts else 0,
        "MaxParts": limit,
        "IsTruncated": more,
        "Parts": [_told_part(upload, part) for part in parts],
        "StorageClass": "STANDARD",
    }
    result |= _told_people(call, upload) | told_checksum(upload)
    return answer(call, result | _told_end(call, upload))


async def list_multipart_uploads(call: Call) -> Response:
    """Lists uploads in the order of keys, then of their beginning."""
    asked = call.params
    limit = min(asked.get("MaxUploads", _MOST), _MOST)
    after = asked.get("KeyMarker", "")
    after_id = asked.get("UploadIdMarker", "") if after else ""
    page = call.store.uploads.list_all(
        call.raw_bucket,
        prefix=_raw(asked.get("Prefix", "")),
        delimiter=_raw(asked.get("Delimiter", "")),
        start_after=_raw(after),
        start_id=after_id,
        max_uploads=limit,
    )
    encoding = asked.get("EncodingType")
    shown = url_encode if encoding else str
    result: dict[str, Any] = {
        "Bucket": call.bucket,
        "KeyMarker": shown(after),
        "UploadIdMarker": after_id,
        "NextKeyMarker": shown(_text(page.following)),
        "NextUploadIdMarker": page.following_id,
        "MaxUploads": limit,
        "IsTruncated": page.truncated,
        "Uploads": [
            {
                "UploadId": upload.id,
                "Key": shown(_text(upload.key)),
                "Initiated": moment(upload.begun_ns),
                "StorageClass": "STANDARD",
                **_told_people(call, upload),
                **told_checksum(upload),
            }
            for upload in page.uploads
        ],
        "CommonPrefixes": [{"Prefix": shown(_text(each))} for each in page.prefixes],
        "EncodingType": encoding,
    }
    for name in ("Prefix", "Delimiter"):
        if name in asked:
            result[name] = shown(asked[name])
    return answer(call, result)


def checksum_of(upload: Upload) -> tuple[Algorithm, str, bool]:
    """Returns algorithm and type of an upload's checksum, and whether its beginner named them."""
    named = upload.metadata.get(_ALGORITHM)
    if named is None:
        return *checksums.multipart_type(None, None), False
    return checksums.algorithm(named), upload.metadata[_TYPE], True


def said_of_object(upload: Upload) -> dict[str, str]:
    """Returns the metadata that were given for the object when the upload was begun."""
    return {name: value for name, value in upload.metadata.items() if not name.startswith(_OWN)}


def told_checksum(upload: Upload) -> dict[str, str]:
    """Returns algorithm and type as members of an answer; empty if nobody named them."""
    algorithm, type_, named = checksum_of(upload)
    return {"ChecksumAlgorithm": algorithm.name, "ChecksumType": type_} if named else {}


def _told_part(upload: Upload, part: UploadPart) -> dict[str, Any]:
    algorithm, _, named = checksum_of(upload)
    told: dict[str, Any] = {
        "PartNumber": part.number,
        "LastModified": moment(part.inode.mtime_ns),
        "ETag": f'"{part.etag}"',
        "Size": part.size,
    }
    value = part.metadata.get(f"checksum.{algorithm.name.lower()}")
    return told | {algorithm.member: value} if named else told


def _told_end(call: Call, upload: Upload) -> dict[str, Any]:
    """Returns when a rule of the bucket's lifecycle ends the upload; empty if none does."""
    rules = call.settings.get(LIFECYCLE)
    if rules is None:
        return {}
    found = lifecycle.upload_expiry(rules, call.key, moment(upload.begun_ns))
    if found is None:
        return {}
    # A rule may have any name, and a header holds no line break.
    return {"AbortDate": found[0], "AbortRuleId": quote(found[1], safe="")}


def _told_people(call: Call, upload: Upload) -> dict[str, dict[str, str]]:
    owner = upload.metadata.get("owner") or call.owner
    initiator = upload.metadata.get(INITIATOR) or "anonymous"
    return {
        "Owner": {"ID": owner, "DisplayName": owner},
        "Initiator": {"ID": initiator, "DisplayName": initiator},
    }


def _whole(name: str, value: object) -> int:
    """Returns a number that the model has as text."""
    text = str(value)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise invalid_argument(name, text)
    return int(text)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


HANDLERS: Final[dict[str, Handler]] = {
    "AbortMultipartUpload": abort_multipart_upload,
    "CreateMultipartUpload": create_multipart_upload,
    "ListMultipartUploads": list_multipart_uploads,
    "ListParts": list_parts,
}
