"""Takes the body of a request: into a draft's data file, or as a small document.

Payload goes from the socket into a reused buffer, is hashed there in C and written from there.
"""

import os
import time
from functools import partial
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Final

from kvfs.http.api import BadChunk, BodyStalled, BodyTooLarge, BodyTruncated
from kvfs.objects.object_drafts import ObjectDraft
from s3api.auth import chunked
from s3api.auth.verified import Payload
from s3api.http.s3_errors import S3Error
from s3api.http.side_digest import Beside
from s3api.rules import checksums
from s3api.rules.checksums import Algorithm, Digests, FirstPass

if TYPE_CHECKING:
    from s3api.http.request_context import Call

_INLINE_BYTES: Final = 64 << 10
"""Up to this size hashing and writing take less than a thread's wake-up."""
_BURST_BYTES: Final = 8 << 20
"""Bytes that a thread receives before others get it, as long as they come without a pause of
_PAUSE_MS: a turn of the loop and two changes of thread for each buffer cost more than the rest."""
_PAUSE_MS: Final = 5
_BESIDE_BYTES: Final = 1 << 20
"""A smaller body is hashed and written before another thread has woken up."""
_BURST_BYTES_S: Final = 32 << 20
"""At a lower rate, a thread's wake-up for each piece costs nothing that counts; and a client that
sends a byte now and then must not keep a thread."""
_OF_ANOTHER_BODY: Final = frozenset({"CompleteMultipartUpload"})
"""Operations whose checksum headers describe the object, not the request's body."""


class _Target:
    """A draft that is written from its beginning on."""

    def __init__(self, draft: ObjectDraft, first_pass: FirstPass, beside: Beside | None) -> None:
        self._beside = beside
        self._fd = draft.fd
        self._offset = draft.offset
        self._first_pass = first_pass
        self.draft = draft
        self.size = 0

    def take(self, parts: list[memoryview]) -> None:
        """Hashes and writes. Raises OSError."""
        first_pass, slow = self._first_pass, None
        if self._beside is not None and (slow := first_pass.slow) is not None:
            self._beside.update(slow, parts)
        for part in parts:
            if slow is None:
                first_pass.update(part)
            else:
                first_pass.update_quickly(part)
            done = 0
            while done < len(part):
                done += os.pwrite(self._fd, part[done:], self._offset + self.size + done)
            self.size += len(part)

    def settle(self) -> None:
        """Returns when everything taken is hashed; this waits for a buffer's worth at most."""
        if self._beside is not None:
            self._beside.wait()


