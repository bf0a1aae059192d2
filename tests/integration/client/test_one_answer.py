"""One state of a file gets one answer at every door, whichever is asked first: the table of
docs/design/answers.md."""

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

import kvfs
from gateway.fsspec.filesystem import KvfsFileSystem
from gds.blocks import Outcome, read_blocks
from kvfs.base.errors import Corrupt, KvfsError, NotFound, Unavailable
from kvfs.client.mount.backing_file import open_backing
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag
from kvfs.tree.inodes import read_inode, write_inode
from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs as command
from tests.integration.posix import make_of
from tests.integration.s3 import S3, serving
from tests.integration.s3_raw import ask

SIZE: Final = 10_000
WHOLE: Final = bytes(range(250)) * 40
NEW: Final = WHOLE[::-1]
ROTTEN: Final = "found by the scrubber"
PUT_AWAY: Final = "in quarantine"
MISS, DAMAGED, AWAY = "miss", "damaged", "away"
Answer = bytes | str


@dataclass(frozen=True)
class Site:
    """A node with its doors."""

    s3: S3
    client: kvfs.Client
    fsspec: KvfsFileSystem
    writers: contextlib.ExitStack
    """Files that are being written."""

    def data_file(self, path: str) -> Path:
        """Where the bytes of a file lie in the store."""
        ino = (self.s3.mount / path).stat().st_ino
        [found] = (self.s3.node.store / "data").glob(f"[0-9a-f]*/{ino:016x}.*")
        return found


def by_mount(site: Site, path: str) -> Answer:
    try:
        return (site.s3.mount / path).read_bytes()
    except OSError as error:
        return {errno.ENOENT: MISS, errno.EIO: DAMAGED}.get(error.errno or 0, str(error))


def by_s3(site: Site, path: str) -> Answer:
    told = ask(site.s3, "GET", f"/{path}")
    if told.status == 200:
        return told.body
    codes = {
        (404, "NoSuchKey"): MISS,
        (500, "InternalError"): DAMAGED,
        (503, "ServiceUnavailable"): AWAY,
    }
    return codes.get((told.status, told.code), f"{told.status} {told.code}")


def by_client(site: Site, path: str) -> Answer:
    try:
        return bytes(site.client.get(f"/{path}"))
    except NotFound:
        return MISS
    except Corrupt:
        return DAMAGED
    except Unavailable:
        return AWAY


def by_batch(site: Site, path: str) -> Answer:
    (found,) = site.client.get_many([f"/{path}"])
    if isinstance(found, KvfsError):
        return {Corrupt: DAMAGED, Unavailable: AWAY}.get(type(found), str(found))
    return MISS if found is None else bytes(found)


def by_fsspec(site: Site, path: str) -> Answer:
    try:
        return bytes(site.fsspec.cat_file(f"/{path}"))
    except FileNotFoundError:
        return MISS
    except OSError as error:
        return DAMAGED if error.errno == errno.EIO else str(error)


def by_stream(site: Site, path: str) -> Answer:
    try:
        with site.fsspec.open(f"/{path}", "rb") as file:
            return bytes(file.read())
    except FileNotFoundError:
        return MISS
    except OSError as error:
        return DAMAGED if error.errno == errno.EIO else str(error)


def by_load(site: Site, path: str) -> Answer:
    """As loads of weights open a file of a mount."""
    try:
        backing = open_backing(site.s3.mount / path)
    except Corrupt:
        return DAMAGED
    except Unavailable:
        return AWAY
    except OSError as error:
        return {errno.ENOENT: MISS, errno.EIO: DAMAGED}.get(error.errno or 0, str(error))
    with open(backing.fd, "rb") as file:
        return file.read()


def by_blocks(site: Site, path: str) -> Answer:
    buffer = bytearray(SIZE)
    (block,) = read_blocks([f"/{path}"], [buffer], client=site.client)
    names = {Outcome.MISS: MISS, Outcome.CORRUPT: DAMAGED, Outcome.UNAVAILABLE: AWAY}
    return bytes(buffer[: block.size]) if block.ok else names.get(block.outcome, str(block))


DOORS: Final[dict[str, Callable[[Site, str], Answer]]] = {
    "mount": by_mount,
    "S3": by_s3,
    "Client": by_client,
    "Client, a batch": by_batch,
    "fsspec": by_fsspec,
    "fsspec, a stream": by_stream,
    "gds, blocks": by_blocks,
    "gds, a load": by_load,
}


ONE_ERRNO: Final = {"mount", "fsspec", "fsspec, a stream", "gds, a load"}
"""Doors that have one errno, EIO, for what is damaged and what is away."""


def nothing(site: Site, path: str) -> None:
    pass


def lose_the_data(site: Site, path: str) -> None:
    site.data_file(path).unlink()


