"""GetObject, HeadObject: bodies by sendfile, conditions, ranges, parts."""

import os
from collections.abc import Mapping
from typing import Final

import msgspec

from kvfs.http.api import Prepared, Response
from kvfs.objects.object_info import Facts
from s3api.http.request_context import Call, Handler, target
from s3api.http.response_cache import file_range, remember
from s3api.http.s3_errors import Headers, S3Error
from s3api.model.frequent_answers import object_headers
from s3api.model.time_formats import iso8601
from s3api.operations.answers import stored_headers
from s3api.operations.object.object_version import (
    expiration,
    find_to_tell,
    open_for_reading,
    version_id,
)
from s3api.operations.object.version_settings import retention_of
from s3api.rules import metadata
from s3api.rules import parts as kept_parts
from s3api.rules.access import actions
from s3api.rules.conditions import Conditions, is_not_modified
from s3api.rules.ranges import ByteRange, parse_range, part_range
from s3api.rules.tagging import parse_kept
from s3api.storage.bucket_settings import Settings

_CONDITIONS: Final = frozenset(("IfMatch", "IfNoneMatch", "IfModifiedSince", "IfUnmodifiedSince"))
_OF_A_PART: Final = frozenset(("Range", "PartNumber"))
_NOT_MODIFIED: Final = frozenset(
    (b"etag", b"last-modified", b"cache-control", b"expires", b"x-amz-version-id")
)
"""The headers of a 304."""


class _Shown(msgspec.Struct):
    """The headers of an object, kept with its facts, from which they follow."""

    settings: Settings
    checksums: bool
    """Whether checksums were asked for."""
    fields: Prepared


async def get_object(call: Call) -> Response:
    """Returns the object. The body is the data file's, sent by the kernel; replaced meanwhile, it
    is the old one to the end; changed in place meanwhile, the connection is reset."""
    opened = await open_for_reading(call)
    try:
        response, chosen = _answer(call, opened.facts)
    except BaseException:
        os.close(opened.fd)
        raise
    if response.status == 304:
        os.close(opened.fd)
    else:
        response.body = file_range(opened, chosen)
        if call.is_again:
            remember(call, opened, chosen, response)
    return response


async def head_object(call: Call) -> Response:
    """Does what GetObject does, without the body."""
    facts = await find_to_tell(call)
    response, chosen = _answer(call, facts)
    response.length = facts.size if chosen is None else chosen.length
    return response


def _answer(call: Call, facts: Facts) -> tuple[Response, ByteRange | None]:
    """Returns status and headers, and the bytes that they describe; None: all."""
    if "owner" in facts.metadata:
        needed = actions.needed_of_source(call.params.get("VersionId"))
        call.service.access.require_of_foreign(call, needed, facts)
    headers = _headers(call, facts)
    conditional = not _CONDITIONS.isdisjoint(call.params)
    if conditional and _is_not_modified(call, facts):
        return Response(304, [each for each in headers if each[0] in _NOT_MODIFIED]), None
    if _OF_A_PART.isdisjoint(call.params):
        return Response(200, headers), None
    chosen = _chosen(call, facts)
    if chosen is None:
        return Response(200, headers), None
    told = chosen.content_range(facts.size)
    further = [] if told is None else [(b"content-range", told.encode())]
    return Response(206, headers, further=further), chosen


def _is_not_modified(call: Call, facts: Facts) -> bool:
    """Returns whether the object is unmodified. Raises PreconditionFailed: it is another version
    than the caller wants."""
    try:
        return is_not_modified(Conditions.of(call.params), target(facts))
    except S3Error:
        call.store.misses.count("other_version")
        raise


def _chosen(call: Call, facts: Facts) -> ByteRange | None:
    """Returns the requested range; None: all of it."""
    number, asked = call.params.get("PartNumber"), call.params.get("Range")
    if number is not None:
        if asked is not None:
            raise S3Error("InvalidRequest", "Cannot specify both Range header and partNumber")
        return part_range(part_sizes(facts), number)
    return None if asked is None else parse_range(asked, facts.size)


def part_sizes(facts: Facts) -> list[int]:
    """Returns the sizes of the parts of the upload that made the object; for one that came whole,
    its own size."""
    sizes = kept_parts.sizes_of(facts.metadata)
    return sizes if sum(sizes) == facts.size and sizes else [facts.size]


def _headers(call: Call, facts: Facts) -> Headers:
    """Returns the headers of the answer. Those of most answers are kept; not if a parameter
    influences them."""
    params = call.params
    checksums = params.get("ChecksumMode") == "ENABLED" and "Range" not in params
    if call.asked.overrides or params.get("PartNumber") is not None:
        return _new_headers(call, facts, checksums)
    settings = call.settings
    entry = call.service.store.cache.entry((call.bucket.encode(), facts.key))
    if entry is None or entry.value is not facts:
        return _new_headers(call, facts, checksums)
    shown = entry.shown
    if isinstance(shown, _Shown) and shown.settings is settings and shown.checksums == checksums:
        return shown.fields
    fields = Prepared(_new_headers(call, facts, checksums))
    entry.shown = _Shown(settings, checksums, fields)
    return fields


def _new_headers(call: Call, facts: Facts, checksums: bool) -> Headers:
    kept = facts.metadata
    stored = stored_headers(kept, call.key)
    if call.asked.overrides:
        stored |= metadata.overrides(call.query, anonymous=call.is_anonymous)
    headers = object_headers(facts.etag, facts.mtime_ns, stored)
    if (version := version_id(call, facts)) is not None:
        headers.append((b"x-amz-version-id", version.encode()))
    if (told := expiration(call, facts)) is not None:
        headers.append((b"x-amz-expiration", told.encode()))
    if kept:
        _add_kept(call, facts, headers, checksums)
    return headers


def _add_kept(call: Call, facts: Facts, headers: Headers, checksums: bool) -> None:
    kept = facts.metadata
    if tags := kept.get("tagging"):
        headers.append((b"x-amz-tagging-count", b"%d" % len(parse_kept(tags))))
    if (retention := retention_of(facts)) is not None:
        until = iso8601(retention.until)
        headers.append((b"x-amz-object-lock-mode", retention.mode.encode()))
        headers.append((b"x-amz-object-lock-retain-until-date", until.encode()))
    if hold := kept.get("legal-hold"):
        headers.append((b"x-amz-object-lock-legal-hold", hold.encode()))
    if call.params.get("PartNumber") is not None and kept.get("parts"):
        headers.append((b"x-amz-mp-parts-count", b"%d" % len(part_sizes(facts))))
    if checksums:
        headers += _checksum_headers(kept, call.params.get("PartNumber"))


def _checksum_headers(kept: Mapping[str, str], part: int | None) -> Headers:
    """Returns the checksum that was stored with the object; for one part of it, that part's own."""
    told = {name: value for name, value in kept.items() if name.startswith("checksum.")}
    if part is not None and kept.get("parts"):
        own = dict(enumerate(kept_parts.checksums_of(kept), 1)).get(part)
        if own is None:
            return []
        told = {name: value if name == "checksum.type" else own for name, value in told.items()}
    return [(b"x-amz-" + name.replace(".", "-").encode(), told[name].encode()) for name in told]


HANDLERS: Final[dict[str, Handler]] = {"GetObject": get_object, "HeadObject": head_object}
