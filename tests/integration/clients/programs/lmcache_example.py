"""LMCache 0.5.6 on a KVFS mount: store KV chunks, look them up, load them, compare.

    pip install -r ../requirements-torch.txt && pip install --no-deps -r ../requirements-lmcache.txt
    python lmcache_example.py /mnt/kvfs/cache/lmcache [--direct] [--chunks N]

Both of LMCache's ways to a filesystem are driven as an engine drives them: the remote connector
that `remote_url: fs://...` makes, and the L2 adapter of type "fs". Ends with 0 when every chunk
came back byte for byte.
"""

import argparse
import asyncio
import hashlib
import os
import select
import sys
import threading
from collections.abc import Coroutine
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

MODEL = "example/model"


class Engine:
    """The part of an inference engine that LMCache needs: memory for chunks, and a loop."""

    def __init__(self, config: LMCacheEngineConfig) -> None:
        self.config = config
        self.metadata = LMCacheMetadata(
            model_name=MODEL,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(4, 2, 256, 8, 128),  # layers, K and V, tokens, heads, head size: 4 MiB
        )
        self.memory = LocalCPUBackend(self.config, self.metadata, "cpu")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def connector(self) -> Any:
        """A connector of the kind that `remote_url` names."""
        config, metadata = self.config, self.metadata
        return CreateConnector(config.remote_url, self.loop, self.memory, config, metadata)

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(120)

    def empty(self) -> Any:
        chunk = self.memory.allocate(self.metadata.get_shapes(), self.metadata.get_dtypes())
        assert chunk is not None, "out of chunk memory"
        return chunk

    def chunk(self, number: int) -> Any:
        """A chunk whose content follows from its number."""
        chunk = self.empty()
        generator = torch.Generator().manual_seed(number)
        whole = torch.empty(chunk.get_size() // 8, dtype=torch.int64)
        whole.random_(generator=generator)
        memoryview(chunk.byte_array).cast("B")[:] = memoryview(whole.numpy()).cast("B")
        return chunk


def digest(chunk: Any) -> bytes:
    return hashlib.sha256(chunk.byte_array).digest()


def connector_round_trip(engine: Engine, chunks: int) -> None:
    """The remote connector: put, exists, get, list, remove."""
    connector = engine.connector()
    keys = [CacheEngineKey(MODEL, 1, 0, n + 1, torch.bfloat16) for n in range(chunks)]
    wanted = []
    for n, key in enumerate(keys):
        assert not engine.run(connector.exists(key))
        chunk = engine.chunk(n)
        wanted.append(digest(chunk))
        engine.run(connector.put(key, chunk))  # gives the chunk's memory back too
    assert all(connector.exists_sync(key) for key in keys)
    for key, want in zip(keys, wanted, strict=True):
        found = engine.run(connector.get(key))
        assert found is not None, f"{key} was not loaded"
        assert digest(found) == want, f"{key} came back changed"
        found.ref_count_down()
    assert len(engine.run(connector.list())) == chunks
    assert connector.remove_sync(keys[0])
    assert not engine.run(connector.exists(keys[0]))
    assert engine.run(connector.get(keys[0])) is None
    engine.run(connector.close())


class Adapter:
    """An L2 adapter, with its event descriptors waited for."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, keys: list[ObjectKey], chunks: list[Any]) -> bool:
        """Whether all were stored."""
        task = self.adapter.submit_store_task(keys, chunks)
        wait(self.adapter.get_store_event_fd())
        return int(self.adapter.pop_completed_store_tasks()[task]) >= 0

    def lookup(self, keys: list[ObjectKey]) -> set[int]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        wait(self.adapter.get_lookup_and_lock_event_fd())
        return found(self.adapter.query_lookup_and_lock_result(task))

    def load(self, keys: list[ObjectKey], into: list[Any]) -> set[int]:
        """The indices of the keys that were loaded."""
        task = self.adapter.submit_load_task(keys, into)
        wait(self.adapter.get_load_event_fd())
        return found(self.adapter.query_load_result(task))

    def close(self) -> None:
        self.adapter.close()


def fs_adapter(directory: str, direct: bool) -> Adapter:
    """The one of type "fs"."""
    return Adapter(FSL2Adapter(FSL2AdapterConfig(directory, use_odirect=direct)))


def wait(event: int) -> None:
    waiting = select.poll()
    waiting.register(event, select.POLLIN)
    assert waiting.poll(120_000), "LMCache did not answer"
    os.eventfd_read(event)


def found(bitmap: Any) -> set[int]:
    assert bitmap is not None
    return set(bitmap.get_indices_list())


def object_key(number: int) -> ObjectKey:
    name = hashlib.sha256(b"%d" % number).digest()
    return ObjectKey(chunk_hash=name, model_name=MODEL, kv_rank=0)


def adapter_round_trip(engine: Engine, directory: str, direct: bool, chunks: int) -> None:
    """The L2 adapter: store, look up, load."""
    adapter = fs_adapter(directory, direct)
    keys = [object_key(n) for n in range(chunks)]
    assert adapter.lookup(keys) == set()
    stored = [engine.chunk(1000 + n) for n in range(chunks)]
    assert adapter.store(keys, stored)
    assert adapter.lookup([*keys, object_key(-1)]) == set(range(chunks))
    loaded = [engine.empty() for _ in keys]
    assert adapter.load(keys, loaded) == set(range(chunks))
    for before, after in zip(stored, loaded, strict=True):
        assert digest(before) == digest(after), "a chunk came back changed"
    for chunk in (*stored, *loaded):
        chunk.ref_count_down()
    adapter.close()


def settings(directory: str, direct: bool) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        chunk_size=256,
        local_cpu=False,
        max_local_cpu_size=0.25,
        remote_url=f"fs://localhost:0{directory}",
        extra_config={
            "fs_connector_use_odirect": direct,
            "save_chunk_meta": not direct,  # a header would break the alignment
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="LMCache on a KVFS mount.")
    parser.add_argument("directory")
    parser.add_argument("--direct", action="store_true", help="with O_DIRECT")
    parser.add_argument("--chunks", type=int, default=8, help="of 4 MiB each; at most 24")
    options = parser.parse_args()
    directory = os.path.abspath(options.directory)
    connector, adapter = os.path.join(directory, "connector"), os.path.join(directory, "adapter")
    os.makedirs(connector, exist_ok=True)  # with O_DIRECT the connector asks before it makes it
    engine = Engine(settings(connector, options.direct))
    connector_round_trip(engine, options.chunks)
    adapter_round_trip(engine, adapter, options.direct, options.chunks)
    how = "O_DIRECT" if options.direct else "buffered"
    print(f"{options.chunks} chunks, {how}: connector and L2 adapter got every byte back")
    sys.stdout.flush()
    os._exit(0)  # LMCache leaves threads behind


if __name__ == "__main__":
    main()
