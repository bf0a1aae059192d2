"""A mirror with an event loop of its own, for tests that have none, or another one."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import trio

from kvfs.base.errors import NoSpace
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.replica.applier import Applied
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.meta.replica.replica_engine import ReplicaEngine

T = TypeVar("T")


class Mirror:
    """Behind the faces of an engine, for any thread."""

    immediate = False
    reads_immediate = True

    def __init__(
        self, path: Path, url: str, *, node: int = 1, map_size: int = 1 << 40, **options: Any
    ) -> None:
        self.local = EmbeddedEngine(path, map_size=map_size)
        self.told: list[Applied] = []
        self._url = url
        self._options: dict[str, Any] = {"node": node, "deadline_s": 10.0, **options}
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        return self.engine.read_now(fn)

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        return self.call(lambda: self.engine.transact(fn))

    def is_local(self, namespace_id: int) -> bool:
        return self.engine.is_local(namespace_id)

    def shard(self, namespace_id: int) -> int:
        return self.engine.shard(namespace_id)

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        await trio.lowlevel.checkpoint()
        return self.read_now(fn)

    async def transact(self, fn: Callable[[Transaction], T]) -> T:
        return await trio.to_thread.run_sync(self.transact_now, fn)

    async def sync(self, namespace_id: int | None = None) -> None:  # noqa: ARG002
        await trio.to_thread.run_sync(lambda: self.call(self.engine.sync))

    def catch_up(self) -> None:
        self.call(self.engine.catch_up)

    def call(self, step: Callable[[], Any]) -> Any:
        """Have it done in the mirror's loop."""
        return trio.from_thread.run(step, trio_token=self._token)

    def close(self) -> None:
        if self._thread.is_alive() and not self._ready.exception():
            trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
        self._thread.join()
        self.local.close()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._ready.set_exception(error)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self.engine = ReplicaEngine(self.local, self._url, on_applied=self._tell, **self._options)
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            await nursery.start(self.engine.run)
            self._ready.set_result(None)

    def _tell(self, applied: Sequence[Applied]) -> None:
        self.told += applied


def everything(engine: Any) -> list[tuple[bytes, bytes]]:
    """All keys and values."""
    found: list[tuple[bytes, bytes]] = engine.read_now(lambda t: list(t.scan(b"", b"\xff")))
    return found


def in_redis(url: str) -> list[tuple[bytes, bytes]]:
    """The same, of the server itself."""
    engine = DirectEngine(url)
    try:
        return everything(engine)
    finally:
        engine.close()


def no_space(*_: object) -> None:
    """Stands for what finds the disk full."""
    raise NoSpace("no space is left")
