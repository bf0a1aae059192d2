"""GetObject, HeadObject: bodies by sendfile, conditions, ranges, parts."""

import os
from datetime import UTC, datetime
from typing import Final

from kvfs.objects.finding import Facts
from kvfs.objects.opening import Opened
from kvfs.objects.problems import MarkedDeleted, NoSuchKey
from kvfs.wire.http import FileRange, Response
from s3api.call import Call, Handler, target
from s3api.errors import Headers, S3Error
from s3api.model.fast import object_headers
from s3api.operations.answers import stored_headers
from s3api.rules import lifecycle, metadata
from s3api.rules.conditions import Conditions, is_not_modified
from s3api.rules.ranges import ByteRange, parse_range, part_range
from s3api.rules.tagging import parse_header
from s3api.settings import LIFECYCLE


async def get_object(call: Call) -> Response:
    """The body is the data file's, sent by the kernel; replaced meanwhile, it is the old one to the
    end; changed in place meanwhile, the connection is reset."""
    opened = _open(call)
    try:
        response = _answer(call, opened.facts)
    except BaseException:
        os.close(opened.fd)
        raise
    if response.body is None and response.status != 304:
        chosen = _chosen(call, opened.facts) or ByteRange(0, opened.size)
        response.body = FileRange(
            opened.fd,
            chosen.offset,
            chosen.length,
            lambda: os.close(opened.fd),
            opened.is_unchanged,
        )
    else:
        os.close(opened.fd)
    return response


async def head_object(call: Call) -> Response:
    """As GetObject, without the body."""
    try:
        facts = call.store.find(call.raw_bucket, call.raw_key, call.version)
    except NoSuchKey as error:
        raise _absent(call, error) from None
    if facts.delete_marker:
        raise _marked(call, facts.version, facts.mtime_ns, latest=facts.latest)
    response = _answer(call, facts)
    chosen = _chosen(call, facts)
    response.length = facts.size if chosen is None else chosen.length
    return response


def _open(call: Call) -> Opened:
    try:
        return call.store.open(call.raw_bucket, call.raw_key, call.version)
    except MarkedDeleted as error:
        raise _marked(call, error.version, 0, latest=error.latest) from None
    except NoSuchKey as error:
        raise _absent(call, error) from None


def _absent(call: Call, error: NoSuchKey) -> S3Error:
    """That a key is missing is told to who may list the bucket."""
    if not call.service.access.allows(call, "s3:ListBucket"):
        return S3Error("AccessDenied")
    if isinstance(error, MarkedDeleted):
        return _marked(call, error.version, 0, latest=error.latest)
    return S3Error("NoSuchKey", extra={"Key": call.key})


def _marked(call: Call, version: str, mtime_ns: int, *, latest: bool) -> S3Error:
    """The answer to who asks for a delete marker: by its id it may not be read at all."""
    told = {"x-amz-delete-marker": "true", "x-amz-version-id": version}
    if latest and not call.version:
        return S3Error("NoSuchKey", extra={"Key": call.key}, headers=told)
    told["allow"] = "DELETE"
    return S3Error("MethodNotAllowed", headers=told)


def _answer(call: Call, facts: Facts) -> Response:
    """Status and headers."""
    conditions = Conditions.of(call.params)
    headers = _headers(call, facts)
    if conditions and is_not_modified(conditions, target(facts)):
        kept = (b"etag", b"last-modified", b"cache-control", b"expires", b"x-amz-version-id")
        return Response(304, [field for field in headers if field[0] in kept])
    chosen = _chosen(call, facts)
    if chosen is None:
        return Response(200, headers)
    if (told := chosen.content_range(facts.size)) is not None:
        headers.append((b"content-range", told.encode()))
    return Response(206, headers)


def _chosen(call: Call, facts: Facts) -> ByteRange | None:
    """The range that is asked for; None: all of it."""
    number, asked = call.params.get("PartNumber"), call.params.get("Range")
    if number is not None:
        if asked is not None:
            raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber")
        return part_range(part_sizes(facts), number)
    return None if asked is None else parse_range(asked, facts.size)


def part_sizes(facts: Facts) -> list[int]:
    """Of the upload that made the object; of one that came whole, its own size."""
    kept = facts.metadata.get("parts", "")
    return [int(size) for size in kept.split(",")] if kept else [facts.size]


def _headers(call: Call, facts: Facts) -> Headers:
    kept = facts.metadata
    stored = stored_headers(kept, call.key)
    if call.query:
        stored |= metadata.overrides(call.query, anonymous=call.is_anonymous)
    headers = object_headers(facts.etag, facts.mtime_ns, stored)
    if call.settings.versioning or facts.version != "null":
        headers.append((b"x-amz-version-id", facts.version.encode()))
    if (rules := call.settings.get(LIFECYCLE)) is not None:
        _add_expiration(headers, rules, facts)
    if kept:
        _add_kept(call, facts, headers)
    return headers


def _add_kept(call: Call, facts: Facts, headers: Headers) -> None:
    kept = facts.metadata
    if tags := kept.get("tagging"):
        headers.append((b"x-amz-tagging-count", b"%d" % len(parse_header(tags))))
    if retention := kept.get("retention"):
        mode, _, until = retention.partition(" ")
        moment = datetime.fromtimestamp(int(until), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        headers.append((b"x-amz-object-lock-mode", mode.encode()))
        headers.append((b"x-amz-object-lock-retain-until-date", moment.encode()))
    if kept.get("legal-hold") == "ON":
        headers.append((b"x-amz-object-lock-legal-hold", b"ON"))
    if call.params.get("PartNumber") is not None and kept.get("parts"):
        headers.append((b"x-amz-mp-parts-count", b"%d" % len(part_sizes(facts))))
    if call.params.get("ChecksumMode") == "ENABLED" and "Range" not in call.params:
        headers += checksum_headers(kept)


def checksum_headers(kept: dict[str, str]) -> Headers:
    """The checksum that was stored with the object."""
    return [
        (b"x-amz-checksum-" + name[9:].encode(), value.encode())
        for name, value in kept.items()
        if name.startswith("checksum.")
    ]


def _add_expiration(headers: Headers, rules: list[dict[str, object]], facts: Facts) -> None:
    told = lifecycle.expiration_header(rules, version_of(facts))
    if told is not None:
        headers.append((b"x-amz-expiration", told.encode()))


def version_of(facts: Facts) -> lifecycle.Version:
    """What lifecycle rules are held against."""
    return lifecycle.Version(
        key=facts.key.decode(),
        size=facts.size,
        tags=parse_header(facts.metadata.get("tagging", "")),
        modified=datetime.fromtimestamp(facts.mtime_ns / 1e9, UTC),
    )


HANDLERS: Final[dict[str, Handler]] = {"GetObject": get_object, "HeadObject": head_object}
