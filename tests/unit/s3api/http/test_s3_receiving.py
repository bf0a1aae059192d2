"""Bodies on their way: what one takes, others must not lack."""

import contextlib
import hashlib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from s3api.http import body_receiver
from s3api.http.body_receiver import Receiver
from s3api.http.buffer_pool import BUFFER_BYTES, BufferPool
from s3api.http.request_context import Call
from s3api.http.side_digest import Beside, Hashing
from s3api.rules.checksums import Digests, Hasher

BODIES = 64


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_buffers_of_a_rush_are_let_go_after_it() -> None:
    buffers = BufferPool()
    with contextlib.ExitStack() as rush:
        for _ in range(BODIES):
            rush.enter_context(buffers.lent())[:] = b"x" * BUFFER_BYTES
        most = resident_bytes()
    assert most - resident_bytes() > BODIES * BUFFER_BYTES * 3 // 4


class Trickle:
    """A body of which something comes now and then, on a clock of its own."""

    trailers: tuple[()] = ()

    def __init__(self, size: int, piece: int, each_s: float) -> None:
        self.remaining, self._piece, self._each_s = size, piece, each_s
        self.now, self.in_thread, self.longest = 0.0, 0, 0

    async def receive_into(self, _buffer: memoryview) -> int:
        self.in_thread = 0
        return self._come()

    def receive_soon(self, _: memoryview, patience_ms: int) -> int | None:
        assert self._each_s * 1000 <= patience_ms
        self.in_thread += 1
        self.longest = max(self.longest, self.in_thread)
        return self._come()

    def _come(self) -> int:
        self.now += self._each_s
        count = min(self._piece, self.remaining)
        self.remaining -= count
        return count


class Pieces:
    """A body that comes in these pieces, with a pause before each that is None."""

    trailers: tuple[()] = ()

    def __init__(self, pieces: list[bytes | None]) -> None:
        self._pieces = pieces
        self.remaining = sum(len(each) for each in pieces if each is not None)

    async def receive_into(self, buffer: memoryview) -> int:
        while self._pieces and self._pieces[0] is None:
            del self._pieces[0]
        return self.receive_soon(buffer, 0) or 0

    def receive_soon(self, buffer: memoryview, _patience_ms: int) -> int | None:
        piece = self._pieces.pop(0) if self._pieces else b""
        if piece is None:
            return None
        buffer[: len(piece)] = piece
        self.remaining -= len(piece)
        return len(piece)


class Late(Beside):
    """Takes bytes at the last moment at which it may."""

    def __init__(self) -> None:
        self._left: list[tuple[Hasher, Sequence[memoryview]]] = []

    def update(self, hasher: Hasher, parts: Sequence[memoryview]) -> None:
        self.wait()
        self._left.append((hasher, parts))

    def wait(self) -> None:
        for hasher, parts in self._left:
            for part in parts:
                hasher.update(part)
        self._left.clear()


def test_a_digest_that_is_computed_beside_the_write_is_of_what_was_sent(
    tmp_path: Path, seed: int
) -> None:
    """However its bytes come: none is overwritten before it was hashed."""
    chance = random.Random(seed)
    pieces: list[bytes | None] = [
        chance.choice([None, chance.randbytes(chance.randint(1, BUFFER_BYTES))]) for _ in range(120)
    ]
    body = b"".join(each for each in pieces if each is not None)
    hashing = SimpleNamespace(body=lambda: contextlib.nullcontext(Late()))
    with open(tmp_path / "body", "wb") as file:
        digests = trio.run(receive, Pieces(pieces), file.fileno(), hashing)
    assert digests.etag == hashlib.md5(body).hexdigest()
    assert (tmp_path / "body").read_bytes() == body


async def receive(body: "Trickle | Pieces", fd: int, hashing: Any = None) -> Digests:
    call: Any = SimpleNamespace(
        headers=dict,
        fields={},
        verified=None,
        operation="PutObject",
        head=SimpleNamespace(content_length=body.remaining, chunked=False),
        body=body,
        store=SimpleNamespace(written=lambda *_: None),
        service=SimpleNamespace(buffers=BufferPool(), hashing=hashing or Hashing()),
        blocking=trio.to_thread.run_sync,
    )
    return await Receiver(cast("Call", call)).into(
        cast(
            "Any",
            SimpleNamespace(
                fd=fd,
                offset=0,
                bucket=SimpleNamespace(etag="md5"),
                part=0,
                body=SimpleNamespace(fd=fd, offset=0),
            ),
        )
    )


def pieces_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, piece: int, each_s: float
) -> int:
    """The most that a thread took without letting others have it."""
    body = Trickle(size, piece, each_s)
    monkeypatch.setattr(body_receiver, "time", SimpleNamespace(monotonic=lambda: body.now))
    with open(tmp_path / "body", "wb") as file:
        trio.run(receive, body, file.fileno())
    assert (tmp_path / "body").stat().st_size == size
    return body.longest


def test_who_sends_a_byte_now_and_then_keeps_no_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert pieces_in_a_thread(monkeypatch, tmp_path, 200, 1, 0.004) <= 2


def test_who_sends_fast_has_a_thread_for_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = 4 << 20
    assert pieces_in_a_thread(monkeypatch, tmp_path, size, BUFFER_BYTES, 0.001) >= 15
