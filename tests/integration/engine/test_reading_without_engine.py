"""The engine goes away: what is strict is read as it was, through every door, and changes are
refused; with real nodes, a server that is stopped or killed, and a link that is cut."""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from gateway.fsspec.filesystem import KvfsFileSystem
from gds.blocks import read_blocks
from kvfs.base.errors import EngineAway, NotFound, Unavailable
from kvfs.client import Client
from kvfs.client.mount.backing_file import open_backing
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.fault.proxy import Proxy, proxied
from tests.integration.harness import Node, kvfs
from tests.integration.posix import refused
from tests.integration.s3 import S3, users_of
from tests.integration.s3 import refused as s3_refused
from tests.integration.several import Several, several

FLAGS = ("--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--s3-workers", "1")
WEIGHTS = os.urandom(1 << 20) * 9
"""Three chunks."""
SMALL = os.urandom(5_000)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Link"]:
    """The second node's way to the engine."""
    with ExitStack() as closing:
        yield Link(tmp_path_factory.mktemp("link") / "s", closing)


@pytest.fixture(scope="module")
def nodes(link: "Link") -> Iterator[Several]:
    with several(1, *FLAGS) as cluster:
        link.begin(cluster.server.socket)
        cluster.add(*FLAGS, "--engine", f"unix://{link.path}")
        models = cluster.nodes[0].mount / "models"
        (models / "llama").mkdir()
        (models / "llama" / "weights").write_bytes(WEIGHTS)
        (models / "llama" / "config").write_bytes(SMALL)
        (models / "llama" / "doomed").write_bytes(SMALL)
        os.setxattr(models / "llama" / "config", "user.made", b"by a test")
        for name in ("weights", "config", "doomed"):
            sealed(cluster.nodes[0], f"/models/llama/{name}")
        yield cluster


class Link:
    """A way to the engine that can be cut, at this path."""

    def __init__(self, path: Path, closing: ExitStack) -> None:
        self.path = path
        self._closing = closing

    def begin(self, server: Path) -> None:
        self.proxy: Proxy = self._closing.enter_context(proxied(self.path, server))

    @contextmanager
    def cut(self, node: Node) -> Iterator[None]:
        """Nothing goes over it, and `node` knows."""
        self.proxy.is_refusing = True
        self.proxy.cut()
        try:
            wait_until(lambda: bool(node.status()["engine"]["is_away"]), "it is known")
            yield
        finally:
            self.proxy.is_refusing = False
        wait_until(lambda: is_back(node), "the engine is heard again")


def is_back(node: Node) -> bool:
    status = node.status()
    return bool(status["cluster"]["holds_lease"]) and not status["engine"]["is_away"]


def sealed(node: Node, path: str) -> None:
    """Return when the file's checksums are recorded."""
    with Client(store=node.store) as client:
        wait_until(lambda: client.stat(path).checksum != b"", f"{path} is sealed")


@pytest.fixture(scope="module")
def doors(nodes: Several) -> Iterator[list[S3]]:
    """S3 of each node."""
    with ExitStack() as closing:
        found = []
        for node in nodes.nodes:
            with users_of(node) as users:
                pair = users.find(ADMINISTRATOR)
            found.append(S3(node, {ADMINISTRATOR: pair}))
            closing.callback(found[-1].client(ADMINISTRATOR).close)
        yield found


@contextmanager
def away(nodes: Several, end: Callable[[], None], back: Callable[[], None]) -> Iterator[None]:
    """The engine is away for as long as the block lasts, and known to be; it is there at the
    end."""
    end()
    try:
        for node in nodes.nodes:
            wait_until(lambda node=node: node.status()["engine"]["is_away"], "it is known")
        yield
    finally:
        back()
    for node in nodes.nodes:
        wait_until(lambda node=node: is_back(node), "the engine is heard again")


@contextmanager
def stopped(nodes: Several) -> Iterator[None]:
    server = nodes.server
    with away(nodes, lambda: server.signal(signal.SIGSTOP), lambda: server.signal(signal.SIGCONT)):
        yield


class Reader(threading.Thread):
    """Reads a directory's files through a mount, each time anew, until it is told to end; keeps
    what went wrong."""

    def __init__(self, top: Path, wanted: dict[str, bytes]) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.rounds = 0
        self._top, self._wanted = top, wanted
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.005):
            for name, content in self._wanted.items():
                try:
                    found = (self._top / name).read_bytes()
                except OSError as error:
                    self.wrong.append(f"{name}: {error}")
                    continue
                if found != content:
                    self.wrong.append(f"{name}: {len(found)} other bytes")
            self.rounds += 1

    def end(self) -> None:
        self._ended.set()
        self.join()
        assert not self.wrong, self.wrong[:5]


