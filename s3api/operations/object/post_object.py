"""PostObject: uploads that browsers make with a form, signed by a policy or unsigned.

Its fields mean what the headers of PutObject mean; so they become those, and the request is handled
like a PutObject. The file goes from the receive buffer into a draft.
"""

import mmap
import os
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec
import trio

from kvfs.http.api import BadChunk, Response
from kvfs.objects.object_info import Facts
from s3api.auth import post_policy
from s3api.auth.post_policy import Bounds
from s3api.http.body_receiver import FAILURES, told_as_s3
from s3api.http.request_context import Call
from s3api.http.s3_errors import DECLARATION, Headers, S3Error
from s3api.model.addressing import KEY_LIMIT_BYTES
from s3api.model.documents import DOCUMENT_LIMIT_BYTES
from s3api.model.form_data import Fields, boundary_of, put_file_name
from s3api.model.parsing import parse
from s3api.model.xml import escape_text
from s3api.operations.answers import answer
from s3api.operations.object.put_object import (
    PUT_LIMIT_BYTES,
    checksum_attributes,
    put_result,
    said_of_new,
)
from s3api.rules import checksums, tagging
from s3api.rules.access import actions
from s3api.rules.checksums import Digests, FirstPass
from s3api.rules.encryption import check_headers

_INLINE_BYTES: Final = 64 << 10
_PUT: Final = "PutObject"
# Field -> header of PutObject.
_HEADERS: Final = {
    "acl": b"x-amz-acl",
    "cache-control": b"cache-control",
    "content-disposition": b"content-disposition",
    "content-encoding": b"content-encoding",
    "content-language": b"content-language",
    "content-md5": b"content-md5",
    "content-type": b"content-type",
    "expires": b"expires",
}
_OF_BROWSER: Final = (b"referer", b"user-agent")
"""Headers of the request itself that policies may ask about."""
_OF_SIGNATURE: Final = frozenset(
    f"x-amz-{name}" for name in ("algorithm", "credential", "date", "security-token", "signature")
)


async def post_object(call: Call) -> Response:
    """Puts the file under the form's key, if the form's policy and the caller's permissions allow
    all its fields."""
    with call.service.buffers.lent() as buffer:
        upload = _Upload(call, buffer)
        form = await upload.fields()
        put, bounds = _as_put(call, form, upload.file_name)
        call.service.access.require(put, actions.needed(_PUT, put.params))
        # Who it is came after the head: before, the node did not begin to follow the bucket.
        await call.service.freshness.before(put.raw_bucket, _PUT)
        facts, digests = await _put(put, upload, bounds)
    return _answer(put, form, facts, digests)


class _Upload:
    """The body of the request, in a reused buffer."""

    def __init__(self, call: Call, buffer: memoryview) -> None:
        self._call = call
        self._fields = Fields(boundary_of(call.fields.get(b"content-type", b"")))
        self._view = buffer
        data = buffer.obj
        assert isinstance(data, mmap.mmap)
        self._data = data
        self._start = self._end = 0

    @property
    def file_name(self) -> str:
        return self._fields.file_name

    async def fields(self) -> Mapping[str, str]:
        """Returns the fields before the file, by name in lower case. Raises S3Error."""
        while True:
            await self._receive()
            begin = self._fields.feed(self._data, self._end)
            if begin is not None:
                self._start = begin
                return self._fields.found

    async def file(self) -> AsyncIterator[memoryview]:
        """Yields the file, in views that are good until the next one. Raises S3Error."""
        delimiter = self._fields.delimiter
        while (close := self._data.find(delimiter, self._start, self._end)) < 0:
            # What may be the beginning of the delimiter waits for the rest.
            known = max(self._start, self._end - len(delimiter) + 1)
            if known > self._start:
                yield self._view[self._start : known]
            kept = self._end - known
            self._view[:kept] = bytes(self._view[known : self._end])
            self._start, self._end = 0, kept
            await self._receive()
        if close > self._start:
            yield self._view[self._start : close]

    async def _receive(self) -> None:
        try:
            count = await self._call.body.receive_into(self._view[self._end :])
        except BadChunk:
            raise S3Error("MalformedPOSTRequest") from None
        except FAILURES as error:
            raise told_as_s3(error) from None
        if not count:
            raise S3Error("MalformedPOSTRequest")
        self._end += count


