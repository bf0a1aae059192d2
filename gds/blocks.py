"""KV blocks, many at once: into and out of the caller's own memory, each with its own result.

Blocks are files of a store, named as `kvfs.Client` names them. Look-ups of one call are one
transaction; then threads read the data files, from the page cache straight to each block's buffer,
or write them.

Invariants
- A fault of one block is that block's result, never an error of the call. A block that is not there
  is a miss for whatever reason: never stored, evicted just now, lost with its node.
- A call that can never be right (no path, no buffer, one too few of them) raises.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, TypeVar

import kvfs
from kvfs.base.errors import (
    AccessDenied,
    Busy,
    Conflict,
    Corrupt,
    Invalid,
    KvfsError,
    NoSpace,
    NotADirectory,
    NotFound,
    ReadOnly,
    TooLarge,
    Unavailable,
)
from kvfs.client.buffers import Buffer, readable, writable
from kvfs.session.paths import Path, several

_FILES_AT_ONCE: Final = 128
"""Most blocks written in one transaction: each has an open file until then."""
_OF_THE_STORE: Final = (AccessDenied, Busy, ReadOnly, Unavailable)
"""Errors that the next block would meet as well."""
_View = TypeVar("_View", memoryview, Any)


class Outcome(Enum):
    """The outcome for one block."""

    HIT = "hit"
    STORED = "stored"
    MISS = "miss"
    """There is no such block; for a write: the directory does not exist."""
    CORRUPT = "corrupt"
    """Its data differ from what was stored, or the disk cannot read them: the content of the buffer
    is undefined."""
    TOO_SMALL = "too small"
    """The buffer is too small: nothing was read."""
    NO_SPACE = "no space"
    UNAVAILABLE = "unavailable"
    """The node that has it does not answer, or it is being written: try again later. A block to be
    written may have been written."""
    REFUSED = "refused"
    """The name belongs to no file, or may not be written: it will not get better by itself."""


class Block(NamedTuple):
    """One block's result."""

    outcome: Outcome
    size: int = 0
    """Bytes read or written."""
    error: KvfsError | None = None
    """The reason of an outcome that is neither a hit nor stored, nor a plain miss."""

    @property
    def ok(self) -> bool:
        return self.outcome in (Outcome.HIT, Outcome.STORED)


def read_blocks(
    keys: Sequence[Path],
    buffers: Buffer | Sequence[Buffer],
    *,
    client: kvfs.Client | None = None,
    verify: bool = False,
) -> list[Block]:
    """Reads each block into the buffer of its place; returns the results in the order of `keys`.

    `keys`: paths like `/cache/model/block-1`, as `kvfs.Client` takes them. `buffers`: a list or
    tuple of a writable buffer for each (slices of one, rows of a tensor), or one buffer that is
    divided into as many equal parts; of the CPU, or tensors of one GPU. A block may be shorter than
    its buffer. `client`: of the store; None: the default store is opened for this call, which a
    loop should not pay. `verify`: see `Client.get_many`.

    Data on other nodes are fetched. Raises Invalid (see above), NotFound (no store there),
    AccessDenied (the caller may not enter it)."""
    if _is_on_gpu(buffers):
        return _read_to_gpu(keys, buffers, client, verify=verify)
    views = _parts(keys, buffers, writable)
    with _opened(client) as store:
        try:
            found = store.get_many(keys, views, verify=verify)
        except _OF_THE_STORE as error:
            return [_failed(error)] * len(keys)
    hits: dict[object, Block] = {
        size: Block(Outcome.HIT, size) for size in set(found) if isinstance(size, int)
    }
    return [hits.get(each) or _read(each) for each in found]


def write_blocks(
    keys: Sequence[Path],
    buffers: Buffer | Sequence[Buffer],
    *,
    client: kvfs.Client | None = None,
    parents: bool = True,
) -> list[Block]:
    """Stores each buffer's bytes as a block, atomically over an existing one; returns the results
    in the order of `keys`.

    Arguments are those of `read_blocks`; `parents`: missing directories are made, except the
    namespace. Up to 128 blocks appear at once; if one of them cannot be stored, the others are
    stored one by one until there is no space. A stored block survives SIGKILL, and in a durable
    namespace power loss. Raises what `read_blocks` raises."""
    if _is_on_gpu(buffers):
        return _write_from_gpu(keys, buffers, client, parents=parents)
    views = _parts(keys, buffers, readable)
    items = list(zip(keys, views, strict=True))
    results: list[Block] = []
    with _opened(client) as store:
        for first in range(0, len(items), _FILES_AT_ONCE):
            batch = items[first : first + _FILES_AT_ONCE]
            results += _together(store, batch, parents) or _one_by_one(store, batch, parents)
    return results