@contextmanager
def readers(nodes: Several) -> Iterator[list[Reader]]:
    wanted = {"weights": WEIGHTS, "config": SMALL}
    found = [Reader(node.mount / "models" / "llama", wanted) for node in nodes.nodes]
    try:
        yield found
    finally:
        for each in found:
            each.end()


def test_all_doors_read_on_and_change_nothing(nodes: Several, doors: list[S3]) -> None:
    first, second = nodes.nodes
    (first.mount / "models" / "far").write_bytes(WEIGHTS[::-1])  # only one node has it
    sealed(first, "/models/far")
    with readers(nodes) as reading, stopped(nodes):
        before = [each.rounds for each in reading]
        wait_until(
            lambda: (
                not first.status()["cluster"]["holds_lease"]
                and not second.status()["cluster"]["holds_lease"]
            ),
            "the leases have ended",
        )
        assert (second.mount / "models" / "far").read_bytes() == WEIGHTS[::-1]
        for node, s3 in zip(nodes.nodes, doors, strict=True):
            read_by_mount(node.mount / "models")
            change_by_mount(node.mount / "models")
            by_s3(s3)
            by_programs(node)
            told(node, s3)
        wait_until(
            lambda: all(each.rounds > past for each, past in zip(reading, before, strict=True)),
            "they read meanwhile",
        )
    models = second.mount / "models"
    (models / "new").write_bytes(b"new")
    assert (first.mount / "models" / "new").stat().st_size == 3
    wait_until(lambda: read(first.mount / "models" / "new") == b"new", "the other node reads it")
    (models / "new").unlink()


def read_by_mount(models: Path) -> None:
    llama = models / "llama"
    assert set(os.listdir(llama)) >= {"config", "weights"}
    assert (llama / "weights").stat().st_size == len(WEIGHTS)
    assert os.getxattr(llama / "config", "user.made") == b"by a test"
    with refused(errno.ENOENT):
        (llama / "absent").read_bytes()
    backing = open_backing(llama / "weights")
    with open(backing.fd, "rb") as file:
        assert file.read() == WEIGHTS


def change_by_mount(models: Path) -> None:
    config = models / "llama" / "config"
    changes: list[Callable[[], object]] = [
        lambda: (models / "new").write_bytes(b"new"),
        lambda: config.open("r+b"),
        lambda: config.open("wb"),
        lambda: config.open("ab"),
        config.unlink,
        lambda: config.rename(models / "llama" / "renamed"),
        lambda: config.chmod(0o600),
        lambda: os.truncate(config, 1),
        lambda: os.setxattr(config, "user.made", b"again"),
        lambda: os.link(config, models / "linked"),
        lambda: (models / "link").symlink_to("llama"),
        (models / "directory").mkdir,
        (models / "llama").rmdir,
        (models.parent / "namespace").mkdir,
    ]
    for number, change in enumerate(changes):
        try:
            with refused(errno.EROFS):
                change()
        except BaseException as error:
            error.add_note(f"change {number}")
            raise
    assert config.read_bytes() == SMALL


def by_s3(s3: S3) -> None:
    client = s3.client(ADMINISTRATOR)
    where = {"Bucket": "models", "Key": "llama/config"}
    assert client.get_object(**where)["Body"].read() == SMALL
    assert client.head_object(**where)["ContentLength"] == len(SMALL)
    listed = client.list_objects_v2(Bucket="models", Prefix="llama/")["Contents"]
    assert {each["Key"] for each in listed} >= {"llama/config", "llama/weights"}
    with s3_refused(404, "NoSuchKey"):
        client.get_object(Bucket="models", Key="llama/absent")
    with s3_refused(503, "BucketReadOnly"):
        client.put_object(Bucket="models", Key="new", Body=b"new")
    with s3_refused(503, "BucketReadOnly"):
        client.delete_object(**where)
    with s3_refused(503, "BucketReadOnly"):
        client.create_multipart_upload(Bucket="models", Key="big")


def by_programs(node: Node) -> None:
    with Client(store=node.store) as client:
        assert client.get("/models/llama/config") == SMALL
        assert [each.name for each in client.list("/models/llama") if each.name == b"weights"]
        assert client.get_many(["/models/llama/config", "/models/llama/absent"]) == [SMALL, None]
        with pytest.raises(NotFound):
            client.get("/models/llama/absent")
        with pytest.raises(EngineAway):
            client.put("/models/new", b"new")
        with pytest.raises(EngineAway):
            client.remove("/models/llama/config")
        buffer = bytearray(len(SMALL))
        (block,) = read_blocks(["/models/llama/config"], [buffer], client=client)
        assert block.ok
        assert buffer == SMALL
    files = KvfsFileSystem(store=str(node.store), skip_instance_cache=True)
    assert files.cat_file("/models/llama/config") == SMALL
    with refused(errno.EROFS):
        files.pipe_file("/models/new", b"new")


