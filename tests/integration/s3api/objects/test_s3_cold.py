"""The cold tier: a node whose cold files lie in the S3 API of another node."""

import contextlib
import errno
import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvfs.base import control
from kvfs.base.errors import Unavailable
from kvfs.client import Client
from kvfs.transfer.cold.endpoint import ColdPart, Endpoint
from kvfs.transfer.cold.object_transfer import PART_BYTES, upload
from tests.cluster.waiting import wait_until
from tests.fault.proxy import Proxy, proxied
from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.posix import refused
from tests.integration.s3 import S3

MIB = 1 << 20
SIZE = MIB // 4
CAPACITY = 16 * MIB
FILES = CAPACITY // SIZE
LATEST_S = 120.0


@dataclass
class Cold:
    """A node with a cold tier, and the bucket behind it."""

    node: Node
    client: Client
    s3: S3
    bucket: str
    proxy: Proxy
    content: dict[str, dict[Path, bytes]] = field(default_factory=dict)
    """Of each namespace, as it was filled."""

    def add(self, name: str, *policy: str, seed: int) -> None:
        """A namespace with more in it than fits."""
        options = ("--capacity", str(CAPACITY), "--cold", "on", *policy)
        self.run("namespace", "create", name, *options)
        self.content[name] = self.fill(name, seed)

    def objects(self) -> dict[str, int]:
        found = self.s3.client("main").list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return {each["Key"]: each["Size"] for each in found}

    def object(self, key: str) -> bytes:
        found = self.s3.client("main").get_object(Bucket=self.bucket, Key=key)["Body"].read()
        assert isinstance(found, bytes)
        return found

    def where(self, *paths: Path) -> list[Any]:
        said = self.run("where", "--json", *map(self.inside, paths))
        return [json.loads(line) for line in said.splitlines()]

    def has(self, ino: int) -> bool:
        """Whether an object of this file is there."""
        return any(f"/{ino:016x}." in key for key in self.objects())

    def is_away(self, path: Path) -> bool:
        """Whether its data are not here."""
        ino = path.stat().st_ino
        return not list((self.node.store / "data").glob(f"???/{ino:016x}.*"))

    def away(self, name: str) -> list[Path]:
        """Files of a namespace whose data are in the tier alone, once it is within its limit and
        the data files of all that it sent there are gone."""
        wait_until(lambda: self.used(name) <= CAPACITY * 3 // 4, "it is within its limit", LATEST_S)
        paths = list((self.node.mount / name).iterdir())
        wait_until(
            lambda: self.here(paths) < CAPACITY * 3 // 4 + SIZE,
            "what is not counted has no data file",
            LATEST_S,
        )
        return [path for path in paths if self.is_away(path)]

    def here(self, paths: list[Path]) -> int:
        """Bytes of those that have data here."""
        return sum(path.stat().st_size for path in paths if not self.is_away(path))

    def run(self, *arguments: str) -> str:
        done = kvfs(*arguments, "--store", str(self.node.store))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> Any:
        return control.call(self.node.store / "run" / "control.sock", "status")

    def used(self, name: str) -> int:
        """As the node counts it."""
        (found,) = [each for each in self.status()["namespaces"] if each["name"] == name]
        return int(found["used_bytes"])

    def fill(self, name: str, seed: int) -> dict[Path, bytes]:
        """As much as fits without its headroom, then twice a bit more, when all before has found
        its place. All of it is less than what would have a cache drop files that are not in the
        tier yet."""
        draw = random.Random(seed)
        content: dict[Path, bytes] = {}
        for count in (FILES * 3 // 4, FILES // 16, FILES // 32):
            batch = [self.node.mount / name / f"block-{len(content) + n}" for n in range(count)]
            for path in batch:
                content[path] = draw.randbytes(SIZE)
                path.write_bytes(content[path])
            wait_until(partial(self.has_settled, name, batch), "all found its place", LATEST_S)
        return content

    def has_settled(self, name: str, written: list[Path]) -> bool:
        """Whether files just written may be demoted, and what is over the limit was."""
        if self.used(name) > CAPACITY * 3 // 4:
            return False
        return all(self.client.stat(self.inside(path)).checksum for path in written)

    def inside(self, path: Path) -> str:
        return f"/{path.relative_to(self.node.mount)}"


@pytest.fixture(scope="module")
def cold(s3: S3) -> Iterator[Cold]:
    with new_cold(s3) as made:
        yield made


@contextlib.contextmanager
def new_cold(s3: S3, *flags: str, kinds: Sequence[str] = ("cache", "durable")) -> Iterator[Cold]:
    """A node with a full namespace of each kind, and a tier of its own."""
    bucket = s3.new_bucket()
    pair = s3.users["main"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", pair.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", pair.secret)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        node = Node.make(best_mode())
        try:
            with (
                proxied(("127.0.0.1", 0), (s3.host, s3.port)) as proxy,
                Client(started(node, bucket, proxy, *flags).store) as client,
            ):
                cold = Cold(node, client, s3, bucket, proxy)
                for number, kind in enumerate(kinds):
                    cold.add(f"cold-{kind}", "--kind", kind, seed=number)
                yield cold
        finally:
            print(node.log[-5000:])
            node.remove()
            s3.remove_bucket(bucket)


def started(node: Node, bucket: str, proxy: Proxy, *flags: str) -> Node:
    """With its cold tier behind the proxy."""
    endpoint = f"http://127.0.0.1:{proxy.port}"
    node.flags = ("--cold", f"s3://{bucket}/tier", "--cold-endpoint", endpoint, *flags)
    return node.up()


@pytest.mark.parametrize("kind", ["cache", "durable"])
def test_what_does_not_fit_goes_there_and_comes_back(cold: Cold, kind: str, seed: int) -> None:
    content = cold.content[f"cold-{kind}"]
    assert cold.used(f"cold-{kind}") <= CAPACITY
    assert len(cold.away(f"cold-{kind}")) >= FILES // 16
    objects = cold.objects()
    for path, data in content.items():
        found = path.stat()
        assert found.st_size == SIZE
        if cold.is_away(path):
            (key,) = [key for key in objects if f"/{found.st_ino:016x}." in key]
            assert cold.object(key) == data
    mtimes = {path: path.stat().st_mtime_ns for path in content}
    for path in random.Random(seed).sample(sorted(content), len(content)):
        assert path.read_bytes() == content[path]
        assert path.stat().st_mtime_ns == mtimes[path]


def test_clients_have_it_brought_too(cold: Cold) -> None:
    path = cold.away("cold-durable")[0]
    assert len(cold.client.get(cold.inside(path))) == SIZE
    assert not cold.is_away(path)


def test_where_it_lies_is_told_and_it_is_fetched_when_asked(cold: Cold) -> None:
    path = cold.away("cold-durable")[0]
    (facts,) = cold.where(path)
    assert facts["copies"] == []
    assert facts["cold"] == f"s3://{cold.bucket}/tier"
    assert facts["blocks"] == 1
    said = cold.run("prefetch", cold.inside(path))
    assert "brought 1 file," in said
    (facts,) = cold.where(path)
    (copy,) = facts["copies"]
    assert (copy["node"], copy["medium"], copy["alive"]) == (0, "ssd", True)
    assert "this node: all blocks, on ssd" in cold.run("where", cold.inside(path))
    said = cold.run("prefetch", "/cold-durable")
    assert f"brought {len(list(path.parent.iterdir()))} files" in said


def test_it_is_changed_as_any_other_file(cold: Cold) -> None:
    path, other = cold.away("cold-cache")[:2]
    ino = path.stat().st_ino
    with path.open("r+b") as file:
        file.seek(1)
        file.write(b"new")
    assert path.read_bytes()[1:4] == b"new"
    assert path.stat().st_size == SIZE
    wait_until(lambda: not cold.has(ino) or not cold.is_away(path), "one place has it")
    os.truncate(other, 5)
    assert len(other.read_bytes()) == 5
    os.utime(third := cold.away("cold-cache")[0], ns=(10**18, 10**18))
    assert third.stat().st_mtime_ns == 10**18
    assert len(third.read_bytes()) == SIZE
    assert third.stat().st_mtime_ns == 10**18


def test_it_is_there_after_a_kill(cold: Cold) -> None:
    inos = [path.stat().st_ino for path in cold.away("cold-durable")]
    assert inos
    cold.node.kill()
    cold.node.up()
    for path in (cold.node.mount / "cold-durable").iterdir():
        assert len(path.read_bytes()) == SIZE


def test_a_kill_while_files_are_sent_loses_nothing(cold: Cold, seed: int) -> None:
    cold.run("namespace", "create", "killed", "--capacity", str(CAPACITY), "--cold", "on")
    cold.proxy.held = "out"
    draw = random.Random(seed)
    paths = [cold.node.mount / "killed" / f"block-{number}" for number in range(FILES * 7 // 8)]
    content = {path: draw.randbytes(SIZE) for path in paths}
    for path, data in content.items():
        path.write_bytes(data)
    inos = [path.stat().st_ino for path in paths]
    # Its answer does not arrive.
    wait_until(lambda: any(map(cold.has, inos)), "the tier has a file", LATEST_S)
    cold.node.kill()
    cold.proxy.held = None
    cold.proxy.cut()
    cold.node.up()
    for path, data in content.items():
        assert path.read_bytes() == data
    assert cold.away("killed")
    for path, data in content.items():
        assert path.read_bytes() == data


def test_uploads_that_did_not_end_are_found_with_their_age_and_ended(cold: Cold) -> None:
    begin = cold.s3.client("main").create_multipart_upload
    ids = [begin(Bucket=cold.bucket, Key=f"left/{key}")["UploadId"] for key in "ab"]
    begin(Bucket=cold.bucket, Key="other/a")
    endpoint = Endpoint(cold.bucket, cold.s3.endpoint)
    found = list(endpoint.unfinished("left/"))
    assert [(each.key, each.upload) for each in found] == [("left/a", ids[0]), ("left/b", ids[1])]
    assert all(-2 < each.age_s < 3600 for each in found)
    for each in (*found, *found):
        endpoint.abort(each.key, each.upload)
    assert list(endpoint.unfinished("left/")) == []
    assert len(list(endpoint.unfinished("other/"))) == 1
    endpoint.close()


class Unheard(Endpoint):
    """Asks for the end of an upload again, as where the first answer was lost, at a store that
    knows nothing any more of one that has ended."""

    def complete(self, key: str, upload: str, parts: list[ColdPart]) -> None:
        super().complete(key, upload, parts)
        super().complete(key, f"{upload[:-1]}{'0' if upload[-1] != '0' else '1'}", parts)


def test_an_upload_that_was_made_and_not_heard_of_is_one(cold: Cold, tmp_path: Path) -> None:
    data = os.urandom(PART_BYTES + MIB)
    (tmp_path / "file").write_bytes(data)
    with contextlib.closing(Unheard(cold.bucket, cold.s3.endpoint)) as endpoint:
        with (tmp_path / "file").open("rb") as file:
            upload(endpoint, "unheard", file.fileno(), len(data), lambda _: None)
        assert cold.object("unheard") == data
        assert list(endpoint.unfinished("unheard")) == []


def test_a_tier_that_is_away_hangs_nobody(cold: Cold) -> None:
    (cached, *_), (durable, *_) = cold.away("cold-cache"), cold.away("cold-durable")
    cold.proxy.is_refusing = True
    cold.proxy.cut()
    with refused(errno.ENOENT, errno.ESTALE):
        cached.read_bytes()
    with refused(errno.EIO):
        durable.read_bytes()
    assert not cold.status()["cold"]["answers"]
    cold.proxy.is_refusing = False
    wait_until(lambda: cold.status()["cold"]["answers"], "the tier answers", LATEST_S)
    assert len(durable.read_bytes()) == SIZE
    assert len(cached.read_bytes()) == SIZE


def test_without_its_setting_nothing_is_forgotten(cold: Cold) -> None:
    (cached, *_), (durable, *_) = cold.away("cold-cache"), cold.away("cold-durable")
    flags, cold.node.flags = cold.node.flags, ()
    cold.node.down()
    with pytest.raises(Unavailable, match="cold tier"):
        cold.client.get(cold.inside(durable))
    cold.node.up()
    for path, code in ((cached, errno.ENOENT), (durable, errno.EIO)):
        with refused(code):
            path.read_bytes()
    cold.node.flags = flags
    cold.node.down()
    cold.node.up()
    assert len(cached.read_bytes()) == len(durable.read_bytes()) == SIZE


def test_what_is_removed_goes_there_too(cold: Cold) -> None:
    inos = [path.stat().st_ino for path in (cold.node.mount / "cold-cache").iterdir()]
    assert any(map(cold.has, inos))
    for path in list((cold.node.mount / "cold-cache").iterdir()):
        path.unlink()
    wait_until(lambda: not any(map(cold.has, inos)), "the tier has none of them", LATEST_S)


def test_a_backup_names_what_the_tier_has(s3: S3, tmp_path: Path) -> None:
    with new_cold(s3) as cold:  # whoever takes its tier over moves the objects as its own
        takes_over(cold, str(tmp_path / "backups"))


def takes_over(cold: Cold, place: str) -> None:
    content = cold.content["cold-durable"]
    away = len(cold.away("cold-durable"))
    made = json.loads(cold.run("backup", "create", "--backup", place, "--json"))
    assert made["left_out"] == 0
    assert made["in_cold_tier"] >= away
    assert made["files"] + made["in_cold_tier"] == len(content)
    other = Node.make(best_mode())
    try:
        command = ("backup", "restore", "--backup", place, "--store", str(other.store))
        done = kvfs(*command, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["in_cold_tier"] == made["in_cold_tier"]
        other.up()
        assert len(list((other.mount / "cold-durable").iterdir())) == made["files"]
        other.down()
        shutil.rmtree(other.store)
        done = kvfs(*command, "--take-over")
        assert done.returncode == 0, done.stderr
        started(other, cold.bucket, cold.proxy)
        for path, data in content.items():
            assert (other.mount / path.relative_to(cold.node.mount)).read_bytes() == data
    finally:
        print(other.log[-5000:])
        other.remove()


def test_no_namespace_asks_for_a_tier_that_there_is_not(s3: S3) -> None:
    done = kvfs("namespace", "create", "x", "--cold", "on", "--store", str(s3.node.store))
    assert (done.returncode, "there is no cold tier" in done.stderr) == (2, True)
