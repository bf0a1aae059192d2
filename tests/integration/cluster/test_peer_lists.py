"""Lists of a namespace whose names its nodes keep themselves (`--coherence peer`): every door shows
what all nodes have, and a directory is removed with what they have in it."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import fsspec
import pytest
from botocore.exceptions import ClientError

import kvfs
from kvfs.base.errors import NotEmpty
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.integration.cluster.test_peer_names import (
    SOON_S,
    Pair,
    counter,
    has_told,
    names,
    own_names,
    pair,
)
from tests.integration.s3 import code_of
from tests.integration.several import paused

__all__ = ["pair"]


def told(pair: Pair, holder: int) -> None:
    """Wait until the other node knows what this one holds."""
    wait_until(lambda: has_told(pair.nodes[holder], pair.nodes[1 - holder]), "it is told")


def filled(pair: Pair, directory: str) -> list[str]:
    """Both nodes have files in a directory, some under one name; returns all names."""
    for number in (0, 1):
        pair.at(number, directory).mkdir(parents=True, exist_ok=True)
    for at in range(30):
        pair.at(at % 2, f"{directory}/f{at:02}").write_bytes(b"%d" % at)
        if at % 10 == 0:
            pair.at(1, f"{directory}/f{at:02}").write_bytes(b"%d" % at)
    pair.at(0, f"{directory}/sub").mkdir()
    pair.at(0, f"{directory}/sub/block").write_bytes(b"deep")
    pair.at(0, f"{directory}/empty").mkdir()
    told(pair, 0)
    told(pair, 1)
    return [*(f"f{at:02}" for at in range(30)), "sub"]


def test_every_door_lists_what_all_nodes_have(pair: Pair) -> None:
    found = filled(pair, "doors")
    assert sorted(os.listdir(pair.at(1, "doors"))) == found
    assert sorted(os.listdir(pair.at(0, "doors"))) == sorted([*found, "empty"])
    with os.scandir(pair.at(1, "doors")) as entries:
        kinds = {each.name: (each.is_dir(follow_symlinks=False), each.inode()) for each in entries}
    for name in found:
        status = pair.at(1, f"doors/{name}").lstat()
        assert kinds[name] == (name == "sub", status.st_ino), name
    long = subprocess.run(["ls", "-l", pair.at(1, "doors")], capture_output=True, text=True)
    assert len(long.stdout.splitlines()) == len(found) + 1
    with kvfs.Client(pair.nodes[1].store) as client:
        listed = {each.name.decode(): each for each in client.list("/blocks/doors")}
        assert list(listed) == found
        assert (listed["f02"].size, listed["f02"].mtime_ns) == (
            1,
            pair.at(0, "doors/f02").stat().st_mtime_ns,
        )
        assert [each.name for each in client.list("/blocks/doors", after=b"f28")] == [
            b"f29",
            b"sub",
        ]
    filesystem = fsspec.filesystem("kvfs", store=str(pair.nodes[1].store))
    assert filesystem.find("/blocks/doors") == [
        *(f"/blocks/doors/f{at:02}" for at in range(30)),
        "/blocks/doors/sub/block",
    ]


def pages(s3: Any, **how: Any) -> Iterator[dict[str, Any]]:
    how = {"Bucket": "blocks", "MaxKeys": 7, **how}
    while True:
        page = s3.list_objects_v2(**how)
        yield page
        if not page["IsTruncated"]:
            return
        how["ContinuationToken"] = page["NextContinuationToken"]


def test_s3_lists_what_all_nodes_have_page_by_page(pair: Pair) -> None:
    found = filled(pair, "keys")
    keys = [f"keys/{name}" for name in found[:-1]] + ["keys/sub/block"]
    clients = [server.client(ADMINISTRATOR) for server in pair.s3]
    for s3 in clients:
        flat = [each for page in pages(s3, Prefix="keys/") for each in page["Contents"]]
        assert [each["Key"] for each in flat] == keys
        after = s3.list_objects_v2(Bucket="blocks", Prefix="keys/", StartAfter="keys/f28")
        assert [each["Key"] for each in after["Contents"]] == keys[-2:]
        first = s3.list_objects(Bucket="blocks", Prefix="keys/", MaxKeys=3)
        assert [each["Key"] for each in first["Contents"]] == keys[:3]
        folders = list(pages(s3, Prefix="keys/", Delimiter="/"))
        assert [each["Prefix"] for page in folders for each in page.get("CommonPrefixes", [])] == [
            "keys/sub/"
        ]
        versions = s3.list_object_versions(Bucket="blocks", Prefix="keys/")["Versions"]
        assert [each["Key"] for each in versions] == keys
    tags = {each["Key"]: each["ETag"] for each in flat}
    assert clients[1].head_object(Bucket="blocks", Key="keys/f04")["ETag"] == tags["keys/f04"]


def test_a_list_goes_on_in_place_while_names_come_and_go(pair: Pair) -> None:
    for at in range(0, 3000, 2):
        pair.at(0, "moving").mkdir(exist_ok=True)
        pair.at(0, f"moving/{at:04}").write_bytes(b"")
    told(pair, 0)
    s3 = pair.s3[1].client(ADMINISTRATOR)
    seen: list[str] = []
    for page in pages(s3, Prefix="moving/", MaxKeys=200):
        seen += (each["Key"] for each in page["Contents"])
        last = int(seen[-1][-4:])
        pair.at(0, f"moving/{max(last - 20, 0):04}").unlink(missing_ok=True)
        pair.at(0, f"moving/{last + 1:04}").write_bytes(b"")
        told(pair, 0)
    evens = [f"moving/{at:04}" for at in range(0, 3000, 2)]
    assert len(set(seen)) == len(seen)
    assert set(evens) <= set(seen)
    assert seen == sorted(seen)


def test_rm_takes_a_directory_with_what_all_nodes_have_in_it(pair: Pair) -> None:
    filled(pair, "tree/a")
    filled(pair, "tree/b/c")
    shutil.rmtree(pair.at(0, "tree/b/c/empty"))
    told(pair, 0)
    with pytest.raises(OSError, match="not empty"):
        pair.at(1, "tree/a/sub").rmdir()
    with kvfs.Client(pair.nodes[1].store) as client, pytest.raises(NotEmpty):
        client.rmdir("/blocks/tree/a/sub")
    subprocess.run(["rm", "-r", pair.at(1, "tree")], check=True, timeout=60)
    assert not pair.at(1, "tree").exists()
    wait_until(lambda: not pair.at(0, "tree/b").exists(), "the other node's go")
    assert os.listdir(pair.at(0, "tree/a")) == ["empty"], "which is told to nobody"
    assert not pair.at(1, "tree").exists()
    pair.at(0, "tree/a/again").write_bytes(b"anew")
    wait_until(lambda: pair.at(1, "tree/a/again").exists(), "what is written later is found")


def test_a_silent_node_is_left_out_in_time_and_told_of(pair: Pair) -> None:
    filled(pair, "silent")
    before = counter(pair.nodes[1], "list_requests_unanswered")
    with paused(pair.nodes[0]):
        began = time.monotonic()
        assert "f01" in os.listdir(pair.at(1, "silent"))
        assert time.monotonic() - began < SOON_S
        assert counter(pair.nodes[1], "list_requests_unanswered") > before
        assert names(pair.nodes[1])["left_out"] == [1]
    wait_until(lambda: "f02" in os.listdir(pair.at(1, "silent")), "it is asked again")


def test_positions_of_a_large_directory_stay_right(pair: Pair) -> None:
    directory = pair.at(0, "large")
    directory.mkdir()
    for at in range(700):
        pair.at(0, f"large/{at:04}").write_bytes(b"")
    told(pair, 0)
    found = subprocess.run(
        [os.environ.get("PYTHON", "python3"), "-c", _SEEKS, pair.at(1, "large")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["702", "same", "702"]


_SEEKS = """
import ctypes, sys
c = ctypes.CDLL(None, use_errno=True)
c.opendir.restype = c.readdir.restype = ctypes.c_void_p
c.readdir.argtypes = c.telldir.argtypes = c.rewinddir.argtypes = [ctypes.c_void_p]
c.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
c.telldir.restype = ctypes.c_long
name = lambda entry: ctypes.string_at(entry + 19)
d = c.opendir(sys.argv[1].encode())
def rest():
    found = []
    while (at := c.telldir(d), entry := c.readdir(d))[1]:
        found.append((at, name(entry)))
    return found
