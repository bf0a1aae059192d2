"""What every client is held against: the objects, the keys, and the mount beside.

The scripts in this directory run in an environment of their own, which has neither KVFS nor pytest.
The server is named by the variables that the SDKs read, the bucket by `S3_BUCKET` and its directory
on the mount by `S3_MOUNT`. The module `configured` is what `kvfs s3 env --for CLIENT` printed.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from objects import ODD, SIZES, content

ENDPOINT: Final = os.environ["AWS_ENDPOINT_URL_S3"]
HOST: Final = urlsplit(ENDPOINT).netloc
REGION: Final = os.environ["AWS_REGION"]
ACCESS_KEY: Final = os.environ["AWS_ACCESS_KEY_ID"]
SECRET: Final = os.environ["AWS_SECRET_ACCESS_KEY"]
BUCKET: Final = os.environ["S3_BUCKET"]
MOUNT: Final = Path(os.environ["S3_MOUNT"])


def beside(key: str) -> Path:
    """Where the mount shows the object: an empty segment as `%`."""
    return MOUNT.joinpath(*(segment or "%" for segment in key.split("/")))


def both_ways(
    put: Callable[[str, bytes], object],
    get: Callable[[str], bytes],
    names: Callable[[], Iterable[str]],
    delete: Callable[[str], object],
    also: Iterable[str] = (),
) -> None:
    """Objects of every size and name, written by the client and on the mount, read by the other.

    `names` lists all keys of the bucket; `also` are keys that this client can say and the mount
    cannot make.
    """
    ordinary = {name: content(size) for name, size in SIZES.items()}
    ordinary |= {key: key.encode() for key in ODD}
    wanted = ordinary | {key: key.encode() for key in also}
    for key, data in wanted.items():
        put(key, data)
        assert beside(key).read_bytes() == data, key
        assert get(key) == data, key
    assert sorted(names()) == sorted(wanted)
    for key in wanted:
        delete(key)
        assert not beside(key).exists(), key
    assert not list(names())
    for key, data in ordinary.items():
        beside(key).parent.mkdir(parents=True, exist_ok=True)
        beside(key).write_bytes(data)
        assert get(key) == data, key
    assert sorted(names()) == sorted(ordinary)
    for key in ordinary:
        beside(key).unlink()
    assert not list(names())
