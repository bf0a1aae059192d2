"""What programs of all hosts do while a soak lasts: blocks of a KV cache, weights, objects over S3.

Each knows what it wrote. A read gives that, or a miss where one is allowed; every other end is an
error, noted with its time and judged when it is known what was disturbed then.
"""

import contextlib
import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from s3api.auth.credentials import Credentials
from tests.cluster.cluster import S3_PORT, Cluster, Host

BLOCKS: Final = "blocks"
WEIGHTS: Final = "weights"
BUCKET: Final = "objects"
BLOCK_BYTES: Final = 256 << 10
_WEIGHT_BYTES: Final = 8 << 20
_WEIGHTS: Final = 3
_OBJECT_BYTES: Final = 64 << 10
_KNOWN: Final = 600
"""The last blocks are asked for again: more than the namespace holds."""
_PAUSE_S: Final = {BLOCKS: 0.01, WEIGHTS: 0.5, BUCKET: 0.05}
_MISSES: Final = ("NoSuchKey", "404")


class LoadError(NamedTuple):
    """An operation that ended otherwise than it may."""

    at: float
    host: int
    load: str
    text: str


@dataclass
class Journal:
    """What all loads did."""

    done: Counter[str] = field(default_factory=Counter)
    errors: list[LoadError] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Contents that nobody wrote under that name: never allowed."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str) -> None:
        with self.lock:
            self.done[what] += 1


class Loads:
    """All loads, a thread for each of a host. `seed` draws what they do."""

    def __init__(self, cluster: Cluster, keys: Credentials, seed: int) -> None:
        self.journal = Journal()
        self._cluster = cluster
        self._keys = keys
        self._seed = seed
        self._stop = threading.Event()
        self._names: list[str] = []
        """Of all blocks that were written; only ever longer, since all threads read it."""

    def prepare(self) -> None:
        """The weights are there, on the first host's word."""
        root = self._cluster[1].mount / WEIGHTS
        for number in range(_WEIGHTS):
            (root / str(number)).write_bytes(content(f"weights {number}", _WEIGHT_BYTES))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """They run while the block lasts."""
        loads = {BLOCKS: self._on_block, WEIGHTS: self._on_weights, BUCKET: self._on_object}
        threads = [
            threading.Thread(target=self._run, args=(host, load, step), daemon=True)
            for host in self._cluster
            for load, step in loads.items()
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(120)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError("an operation of a load hangs")

    def _run(self, host: Host, load: str, step: Callable[[Host, random.Random, Any], None]) -> None:
        draw = random.Random(f"{self._seed} {host.number} {load}")
        client = self._client(host) if load == BUCKET else None
        while not self._stop.wait(_PAUSE_S[load]):
            began = time.monotonic()
            try:
                step(host, draw, client)
            except (OSError, BotoCoreError, ClientError) as error:
                text = f"{type(error).__name__}: {error}"
                with self.journal.lock:
                    self.journal.errors.append(LoadError(began, host.number, load, text))
                self._stop.wait(0.2)

    def _client(self, host: Host) -> Any:
        """A client on that host; the thread stays there."""
        self._cluster.network.enter(host.name)
        return boto3.session.Session().client(
            "s3",
            endpoint_url=f"http://{host.address}:{S3_PORT}",
            region_name="us-east-1",
            aws_access_key_id=self._keys.access_key,
            aws_secret_access_key=self._keys.secret,
            config=Config(
                connect_timeout=5,
                read_timeout=30,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
            ),
        )

    def _on_block(self, host: Host, draw: random.Random, _: Any) -> None:
        """As LMCache does it: a block gets its name when it is whole, and is looked for by all."""
        root = host.mount / BLOCKS
        if not self._names or draw.random() < 0.3:
            name = f"{draw.getrandbits(64):016x}"
            draft = root / f".{name}.{host.number}"
            draft.write_bytes(content(name, BLOCK_BYTES))
            draft.rename(root / name)
            self._names.append(name)
            self.journal.count("blocks written")
            return
        name = draw.choice(self._names[-_KNOWN:])
        try:
            found = (root / name).read_bytes()
        except FileNotFoundError:
            self.journal.count("blocks missed")
            return
        self._compare(f"{BLOCKS}/{name}", found, content(name, BLOCK_BYTES), "blocks read")

    def _on_weights(self, host: Host, draw: random.Random, _: Any) -> None:
        number = draw.randrange(_WEIGHTS)
        found = (host.mount / WEIGHTS / str(number)).read_bytes()
        wanted = content(f"weights {number}", _WEIGHT_BYTES)
        self._compare(f"{WEIGHTS}/{number}", found, wanted, "weights read")

    def _on_object(self, host: Host, draw: random.Random, client: Any) -> None:
        """Keys of this host alone: what it put last is what it gets."""
        key = f"{host.number}/{draw.randrange(50)}"
        match draw.choice(("put", "get", "get", "delete")):
            case "put":
                client.put_object(Bucket=BUCKET, Key=key, Body=content(key, _OBJECT_BYTES))
                self.journal.count("objects put")
            case "delete":
                client.delete_object(Bucket=BUCKET, Key=key)
                self.journal.count("objects deleted")
            case _:
                try:
                    found = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
                except ClientError as error:
                    if error.response["Error"]["Code"] not in _MISSES:
                        raise
                    self.journal.count("objects missed")
                    return
                wanted = content(key, _OBJECT_BYTES)
                self._compare(f"{BUCKET}/{key}", found, wanted, "objects got")

    def _compare(self, name: str, found: bytes, wanted: bytes, what: str) -> None:
        self.journal.count(what)
        if found != wanted:
            with self.journal.lock:
                self.journal.wrong.append(f"{name}: {len(found)} of {len(wanted)} bytes, or others")


def content(name: str, size: int) -> bytes:
    """The content that a name stands for."""
    piece = hashlib.blake2b(name.encode(), digest_size=64).digest()
    return piece * (size // len(piece))
