"""Spare copies of blocks: what becomes of a copy that was to go when nobody waits for that any
more."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from kvfs.cluster.handshake import Party
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_root
from kvfs.node.siblings.copy_protocol import CopyPromise, WantedPromise, packed
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.node.siblings.peer_spares import PeerSpares
from kvfs.tree import tree
from tests.contract.bringers import publish
from tests.contract.node.test_sibling_keeper import CONTENT, INO, ME, OTHER, Scene, run
from tests.contract.small_node import new_inode

SILENT = 3
BLOCK = b"block%d" % INO
"""As a scene names it."""


def test_a_copy_stays_for_others_where_what_it_was_to_make_room_for_is_given_up(
    tmp_path: Path,
) -> None:
    st = os.stat(tmp_path)

    def second(t: Transaction) -> None:
        tree.add(t, namespace_root(1), b"other", INO + 1, new_inode())
        publish(t, INO + 1, st, seal=CONTENT)

    async def claims(names: Sequence[tuple[int, bytes]]) -> list[tuple[int, list[int] | None]]:
        return [(7, [OTHER if path == BLOCK else SILENT]) for _, path in names]

    async def act(scene: Scene) -> None:
        scene.write()
        scene.engine.transact_now(second)
        is_promised = trio.Event()

        async def call(node: int, _method: str, params: list[Any], _deadline_s: float) -> Any:
            if node == SILENT:
                await trio.sleep_forever()
            is_promised.set()
            return [int(CopyPromise.KEPT)] * len(params)

        paths: Any = None
        engine: Any = scene.engine
        spares = PeerSpares(
            *(engine, ME, lambda: claims, lambda names: [7] * len(names), call, DifferingNames()),
            *(lambda _ino, _inode: True, lambda _ino: None, paths),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(spares.promised, [INO, INO + 1])
            await is_promised.wait()
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        wanted = packed([WantedPromise(1, BLOCK, len(b"block"), CONTENT)])
        assert await spares.asked(Party("c", OTHER, 1, "n"), wanted) == [int(CopyPromise.KEPT)]

    run(tmp_path, act)
