"""Repeats the answer to a GET whose head comes again byte for byte while everything is as it was.

Everything that the answer depends on is checked each time: the head (the answer is kept with its
bytes), the metadata (their generation: the holder of the key, policies, settings, the object), the
time (the signature's, and the session's), and the data file. An answer that a policy or an ACL
influenced is not kept, for they may ask for facts beyond the head: an address, the time of day.
"""

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
import trio

from kvfs.base.errors import KvfsError
from kvfs.http.api import Field, FileRange, Response
from kvfs.http.connection_errors import ConnectionLost
from kvfs.objects.open_object import OpenedObject
from s3api.auth.credentials import KeyOwner
from s3api.auth.verified import Verified
from s3api.http.request_context import Call
from s3api.http.s3_errors import S3Error
from s3api.rules.access import actions
from s3api.rules.ranges import ByteRange
from s3api.storage.bucket_settings import Settings


class Answered(msgspec.Struct):
    """The answer to a GET."""

    generation: int
    """The generation of the metadata, before anything of them was read."""
    until: float
    """Seconds since the epoch."""
    verified: Verified
    known: KeyOwner
    settings: Settings
    opened: OpenedObject
    """The opened object; its descriptor is closed."""
    chosen: ByteRange | None
    """The range; None: everything."""
    status: int
    headers: Sequence[Field]
    further: Sequence[Field]


def repeat(call: Call) -> Response | None:
    """Returns the answer that an equal request got, if it would get it again; None: it has to be
    found. Raises OSError, Busy, Unavailable, Corrupt."""
    asked = call.asked
    seen = asked.answered
    if not isinstance(seen, Answered):
        return None
    now = call.now.timestamp()
    if seen.verified.valid_from <= now <= seen.until and (
        seen.generation == call.generation or _is_same(call, seen)
    ):
        opened = call.service.store.reopen(seen.opened)
        if opened is not None:
            call.take_signer(seen.verified, seen.known)
            body = file_range(opened, seen.chosen)
            return Response(seen.status, seen.headers, body, further=seen.further)
    asked.answered = None
    return None


def _is_same(call: Call, seen: Answered) -> bool:
    """Returns whether the metadata are the same as then, though a commit was made."""
    verified, bucket, key = seen.verified, call.bucket.encode(), call.key.encode()
    try:
        same = (
            call.look_up(verified.access_key, verified.session_token) is seen.known
            and call.settings is seen.settings
            and call.store.current(bucket, key, call.generation) is seen.opened.facts
        )
    except (S3Error, KvfsError):
        return False  # and found again, with the right error
    if same:
        seen.generation = call.generation
    return same


def remember(
    call: Call, opened: OpenedObject, chosen: ByteRange | None, response: Response
) -> None:
    """Keeps an answer with its head, if it may be given again."""
    verified, known = call.verified, call.known
    if verified is None or known is None:
        return
    needed = actions.needed(call.operation, call.params)
    if not call.service.access.is_unconditional(call, needed, opened.facts):
        return
    until = verified.valid_until
    call.asked.answered = Answered(
        call.generation,
        min(until, known.expires - 1) if known.expires else until,
        verified,
        known,
        call.settings,
        opened,
        chosen,
        response.status,
        response.headers,
        response.further,
    )


def file_range(opened: OpenedObject, chosen: ByteRange | None) -> FileRange:
    """Returns the body, which closes the descriptor. None: all of the object."""
    fd, offset, length = opened.fd, 0, opened.facts.inode.size
    if chosen is not None:
        offset, length = chosen
    body = FileRange(fd, offset, length, partial(os.close, fd), opened.is_unchanged)
    if opened.coming is not None:
        body.coming = _awaited(opened.coming)
    return body


def _awaited(coming: Callable[[int, int], None]) -> Callable[[int, int], Awaitable[None]]:
    async def wait(offset: int, length: int) -> None:
        try:
            await trio.to_thread.run_sync(coming, offset, length)
        except (KvfsError, OSError) as error:
            raise ConnectionLost(f"the rest of the object does not come: {error}") from error

    return wait
