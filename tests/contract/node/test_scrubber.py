"""Scrubbing real files: what is whole is left alone, what is damaged is found and seen to."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio

from kvfs.datastore.checksum import CHUNK_BYTES, DIGEST_BYTES, checksum
from kvfs.datastore.index import Sealed
from kvfs.datastore.quarantine_directory import Reason
from kvfs.meta.records import Inode
from kvfs.node.tasks.damaged_files import DamagedFiles
from kvfs.node.tasks.scrubber import Scrubber
from kvfs.tree import lifecycle
from tests.contract.small_node import SmallNode, small_node

CONTENT = os.urandom(CHUNK_BYTES + 1000)


class Scrubbed:
    """A node with a scrubber, and what this did."""

    def __init__(self, node: SmallNode) -> None:
        self.node = node
        self.found: list[int] = []
        self.forgotten: list[bytes] = []
        self.dropped: list[int] = []
        self.damage = DamagedFiles(
            node.engine, node.files, node.holders, self._tell, self._drop, lambda: None
        )
        self.scrubber = Scrubber(node.engine, node.files, node.index, self._damaged, 0)

    async def _damaged(self, ino: int, inode: Inode) -> None:
        self.found.append(ino)
        await self.damage.found(ino, inode)

    async def _tell(self, evicted: Sequence[lifecycle.Evicted]) -> None:
        self.forgotten += [name for each in evicted for _, name in each.names]

    async def _drop(self, inos: Sequence[int]) -> None:
        self.dropped += inos

    def write(self, space: int, name: str, content: bytes = CONTENT) -> int:
        ino = self.node.write(space, name, content)
        trio.run(self.node.sealer.settle)
        return ino

    def spoil(self, ino: int, offset: int) -> None:
        """Change a byte as a disk does: nobody is told."""
        path = self.node.files.path(ino, 0)
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))

    def run(self) -> None:
        trio.run(self.scrubber.scrub)


@pytest.fixture
def scrubbed(tmp_path: Path) -> Iterator[Scrubbed]:
    with small_node(tmp_path / "store") as node:
        yield Scrubbed(node)


def test_what_is_whole_stays(scrubbed: Scrubbed) -> None:
    space = scrubbed.node.namespace("kept", kind="durable")
    for name, content in (("large", CONTENT), ("empty", b""), ("hole", bytes(2 * CHUNK_BYTES))):
        scrubbed.write(space, name, content)
    scrubbed.run()
    assert scrubbed.found == []
    assert scrubbed.scrubber.counters["scrubbed_files"] == 3


@pytest.mark.parametrize("offset", [0, CHUNK_BYTES - 1, CHUNK_BYTES, len(CONTENT) - 1])
def test_a_damaged_cache_file_is_evicted(scrubbed: Scrubbed, offset: int) -> None:
    space = scrubbed.node.namespace("cache")
    good, bad = scrubbed.write(space, "good"), scrubbed.write(space, "bad")
    scrubbed.spoil(bad, offset)
    scrubbed.run()
    assert scrubbed.node.names(space) == {"good"}
    assert scrubbed.forgotten == [b"bad"]
    assert scrubbed.dropped == [bad]
    assert scrubbed.node.files.stat(good, 0)


def test_what_is_left_of_a_damaged_durable_file_is_quarantined(scrubbed: Scrubbed) -> None:
    space = scrubbed.node.namespace("kept", kind="durable")
    bad = scrubbed.write(space, "bad")
    scrubbed.spoil(bad, 5)
    scrubbed.run()
    assert scrubbed.node.names(space) == {"bad"}, "it is not forgotten"
    with pytest.raises(FileNotFoundError):
        scrubbed.node.files.stat(bad, 0)
    [kept] = scrubbed.node.files.quarantined()
    assert kept.reason is Reason.DAMAGED
    assert Path(kept.path).read_bytes()[6:] == CONTENT[6:]
    scrubbed.run()
    assert scrubbed.found == [bad], "it is said once"
    assert list(scrubbed.node.files.strangers()) == []


def test_a_data_file_that_lost_its_end_is_damaged(scrubbed: Scrubbed) -> None:
    bad = scrubbed.write(scrubbed.node.namespace("cache"), "bad")
    os.truncate(scrubbed.node.files.path(bad, 0), 1000)
    scrubbed.run()
    assert scrubbed.found == [bad]


def test_a_copy_of_other_content_than_the_record_is_damaged(scrubbed: Scrubbed) -> None:
    """The index has the checksums of what came, and not those that the record was sealed with."""
    node, space = scrubbed.node, scrubbed.node.namespace("cache")
    good, bad = scrubbed.write(space, "good"), scrubbed.write(space, "bad")
    scrubbed.spoil(bad, 5)
    with open(node.files.path(bad, 0), "rb") as file:
        found = checksum(file.fileno(), len(CONTENT))
    assert found is not None
    node.index.store([Sealed(bad, 0, found.chunks, 0)])
    scrubbed.run()
    assert scrubbed.found == [bad]
    assert node.names(space) == {"good"}
    assert node.files.stat(good, 0)


def test_an_index_that_is_wrong_about_a_whole_file_is_put_right(scrubbed: Scrubbed) -> None:
    node, space = scrubbed.node, scrubbed.node.namespace("kept", kind="durable")
    ino = scrubbed.write(space, "whole")
    before = node.index.get(ino)
    assert before is not None
    for wrong in (bytes(2 * DIGEST_BYTES), b""):
        node.index.store([Sealed(ino, 0, wrong, before.blocks)])
        scrubbed.run()
        assert scrubbed.found == []
        after = node.index.get(ino)
        assert after is not None
        assert after.chunks == before.chunks


def test_what_is_not_sealed_is_nobodys_damage(scrubbed: Scrubbed) -> None:
    node, space = scrubbed.node, scrubbed.node.namespace("cache")
    again = scrubbed.write(space, "again")
    never = node.write(space, "never", CONTENT)
    node.engine.transact_now(lambda t: lifecycle.reopen(t, again))
    for ino in (never, again):
        scrubbed.spoil(ino, 7)
    scrubbed.run()
    assert scrubbed.found == []


def test_a_file_that_is_written_meanwhile_is_nobodys_damage(
    scrubbed: Scrubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, space = scrubbed.node, scrubbed.node.namespace("cache")
    ino = scrubbed.write(space, "b")
    spend = scrubbed.scrubber._pace.spend

    def reopen_first(size: int, now: float) -> float:
        node.engine.transact_now(lambda t: lifecycle.reopen(t, ino))
        scrubbed.spoil(ino, 7)
        return spend(size, now)

    monkeypatch.setattr("kvfs.policy.pace.Pace.spend", lambda _self, *a: reopen_first(*a))
    scrubbed.run()
    assert scrubbed.found == []


def test_a_pass_that_was_cut_short_goes_on_where_it_was(scrubbed: Scrubbed) -> None:
    space = scrubbed.node.namespace("cache")
    first, second = scrubbed.write(space, "first"), scrubbed.write(space, "second")
    scrubbed.node.index.scrub_from(first + 1)
    scrubbed.spoil(first, 0)
    scrubbed.spoil(second, 0)
    scrubbed.run()
    assert scrubbed.found == [second]
    scrubbed.run()
    assert scrubbed.found == [second, first]