def shorten(site: Site, path: str) -> None:
    os.truncate(site.data_file(path), SIZE // 2)


def lengthen(site: Site, path: str) -> None:
    with site.data_file(path).open("ab") as data:
        data.write(b"more")


def replace(site: Site, path: str) -> None:
    """Closed, and not sealed yet."""
    (site.s3.mount / path).write_bytes(NEW)


def write_in_place(site: Site, path: str) -> None:
    """Neither closed nor synced."""
    file = site.writers.enter_context((site.s3.mount / path).open("r+b", buffering=0))
    file.write(NEW[:10])


def remove(site: Site, path: str) -> None:
    (site.s3.mount / path).unlink()


def put_in_place(kind: str) -> Callable[[Site, str], None]:
    """Something that is no data file of the node's stands under its name."""

    def step(site: Site, path: str) -> None:
        data = site.data_file(path)
        data.unlink()
        make_of(kind, data)

    return step


def remove_while_open(site: Site, path: str) -> None:
    """Whoever has it open keeps its data; its name leads nowhere."""
    site.writers.enter_context((site.s3.mount / path).open("rb"))
    remove(site, path)


def delete(site: Site, path: str) -> None:
    """By S3."""
    assert ask(site.s3, "DELETE", f"/{path}").status == 204


def rename_away(site: Site, path: str) -> None:
    source = site.s3.mount / path
    source.rename(source.with_name(f"{source.name}.moved"))


def put_away(site: Site, path: str) -> None:
    """As an administrator has it, or a start: the data file is whole, and not in its place."""
    data = site.data_file(path)
    kept = site.s3.node.store / "data" / "quarantine"
    kept.mkdir(mode=0o700, exist_ok=True)
    data.rename(kept / data.name)


def leave_in_tier(site: Site, path: str) -> None:
    """As a node with a cold tier left it; this one has none."""
    data = site.data_file(path)
    ino = int(data.name.partition(".")[0], 16)
    data.unlink()

    def fn(t: Transaction) -> None:
        inode = read_inode(t, ino)
        inode.flags |= Flag.COLD
        write_inode(t, ino, inode)

    session = site.client._core._session
    assert session is not None
    session.write(fn)


def lose_before_the_seal(site: Site, path: str) -> None:
    replace(site, path)
    lose_the_data(site, path)


STATES: Final[dict[str, tuple[Callable[[Site, str], None], Answer, Answer]]] = {
    "whole": (nothing, WHOLE, WHOLE),
    "removed": (remove, MISS, MISS),
    "removed while it is open": (remove_while_open, MISS, MISS),
    "deleted": (delete, MISS, MISS),
    "renamed away": (rename_away, MISS, MISS),
    "no data here": (lose_the_data, MISS, DAMAGED),
    "no data here, and not sealed": (lose_before_the_seal, MISS, DAMAGED),
    "in a tier that is not asked": (leave_in_tier, MISS, AWAY),
    "shorter than its record": (shorten, MISS, DAMAGED),
    "longer than its record": (lengthen, MISS, DAMAGED),
    ROTTEN: (nothing, MISS, DAMAGED),
    PUT_AWAY: (put_away, MISS, DAMAGED),
    "replaced a moment ago": (replace, NEW, NEW),
    **{
        f"a {kind} in its place": (put_in_place(kind), DAMAGED, DAMAGED)
        for kind in ("symlink", "fifo", "socket")
    },
    "being written": (write_in_place, NEW[:10] + WHOLE[10:], NEW[:10] + WHOLE[10:]),
}
"""What makes the state of a sealed file; the answers in a cache, and in a durable namespace."""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as s3:
        s3.add_user("main")
        with kvfs.Client(s3.node.store) as client, contextlib.ExitStack() as writers:
            fsspec = KvfsFileSystem(store=str(s3.node.store), skip_instance_cache=True)
            yield Site(s3, client, fsspec, writers)
            fsspec.close()


@pytest.fixture(scope="module")
def buckets(site: Site) -> dict[str, str]:
    """A bucket of each kind, with a sealed file for each test."""
    made = {"cache": site.s3.new_cache(), "durable": site.s3.new_bucket()}
    sealed = site.s3.node.status()["counters"]["sealed_files"]
    cases = list(itertools.product(made.values(), STATES, DOORS))
    for bucket, state, door in cases:
        (site.s3.mount / name_of(bucket, state, door)).write_bytes(WHOLE)
    wait_until(
        lambda: site.s3.node.status()["counters"]["sealed_files"] >= sealed + len(cases),
        "all are sealed",
        60,
    )
    let_rot(site, [name_of(bucket, ROTTEN, door) for bucket in made.values() for door in DOORS])
    return made


def let_rot(site: Site, paths: list[str]) -> None:
    """What the disk changed has been found."""
    for path in paths:
        with site.data_file(path).open("r+b") as data:
            data.write(b"rot")
    done = command("scrub", "--store", str(site.s3.node.store))
    assert done.returncode == 0, done.stderr
    wait_until(
        lambda: site.s3.node.status()["counters"]["scrub_damaged"] >= len(paths), "found", 60
    )


def test_what_the_scrubber_found_is_in_quarantine_where_it_is_durable(
    site: Site, buckets: dict[str, str]
) -> None:
    kept = list((site.s3.node.store / "data" / "quarantine").iterdir())
    for door in DOORS:
        rotten = site.s3.mount / name_of(buckets["durable"], ROTTEN, door)
        assert [each for each in kept if f"{rotten.stat().st_ino:016x}" in each.name]
        assert not (site.s3.mount / name_of(buckets["cache"], ROTTEN, door)).exists()


def name_of(bucket: str, state: str, door: str) -> str:
    return f"{bucket}/{state}-{door}".replace(" ", "_").replace(",", "")


@pytest.mark.parametrize("first", DOORS)
@pytest.mark.parametrize("kind", ["cache", "durable"])
@pytest.mark.parametrize("state", STATES)
def test_every_door_gives_the_answer_of_the_table(
    site: Site, buckets: dict[str, str], state: str, kind: str, first: str
) -> None:
    make, *answers = STATES[state]
    meant = answers[kind == "durable"]
    path = name_of(buckets[kind], state, first)
    make(site, path)
    expected = dict.fromkeys(DOORS, meant)
    if meant == AWAY:
        expected |= dict.fromkeys(ONE_ERRNO, DAMAGED)
    assert DOORS[first](site, path) == expected[first]
    assert {name: door(site, path) for name, door in DOORS.items()} == expected
