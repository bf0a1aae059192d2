"""A namespace whose names its nodes keep themselves (`--coherence peer`): what one node wrote is
read on the other, with the metadata server paused throughout."""

import mmap
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from botocore.exceptions import ClientError

import kvfs
from kvfs.base.errors import NotFound
from kvfs.datastore import layout
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import namespace_root
from kvfs.tree import inodes, namespaces
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node
from tests.integration.harness import kvfs as command
from tests.integration.s3 import S3, code_of, users_of
from tests.integration.several import Several, paused, several

SOON_S = 60.0
"""A question to a node that does not answer takes a second, on a busy machine some more; without a
deadline it would never end."""


class Pair(NamedTuple):
    """Two nodes, of which the server is paused."""

    cluster: Several
    s3: list[S3]

    @property
    def nodes(self) -> list[Node]:
        return self.cluster.nodes

    def at(self, number: int, name: str) -> Path:
        return self.nodes[number].mount / "blocks" / name


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    flags = ("--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--s3-workers", "1")
    with several(2, *flags) as cluster, ExitStack() as closing:
        made = command(
            *("namespace", "create", "blocks", "--kind", "cache", "--coherence", "peer"),
            *("--store", str(cluster.nodes[0].store)),
        )
        assert made.returncode == 0, made.stderr
        found = []
        for node in cluster.nodes:
            with users_of(node) as users:
                found.append(S3(node, {ADMINISTRATOR: users.find(ADMINISTRATOR)}))
            wait_until((node.mount / "blocks").is_dir, "the namespace is known")
            (node.mount / "blocks" / "first").write_bytes(b"takes numbers for files")
            (node.mount / "blocks" / "first").unlink()
        for node in cluster.nodes:
            wait_until(lambda node=node: names(node) is not None, "it takes part")
            wait_until(lambda node=node: names(node)["members"] == 2, "it sees the other")
        cluster.server.signal(signal.SIGSTOP)
        try:
            yield Pair(cluster, found)
            for node in cluster.nodes:
                node.down()
                found_there = command("fsck", "--json", "--store", str(node.store)).stdout
                # A test took data files away, and who read them had their records dropped.
                assert not [line for line in found_there.splitlines() if '"kind"' in line]
        finally:
            cluster.server.signal(signal.SIGCONT)
            for server in found:
                for client in server.clients.values():
                    closing.callback(client.close)


def names(node: Node) -> Any:
    return node.status()["cluster"]["names"]


def has_told(node: Node, other: Node) -> bool:
    """Whether the other node knows of all that this one has."""
    found = names(node)
    return not found["unannounced"] and bool(names(other)["others"] == found["own"])


def own_names(node: Node) -> int:
    """How many names it has, once all were announced."""
    wait_until(lambda: not names(node)["unannounced"], "it has announced all")
    found = names(node)["own"]
    assert isinstance(found, int)
    return found


def counter(node: Node, name: str) -> int:
    found = node.status()["counters"][name]
    assert isinstance(found, int)
    return found