whole = rest()
print(len(whole))
for at in (whole[3][0], whole[600][0], whole[50][0]):
    c.seekdir(d, at)
    expected = [n for a, n in whole if a >= at] if at else whole
    assert [n for _, n in rest()] == [n for _, n in whole][[a for a, _ in whole].index(at):]
print("same")
c.rewinddir(d)
print(len(rest()))
"""


def test_s3_finds_what_another_node_has_for_every_operation(pair: Pair) -> None:
    there, here = (server.client(ADMINISTRATOR) for server in pair.s3)
    tags = [{"Key": "k", "Value": "v"}]
    for key in ("tagged", "attributes", "source", "part", "retagged"):
        there.put_object(Bucket="blocks", Key=key, Body=b"content", Tagging="k=v")
    told(pair, 0)
    assert here.get_object_tagging(Bucket="blocks", Key="tagged")["TagSet"] == tags
    found = here.get_object_attributes(
        Bucket="blocks", Key="attributes", ObjectAttributes=["ObjectSize"]
    )
    assert found["ObjectSize"] == 7
    here.copy_object(Bucket="blocks", Key="copy", CopySource="blocks/source")
    assert here.get_object(Bucket="blocks", Key="copy")["Body"].read() == b"content"
    assert here.get_object_tagging(Bucket="blocks", Key="copy")["TagSet"] == tags
    upload = here.create_multipart_upload(Bucket="blocks", Key="whole")["UploadId"]
    part = {"Bucket": "blocks", "Key": "whole", "UploadId": upload, "PartNumber": 1}
    etag = here.upload_part_copy(**part, CopySource="blocks/part")["CopyPartResult"]["ETag"]
    parts = {"Parts": [{"ETag": etag, "PartNumber": 1}]}
    here.complete_multipart_upload(
        Bucket="blocks", Key="whole", UploadId=upload, MultipartUpload=parts
    )
    assert here.get_object(Bucket="blocks", Key="whole")["Body"].read() == b"content"
    own = own_names(pair.nodes[1])
    other = [{"Key": "k", "Value": "other"}]
    here.put_object_tagging(Bucket="blocks", Key="retagged", Tagging={"TagSet": other})
    wait_until(lambda: names(pair.nodes[1])["own"] == own + 1, "this node holds it, too")
    assert here.get_object_tagging(Bucket="blocks", Key="retagged")["TagSet"] == other
    with pytest.raises(ClientError) as refused:
        here.copy_object(Bucket="blocks", Key="copy", CopySource="blocks/never")
    assert code_of(refused.value) == (404, "NoSuchKey")


def test_a_condition_on_tags_holds_for_what_another_node_has(pair: Pair) -> None:
    there = pair.s3[0].client(ADMINISTRATOR)
    allowed = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": "arn:aws:s3:::blocks/*",
    }
    condition = {"StringEquals": {"s3:ExistingObjectTag/open": "no"}}
    denied = {**allowed, "Effect": "Deny", "Condition": condition}
    policy = {"Version": "2012-10-17", "Statement": [allowed, denied]}
    pair.cluster.server.signal(signal.SIGCONT)  # a policy is everybody's
    there.put_bucket_policy(Bucket="blocks", Policy=json.dumps(policy))
    try:
        for key, tag in (("open", "yes"), ("closed", "no")):
            there.put_object(Bucket="blocks", Key=key, Body=b"x", Tagging=f"open={tag}")
        told(pair, 0)
        url = f"{pair.s3[1].endpoint}/blocks"
        wait_until(lambda: status_of(f"{url}/open") == 200, "the policy is known")
        assert status_of(f"{url}/closed") == 403
    finally:
        there.delete_bucket_policy(Bucket="blocks")


def status_of(url: str) -> int:
    try:
        with urlopen(url) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


ODD = [
    "odd//slashes",
    "odd/../dots",
    "odd/./dot",
    "odd/dir/",
    "odd/" + "l" * 300,
    "odd/" + "m" * 470,
]


def test_names_that_a_mount_shows_escaped_are_found_and_listed(pair: Pair) -> None:
    there, here = (server.client(ADMINISTRATOR) for server in pair.s3)
    for key in ODD:
        there.put_object(Bucket="blocks", Key=key, Body=key.encode())
    told(pair, 0)
    wait_until(lambda: pair.at(1, "odd").is_dir(), "the directory is known")
    assert pair.at(1, "odd/%/slashes").read_bytes() == b"odd//slashes"
    assert pair.at(1, "odd/%2E/dot").read_bytes() == b"odd/./dot"
    shown = sorted(os.listdir(pair.at(0, "odd")))
    assert sorted(os.listdir(pair.at(1, "odd"))) == shown
    (long,) = [name for name in shown if name.startswith("l")]
    assert pair.at(1, f"odd/{long}").read_bytes() == ODD[4].encode()
    listed = here.list_objects_v2(Bucket="blocks", Prefix="odd/")["Contents"]
    assert [each["Key"] for each in listed] == sorted(ODD)
    for key in ODD:
        found = here.get_object(Bucket="blocks", Key=key)["Body"].read()
        assert found == key.encode(), key
        here.delete_object(Bucket="blocks", Key=key)
    for key in ODD:
        wait_until(lambda key=key: not is_there(there, key), "the other node's copies go")


def is_there(s3: Any, key: str) -> bool:
    return bool(s3.list_objects_v2(Bucket="blocks", Prefix=key).get("Contents"))


def test_a_small_block_comes_with_the_answer_about_its_name(pair: Pair) -> None:
    pair.at(0, "small").mkdir()
    blocks = {f"small/{at}": b"%d" % at * 1000 for at in range(60)}
    for name, content in blocks.items():
        pair.at(0, name).write_bytes(content)
    told(pair, 0)
    names_read, names_looked_at = list(blocks)[:40], list(blocks)[40:]
    before = counter(pair.nodes[1], "answers_ahead")
    for name in names_read:
        assert pair.at(1, name).read_bytes() == blocks[name]
    # What earlier tests only looked at makes the first ones come without their bytes.
    came = counter(pair.nodes[1], "answers_ahead")
    assert came - before >= 25
    for name in names_looked_at:
        assert pair.at(1, name).stat().st_size == len(blocks[name])
    assert counter(pair.nodes[1], "answers_ahead") - came < len(names_looked_at)
    for name in names_looked_at:
        assert pair.at(1, name).read_bytes() == blocks[name]
