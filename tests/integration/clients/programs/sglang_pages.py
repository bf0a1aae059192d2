"""SGLang's HiCache on KVFS: pages of its own host pool, stored and loaded by its own back ends.

    python sglang_pages.py store|load '{"file": {"max_size": "64Mi"}, "nixl": {}}'

`store` fills a pool, and gives its pages to each back end as SGLang's cache controller does.
`load`, in another process, finds them and compares what comes into another pool. Names of back ends
and their settings are those of --hicache-storage-backend and its extra-config; where a back end
keeps its files, an environment variable of SGLang's says. Runs on a CPU: between the pool and a GPU
nothing is moved. Ends with 0 when every page came back.
"""

import argparse
import hashlib
import json
import os
import sys

import sglang_stand_ins  # noqa: F401  (before SGLang)
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGES, PAGE_TOKENS = 24, 64
LAYERS, HEADS, HEAD = 4, 8, 64
POOL_BYTES = 64 << 20
IN_PLACE = frozenset({"nixl", "seaweedfs"})
"""Back ends that are given the pool's own memory (SGLang: interface v1)."""


def make_pool() -> MHATokenToKVPoolHost:
    """Of pages of 512 KiB, K and V of all layers."""
    dtype, device = torch.bfloat16, torch.device("cpu")
    rows = tuple(torch.zeros(1, HEADS, HEAD, dtype=dtype) for _ in range(LAYERS))
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=rows, v=rows, k_data_ptrs=None, v_data_ptrs=None, layout=KVBufferLayout.NHD
        ),
        page_size=PAGE_TOKENS,
        head_num=HEADS,
        head_dim=HEAD,
        v_head_dim=HEAD,
        dtype=dtype,
        device=device,
        transfer_buffers=lambda: (rows[0], rows[0]),  # of a GPU's, which is not asked
    )
    with host_memory_budget_scope(POOL_BYTES):
        return MHATokenToKVPoolHost(
            info,
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=PAGE_TOKENS,
            layout="page_first",
            pin_memory=False,
            device_capacity_tokens=PAGES * PAGE_TOKENS,
            start_layer=0,
            end_layer=LAYERS,
        )


def make_backend(name: str, settings: dict[str, object], pool: object) -> HiCacheStorage:
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="example/model",
        extra_config=settings,
    )
    backend = StorageBackendFactory.create_backend(name, config, pool)
    backend.register_mem_pool_host(pool)
    return backend


def key(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


NUMBERS = list(range(PAGES))
KEYS = [key(number) for number in NUMBERS]


def page(pool: MHATokenToKVPoolHost, number: int) -> torch.Tensor:
    found: torch.Tensor = pool.get_data_page(number * PAGE_TOKENS)
    return found


def content(number: int) -> torch.Tensor:
    """Of a page, from its number."""
    generator = torch.Generator().manual_seed(number)
    numel = 2 * LAYERS * PAGE_TOKENS * HEADS * HEAD
    return torch.randint(0, 30_000, (numel,), dtype=torch.int16, generator=generator).view(
        torch.bfloat16
    )


def places(numbers: list[int]) -> torch.Tensor:
    """Of these pages' tokens in a pool."""
    return torch.cat([torch.arange(PAGE_TOKENS) + number * PAGE_TOKENS for number in numbers])


class Storage:
    """One back end, asked as the cache controller asks it."""

    def __init__(self, name: str, settings: dict[str, object]) -> None:
        self.pool = make_pool()
        self.is_in_place = name in IN_PLACE
        self.backend = make_backend(name, settings, self.pool)

    def count(self, keys: list[str]) -> int:
        """How many of them are there, until the first that is not."""
        found: int = self.backend.batch_exists(keys)
        return found

    def store(self, keys: list[str], numbers: list[int]) -> bool:
        """Of these pages of the pool; whether all were stored."""
        if self.is_in_place:
            return all(self.backend.batch_set_v1(keys, places(numbers)))
        return bool(self.backend.batch_set(keys, [page(self.pool, n) for n in numbers]))

    def load(self, keys: list[str], numbers: list[int]) -> list[bool]:
        """Into these pages of the pool; which of them came."""
        if self.is_in_place:
            return list(self.backend.batch_get_v1(keys, places(numbers)))
        blank = [self.pool.get_dummy_flat_data_page() for _ in keys]
        pages = self.backend.batch_get(keys, blank)
        for number, found in zip(numbers, pages, strict=True):
            if found is not None:
                self.pool.set_from_flat_data_page(number * PAGE_TOKENS, found)
        return [found is not None for found in pages]


def store(storage: Storage) -> None:
    for number in NUMBERS:
        storage.pool.set_from_flat_data_page(number * PAGE_TOKENS, content(number))
    assert storage.count(KEYS) == 0
    assert storage.store(KEYS, NUMBERS)
    assert storage.count([*KEYS, key(-1)]) == PAGES


def load(storage: Storage) -> None:
    """Into the pages the other way round; then what is not there."""
    assert storage.count([*KEYS, key(-1)]) == PAGES
    assert all(storage.load(KEYS, NUMBERS[::-1]))
    for wanted, number in zip(NUMBERS, NUMBERS[::-1], strict=True):
        found, want = page(storage.pool, number).view(torch.int16), content(wanted)
        assert torch.equal(found, want.view(torch.int16)), f"page {wanted} came back changed"
    assert storage.load([key(-1)], [0]) == [False]


def main() -> None:
    parser = argparse.ArgumentParser(description="SGLang's HiCache on KVFS.")
    parser.add_argument("step", choices=["store", "load"])
    parser.add_argument("backends", type=json.loads)
    options = parser.parse_args()
    step = {"store": store, "load": load}[options.step]
    for name, settings in options.backends.items():
        step(Storage(name, settings))
        print(f"{name}: {options.step} of {PAGES} pages")
    sys.stdout.flush()
    os._exit(0)  # back ends leave threads behind


if __name__ == "__main__":
    main()
