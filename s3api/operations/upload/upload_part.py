"""UploadPart and UploadPartCopy."""

import os
from functools import partial
from typing import Any, Final

import trio

from kvfs.http.api import Response
from kvfs.objects.multipart.upload_transactions import MAX_PARTS, Upload, UploadPart
from kvfs.objects.object_drafts import ObjectDraft
from s3api.http.body_receiver import Receiver
from s3api.http.buffer_pool import BUFFER_BYTES
from s3api.http.request_context import Call, Handler, moment
from s3api.http.s3_errors import S3Error, invalid_argument
from s3api.operations.answers import answer
from s3api.operations.long_running import WorkPace, answer_lasting
from s3api.operations.object.copy_object import Source, copied, search_source
from s3api.operations.upload.multipart import checksum_of
from s3api.rules.access import actions
from s3api.rules.checksums import Algorithm, Digests, FirstPass, WantedChecksum
from s3api.rules.ranges import ByteRange, parse_copy_range

PART_LIMIT_BYTES: Final = 5 << 30


async def upload_part(call: Call) -> Response:
    """Receives a part as an object is received. The upload's checksum is computed in any case, so
    that the object's can be combined from those of its parts."""
    number, upload = _number(call), _upload(call)
    algorithm, _, named = checksum_of(upload)
    receiver = Receiver(call, algorithm.name, besides=algorithm)
    _check_algorithm(receiver.wanted, algorithm if named else None)
    size = receiver.announced
    if size is None and not call.head.chunked:
        raise S3Error("MissingContentLength")
    if size is not None and size > PART_LIMIT_BYTES:
        raise S3Error("EntityTooLarge")
    draft = await _begin(call, upload, number, size or 0)
    try:
        digests = await receiver.into(draft)
        await _commit(call, draft, digests)
    except BaseException:
        await _discard(call, draft)
        raise
    return answer(call, _told(digests))


async def upload_part_copy(call: Call) -> Response:
    """Copies a part by the kernel; its bytes are read once for the part's checksum."""
    call.service.access.require(call, actions.needed(call.operation, call.params))
    number, upload = _number(call), _upload(call)
    await search_source(call)
    size = _chosen(call, Source(call).facts.size).length
    return await answer_lasting(call, partial(_copied, call, upload, number), size)


def _copied(call: Call, upload: Upload, number: int, pace: WorkPace) -> dict[str, Any]:
    """Returns the members of the answer. Blocking."""
    return copied(call, Source, lambda source: _copy(call, upload, number, source, pace))


def _copy(
    call: Call, upload: Upload, number: int, source: Source, pace: WorkPace
) -> dict[str, Any]:
    chosen, store = _chosen(call, source.facts.size), call.store
    size = chosen.length
    pace.begin(2 * size)  # copied, then read
    draft = store.uploads.begin_part(call.raw_bucket, call.raw_key, upload.id, number, size)
    try:
        store.uploads.copy_part(
            source.triple, draft, chosen.offset, size, check_source=source.check, step=pace.step
        )
        digests = _digests(call, draft, size, checksum_of(upload)[0], pace)
        part = store.uploads.commit_part(draft, digests.etag, _said(digests))
    finally:
        store.discard(draft)
    told = _told(digests) | {"LastModified": moment(part.inode.mtime_ns)}
    result: dict[str, Any] = {"CopyPartResult": told}
    if source.settings.versioning:
        result["CopySourceVersionId"] = source.facts.version
    return result


def _number(call: Call) -> int:
    number: int = call.params["PartNumber"]
    if not 1 <= number <= MAX_PARTS:
        raise invalid_argument(
            "partNumber",
            str(number),
            f"Part number must be an integer between 1 and {MAX_PARTS}, inclusive",
        )
    return number


def _upload(call: Call) -> Upload:
    return call.store.uploads.find(call.raw_bucket, call.raw_key, call.params["UploadId"])


def _check_algorithm(wanted: WantedChecksum, algorithm: Algorithm | None) -> None:
    """Checks that a part has the checksum that its upload was begun with."""
    if algorithm is not None and wanted.algorithm is not algorithm:
        raise S3Error(
            "InvalidRequest",
            f"Checksum Type mismatch occurred, expected checksum Type: {algorithm.name.lower()},"
            f" actual checksum Type: {wanted.algorithm.name.lower()}",
        )


def _chosen(call: Call, size: int) -> ByteRange:
    asked = call.params.get("CopySourceRange")
    chosen = ByteRange(0, size) if asked is None else parse_copy_range(asked, size)
    if chosen.length > PART_LIMIT_BYTES:
        raise S3Error(
            "InvalidRequest",
            "The specified copy source is larger than the maximum allowable size for a copy"
            f" source: {PART_LIMIT_BYTES}",
        )
    return chosen


async def _begin(call: Call, upload: Upload, number: int, size: int) -> ObjectDraft:
    return await call.blocking(
        lambda: call.store.uploads.begin_part(
            call.raw_bucket, call.raw_key, upload.id, number, size
        )
    )


async def _commit(call: Call, draft: ObjectDraft, digests: Digests) -> UploadPart:
    return await call.blocking(
        lambda: call.store.uploads.commit_part(draft, digests.etag, _said(digests))
    )


def _said(digests: Digests) -> dict[str, str]:
    """Returns the metadata that are kept with a part."""
    return {
        f"checksum.{each.algorithm.name.lower()}": each.value
        for each in (digests.checksum, digests.besides)
        if each is not None
    }


async def _discard(call: Call, draft: ObjectDraft) -> None:
    """Discards a draft. Cancelled: at its end."""
    with trio.CancelScope(shield=True):
        await call.blocking(lambda: call.store.discard(draft))


def _digests(
    call: Call, draft: ObjectDraft, size: int, algorithm: Algorithm, pace: WorkPace
) -> Digests:
    """Returns the digests of the bytes that were copied."""
    first_pass = FirstPass(WantedChecksum(algorithm), size=size)
    first_pass.tag(fast=draft.fast_etag)
    with call.service.buffers.lent() as buffer:
        at = 0
        while at < size:
            rest = buffer[: min(BUFFER_BYTES, size - at)]
            if not (count := os.preadv(draft.fd, [rest], draft.offset + at)):
                break
            first_pass.update(buffer[:count])
            at += count
            pace.step(at)
    return first_pass.finish({})


def _told(digests: Digests) -> dict[str, Any]:
    found = digests.checksum
    return {"ETag": f'"{digests.etag}"', found.algorithm.member: found.value}


HANDLERS: Final[dict[str, Handler]] = {
    "UploadPart": upload_part,
    "UploadPartCopy": upload_part_copy,
}
