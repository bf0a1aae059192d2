"""LMCache 0.5.6 on a mount whose daemons are killed: every call of it has to succeed.

    python lmcache_waits.py DIRECTORY UNTIL

Stores chunks by the connector and by the L2 adapter, one buffered, one with direct I/O, and loads
earlier ones, until the file UNTIL exists; then it loads all that it keeps. Prints how many it has
stored and loaded. A store that fails, a chunk that is missing or other than it was stored, or one
that is there and was never stored, ends it with a traceback.
"""

import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache_example import MODEL, Engine, digest, fs_adapter, object_key, settings

KEPT = 30
"""The last chunks are kept, 4 MiB each, by both ways."""


class Connector:
    """The remote connector for filesystems."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connector = engine.connector()

    def has(self, number: int) -> bool:
        return bool(self._engine.run(self._connector.exists(_key(number))))

    def store(self, number: int) -> None:
        chunk = self._engine.chunk(number)
        self._engine.run(self._connector.put(_key(number), chunk))  # raises what fails

    def load(self, number: int) -> bytes:
        found = self._engine.run(self._connector.get(_key(number)))
        assert found is not None, f"the connector misses chunk {number}"
        content = digest(found)
        found.ref_count_down()
        return content

    def remove(self, number: int) -> None:
        assert self._connector.remove_sync(_key(number))


class L2:
    """The L2 adapter for filesystems."""

    def __init__(self, engine: Engine, directory: str, *, direct: bool) -> None:
        self._engine = engine
        self._directory = directory
        self._adapter = fs_adapter(directory, direct)

    def has(self, number: int) -> bool:
        return self._adapter.lookup([object_key(number)]) == {0}

    def store(self, number: int) -> None:
        chunk = self._engine.chunk(number)
        assert self._adapter.store([object_key(number)], [chunk]), f"chunk {number}"
        chunk.ref_count_down()

    def load(self, number: int) -> bytes:
        into = self._engine.empty()
        loaded = self._adapter.load([object_key(number)], [into])
        assert loaded == {0}, f"the adapter misses chunk {number}"
        content = digest(into)
        into.ref_count_down()
        return content

    def remove(self, number: int) -> None:
        before = len(os.listdir(self._directory))
        self._adapter.adapter.delete([object_key(number)])
        assert not self.has(number)
        assert len(os.listdir(self._directory)) == before - 1


def _key(number: int) -> CacheEngineKey:
    return CacheEngineKey(MODEL, 1, 0, number + 1, torch.bfloat16)


def main() -> None:
    directory, until = sys.argv[1], Path(sys.argv[2])
    places = [f"{directory}/connector", f"{directory}/adapter"]
    for place in places:
        os.makedirs(place)
    engine = Engine(settings(places[0], direct=False))
    ways: list[Any] = [Connector(engine), L2(engine, places[1], direct=True)]
    draw, kept, loaded, number = random.Random(1), dict[int, bytes](), 0, 0
    while not number or not until.exists():
        wanted = engine.chunk(number)
        kept[number] = digest(wanted)
        wanted.ref_count_down()
        chosen = draw.choice(list(kept))
        for way in ways:
            assert not way.has(number), number
            way.store(number)
            assert way.load(chosen) == kept[chosen], chosen
            if len(kept) > KEPT:
                way.remove(min(kept))
        if len(kept) > KEPT:
            del kept[min(kept)]
        number, loaded = number + 1, loaded + len(ways)
    for each, content in kept.items():
        for way in ways:
            assert way.load(each) == content, each
            loaded += 1
    print(f"{number * len(ways)} chunks stored, {loaded} loaded")
    sys.stdout.flush()
    os._exit(0)  # LMCache leaves threads behind


if __name__ == "__main__":
    main()
