"""`kvfs backup`, as an operator uses it: beside a node, for a cluster, and back."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.waiting import wait_until
from tests.contract.redis_servers import RedisServer, killed
from tests.integration.conftest import start
from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.s3 import S3
from tests.integration.several import several

SMALL, LARGE = 40, 5 << 20
MADE_NS = 1_700_000_000_000_000_000


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node.make(best_mode())
    try:
        yield start(made)
    finally:
        made.remove()


@pytest.fixture
def other() -> Iterator[Node]:
    """A node that is not started; its store is not made."""
    made = Node.make(best_mode())
    try:
        yield made
    finally:
        made.remove()


def fill(mount: Path, seed: int) -> None:
    """Files, links, attributes and directories of a durable namespace; a block of a cache."""
    draw = random.Random(seed)
    deep = mount / "models" / "org" / "model"
    deep.mkdir(parents=True)
    (mount / "models" / "empty").mkdir(mode=0o711)
    for number in range(SMALL):
        (deep / f"part-{number:03}").write_bytes(draw.randbytes(draw.randrange(10_000)))
    (deep / "weights").write_bytes(draw.randbytes(LARGE))
    (deep / "nothing").touch()
    os.link(deep / "weights", mount / "models" / "linked")
    (mount / "models" / "symbolic").symlink_to("org/model/weights")
    os.setxattr(deep / "part-000", "user.note", b"kept")
    for path in deep.iterdir():
        os.utime(path, ns=(MADE_NS, MADE_NS + draw.randrange(10**9)))
    (mount / "cache" / "block").write_bytes(b"block" * 1000)


def contents(mount: Path) -> dict[str, Any]:
    """Everything of the durable namespace, with its attributes."""
    found: dict[str, Any] = {}
    for path in sorted((mount / "models").rglob("*")):
        stat = path.lstat()
        facts: list[Any] = [stat.st_mode, stat.st_uid, stat.st_ino, stat.st_nlink, stat.st_mtime_ns]
        if path.is_symlink():
            facts.append(path.readlink())
        elif path.is_file():
            facts += [
                path.read_bytes(),
                {each: os.getxattr(path, each) for each in os.listxattr(path)},
            ]
        found[str(path.relative_to(mount))] = facts
    return found


def done(*arguments: str) -> Any:
    """The JSON that a command prints."""
    found = kvfs("backup", *arguments, "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def refused(*arguments: str) -> tuple[int, str]:
    found = kvfs("backup", *arguments)
    assert found.returncode != 0, found.stdout
    assert found.stderr.count("\n") == 1, found.stderr
    return found.returncode, found.stderr


def check_store(path: Path) -> None:
    found = kvfs("fsck", "--checksums", "--store", str(path))
    assert (found.returncode, found.stdout) == (0, "the store is whole\n")


def test_a_store_comes_back_as_it_was_at_each_backup(
    node: Node, other: Node, tmp_path: Path, seed: int
) -> None:
    fill(node.mount, seed)
    place, store = str(tmp_path / "backups"), str(node.store)
    first = done("create", "--store", store, "--backup", place)
    files = SMALL + 2
    assert (first["files"], first["left_out"]) == (files, 0)
    assert first["added_bytes"] == first["bytes"]
    before = contents(node.mount)
    changed = node.mount / "models" / "org" / "model" / "part-001"
    changed.write_bytes(b"changed")
    os.utime(changed, ns=(MADE_NS, MADE_NS))
    (node.mount / "models" / "org" / "model" / "part-002").unlink()
    second = done("create", "--store", store, "--backup", place)
    assert (second["files"], second["added_bytes"]) == (files - 1, len(b"changed"))
    assert [each["name"] for each in done("list", "--backup", place)] == [
        first["name"],
        second["name"],
    ]
    after = contents(node.mount)
    code, said = refused("restore", "--backup", place, "--store", store)
    assert (code, "there is a store" in said or "in use by" in said) == (4, True), said
    node.down()
    code, said = refused("restore", "--backup", place, "--store", store)
    assert (code, "name another directory by --store" in said) == (4, True), said

    restored = done("restore", "--backup", place, "--store", str(other.store))
    assert (restored["files"], restored["dropped"]) == (files - 1, 0)
    other.up()
    assert contents(other.mount) == after
    assert list((other.mount / "cache").iterdir()) == []
    (other.mount / "models" / "new").write_bytes(b"new")
    (other.mount / "cache" / "new").write_bytes(b"new")
    other.down()
    check_store(other.store)

    shutil.rmtree(other.store)
    done("restore", "--backup", place, "--store", str(other.store), "--at", first["name"])
    other.up()
    assert contents(other.mount) == before
    other.down()
    check_store(other.store)


def test_what_is_damaged_is_named_and_the_rest_comes_back(
    node: Node, other: Node, tmp_path: Path
) -> None:
    good, bad = os.urandom(LARGE), os.urandom(LARGE)
    for name, content in (("good", good), ("bad", bad)):
        (node.mount / "models" / name).write_bytes(content)
    ino = (node.mount / "models" / "bad").stat().st_ino
    place = tmp_path / "backups"
    made = done("create", "--store", str(node.store), "--backup", str(place))
    (damaged,) = (place / "large").rglob(f"{ino:016x}.*")
    with damaged.open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"damage")
    code, said = refused("restore", "--backup", str(place), "--store", str(other.store))
    assert code == 8
    assert damaged.name in said
    assert "--skip-damaged" in said
    restored = done(
        *("restore", "--backup", str(place), "--store", str(other.store), "--skip-damaged")
    )
    assert (restored["files"], restored["damaged_files"]) == (1, 1)
    assert damaged.name in restored["damaged"][0]
    other.up()
    assert (other.mount / "models" / "good").read_bytes() == good
    assert [path.name for path in (other.mount / "models").iterdir()] == ["good"]
    other.down()
    check_store(other.store)

    (manifest,) = (place / "backups").iterdir()
    manifest.write_bytes(manifest.read_bytes().replace(b'"files":2', b'"files":3'))
    (listed,) = done("list", "--backup", str(place))
    assert listed == {"name": made["name"], "damaged": True}


def test_secrets_are_in_a_backup_only_if_it_is_said(
    node: Node, other: Node, tmp_path: Path
) -> None:
    place, store = tmp_path / "backups", str(node.store)
    assert kvfs("s3", "user", "add", "reader", "--store", store).returncode == 0
    key = (node.store / "secret.key").read_bytes()
    made = done("create", "--store", store, "--backup", str(place))
    assert not made["secrets"]
    for path in place.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
        assert path.is_dir() or key not in path.read_bytes()
    assert done("create", "--store", store, "--backup", str(place), "--secrets")["secrets"]
    assert done("restore", "--backup", str(place), "--store", str(other.store))["secrets"]
    assert (other.store / "secret.key").read_bytes() == key
    assert (other.store / "secret.key").stat().st_mode & 0o077 == 0


def test_older_backups_go_and_those_that_stay_are_whole(
    node: Node, other: Node, tmp_path: Path, seed: int
) -> None:
    place, store = tmp_path / "backups", str(node.store)
    gone = node.mount / "models" / "gone"
    gone.write_bytes(random.Random(seed).randbytes(LARGE))
    ino = gone.stat().st_ino
    names = []
    for number in range(3):
        (node.mount / "models" / f"file-{number}").write_bytes(b"%d" % number)
        made = done("create", "--store", store, "--backup", str(place), "--backup-keep", "2")
        names.append(made["name"])
        if not number:
            gone.unlink()
    assert made["deleted"] == names[:1]
    assert [each["name"] for each in done("list", "--backup", str(place))] == names[1:]
    assert list((place / "large").rglob(f"{ino:016x}.*")) == []
    assert done("restore", "--backup", str(place), "--store", str(other.store))["files"] == 3


def test_a_cluster_comes_back_with_another_engine(tmp_path: Path, seed: int) -> None:
    place = str(tmp_path / "backups")
    with several(2) as cluster:
        first, second = cluster.nodes
        fill(second.mount, seed)
        (first.mount / "models" / "of-the-first").write_bytes(b"first")
        made = done("create", "--store", str(first.store), "--backup", place)
        assert (made["files"], made["left_out"]) == (SMALL + 3, 0)
        before = contents(second.mount)
    with killed(RedisServer(tmp_path / "redis")) as server:
        restored = Node.make(best_mode())
        joined = Node.make(best_mode())
        try:
            engine = ("--engine", server.url)
            found = done("restore", "--backup", place, "--store", str(restored.store), *engine)
            assert found["files"] == SMALL + 3
            code, said = refused(
                "restore", "--backup", place, "--store", str(joined.store), *engine
            )
            assert (code, "belongs to the cluster" in said) == (4, True), said
            shutil.rmtree(joined.store)
            flags = (*engine, "--peer", "127.0.0.1:0")
            secret = str(restored.store / "cluster.key")
            restored.flags = (*flags, "--node-name", "n1")
            joined.flags = (*flags, "--node-name", "n2", "--secret-file", secret)
            restored.up()
            assert contents(restored.mount) == before
            joined.up()
            assert contents(joined.mount) == before
            (joined.mount / "models" / "new").write_bytes(b"new")
            assert (restored.mount / "models" / "new").read_bytes() == b"new"
            joined.down()
            restored.down()
            check_store(restored.store)
        finally:
            print(restored.log[-5000:], joined.log[-5000:])
            joined.remove()
            restored.remove()


def test_a_bucket_takes_backups_and_one_that_is_away_is_named(
    s3: S3, node: Node, other: Node, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(node.mount, seed)
    before = contents(node.mount)
    pair, bucket = s3.users["main"], s3.new_bucket()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", pair.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", pair.secret)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    where = ("--backup", f"s3://{bucket}/backups", "--backup-endpoint")
    away = (*where, "http://127.0.0.1:1")
    code, said = refused("create", "--store", str(node.store), *away)
    assert (code, "does not answer" in said) == (7, True), said
    there = (*where, s3.endpoint)
    made = done("create", "--store", str(node.store), *there)
    assert made["files"] == SMALL + 2
    assert done("create", "--store", str(node.store), *there)["added_bytes"] == 0
    assert len(done("list", *there)) == 2
    assert [each["damaged"] for each in done("verify", *there)] == [[], []]
    done("restore", *there, "--store", str(other.store), "--at", made["name"])
    other.up()
    assert contents(other.mount) == before
    s3.remove_bucket(bucket)


def test_a_node_makes_backups_by_itself_and_says_what_hinders_it(
    node: Node, tmp_path: Path
) -> None:
    node.down()
    place = tmp_path / "backups"
    place.mkdir(mode=0o700)
    (place / "foreign").touch()
    flags = ("--backup", str(place), "--backup-every-s", "1", "--backup-keep", "2")
    node.flags = (*node.flags, *flags)
    node.up()
    (node.mount / "models" / "file").write_bytes(b"content")
    wait_until(lambda: node.status()["backup"]["problem"], "it says what hinders it")
    assert "holds something else" in node.status()["backup"]["problem"]
    shown = kvfs("status", "--store", str(node.store)).stdout
    assert "NO BACKUP IS MADE" in shown
    (place / "foreign").unlink()

    def made() -> bool:
        last = node.status()["backup"]["last"]
        return last is not None and last["files"] == 1

    wait_until(made, "it makes one, and goes on")
    assert node.status()["backup"]["problem"] is None
    first = node.status()["backup"]["last"]["name"]
    wait_until(lambda: node.status()["backup"]["last"]["name"] > first, "it makes the next one")
    assert len(done("list", "--backup", str(place))) <= 3
