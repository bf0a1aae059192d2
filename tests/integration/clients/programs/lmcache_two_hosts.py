"""LMCache on two hosts that mount one KVFS: what one stores the other finds and loads.

    python lmcache_two_hosts.py /hostA/mnt/cache/lmcache /hostB/mnt/cache/lmcache

Ends with 0 when each chunk that was stored through the first directory came back byte for byte
through the second, by the remote connector and by the L2 adapter.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache_example import (
    MODEL,
    Adapter,
    Engine,
    digest,
    fs_adapter,
    object_key,
    settings,
    torch,
)

CHUNKS = 6
BOUND_S = 60.0
"""A cache namespace tells other hosts of a close within two seconds; machines are slow."""


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + BOUND_S
    while not is_so():
        assert time.monotonic() < end, f"after {BOUND_S:g} s: {what}"
        time.sleep(0.02)


def by_connector(stores: Engine, loads: Engine) -> None:
    """What the one puts the other finds and gets."""
    here, there = stores.connector(), loads.connector()
    keys = [CacheEngineKey(MODEL, 1, 0, n + 1, torch.bfloat16) for n in range(CHUNKS)]
    wanted = []
    for n, key in enumerate(keys):
        chunk = stores.chunk(n)
        wanted.append(digest(chunk))
        stores.run(here.put(key, chunk))
    for key, want in zip(keys, wanted, strict=True):
        until(lambda key=key: there.exists_sync(key), f"{key} is not found")
        found = loads.run(there.get(key))
        assert found is not None, f"{key} was not loaded"
        assert digest(found) == want, f"{key} came back changed"
        found.ref_count_down()
    stores.run(here.close())
    loads.run(there.close())


def by_adapter(stores: Engine, loads: Engine, here: Adapter, there: Adapter) -> None:
    """What the one stores the other looks up and loads."""
    keys = [object_key(n) for n in range(CHUNKS)]
    assert there.lookup(keys) == set()
    stored: list[Any] = [stores.chunk(1000 + n) for n in range(CHUNKS)]
    assert here.store(keys, stored)
    until(lambda: there.lookup(keys) == set(range(CHUNKS)), "chunks are not found")
    loaded = [loads.empty() for _ in keys]
    assert there.load(keys, loaded) == set(range(CHUNKS))
    assert [digest(each) for each in stored] == [digest(each) for each in loaded]
    here.close()
    there.close()


def main() -> None:
    engines, adapters = [], []
    for directory in sys.argv[1:3]:
        connector = os.path.join(directory, "connector")
        os.makedirs(connector, exist_ok=True)
        engines.append(Engine(settings(connector, direct=False)))
        adapters.append(fs_adapter(os.path.join(directory, "adapter"), direct=False))
    by_connector(*engines)
    by_adapter(*engines, *adapters)
    print(f"{CHUNKS} chunks stored on one host came whole to the other")
    sys.stdout.flush()
    os._exit(0)  # LMCache leaves threads behind


if __name__ == "__main__":
    main()