def can_read(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except FileNotFoundError:
        return False


def wait_to_read(path: Path, content: bytes) -> None:
    wait_until(lambda: can_read(path, content), f"{path} is read")


def test_a_block_is_read_where_it_was_not_written(pair: Pair) -> None:
    pair.at(0, "block").write_bytes(b"b" * 100_000)
    wait_to_read(pair.at(1, "block"), b"b" * 100_000)
    here, there = pair.at(0, "block").stat(), pair.at(1, "block").stat()
    assert (here.st_ino, here.st_size, here.st_mtime_ns, here.st_mode) == (
        *(there.st_ino, there.st_size, there.st_mtime_ns, there.st_mode),
    )


def test_a_block_is_stored_and_loaded_as_vllm_does(pair: Pair) -> None:
    name = "model_0123456789ab_r0/abc/de_g0/" + "5" * 64 + ".bin"
    stored, loaded = mmap.mmap(-1, 1 << 20), mmap.mmap(-1, 1 << 20)
    stored.write(os.urandom(len(stored)))
    path = pair.at(0, name)
    path.parent.mkdir(parents=True)
    draft = path.with_suffix(".tmp")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT
    fd = os.open(draft, flags, 0o644)
    assert os.write(fd, stored) == len(stored)
    os.close(fd)
    draft.replace(path)
    there = pair.at(1, name)
    wait_until(lambda: os.access(there, os.F_OK), "the other node finds it")
    assert not os.access(there.with_suffix(".tmp"), os.F_OK)
    fd = os.open(there, os.O_RDONLY | os.O_DIRECT)
    assert os.readv(fd, [loaded]) == len(loaded)
    os.close(fd)
    assert loaded[:] == stored[:]


def test_directories_come_with_what_is_in_them(pair: Pair) -> None:
    pair.at(0, "model/layer").mkdir(parents=True)
    pair.at(0, "model/layer/empty").write_bytes(b"")
    pair.at(0, "model/layer/block").write_bytes(b"deep")
    wait_to_read(pair.at(1, "model/layer/block"), b"deep")
    wait_to_read(pair.at(1, "model/layer/empty"), b"")
    assert not pair.at(1, "model/layer/other").exists()
    with pytest.raises(FileNotFoundError):
        pair.at(1, "model/other/block").stat()


def test_a_client_and_s3_find_what_another_node_has(pair: Pair) -> None:
    blocks = {f"many/{number}": b"%d" % number * 1000 for number in range(40)}
    pair.at(0, "many").mkdir()
    for name, content in blocks.items():
        pair.at(0, name).write_bytes(content)
    with kvfs.Client(pair.nodes[1].store) as client:
        wait_until(lambda: client.exists(["/blocks/many/39"]) == [True], "the last one is known")
        paths = [f"/blocks/{name}" for name in blocks]
        assert client.exists([*paths[:3], "/blocks/many/none"]) == [True, True, True, False]
        assert client.get("/blocks/many/0") == blocks["many/0"]
        assert client.get_many([*paths, "/blocks/none"]) == [*blocks.values(), None]
    pair.at(0, "object").write_bytes(b"o" * 5000)
    s3 = pair.s3[1].client(ADMINISTRATOR)

    def is_there() -> bool:
        try:
            return bool(s3.head_object(Bucket="blocks", Key="object")["ContentLength"] == 5000)
        except ClientError as error:
            assert code_of(error) == (404, "404")
            return False

    wait_until(is_there, "S3 finds it")
    assert s3.get_object(Bucket="blocks", Key="object")["Body"].read() == b"o" * 5000
    with pytest.raises(ClientError) as refused:
        s3.get_object(Bucket="blocks", Key="many/none")
    assert code_of(refused.value) == (404, "NoSuchKey")


def test_each_host_reads_its_own_of_two_blocks_of_one_name(pair: Pair) -> None:
    with paused(pair.nodes[1]):  # neither has heard of the other's when it writes its own
        pair.at(0, "both").write_bytes(b"zero")
        silent = ExitStack()
        silent.enter_context(paused(pair.nodes[0]))
    with silent:
        pair.at(1, "both").write_bytes(b"one")
    for number, content in enumerate((b"zero", b"one")):
        assert pair.at(number, "both").read_bytes() == content


def test_temporary_names_of_blocks_are_told_to_nobody(pair: Pair) -> None:
    """Also of a node that writes one now and then, each of which is found before the next."""
    before = counter(pair.nodes[0], "removals_told")
    for number in range(20):
        temporary, block = pair.at(0, f"{number}.tmp"), f"renamed-{number}"
        temporary.write_bytes(b"block")
        time.sleep(0.02)  # a program that does something before it renames
        temporary.rename(pair.at(0, block))
        wait_to_read(pair.at(1, block), b"block")
    # By the first it learns that there are such names, by others how long they live on a node
    # that is very busy.
    assert counter(pair.nodes[0], "removals_told") - before <= 10


def test_a_holder_that_is_silent_is_a_miss_in_time_and_found_again(pair: Pair) -> None:
    pair.at(0, "silent").write_bytes(b"s")
    wait_until(lambda: has_told(pair.nodes[0], pair.nodes[1]), "it is told")
    with paused(pair.nodes[0]):
        began = time.monotonic()
        assert not pair.at(1, "silent").exists()
        assert not pair.at(1, "silent").exists()
        assert time.monotonic() - began < SOON_S
    wait_to_read(pair.at(1, "silent"), b"s")


def test_a_removal_takes_all_copies_and_what_is_written_later_stays(pair: Pair) -> None:
    for name in ("removed", "renamed"):
        pair.at(0, name).write_bytes(b"copy")
        wait_to_read(pair.at(1, name), b"copy")
    pair.at(1, "removed").unlink()
    pair.at(0, "renamed").rename(pair.at(0, "name"))
    assert not pair.at(1, "removed").exists()
    wait_until(lambda: not pair.at(0, "removed").exists(), "the other copy goes")
    wait_until(lambda: not pair.at(1, "renamed").exists(), "the copy of the earlier name goes")
    wait_to_read(pair.at(1, "name"), b"copy")
    pair.at(0, "removed").write_bytes(b"anew")
    wait_to_read(pair.at(1, "removed"), b"anew")


def test_a_door_removes_what_it_never_saw(pair: Pair) -> None:
    for name in ("by-s3", "by-s3-too", "by-client"):
        pair.at(0, name).write_bytes(b"x")
    wait_until(lambda: has_told(pair.nodes[0], pair.nodes[1]), "it is told")
    s3 = pair.s3[1].client(ADMINISTRATOR)
    s3.delete_object(Bucket="blocks", Key="by-s3")
    doomed = [{"Key": key} for key in ("by-s3-too", "never")]
    s3.delete_objects(Bucket="blocks", Delete={"Objects": doomed})
    with kvfs.Client(pair.nodes[1].store) as client:
        client.remove("/blocks/by-client")
        with pytest.raises(NotFound):
            client.remove("/blocks/by-client")
    for name in ("by-s3", "by-s3-too", "by-client"):
        assert not pair.at(1, name).exists()
        wait_until(lambda name=name: not pair.at(0, name).exists(), "its holder drops it")


def test_s3_copies_tags_and_compares_what_another_node_holds(pair: Pair) -> None:
    here, there = (each.client(ADMINISTRATOR) for each in pair.s3)
    for name in ("source", "kept", "compared", "tagged"):
        here.put_object(Bucket="blocks", Key=f"at/{name}", Body=b"s" * 5000)
    wait_until(lambda: has_told(pair.nodes[0], pair.nodes[1]), "it is told")
    source = {"Bucket": "blocks", "Key": "at/source"}
    there.copy_object(Bucket="blocks", Key="copy", CopySource=source)
    assert pair.at(1, "copy").read_bytes() == b"s" * 5000
    with pytest.raises(ClientError) as refused:
        there.put_object(Bucket="blocks", Key="at/kept", Body=b"x", IfNoneMatch="*")
    assert code_of(refused.value) == (412, "PreconditionFailed")
    tag = here.head_object(Bucket="blocks", Key="at/compared")["ETag"]
    there.put_object(Bucket="blocks", Key="at/compared", Body=b"x", IfMatch=tag)
    assert there.get_object_tagging(Bucket="blocks", Key="at/tagged")["TagSet"] == []
    upload = there.create_multipart_upload(Bucket="blocks", Key="parts")["UploadId"]
    named = {"Bucket": "blocks", "Key": "parts", "UploadId": upload}
    part = there.upload_part_copy(**named, PartNumber=1, CopySource=source)["CopyPartResult"]
    parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
    there.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
    assert pair.at(1, "parts").read_bytes() == b"s" * 5000


def test_what_its_holder_lost_is_a_miss_and_counted(pair: Pair) -> None:
    for name in ("claimed", "looked-up"):  # larger than what comes along with a look-up
        pair.at(0, name).write_bytes(b"gone" * 32_768)
    wait_until(lambda: has_told(pair.nodes[0], pair.nodes[1]), "it is told")
    assert pair.at(1, "looked-up").stat().st_size == 131_072
    before = [counter(pair.nodes[1], name) for name in ("false_claims", "stale_claims")]
    for name in ("claimed", "looked-up"):
        lose_data(pair.nodes[0], pair.at(0, name))
        with pytest.raises(FileNotFoundError):
            pair.at(1, name).read_bytes()
    after = [counter(pair.nodes[1], name) for name in ("false_claims", "stale_claims")]
    assert all(now > then for now, then in zip(after, before, strict=True))
    for name in ("claimed", "looked-up"):  # by whom its record says to be there, no error either
        with pytest.raises(FileNotFoundError):
            pair.at(0, name).read_bytes()
        assert name not in os.listdir(pair.at(0, ""))


def test_a_file_is_renamed_and_changed_only_where_its_data_are(pair: Pair) -> None:
    pair.at(1, "near-moved").write_bytes(b"replaced")
    names_ = ("moved", "moved-by-client", "mode", "attribute", "tagged")
    for name in names_:
        pair.at(0, f"far-{name}").write_bytes(b"f" * 5000)
    wait_until(lambda: has_told(pair.nodes[0], pair.nodes[1]), "it is told")
    pair.at(1, "far-moved").rename(pair.at(1, "near-moved"))
    with kvfs.Client(pair.nodes[1].store) as client:
        client.rename("/blocks/far-moved-by-client", "/blocks/near-moved-by-client")
    pair.at(1, "far-mode").chmod(0o600)
    os.setxattr(pair.at(1, "far-attribute"), "user.a", b"1")
    s3 = pair.s3[1].client(ADMINISTRATOR)
    tags = {"TagSet": [{"Key": "k", "Value": "v"}]}
    s3.put_object_tagging(Bucket="blocks", Key="far-tagged", Tagging=tags)
    for name in ("near-moved", "near-moved-by-client", "far-mode", "far-attribute", "far-tagged"):
        assert data_of(pair.nodes[1], pair.at(1, name))
    for name in ("moved", "moved-by-client"):
        wait_to_read(pair.at(0, f"near-{name}"), b"f" * 5000)
        wait_until(lambda name=name: not pair.at(0, f"far-{name}").exists(), "the old name goes")


def data_of(node: Node, path: Path) -> list[Path]:
    return list((node.store / "data").rglob(f"{path.stat().st_ino:016x}*"))


def lose_data(node: Node, path: Path) -> None:
    """Take a file's data away, as a disk would."""
    (data,) = data_of(node, path)
    data.unlink()


def test_a_node_that_was_killed_is_asked_again_and_asks_again(pair: Pair) -> None:
    pair.at(0, "kept").write_bytes(b"k")
    wait_to_read(pair.at(1, "kept"), b"k")
    pair.at(0, "unread").write_bytes(b"u")
    wait_until(lambda: has_told(pair.nodes[0], pair.nodes[1]), "it is told")
    pair.cluster.server.signal(signal.SIGCONT)  # a start joins the cluster
    before = counter(pair.nodes[1], "name_repairs")
    pair.nodes[0].kill()
    began = time.monotonic()
    assert not pair.at(1, "unread").exists()
    assert pair.at(1, "kept").read_bytes() == b"k"
    assert time.monotonic() - began < SOON_S
    pair.nodes[0].up()
    wait_to_read(pair.at(1, "unread"), b"u")
    assert counter(pair.nodes[1], "name_repairs") <= before + 1
    pair.at(0, "later").write_bytes(b"l")
    pair.nodes[1].kill()
    pair.at(0, "kept").unlink()
    pair.nodes[1].up()
    wait_to_read(pair.at(1, "later"), b"l")
    wait_until(lambda: not pair.at(1, "kept").exists(), "it hears what was removed meanwhile")
    assert not pair.at(0, "kept").exists()


def test_files_of_a_namespace_that_another_node_removed_are_announced_no_more(pair: Pair) -> None:
    pair.cluster.server.signal(signal.SIGCONT)
    # Else one that waits for its disk has not written of late what it acknowledged.
    pair.cluster.server.call("CONFIG", "SET", "appendfsync", "always")
    remover, holder = pair.nodes
    place = ("--store", str(remover.store))
    made = command("namespace", "create", "brief", "--kind", "cache", "--coherence", "peer", *place)
    assert made.returncode == 0, made.stderr
    wait_until((holder.mount / "brief").is_dir, "the namespace is known")
    # The node cannot tell before the removal that it has files now: that would be refused.
    pair.cluster.server.kill()
    (holder.mount / "brief" / "file").write_bytes(b"f")
    own_names(holder)
    with paused(holder):
        pair.cluster.server.start()
        removed = command("namespace", "remove", "brief", *place)
    assert removed.returncode == 0, removed.stderr
    wait_until(lambda: "nothing is left of it here" in holder.log, "its files are dropped")
    announced = own_names(holder)  # this file still is, which nobody asks for any more
    holder.down()
    assert "is not kept" not in holder.log
    holder.up()
    wait_until(
        lambda: (names(holder) or {}).get("own") == announced - 1, "the others are told anew"
    )


def test_blocks_that_are_renamed_into_place_leave_no_removals(pair: Pair) -> None:
    before = names(pair.nodes[0])["tombstones"]
    for number in range(200):
        pair.at(0, f"r{number}.tmp").write_bytes(b"block")
        pair.at(0, f"r{number}.tmp").rename(pair.at(0, f"r{number}"))
    wait_to_read(pair.at(1, "r199"), b"block")
    # One whose temporary name was told of in the middle may be anywhere.
    assert names(pair.nodes[0])["tombstones"] - before < 50
    pair.at(0, "r1").rename(pair.at(0, "moved"))
    wait_to_read(pair.at(1, "moved"), b"block")
    assert not pair.at(1, "r1").exists()


def test_names_are_told_whose_node_could_not_open_its_set_when_they_came() -> None:
    with several(2) as cluster:
        here, there = cluster.nodes
        made = command(
            *("namespace", "create", "blocks", "--kind", "cache", "--coherence", "peer"),
            *("--store", str(here.store)),
        )
        assert made.returncode == 0, made.stderr
        for node in cluster.nodes:
            wait_until((node.mount / "blocks").is_dir, "the namespace is known")
        (here.mount / "blocks" / "early").write_bytes(b"early")
        (here.mount / "blocks" / "unread").write_bytes(b"unread")
        wait_to_read(there.mount / "blocks" / "early", b"early")
        wait_until(lambda: counter(here, "sealed_files") == 2, "both are sealed")
        here.down()
        (of_set,) = here.store.glob("names.*")
        aside = of_set.rename(here.store / "aside")
        of_set.mkdir()
        here.up()
        (here.mount / "blocks" / "late").write_bytes(b"late")
        wait_until(lambda: counter(here, "sealed_files") == 1, "it is sealed")
        of_set.rmdir()
        aside.rename(of_set)
        wait_to_read(there.mount / "blocks" / "late", b"late")

        # A repair gives a file that was sealed before another name.
        here.down()
        ino = lose_place(here, b"unread")
        repaired = command("fsck", "--repair", "--store", str(here.store))
        assert "unreachable_inode" in repaired.stdout, repaired.stdout + repaired.stderr
        here.up()
        wait_to_read(there.mount / "blocks" / f"lost+found-{ino:x}", b"unread")


def lose_place(node: Node, name: bytes) -> int:
    """As damage of the metadata takes a file in `blocks` its name and its directory; returns its
    number."""
    engine = EmbeddedEngine(layout.open_store(node.store).meta)

    def fn(t: Transaction) -> int:
        root = namespace_root(namespaces.by_name(t, b"blocks")[0])
        entry = keys.file_entry(root, name)
        ino = keys.unpack_u64(t.get(entry) or b"")
        t.delete(entry)
        inode = inodes.read_inode(t, ino)
        inode.parent = root + 1000
        inodes.write_inode(t, ino, inode)
        return ino

    try:
        return engine.transact_now(fn)
    finally:
        engine.close()
