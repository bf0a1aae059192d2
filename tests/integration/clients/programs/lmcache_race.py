"""One of several LMCache processes that store the same keys, and load them, at the same time.

    python lmcache_race.py DIRECTORY ROUNDS

LMCache's temporary name follows from the key alone, so all of them write the same one. A store may
fail (another has renamed the file away) and a load may miss; a load that succeeds must have the
right bytes. First in DIRECTORY/buffered, then with direct I/O in DIRECTORY/direct; prints how many
of each.
"""

import os
import sys

from lmcache_example import Engine, digest, fs_adapter, object_key, settings


def race(directory: str, rounds: int, *, direct: bool) -> None:
    engine, adapter = Engine(settings(directory, direct)), fs_adapter(directory, direct)
    chunk, into = engine.chunk(7), engine.empty()
    right = digest(chunk)
    stored = loaded = 0
    for n in range(rounds):
        key = object_key(n)
        stored += adapter.store([key], [chunk])
        for look in (key, object_key(max(n - 1, 0))):
            if adapter.load([look], [into]):
                loaded += 1
                assert digest(into) == right, f"round {n}: a chunk came back torn"
    print(f"{stored} stored, {loaded} loaded")


def main() -> None:
    directory, rounds = sys.argv[1], int(sys.argv[2])
    race(f"{directory}/buffered", rounds, direct=False)
    race(f"{directory}/direct", rounds, direct=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