def _is_on_gpu(buffers: Buffer | Sequence[Buffer]) -> bool:
    """Returns whether the buffer, or the first of several, is a tensor of one."""
    first = buffers[0] if isinstance(buffers, list | tuple) and buffers else buffers
    return bool(getattr(first, "is_cuda", False))


def _read_to_gpu(
    keys: Sequence[Path],
    buffers: Buffer | Sequence[Buffer],
    client: kvfs.Client | None,
    *,
    verify: bool,
) -> list[Block]:
    from gds.device import device_blocks

    parts = _parts(keys, buffers, device_blocks.raw_of)
    results: list[Block] = []

    def fetch(batch: slice, views: list[memoryview]) -> list[int]:
        found = read_blocks(keys[batch], views, client=store, verify=verify)
        results.extend(found)
        return [block.size for block in found]

    with _opened(client) as store:
        if parts:
            device_blocks.read_into(parts, device_blocks.device_of(parts), fetch)
    return results


def _write_from_gpu(
    keys: Sequence[Path],
    buffers: Buffer | Sequence[Buffer],
    client: kvfs.Client | None,
    *,
    parents: bool,
) -> list[Block]:
    from gds.device import device_blocks

    parts = _parts(keys, buffers, device_blocks.raw_of)
    results: list[Block] = []

    def store_batch(batch: slice, views: list[memoryview]) -> None:
        results.extend(write_blocks(keys[batch], views, client=store, parents=parents))

    with _opened(client) as store:
        if parts:
            device_blocks.write_from(parts, device_blocks.device_of(parts), store_batch)
    return results


def _together(
    client: kvfs.Client, items: Sequence[tuple[Path, memoryview]], parents: bool
) -> list[Block] | None:
    """Stores the blocks in one transaction. Returns None if not all can be stored."""
    try:
        client.put_many(items, parents=parents)
    except _OF_THE_STORE as error:
        return [_failed(error)] * len(items)
    except (KvfsError, OSError):
        return None
    return [Block(Outcome.STORED, len(view)) for _, view in items]


def _one_by_one(
    client: kvfs.Client, items: Iterable[tuple[Path, memoryview]], parents: bool
) -> list[Block]:
    results: list[Block] = []
    over: KvfsError | None = None
    """The error that ended the call for all following blocks: looking for space again would take
    its time for each."""
    for key, view in items:
        if over is None:
            try:
                client.put(key, view, parents=parents)
            except KvfsError as error:
                over = error if isinstance(error, (NoSpace, *_OF_THE_STORE)) else None
                results.append(_failed(error))
            except OSError as error:
                results.append(_failed(Unavailable(f"{key!r}: {error.strerror}")))
            else:
                results.append(Block(Outcome.STORED, len(view)))
        else:
            results.append(_failed(over))
    return results


def _read(found: bytearray | int | KvfsError | None) -> Block:
    if found is None:
        return Block(Outcome.MISS)
    if isinstance(found, KvfsError):
        return _failed(found)
    assert isinstance(found, int)
    return Block(Outcome.HIT, found)


def _failed(error: KvfsError) -> Block:
    return Block(_outcome(error), 0, error)


def _outcome(error: KvfsError) -> Outcome:
    match error:
        case NotFound() | NotADirectory():
            return Outcome.MISS
        case Corrupt():
            return Outcome.CORRUPT
        case TooLarge():
            return Outcome.TOO_SMALL
        case NoSpace():
            return Outcome.NO_SPACE
        case Unavailable() | Busy() | Conflict():
            return Outcome.UNAVAILABLE
        case _:
            return Outcome.REFUSED


def _parts(
    keys: Sequence[Path],
    buffers: Buffer | Sequence[Buffer],
    view_of: Callable[[Buffer], _View],
) -> list[_View]:
    """Returns a buffer for each key. Raises Invalid."""
    several(keys)
    if isinstance(buffers, list | tuple):
        if len(buffers) != len(keys):
            raise Invalid(f"{len(keys)} blocks need as many buffers, not {len(buffers)}")
        return [view_of(each) for each in buffers]
    whole = view_of(buffers)
    size, rest = divmod(len(whole), max(1, len(keys)))
    if rest:
        raise Invalid(f"a buffer of {len(whole)} bytes has no {len(keys)} equal parts")
    return [whole[at * size : (at + 1) * size] for at in range(len(keys))]


@contextlib.contextmanager
def _opened(client: kvfs.Client | None) -> Iterator[kvfs.Client]:
    if client is not None:
        yield client
        return
    with kvfs.Client() as opened:
        yield opened