def told(node: Node, s3: S3) -> None:
    status = node.status()
    assert status["engine"]["is_away"]
    assert status["engine"]["silent_s"] > 5
    admin = s3.admin_endpoint
    with urlopen(f"{admin}/health/read") as answer:
        assert b"read only" in answer.read()
    with urlopen(f"{admin}/metrics") as answer:
        assert b"kvfs_engine_away 1.0" in answer.read()
    shown = kvfs("status", "--store", str(node.store)).stdout
    assert "take no changes" in " ".join(shown.split())


def test_a_killed_engine_that_comes_back_is_followed_again(nodes: Several) -> None:
    server = nodes.server
    models = [node.mount / "models" for node in nodes.nodes]
    with readers(nodes):
        with away(nodes, server.kill, server.restart), refused(errno.EROFS):
            (models[0] / "later").write_bytes(b"later")
        (models[0] / "later").write_bytes(b"later")
        assert (models[1] / "later").stat().st_size == 5
        wait_until(lambda: read(models[1] / "later") == b"later", "the other node reads it")


def test_a_node_that_is_cut_off_reads_what_others_have_removed_until_it_hears(
    nodes: Several, link: Link
) -> None:
    first, second = nodes.nodes
    models = second.mount / "models"
    assert (models / "llama" / "doomed").read_bytes() == SMALL  # its data are here
    with readers(nodes), link.cut(second):
        (first.mount / "models" / "llama" / "doomed").unlink()  # changes go on elsewhere
        (first.mount / "models" / "made").write_bytes(b"made")
        assert (models / "llama" / "doomed").read_bytes() == SMALL
        with refused(errno.ENOENT):
            (models / "made").stat()
        with refused(errno.EROFS):
            (models / "llama" / "doomed").unlink()
        shown = " ".join(kvfs("status", "--store", str(second.store)).stdout.split())
        assert "read as they were then (removed files, too)" in shown
    with refused(errno.ENOENT):
        (models / "llama" / "doomed").stat()
    wait_until(lambda: read(models / "made") == b"made", "what came meanwhile is read")


def test_a_file_open_for_writing_keeps_what_is_written_and_is_recorded_afterwards(
    nodes: Several, link: Link
) -> None:
    first, second = nodes.nodes
    path = second.mount / "models" / "open"
    file = path.open("wb")
    file.write(b"before")
    file.flush()
    os.fsync(file.fileno())
    with link.cut(second):
        file.write(b" and after")
        with refused(errno.EROFS):
            file.close()
    other = first.mount / "models" / "open"
    wait_until(lambda: read(other) == b"before and after", "its close is recorded")


def read(path: Path) -> bytes | None:
    """What a file has; None: it cannot be read now, as the node that has it is just back."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def test_a_namespace_may_refuse_to_be_read_or_have_changes_wait(nodes: Several, link: Link) -> None:
    first, second = nodes.nodes
    place = ("--store", str(first.store))
    for name, how in (("shut", "refuse"), ("patient", "wait")):
        done = kvfs("namespace", "create", name, "--without-engine", how, *place)
        assert done.returncode == 0, done.stderr
        (first.mount / name / "file").write_bytes(SMALL)
        sealed(first, f"/{name}/file")
        assert (second.mount / name / "file").read_bytes() == SMALL
    changed = threading.Thread(
        target=(second.mount / "patient" / "file").rename, args=[second.mount / "patient" / "moved"]
    )
    with link.cut(second):
        with refused(errno.EIO):
            (second.mount / "shut" / "file").read_bytes()
        with refused(errno.EIO):
            (second.mount / "shut" / "new").write_bytes(b"new")
        with Client(store=second.store) as client, pytest.raises(Unavailable):
            client.get("/shut/file")
        assert (second.mount / "patient" / "file").read_bytes() == SMALL
        changed.start()
        changed.join(1)
        assert changed.is_alive()
    changed.join(60)
    wait_until(lambda: read(first.mount / "patient" / "moved") == SMALL, "it is read elsewhere")


def test_an_engine_that_lost_its_metadata_is_named_and_files_are_read_on() -> None:
    with several(1, *FLAGS) as cluster:
        (node,) = cluster.nodes
        file = node.mount / "models" / "file"
        file.write_bytes(SMALL)
        sealed(node, "/models/file")
        cluster.server.call("FLUSHALL")
        wait_until(lambda: bool(node.status()["engine"]["loss"]), "it is known")
        assert file.read_bytes() == SMALL
        with refused(errno.EROFS):
            file.unlink()
        shown = " ".join(kvfs("status", "--store", str(node.store)).stdout.split())
        assert "the ENGINE HAS LOST METADATA" in shown
        assert "recreate the metadata with kvfs rebuild" in shown
        with urlopen(f"{node.status()['admin']['endpoint']}/health/read") as answer:
            assert b"read only: the engine" in answer.read()
