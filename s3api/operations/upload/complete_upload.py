"""CompleteMultipartUpload: the object is assembled, or not at all."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from kvfs.http.api import Response
from kvfs.objects.multipart.upload_transactions import (
    MAX_PARTS,
    CompletedPart,
    Upload,
    UploadPart,
)
from kvfs.objects.mutations import ENABLED
from kvfs.objects.object_errors import InvalidPart, NoSuchUpload
from kvfs.objects.object_info import Facts
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.long_running import WorkPace, answer_lasting
from s3api.operations.object.object_version import expiration, search
from s3api.operations.object.put_object import check_of
from s3api.operations.upload.multipart import checksum_of, said_of_object
from s3api.rules import checksums, etag
from s3api.rules import parts as kept_parts
from s3api.rules.checksums import ALGORITHMS, COMPOSITE, StoredChecksum
from s3api.rules.conditions import WRITE_CONDITIONS, Conditions


async def complete_multipart_upload(call: Call) -> Response:
    """Completes an upload. Repeated within the hour it gives the same answer."""
    if not WRITE_CONDITIONS.isdisjoint(call.params):
        await search(call, [call.key])
    return await answer_lasting(call, partial(_complete, call), outlives_client=True)


def _complete(call: Call, pace: WorkPace) -> dict[str, Any]:
    """Returns the members of the answer. Blocking."""
    call.look_again()
    wanted = _wanted(call)
    upload_id = call.params["UploadId"]
    try:
        upload, parts = call.store.uploads.choose_parts(
            call.raw_bucket, call.raw_key, upload_id, wanted
        )
        pace.begin(sum(part.size for part in parts))
        return _told(call, _put_together(call, upload, parts, pace))
    except (NoSuchUpload, InvalidPart):
        # Another may have completed it, just now or before.
        done = call.store.uploads.completed(call.raw_bucket, call.raw_key, upload_id)
        if done is None:
            raise
        return _told_again(call, *done)


def _put_together(call: Call, upload: Upload, parts: Sequence[UploadPart], pace: WorkPace) -> Facts:
    conditions = Conditions.of(call.params)
    check = check_of(conditions)
    checksum = _checksum(call, upload, parts)
    _check_size(call, parts)
    if conditions:
        (found,) = call.store.find_many(call.raw_bucket, [call.raw_key])
        check(found)  # before all is put together for nothing; it counts when it is put
    _, _, named = checksum_of(upload)
    said = said_of_object(upload) | _said_of_parts(checksum, parts, with_each=named)
    return call.store.uploads.complete(
        call.raw_bucket,
        upload,
        parts,
        etag.multipart_etag([part.etag for part in parts]),
        said,
        versioning=call.settings.versioning,
        check=check,
        step=pace.step,
    )


def _wanted(call: Call) -> list[CompletedPart]:
    """Returns the parts that the request names. Raises MalformedXML."""
    asked = (call.params.get("MultipartUpload") or {}).get("Parts") or []
    if not 0 < len(asked) <= MAX_PARTS:
        raise S3Error("MalformedXML")
    return [_wanted_part(each) for each in asked]


def _wanted_part(asked: Mapping[str, Any]) -> CompletedPart:
    number, tag = asked.get("PartNumber"), asked.get("ETag")
    if number is None or tag is None:
        raise S3Error("MalformedXML")
    for each in ALGORITHMS.values():
        if (value := asked.get(each.member)) is not None:
            return CompletedPart(number, tag.strip().strip('"'), (_attribute(each.name), value))
    return CompletedPart(number, tag.strip().strip('"'))


def _checksum(call: Call, upload: Upload, parts: Sequence[UploadPart]) -> StoredChecksum | None:
    """Returns the checksum of the object, compared with the client's. Raises S3Error."""
    algorithm, type_, named = checksum_of(upload)
    given = {
        each.name: call.params[each.member]
        for each in ALGORITHMS.values()
        if each.member in call.params
    }
    said_type = call.params.get("ChecksumType")
    if named and said_type not in (None, type_):
        raise S3Error(
            "InvalidRequest",
            f"The upload was created using the {type_} checksum mode. The complete request must use"
            " the same checksum mode.",
        )
    if not named and given and algorithm.name not in given:
        algorithm = ALGORITHMS[next(iter(given))]
        type_ = said_type or algorithm.types[0]
        checksums.check_type(algorithm, type_)
    if set(given) - {algorithm.name}:
        raise S3Error("InvalidRequest", "The checksum is of another algorithm than the upload's")
    values = [part.metadata.get(_attribute(algorithm.name)) for part in parts]
    if None in values:
        if given:
            raise S3Error("InvalidRequest", f"The parts have no {algorithm.name} checksum")
        return None
    pairs = [(value or "", part.size) for value, part in zip(values, parts, strict=True)]
    computed = checksums.whole(algorithm, type_, pairs)
    checksums.check_whole(computed, given.get(algorithm.name))
    return computed


def _check_size(call: Call, parts: Sequence[UploadPart]) -> None:
    said, size = call.params.get("MpuObjectSize"), sum(part.size for part in parts)
    if said is not None and int(said) != size:
        raise S3Error(
            "InvalidRequest",
            f"The provided 'x-amz-mp-object-size' header value {said} does not match what was"
            f" computed: {size}",
        )


def _said_of_parts(
    checksum: StoredChecksum | None, parts: Sequence[UploadPart], *, with_each: bool
) -> dict[str, str]:
    sizes = [part.size for part in parts]
    if checksum is None:
        return kept_parts.attributes(sizes)
    name = _attribute(checksum.algorithm.name)
    with_each = with_each or checksum.type == COMPOSITE
    values = [part.metadata[name] for part in parts] if with_each else []
    said = kept_parts.attributes(sizes, values)
    return said | {name: checksum.value, "checksum.type": checksum.type}


def _attribute(algorithm: str) -> str:
    return f"checksum.{algorithm.lower()}"


def _told(call: Call, facts: Facts) -> dict[str, Any]:
    told = _result(call, facts.etag, facts.version) | {"Expiration": expiration(call, facts)}
    kept = facts.metadata
    for each in ALGORITHMS.values():
        if (value := kept.get(_attribute(each.name))) is not None:
            told |= {each.member: value, "ChecksumType": kept.get("checksum.type")}
    return told


def _told_again(call: Call, tag: str, version: str) -> dict[str, Any]:
    (found,) = call.store.find_many(call.raw_bucket, [call.raw_key])
    if found is not None and (found.etag, found.version) == (tag, version):
        return _told(call, found)
    return _result(call, tag, version)  # it was replaced since


def _result(call: Call, tag: str, version: str) -> dict[str, Any]:
    host = (call.head.get(b"host") or b"").decode("latin-1")
    path = call.head.target.partition(b"?")[0].decode("latin-1")
    scheme = "https" if call.head.secure else "http"
    told = {
        "Location": f"{scheme}://{host}{path}",
        "Bucket": call.bucket,
        "Key": call.key,
        "ETag": f'"{tag}"',
    }
    return told | {"VersionId": version} if call.settings.versioning == ENABLED else told


HANDLERS: Final[dict[str, Handler]] = {"CompleteMultipartUpload": complete_multipart_upload}
