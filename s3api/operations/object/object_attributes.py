"""Facts about an object, without its bytes: GetObjectAttributes; and RestoreObject, which finds
nothing to restore."""

from typing import Any, Final

from kvfs.http.api import Response
from kvfs.objects.object_info import Facts
from s3api.http.request_context import Call, Handler, moment
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer, checksum_members
from s3api.operations.object.object_version import find_anywhere, find_to_tell, version_id
from s3api.rules import parts as kept_parts
from s3api.rules.checksums import ALGORITHMS
from s3api.rules.metadata import STORAGE_CLASS

PARTS_LIMIT: Final = 1000


async def get_object_attributes(call: Call) -> Response:
    """Returns the requested attributes; ObjectParts only for an object that was uploaded in
    parts."""
    asked = call.params["ObjectAttributes"]
    facts = await find_to_tell(call) if "ETag" in asked else await find_anywhere(call)
    told: dict[str, Any] = {
        "LastModified": moment(facts.mtime_ns),
        "VersionId": version_id(call, facts),
    }
    if "ETag" in asked:
        told["ETag"] = facts.etag
    if "Checksum" in asked:
        told["Checksum"] = checksum_members(facts.metadata) or None
    if "ObjectParts" in asked and (sizes := kept_parts.sizes_of(facts.metadata)):
        told["ObjectParts"] = _page(call, facts, sizes)
    if "StorageClass" in asked:
        told["StorageClass"] = STORAGE_CLASS
    if "ObjectSize" in asked:
        told["ObjectSize"] = facts.size
    return answer(call, told)


def _page(call: Call, facts: Facts, sizes: list[int]) -> dict[str, Any]:
    limit = min(call.params.get("MaxParts", PARTS_LIMIT), PARTS_LIMIT)
    marker = call.params.get("PartNumberMarker", 0)
    last = max(min(marker + limit, len(sizes)), 0)
    checksums = kept_parts.checksums_of(facts.metadata)
    member = _member(facts)
    shown = []
    for number in range(marker + 1, last + 1):
        part: dict[str, Any] = {"PartNumber": number, "Size": sizes[number - 1]}
        if member and number <= len(checksums):
            part[member] = checksums[number - 1]
        shown.append(part)
    return {
        "TotalPartsCount": len(sizes),
        "PartNumberMarker": marker,
        "NextPartNumberMarker": last,
        "MaxParts": limit,
        "IsTruncated": 0 < last < len(sizes),
        "Parts": shown,
    }


def _member(facts: Facts) -> str:
    """Returns the member of a checksum in the object's algorithm."""
    kept = (each for each in ALGORITHMS.values() if each.kept_as in facts.metadata)
    return next((each.member for each in kept), "")


async def restore_object(call: Call) -> Response:
    """Restores nothing: there is one storage class, and nothing is archived."""
    await find_anywhere(call)
    raise S3Error(
        "InvalidObjectState",
        "Restore is not allowed for the object's current storage class",
        extra={"StorageClass": STORAGE_CLASS},
    )


HANDLERS: Final[dict[str, Handler]] = {
    "GetObjectAttributes": get_object_attributes,
    "RestoreObject": restore_object,
}
