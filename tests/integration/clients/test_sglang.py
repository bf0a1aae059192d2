"""SGLang's own code on a node: its loaders of weights and its storage of KV pages (HiCache), on the
mount and by the S3 API."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3api.auth.key_holders import ADMINISTRATOR
from tests.integration.clients import environments, examples
from tests.integration.harness import kvfs
from tests.integration.s3 import REGION, S3, serving
from tests.integration.several import several

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install what it drives


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving() as served:
        place = ("--store", str(served.node.store))
        done = kvfs("namespace", "set", "cache", "--capacity", "1GiB", *place)
        assert done.returncode == 0, done.stderr
        yield served


def run(server: S3, home: Path, script: str, *arguments: object) -> str:
    keys = server.users[ADMINISTRATOR]
    return run_on(
        server.mount,
        home,
        script,
        *arguments,
        AWS_ACCESS_KEY_ID=keys.access_key,
        AWS_SECRET_ACCESS_KEY=keys.secret,
        AWS_REGION=REGION,
        AWS_ENDPOINT_URL=server.endpoint,
        AWS_EC2_METADATA_DISABLED="true",
        RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING=0,
    )


def run_on(mount: Path, home: Path, script: str, *arguments: object, **variables: object) -> str:
    env = examples.environ(
        home,
        *environments.sglang(),
        PYTHONWARNINGS="ignore",
        SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=mount / "cache" / "file",
        SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR=mount / "cache" / "nixl",
        **variables,
    )
    return examples.run(sys.executable, script, *arguments, env=env)


def test_weights_come_by_each_loader(server: S3, tmp_path: Path) -> None:
    printed = run(
        server, tmp_path, "sglang_weights.py", server.mount / "models/llama", "s3://models/llama"
    )
    assert printed.count("bit for bit") == 8


def test_pages_come_back_after_a_kill(server: S3, tmp_path: Path) -> None:
    backends = {
        "file": {"enable_metadata_cache": True, "max_size": "64Mi"},
        "nixl": {"plugin": {"posix": {"active": True}}, "l3_cleaner_enabled": False},
        "seaweedfs": {"endpoint": server.endpoint},
    }
    assert "seaweedfs: store of 24 pages" in run(
        server, tmp_path, "sglang_pages.py", "store", json.dumps(backends)
    )
    server.node.kill()
    server.node.up()
    backends["seaweedfs"] = {"endpoint": server.node.status()["s3"]["endpoint"]}
    assert "seaweedfs: load of 24 pages" in run(
        server, tmp_path, "sglang_pages.py", "load", json.dumps(backends)
    )
    kept = ("cache/file", 24), ("cache/nixl", 48), ("sglang-hicache", 24)  # nixl: K and V apart
    for directory, files in kept:
        found = [path for path in (server.mount / directory).rglob("*") if path.is_file()]
        assert len(found) == files, directory


def test_pages_of_one_host_come_to_another(tmp_path: Path) -> None:
    backends = {
        "file": {"max_size": "64Mi"},
        "nixl": {"plugin": {"posix": {"active": True}}, "l3_cleaner_enabled": False},
    }
    with several(2) as cluster:
        stores, loads = cluster.nodes
        first = ("--store", str(stores.store))
        done = kvfs("namespace", "set", "cache", "--coherence", "peer", *first)
        assert done.returncode == 0, done.stderr
        for node, step in ((stores, "store"), (loads, "load")):
            told = run_on(node.mount, tmp_path, "sglang_pages.py", step, json.dumps(backends))
            assert f"nixl: {step} of 24 pages" in told
