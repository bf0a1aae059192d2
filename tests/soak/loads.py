"""What programs of all hosts do while a soak lasts: blocks of a KV cache, weights, objects over S3,
files over NFS where there is a server for that.

Each knows what it wrote. A read gives that, or a miss where one is allowed; every other end is an
error, noted with its time and judged when it is known what was disturbed then.
"""

import contextlib
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from s3api.auth.credentials import Credentials
from tests.cluster.cluster import S3_PORT, Cluster, Host
from tests.cluster.histories.events import Hangs
from tests.cluster.stacks import stacks_of
from tests.cluster.waiting import join_all
from tests.nfs import ganesha
from tests.soak.nfs_load import FAILURES, FILES, NfsLoad

BLOCKS: Final = "blocks"
WEIGHTS: Final = "weights"
BUCKET: Final = "objects"
BLOCK_BYTES: Final = 256 << 10
_WEIGHT_BYTES: Final = 8 << 20
_WEIGHTS: Final = 3
_OBJECT_BYTES: Final = 64 << 10
_KNOWN: Final = 600
"""The last blocks are asked for again: more than the namespace holds."""
_FILE_BYTES: Final = 32 << 10
_GIVE_UP_S: Final = 120.0
"""In which what is under way has to end."""
_PAUSE_S: Final = {BLOCKS: 0.01, WEIGHTS: 0.5, BUCKET: 0.05, FILES: 0.1}
_HEARD_S: Final = 10.0
"""Within which a host hears what became of a name, on a busy machine."""
_Step = Callable[[Host, random.Random, Any], None]
_MISSES: Final = ("NoSuchKey", "404")


class LoadError(NamedTuple):
    """An operation that ended otherwise than it may."""

    began: float
    ended: float
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
        self._under_way: dict[str, float] = {}
        """Since when the operation of a load has been going on."""
        self._names: list[str] = []
        """Of all blocks that were written; only ever longer, since all threads read it."""

    def prepare(self) -> None:
        """The weights are there, on the first host's word."""
        root = self._cluster[1].mount / WEIGHTS
        for number in range(_WEIGHTS):
            (root / str(number)).write_bytes(content(f"weights {number}", _WEIGHT_BYTES))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """They run while the block lasts. Raises Hangs in the end."""
        loads: dict[str, _Step] = {
            BLOCKS: self._on_block,
            WEIGHTS: self._on_weights,
            BUCKET: self._on_object,
        }
        if not ganesha.why_not():
            loads[FILES] = self._on_file
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
            have_ended = join_all(threads, _GIVE_UP_S)
        if not have_ended:
            now = time.monotonic()
            what = [f"{name} for {now - began:.0f} s" for name, began in self._under_way.items()]
            raise Hangs("\n".join(["never ends:", *what, stacks_of(self._cluster)]))

    def _run(self, host: Host, load: str, step: _Step) -> None:
        draw = random.Random(f"{self._seed} {host.number} {load}")
        name = f"host {host.number} {load}"
        with contextlib.ExitStack() as closing:
            client = self._client(host, load)
            if client is not None:
                closing.callback(client.close)
            while not self._stop.wait(_PAUSE_S[load]):
                self._under_way[name] = began = time.monotonic()
                try:
                    step(host, draw, client)
                except (OSError, BotoCoreError, ClientError, *FAILURES) as error:
                    ended, text = time.monotonic(), f"{type(error).__name__}: {error}"
                    with self.journal.lock:
                        self.journal.errors.append(LoadError(began, ended, host.number, load, text))
                    self._stop.wait(0.2)
                finally:
                    del self._under_way[name]

    def _client(self, host: Host, load: str) -> Any:
        """A client on that host, where the thread stays; None for loads of the mount."""
        if load not in (BUCKET, FILES):
            return None
        self._cluster.network.enter(host.name)
        if load == FILES:
            return NfsLoad(host)
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

    def _on_file(self, _host: Host, draw: random.Random, client: NfsLoad) -> None:
        """Names of this host alone."""
        found = client.step(draw, lambda name: content(name, _FILE_BYTES))
        if found is None:
            self.journal.count("files written by NFS")
            return
        name, data = found
        self._compare(f"{FILES}/{name}", data, content(name, _FILE_BYTES), "files read by NFS")

    def look_at_all(self) -> None:
        """Once nobody writes any more: each block that a host lists can be read there, or is soon
        listed no more, since what is read takes the place of others."""
        for host in self._cluster:
            root = host.mount / BLOCKS
            missed = self._missed(root, os.listdir(root))
            end = time.monotonic() + _HEARD_S
            while missed and time.monotonic() < end:
                time.sleep(1.0)
                missed = self._missed(root, sorted({*missed} & {*os.listdir(root)}))
            self.journal.wrong += [f"{BLOCKS}/{each}: listed by {host.name}" for each in missed]

    def _missed(self, root: Path, names: list[str]) -> list[str]:
        """Returns those that are not there. Drafts are passed over."""
        missed = []
        for name in names:
            if name.startswith("."):
                continue
            try:
                found = (root / name).read_bytes()
            except OSError:
                missed.append(name)
                continue
            wanted = content(name, BLOCK_BYTES)
            self._compare(f"{BLOCKS}/{name}", found, wanted, "blocks read in the end")
        return missed

    def _compare(self, name: str, found: bytes, wanted: bytes, what: str) -> None:
        self.journal.count(what)
        if found != wanted:
            with self.journal.lock:
                self.journal.wrong.append(f"{name}: {len(found)} of {len(wanted)} bytes, or others")


def content(name: str, size: int) -> bytes:
    """The content that a name stands for."""
    piece = hashlib.blake2b(name.encode(), digest_size=64).digest()
    return piece * (size // len(piece))
