"""LMCache 0.5.6 on KVFS through its S3 API: store KV chunks, look them up, load them, compare.

    kvfs s3 env --for lmcache > lmcache.yaml   # the bucket "cache" must be there
    python lmcache_s3_example.py lmcache.yaml [--chunks N]

Both of LMCache's ways to S3 are driven as an engine drives them: the remote connector that
`remote_url: s3://...` makes, and the L2 adapter of type "s3". Ends with 0 when every chunk came
back byte for byte.
"""

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2Adapter, S3L2AdapterConfig
from lmcache_example import MODEL, Adapter, Engine, digest, object_key


def connector_round_trip(engine: Engine, chunks: int) -> None:
    """The remote connector: put, exists, get alone and in a batch, by one that has no memory of
    the puts. Neither is closed: close() waits, on the loop, for a task of the same loop."""
    keys = [CacheEngineKey(MODEL, 1, 0, n + 1, torch.bfloat16) for n in range(chunks)]
    writer, wanted = engine.connector(), []
    for n, key in enumerate(keys):
        assert not engine.run(writer.exists(key))
        chunk = engine.chunk(n)
        wanted.append(digest(chunk))
        engine.run(writer.put(key, chunk))
    reader = engine.connector()
    assert all(reader.exists_sync(key) for key in keys)
    found = [engine.run(reader.get(keys[0])), *engine.run(reader.batched_get(keys[1:]))]
    for key, chunk, want in zip(keys, found, wanted, strict=True):
        assert chunk is not None, f"{key} was not loaded"
        assert digest(chunk) == want, f"{key} came back changed"
        chunk.ref_count_down()
    missing = CacheEngineKey(MODEL, 1, 0, chunks + 1, torch.bfloat16)
    assert engine.run(reader.get(missing)) is None


def adapter_round_trip(engine: Engine, chunks: int) -> None:
    """The L2 adapter: store; look up, load, list and delete by another."""
    keys = [object_key(n) for n in range(chunks)]
    first, second = Adapter(adapter_of(engine.config)), Adapter(adapter_of(engine.config))
    assert first.lookup(keys) == set()
    stored = [engine.chunk(1000 + n) for n in range(chunks)]
    assert first.store(keys, stored)
    assert second.lookup([*keys, object_key(-1)]) == set(range(chunks))
    loaded = [engine.empty() for _ in keys]
    assert second.load(keys, loaded) == set(range(chunks))
    for before, after in zip(stored, loaded, strict=True):
        assert digest(before) == digest(after), "a chunk came back changed"
        before.ref_count_down()
        after.ref_count_down()
    assert len(second.adapter.list_l2_keys(MODEL, page_size=1000).entries) == chunks
    second.adapter.submit_unlock(keys)
    second.adapter.delete(keys[:1])
    assert Adapter(adapter_of(engine.config)).lookup(keys) == set(range(1, chunks))
    for adapter in (first, second):
        adapter.close()


def adapter_of(config: LMCacheEngineConfig) -> S3L2Adapter:
    told: dict[str, Any] = config.extra_config
    return S3L2Adapter(
        S3L2AdapterConfig(
            config.remote_url,
            told["s3_region"],
            disable_tls=told["disable_tls"],
            aws_access_key_id=told["aws_access_key_id"],
            aws_secret_access_key=told["aws_secret_access_key"],
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="LMCache on KVFS through its S3 API.")
    parser.add_argument("config", help="what `kvfs s3 env --for lmcache` printed")
    parser.add_argument("--chunks", type=int, default=8, help="of 4 MiB each; at most 24")
    options = parser.parse_args()
    config = LMCacheEngineConfig.from_file(options.config)
    config.chunk_size, config.local_cpu, config.max_local_cpu_size = 256, False, 0.25
    engine = Engine(config)
    connector_round_trip(engine, options.chunks)
    adapter_round_trip(engine, options.chunks)
    print(f"{options.chunks} chunks: connector and L2 adapter got every byte back")
    sys.stdout.flush()
    os._exit(0)  # LMCache leaves threads behind


if __name__ == "__main__":
    main()