class Receiver:
    """The body of one call; use it once."""

    def __init__(
        self, call: "Call", fallback: str = checksums.DEFAULT, besides: Algorithm | None = None
    ) -> None:
        """`fallback` names the checksum that is computed if the request asks for none, `besides`
        one that is computed in any case.

        Raises S3Error for wrong headers about the body."""
        fields, verified = call.fields, call.verified
        self._call = call
        self._decoder = chunked.decoder(fields, verified)
        self.announced = call.head.content_length
        """Bytes of payload that the headers announce."""
        if self._decoder is not None:
            self.announced = int(fields[b"x-amz-decoded-content-length"])
        sha256 = None
        if verified is not None and verified.payload is Payload.DIGEST:
            sha256 = verified.payload_sha256.decode()
        said, content_md5 = {}, None
        if call.operation not in _OF_ANOTHER_BODY and checksums.are_named(fields):
            said = call.headers()
        if (sent := fields.get(b"content-md5")) is not None:
            content_md5 = checksums.content_md5(sent.decode("utf-8", "replace"))
        self.wanted = checksums.wanted(said, fallback)
        self._first_pass = FirstPass(
            self.wanted,
            size=self.announced,
            content_sha256=sha256,
            content_md5=content_md5,
            besides=besides,
        )

    async def into(self, draft: ObjectDraft) -> Digests:
        """Writes the payload to the draft. Raises S3Error, OSError, NoSpace, Unavailable."""
        self._first_pass.tag(fast=draft.bucket.etag == "fast")
        service = self._call.service
        buffers = [service.buffers.take()]
        try:
            if self._decoder is None and (self.announced or _INLINE_BYTES) < _INLINE_BYTES:
                await self._move_small(draft, buffers[0])
            elif self._first_pass.slow is None or (self.announced or 0) < _BESIDE_BYTES:
                await self._move(_Target(draft, self._first_pass, None), buffers)
            else:
                with service.hashing.body() as beside:
                    if beside is not None:
                        buffers.append(service.buffers.take())
                    try:
                        await self._move(_Target(draft, self._first_pass, beside), buffers)
                    finally:
                        if beside is not None:
                            beside.wait()  # before the buffers go to others
        finally:
            service.buffers.give_back(buffers)
        return self._finish()

    async def _move(self, target: _Target, buffers: list[memoryview]) -> None:
        body, store, buffer = self._call.body, self._call.store, buffers[0]
        while count := await self._receive(buffer):
            if self.announced is None:
                await self._call.blocking(partial(store.grow, target.draft, target.size + count))
            if count <= _INLINE_BYTES and body.remaining == 0:
                target.take(self._fed(buffer[:count]))
                return
            await self._call.blocking(partial(self._burst, target, buffers, count))

    async def _move_small(self, draft: ObjectDraft, buffer: memoryview) -> None:
        """Moves a body that is sent as it is and takes less than a thread's wake-up."""
        fd, first_pass = draft.body.fd, self._first_pass
        offset = draft.offset if draft.part else 0
        while count := await self._receive(buffer):
            part = buffer[:count]
            first_pass.update(part)
            done = 0
            while done < count:
                done += os.pwrite(fd, part[done:], offset + first_pass.size - count + done)
            if first_pass.size == self.announced:
                return

    async def document(self, limit_bytes: int) -> bytes:
        """Returns the whole of a small body. Raises S3Error."""
        document = bytearray()
        with self._call.service.buffers.lent() as buffer:
            while count := await self._receive(buffer):
                for part in self._fed(buffer[:count]):
                    self._first_pass.update(part)
                    document += part
                if len(document) > limit_bytes:
                    raise S3Error("MaxMessageLengthExceeded")
        self._finish()
        return bytes(document)

    def _burst(self, target: _Target, buffers: list[memoryview], count: int) -> None:
        """Takes the bytes in the first buffer, in a thread, and those that come at once after them,
        in turns with the second buffer, if there is one."""
        try:
            self._take_what_comes(target, buffers, count)
        finally:
            target.settle()

    def _take_what_comes(self, target: _Target, buffers: list[memoryview], count: int) -> None:
        taken, began = 0, time.monotonic()
        for buffer, following in pairwise(cycle(buffers)):
            target.take(self._fed(buffer[:count]))
            taken += count
            if taken >= _BURST_BYTES:
                start = max(0, target.size - _BURST_BYTES)
                self._call.store.written(target.draft, start, target.size)
                return
            if time.monotonic() - began > _PAUSE_MS / 1000 + taken / _BURST_BYTES_S:
                return
            try:
                count = self._call.body.receive_soon(following, _PAUSE_MS) or 0
            except FAILURES as error:
                raise told_as_s3(error) from None
            if not count:
                return

    def _fed(self, view: memoryview) -> list[memoryview]:
        """The payload in bytes that were received."""
        return [view] if self._decoder is None else self._decoder.feed(view)

    def _finish(self) -> Digests:
        if self._decoder is not None:
            return self._first_pass.finish(self._decoder.finish())
        if not self._call.head.chunked:
            return self._first_pass.finish({})
        trailers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in self._call.body.trailers
        }
        return self._first_pass.finish(trailers)

    async def _receive(self, buffer: memoryview) -> int:
        try:
            return await self._call.body.receive_into(buffer)
        except FAILURES as error:
            raise told_as_s3(error) from None


FAILURES: Final = (BodyTruncated, BodyStalled, BodyTooLarge, BadChunk)
"""Failures of a body on its way."""


def told_as_s3(error: Exception) -> S3Error:
    """Returns the error of S3 for one of FAILURES."""
    if isinstance(error, BodyTruncated):
        return S3Error("IncompleteBody")
    if isinstance(error, BodyStalled):
        return S3Error("RequestTimeout")
    if isinstance(error, BodyTooLarge):
        return S3Error("EntityTooLarge")
    return S3Error("InvalidRequest", "The chunked body is malformed")