def _as_put(call: Call, form: Mapping[str, str], file_name: str) -> tuple[Call, Bounds]:
    """Returns the request as the PutObject that it stands for, and the limits of the file's
    length."""
    if not form.get("key"):
        raise S3Error("UserKeyMustBeSpecified")
    form = {**form, "key": put_file_name(form["key"], file_name)}
    key = form["key"]
    if len(key.encode()) > KEY_LIMIT_BYTES:
        raise S3Error("KeyTooLongError")
    check_headers(form, encrypted=call.service.encrypted)
    fields = _as_headers(form)
    params = parse(_PUT, call.bucket, key, {}, fields)
    said = {name: call.fields[name] for name in _OF_BROWSER if name in call.fields}
    put = msgspec.structs.replace(
        call, operation=_PUT, key=key, fields=said | fields, params=params
    )
    signed = post_policy.verify(
        form,
        call.bucket,
        call.service.identities.secret_of,
        call.now.timestamp(),
        version_2=call.service.version_2,
    )
    if signed is None:
        return put, Bounds()
    put.sign(signed.verified)
    return put, signed.bounds


def _as_headers(form: Mapping[str, str]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in form.items():
        if header := _HEADERS.get(name):
            headers[header] = value.encode()
        elif name.startswith("x-amz-") and name not in _OF_SIGNATURE:
            headers[name.encode()] = value.encode()
    if document := form.get("tagging"):
        headers[b"x-amz-tagging"] = _tags(document).encode()
    return headers


def _tags(document: str) -> str:
    """Returns the header's form of the Tagging document in a field."""
    body = document.encode()
    if len(body) > DOCUMENT_LIMIT_BYTES:
        raise S3Error("MalformedXML")
    tags = parse("PutObjectTagging", "", "", {}, {}, body)["Tagging"]
    return tagging.encode(tagging.parse_document(tags))


async def _put(call: Call, upload: _Upload, bounds: Bounds) -> tuple[Facts, Digests]:
    headers = call.headers()
    first_pass = FirstPass(
        checksums.wanted(headers),
        size=call.head.content_length,  # a little more than the file's
        content_md5=checksums.content_md5(headers.get("content-md5")),
    )
    said = said_of_new(call)
    draft = await call.blocking(lambda: call.store.begin(call.raw_bucket, call.raw_key, 0))
    try:
        length = 0
        first_pass.tag(fast=draft.fast_etag)
        async for view in upload.file():
            _check_longest(bounds, length + len(view))
            await call.blocking(partial(call.store.grow, draft, length + len(view)))
            step = partial(_write, draft.fd, view, length, first_pass)
            if len(view) <= _INLINE_BYTES:
                step()
            else:
                await call.blocking(step)
            length += len(view)
        bounds.check(length)
        digests = first_pass.finish({})
        said |= checksum_attributes(digests)
        call.look_again()  # as PutObject does
        facts = await call.committing(
            lambda later: call.store.commit(
                draft, digests.etag, said, versioning=call.settings.versioning, later=later
            )
        )
    except BaseException:
        with trio.CancelScope(shield=True):
            await call.blocking(lambda: call.store.discard(draft))
        raise
    return facts, digests


def _check_longest(bounds: Bounds, length: int) -> None:
    """Checks the upper limit of the length: while the file comes, only that can be judged."""
    if length > min(bounds.most, PUT_LIMIT_BYTES):
        Bounds(0, min(bounds.most, PUT_LIMIT_BYTES)).check(length)


def _write(fd: int, view: memoryview, offset: int, first_pass: FirstPass) -> None:
    first_pass.update(view)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _answer(call: Call, form: Mapping[str, str], facts: Facts, digests: Digests) -> Response:
    result = put_result(call, facts, digests)
    headers: Headers = list(answer(call, result).headers)
    headers = [field for field in headers if field[0] != b"content-type"]
    target = form.get("success_action_redirect") or form.get("redirect") or ""
    if _is_url(target):
        shown = f"bucket={quote(call.bucket)}&key={quote(call.key)}&etag=%22{facts.etag}%22"
        joint = "&" if "?" in target else "?"
        return Response(303, [*headers, (b"location", f"{target}{joint}{shown}".encode())])
    location = _location(call)
    headers.append((b"location", location.encode()))
    status = form.get("success_action_status")
    if status == "201":
        document = _document(call, location, facts)
        return Response(201, [*headers, (b"content-type", b"application/xml")], document)
    return Response(200 if status == "200" else 204, headers)


def _location(call: Call) -> str:
    """Returns the object's URL, by the way that the form came."""
    host = (call.head.get(b"host") or b"").decode("latin-1")
    path = call.head.target.partition(b"?")[0].decode("latin-1").rstrip("/")
    scheme = "https" if call.head.secure else "http"
    return f"{scheme}://{host}{path}/{quote(call.key)}"


def _document(call: Call, location: str, facts: Facts) -> bytes:
    members = {
        "Location": location,
        "Bucket": call.bucket,
        "Key": call.key,
        "ETag": f'"{facts.etag}"',
    }
    inner = "".join(f"<{name}>{escape_text(value)}</{name}>" for name, value in members.items())
    return DECLARATION + f"<PostResponse>{inner}</PostResponse>".encode()


def _is_url(text: str) -> bool:
    """Returns whether it can be redirected to; anything else is ignored, as S3 does."""
    if not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
