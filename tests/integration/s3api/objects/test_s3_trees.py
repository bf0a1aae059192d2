"""`kvfs import` and `kvfs export`, from and to the S3 API of a node."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import ROOT, kvfs
from tests.integration.s3 import S3

MIB = 1 << 20
PART = 16 * MIB


@pytest.fixture(autouse=True)
def credentials(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has them: in the environment."""
    pair = s3.users["main"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", pair.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", pair.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


@pytest.fixture
def tree(s3: S3) -> Iterator[Path]:
    """A directory on the mount that is not there yet, in a namespace of its own."""
    top = s3.mount / f"trees-{os.getpid()}-{random.randrange(1 << 32):x}"
    top.mkdir()
    yield top / "tree"
    done = kvfs("rm", "-r", f"/{top.name}", "--store", str(s3.node.store))
    assert done.returncode == 0, done.stderr


def path_of(s3: S3, path: Path) -> str:
    return "/" + str(path.relative_to(s3.mount))


def run(s3: S3, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kvfs(*arguments, "--store", str(s3.node.store), timeout_s=120)


def test_a_tree_is_imported_and_what_is_there_is_left_alone(
    s3: S3, bucket: str, tree: Path, seed: int
) -> None:
    client = s3.client("main")
    content = {
        "models/a/config.json": b"{}",
        "models/a/weights.bin": random.Random(seed).randbytes(2 * PART + 12345),
        "models/b/empty": b"",
        "models/b/marker/": b"",
        "modelsnot/here": b"no",
    }
    for key, data in content.items():
        client.put_object(Bucket=bucket, Key=key, Body=data)
    done = run(s3, "import", f"s3://{bucket}/models", path_of(s3, tree))
    assert done.returncode == 0, done.stderr
    assert "imported 3 files" in done.stdout
    assert (tree / "a/config.json").read_bytes() == b"{}"
    assert (tree / "a/weights.bin").read_bytes() == content["models/a/weights.bin"]
    assert (tree / "b/empty").read_bytes() == b""
    assert sorted(os.listdir(tree)) == ["a", "b"]

    (tree / "a/config.json").unlink()
    done = run(s3, "import", f"s3://{bucket}/models", path_of(s3, tree))
    assert done.returncode == 0, done.stderr
    assert "imported 1 files" in done.stdout
    assert "2 were there" in done.stdout
    assert (tree / "a/config.json").read_bytes() == b"{}"


def test_one_object_is_imported_under_its_name(s3: S3, bucket: str, tree: Path) -> None:
    s3.client("main").put_object(Bucket=bucket, Key="deep/block", Body=b"one")
    done = run(s3, "import", f"s3://{bucket}/deep/block", path_of(s3, tree) + "/")
    assert done.returncode == 0, done.stderr
    assert (tree / "block").read_bytes() == b"one"


def test_keys_that_no_path_can_be_are_named(s3: S3, bucket: str, tree: Path) -> None:
    client = s3.client("main")
    for key in ("x/good", "x/a//b", "x/../up"):
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    done = run(s3, "import", f"s3://{bucket}/x", path_of(s3, tree))
    assert done.returncode == 2
    assert "x/a//b" in done.stderr
    assert "2 were left out" in done.stderr
    assert (tree / "good").read_bytes() == b"x/good"
    assert os.listdir(tree) == ["good"]


def test_a_tree_is_exported_and_what_is_there_is_left_alone(
    s3: S3, bucket: str, tree: Path, seed: int
) -> None:
    client = s3.client("main")
    content = {
        "one": b"1",
        "below/large": random.Random(seed).randbytes(2 * PART + 999),
        "below/empty": b"",
    }
    for name, data in content.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
        os.utime(tree / name, (time.time() - 60, time.time() - 60))
    (tree / "link").symlink_to("one")
    target = f"s3://{bucket}/out"
    done = run(s3, "export", path_of(s3, tree), target)
    assert done.returncode == 2
    assert "exported 3 files" in done.stdout
    assert "link: it is no regular file" in done.stderr
    for name, data in content.items():
        assert client.get_object(Bucket=bucket, Key=f"out/{name}")["Body"].read() == data

    (tree / "link").unlink()
    (tree / "one").write_bytes(b"changed")
    done = run(s3, "export", path_of(s3, tree), target)
    assert done.returncode == 0, done.stderr
    assert "exported 1 files" in done.stdout
    assert "2 were there" in done.stdout
    assert client.get_object(Bucket=bucket, Key="out/one")["Body"].read() == b"changed"


def test_an_export_that_was_cut_off_goes_on(s3: S3, bucket: str, tree: Path, seed: int) -> None:
    client = s3.client("main")
    data = random.Random(seed).randbytes(3 * PART)
    tree.mkdir()
    (tree / "file").write_bytes(data)
    upload = client.create_multipart_upload(Bucket=bucket, Key="out/file")["UploadId"]
    for number, part in ((1, data[:PART]), (2, bytes(PART))):  # the second of other content
        client.upload_part(
            Bucket=bucket, Key="out/file", UploadId=upload, PartNumber=number, Body=part
        )
    done = run(s3, "export", path_of(s3, tree), f"s3://{bucket}/out")
    assert done.returncode == 0, done.stderr
    assert client.get_object(Bucket=bucket, Key="out/file")["Body"].read() == data
    assert not client.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_what_cannot_work_says_why(
    s3: S3, bucket: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(s3, tree)
    done = run(s3, "import", f"s3://{bucket}/nothing", path)
    assert (done.returncode, "no such object" in done.stderr) == (3, True)
    done = run(s3, "import", "/not/s3", path)
    assert (done.returncode, "s3://BUCKET" in done.stderr) == (2, True)
    done = run(s3, "import", f"s3://{bucket}/x", path, "--endpoint", "nonsense")
    assert done.returncode == 2
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = run(s3, "export", "/", f"s3://{bucket}/x", "--endpoint", f"http://127.0.0.1:{port}")
    assert (done.returncode, "does not answer" in done.stderr) == (7, True)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    done = run(s3, "import", f"s3://{bucket}/x", path)
    assert done.returncode == 5
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    done = run(s3, "import", f"s3://{bucket}/x", path)
    assert (done.returncode, "AWS_ACCESS_KEY_ID" in done.stderr) == (5, True)


def test_an_interrupt_ends_it_at_once(s3: S3, tree: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        running = subprocess.Popen(
            [
                *(sys.executable, "-c", "from cli.main import main; main()"),
                *("import", "s3://bucket/key", path_of(s3, tree), "--endpoint", url),
                *("--store", str(s3.node.store)),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), "KVFS_CONFIG": os.devnull},
            stderr=subprocess.PIPE,
            text=True,
        )
        peer, _ = silent.accept()
        with peer:
            assert peer.recv(1)  # it waits for the answer from here on
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=30)
    assert running.returncode == 130, said
