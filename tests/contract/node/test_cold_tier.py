"""What a node leaves in the bucket of its cold tier, and what it clears up there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trio

from kvfs.node.tasks.cold_tier import ColdTier
from kvfs.transfer.cold.endpoint import ColdLocation, UnfinishedUpload
from tests.contract.small_node import small_node
from tests.jumping import jumping_clock

_DAY_S = 86_400.0


class Bucket:
    """Uploads that were begun in it."""

    def __init__(self) -> None:
        self.uploads = [
            UnfinishedUpload("tier/store/killed", "1", 8 * _DAY_S),
            UnfinishedUpload("tier/store/under way", "2", 6 * _DAY_S),
            UnfinishedUpload("tier/another store/killed", "3", 8 * _DAY_S),
        ]
        self.looks = 0

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        self.looks += 1
        return iter([each for each in self.uploads if each.key.startswith(prefix)])

    def abort(self, key: str, upload: str) -> None:
        self.uploads = [each for each in self.uploads if each[:2] != (key, upload)]


async def always() -> bool:
    return True


def test_parts_of_what_was_not_sent_to_its_end_go_a_week_later(tmp_path: Path) -> None:
    bucket: Any = Bucket()
    where = ColdLocation("bucket", "tier")
    with small_node(tmp_path / "store") as node:
        tier = ColdTier(node.engine, node.files, where, bucket, "store", 0, always)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(tier.run)
                await trio.sleep(2 * 3600)
                nursery.cancel_scope.cancel()

        with jumping_clock() as clock:
            trio.run(main, clock=clock)
    assert [each.upload for each in bucket.uploads] == ["2", "3"]
    assert bucket.looks <= 3
