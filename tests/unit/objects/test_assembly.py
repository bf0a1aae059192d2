"""The data of an upload, as other nodes than the one that has them see them."""

from collections.abc import Callable
from typing import TypeVar

import pytest

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.objects.multipart import part_assembly, upload_transactions
from kvfs.objects.multipart.part_assembly import PartBytes
from kvfs.tree.copies import replica_counts
from tests.unit.object_space import ObjectSpace
from tests.unit.space import BOOT

T = TypeVar("T")
MIB = 1 << 20
OTHER_BOOT = BOOT + 1


class Uploaded(ObjectSpace):
    """Node 1 began an upload in the bucket, and has its first part, which is not on its disk."""

    def __init__(self) -> None:
        super().__init__()
        self.data = self.body().ino
        self.upload = self.on(
            1, lambda t: upload_transactions.create(t, self.bucket, b"k", {}, self.moment())
        )
        self.on(1, self._put)

    def _put(self, t: Transaction) -> None:
        upload, moment = self.upload, self.moment()
        assert part_assembly.make(t, self.bucket, upload.directory, 5 * MIB, self.data, moment)
        upload_transactions.put_part_in_place(
            *(t, self.bucket, upload, 1, PartBytes(self.data, 0), 5 * MIB, "e", {}, moment),
            self.changed,
            synced=False,
        )

    def on(self, node: int, fn: Callable[[Transaction], T]) -> T:
        """As a node does it; 0: a lone one."""

        def run(t: Transaction) -> T:
            t.node = keys.pack_node(node) if node else b""
            return fn(t)

        return self.do(run)

    def parts(self, node: int, boot: int) -> list[int]:
        found, _ = self.on(
            node, lambda t: upload_transactions.list_parts(t, self.upload, 0, 10, boot)
        )
        return [each.number for each in found]


@pytest.mark.parametrize(
    ("node", "boot", "seen"),
    [
        (1, BOOT, [1]),
        (1, OTHER_BOOT, []),
        (2, BOOT, [1]),
        (2, OTHER_BOOT, [1]),
        (0, OTHER_BOOT, []),
    ],
)
def test_whoever_wrote_a_part_says_whether_it_is_there_still(
    node: int, boot: int, seen: list[int]
) -> None:
    assert Uploaded().parts(node, boot) == seen


def test_an_assembly_that_was_evicted_has_no_parts_on_any_node() -> None:
    uploaded = Uploaded()
    uploaded.do(lambda t: part_assembly.release(t, uploaded.upload.directory, uploaded.data))
    assert uploaded.parts(1, BOOT) == uploaded.parts(2, OTHER_BOOT) == []


def test_nobody_is_given_a_copy_of_what_is_still_put_together() -> None:
    uploaded = Uploaded()
    assert uploaded.on(1, lambda t: replica_counts.look(t, [uploaded.data])) == []
