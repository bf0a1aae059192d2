"""The Python API for trio: the same client, its steps taken in worker threads."""

import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar, overload

import trio

from kvfs.base.errors import KvfsError
from kvfs.client.blocking import NEW_DIRECTORY, NEW_FILE, Client
from kvfs.client.buffers import Buffer
from kvfs.client.client_core import Core, target_of
from kvfs.client.file_status import Stat
from kvfs.client.local_files import Destination, Source
from kvfs.client.match import Match
from kvfs.client.writer import Writer
from kvfs.session import paths
from kvfs.session.parallel import Step
from kvfs.session.paths import Path
from kvfs.vfs.stage_records import Options

T = TypeVar("T")
_KEYS_AT_ONCE: Final = 2_048
"""Keys looked up on the event loop in one go: some 2 ms."""


def _documented(cls: type[T]) -> type[T]:
    """Gives methods the documentation of their namesakes of `Client`; their own is added to it."""
    for name, namesake in vars(Client).items():
        method = vars(cls).get(name)
        if method is not None and not name.startswith("_"):
            own = inspect.getdoc(method)
            method.__doc__ = f"{inspect.getdoc(namesake)}\n\n{own or ''}".strip()
    return cls


@_documented
class AsyncClient:
    """Like `Client`, for trio: arguments, results and errors of each method are those of its
    namesake, and so is its documentation.

        async with kvfs.AsyncClient() as client:
            await client.put("/cache/model/block-1", tensor, parents=True)
            async for entry in client.list("/cache/model"):
                print(entry.name, entry.size)
            async with client.open("/cache/log", "wb") as file:
                await file.write(b"...")

    Cancelled: a method ends after the part of 64 MiB that is being moved, and its target is
    unchanged, or changed whole; buffers being read into may hold anything. A change that is
    committed when the cancellation comes stays, and the method returns. `exists` looks up on the
    event loop, 2,048 keys between checkpoints; everything else works in trio's worker threads.
    """

    def __init__(self, store: str | bytes | os.PathLike[str] | None = None) -> None:
        self._core = Core(store)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Like `Client.close`. Cancelled: done all the same."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._core.close)

    # ---- whole files

    async def put(
        self,
        path: Path,
        data: Buffer,
        *,
        mode: int = NEW_FILE,
        exclusive: bool = False,
        parents: bool = False,
    ) -> None:
        options = Options(mode, exclusive, parents)
        await _in_thread(lambda step: self._core.put(path, data, options, step))

    async def put_many(
        self,
        items: Iterable[tuple[Path, Buffer]],
        *,
        mode: int = NEW_FILE,
        exclusive: bool = False,
        parents: bool = False,
    ) -> None:
        """`items` is iterated over in a worker thread."""
        options = Options(mode, exclusive, parents)
        await _in_thread(lambda step: self._core.put_many(items, options, step))

    @overload
    async def get(self, path: Path, *, offset: int = 0, size: int | None = None) -> bytearray: ...

    @overload
    async def get(
        self, path: Path, into: Buffer, *, offset: int = 0, size: int | None = None
    ) -> int: ...

    async def get(
        self,
        path: Path,
        into: Buffer | None = None,
        *,
        offset: int = 0,
        size: int | None = None,
    ) -> bytearray | int:
        return await _in_thread(lambda step: self._core.get(path, into, offset, size, step))

    @overload
    async def get_many(
        self, keys: Sequence[Path] | Match, buffers: None = None, *, verify: bool = False
    ) -> list[bytearray | KvfsError | None]: ...

    @overload
    async def get_many(
        self, keys: Sequence[Path] | Match, buffers: Sequence[Buffer], *, verify: bool = False
    ) -> list[int | KvfsError | None]: ...

    async def get_many(
        self,
        keys: Sequence[Path] | Match,
        buffers: Sequence[Buffer] | None = None,
        *,
        verify: bool = False,
    ) -> Sequence[bytearray | int | KvfsError | None]:
        return await _in_thread(
            lambda step: self._core.get_many(keys, buffers, step, verify=verify)
        )

    async def put_file(
        self,
        source: Source,
        path: Path,
        *,
        mode: int = NEW_FILE,
        exclusive: bool = False,
        parents: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """`progress` is called on the event loop."""
        options = Options(mode, exclusive, parents)
        return await _in_thread(
            lambda step: self._core.put_file(source, path, options, step), progress
        )

    async def get_file(
        self,
        path: Path,
        destination: Destination,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """`progress` is called on the event loop."""
        return await _in_thread(lambda step: self._core.get_file(path, destination, step), progress)

    @contextlib.asynccontextmanager
    async def open(
        self, path: Path, mode: str = "rb", *, parents: bool = False
    ) -> AsyncIterator[Any]:
        """Opens a file, wrapped as by `trio.wrap_file`, for an `async with` block. A new file
        appears when the block ends; left by an error or cancelled, it is dropped."""
        file = await trio.to_thread.run_sync(lambda: self._core.open(path, mode, parents=parents))
        try:
            yield trio.wrap_file(file)
            await trio.to_thread.run_sync(file.close)
        finally:
            end = file.abort if isinstance(file, Writer) else file.close
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(end)

    # ---- names

    async def exists(self, keys: Sequence[Path]) -> list[bool]:
        """Makes one transaction for each 2,048 keys, on the event loop."""
        found: list[bool] = []
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            await trio.lowlevel.checkpoint()
            found += self._core.names.exist(keys[start : start + _KEYS_AT_ONCE])
        return found

    async def match(self, keys: Sequence[Path], lease_s: float = 30.0) -> Match:
        """Cancelled: before it begins, or not at all. Its `release`, which takes no time, may be
        called on the event loop; `open` and `where` ask the filesystem."""
        return await _in_thread(lambda _: self._core.match(keys, lease_s))

    async def stat(self, path: Path) -> Stat:
        return await _in_thread(lambda _: self._core.names.stat(paths.parse(path)))

    async def remove(self, path: Path) -> None:
        await _in_thread(lambda _: self._core.names.remove(*paths.parse_name(path)))

    async def rename(self, old: Path, new: Path, *, exclusive: bool = False) -> None:
        await _in_thread(
            lambda _: self._core.names.rename(
                paths.parse_name(old), paths.parse_name(new), exclusive=exclusive
            )
        )

    async def mkdir(self, path: Path, *, mode: int = NEW_DIRECTORY, parents: bool = False) -> None:
        options = Options(mode=mode, parents=parents)
        await _in_thread(lambda _: self._core.names.make_directory(target_of(path), options))

    async def rmdir(self, path: Path) -> None:
        await _in_thread(lambda _: self._core.names.remove_directory(*paths.parse_name(path)))

    async def sync(self) -> None:
        await _in_thread(lambda _: self._core.session.sync())

    async def list(self, path: Path = "/", *, after: bytes = b"") -> AsyncIterator[Stat]:
        parts = paths.parse(path)
        while True:
            page, after = await _in_thread(
                lambda _, after=after: self._core.names.page(parts, after)  # type: ignore[misc]
            )
            for entry in page:
                yield entry
            if not after:
                return


async def _in_thread(work: Callable[[Step], T], progress: Callable[[int], None] | None = None) -> T:
    """Does the work in a worker thread; its `step` checks whether the caller was cancelled."""

    def step(done: int) -> None:
        trio.from_thread.check_cancelled()
        if progress is not None:
            trio.from_thread.run_sync(progress, done)

    return await trio.to_thread.run_sync(work, step)
