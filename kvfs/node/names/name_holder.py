"""The answers of a node to others that ask for names that it is said to hold.

Invariants
- It answers from its own records and data alone: it asks nobody, so no two nodes wait for each
  other.
- A file that is being written in place has no content that anybody could get: it is not told of.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import trio

from kvfs.cluster.handshake import Party
from kvfs.cluster.peer_protocol import Ask, chunks_of
from kvfs.cluster.peer_server import OfFile
from kvfs.datastore.files import DataFiles
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, unpack_inode
from kvfs.node.names.name_leases import NameLeases
from kvfs.node.names.name_protocol import Question, parse_asked_pages, parse_confirm
from kvfs.tree.copies import held_names, told_names
from kvfs.tree.copies.held_names import HeldName
from kvfs.tree.copies.peer_directories import DirectoryAccess
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldName, ToldPage
from kvfs.vfs.inode_holders import Holders

_BATCH: Final = 256
"""Entries that are looked at in one turn of the event loop, a millisecond or two."""


class NameHolder:
    """The answers of one node."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        holders: Holders,
        leases: NameLeases,
        renewed: Callable[[int, bytes], int],
        denied: Callable[[int, bytes], None],
        told: Callable[[int, Sequence[bytes]], None],
    ) -> None:
        """`renewed`: the removal after which a path was written here. `denied` is told of a path
        that this node has not: it may have announced it. `told` is told of paths that another node
        was told of, in a list perhaps before they are announced."""
        self._engine = engine
        self._files = files
        self._holders = holders
        self._leases = leases
        self._renewed = renewed
        self._denied = denied
        self._told_of = told
        self.counters = {"names_confirmed": 0, "names_denied": 0, "names_listed": 0}

    async def confirm(self, _peer: Party, params: Any) -> list[Any] | OfFile:
        """Handles the request `confirm`; the bytes of a file that alone is asked for may go with
        the answer. Raises Invalid, Unavailable."""
        asked = parse_confirm(params)
        told = await self._engine.read(lambda t: _told(t, asked.names))
        answers = [each if each is not None and self._has(each) else None for each in told]
        for name, found, each in zip(asked.names, told, answers, strict=True):
            if each is not None and each.ino:
                each.renews_ns = self._renewed(*name)
                self._leases.give(each.ino, asked.lease_s)
            elif found is None:
                self._denied(*name)
        confirmed = sum(each is not None for each in answers)
        self.counters["names_confirmed"] += confirmed
        self.counters["names_denied"] += len(answers) - confirmed
        built: list[Any] = msgspec.to_builtins(answers, builtin_types=(bytes,))
        one = answers[0] if len(answers) == 1 else None
        return built if one is None or not one.ino else OfFile(built, _whole(one))

    async def list_names(self, _peer: Party, params: Any) -> list[Any]:
        """Handles the request `list-names`. Raises Invalid, Unavailable."""
        asked = parse_asked_pages(params)
        pages = [await self._page(each, asked.detail) for each in asked.pages]
        self.counters["names_listed"] += sum(len(each.names) for each in pages)
        built: list[Any] = msgspec.to_builtins(pages, builtin_types=(bytes,))
        return built

    async def _page(self, asked: AskedPage, detail: Detail) -> ToldPage:
        """Returns a page, some entries at a time."""
        names: list[ToldName] = []
        directories: list[DirectoryAccess] = []
        end = asked.start, asked.limit
        while True:
            start, rest = end
            part = msgspec.structs.replace(asked, start=start, limit=min(rest, _BATCH))
            page = await self._engine.read(lambda t: told_names.told_page(t, part, detail))  # noqa: B023
            names += page.names
            directories = page.directories or directories  # it may go meanwhile
            end = page.following, rest - part.limit
            if not all(end):
                break
            await trio.lowlevel.checkpoint()
        above = asked.path + b"/" if asked.path else b""
        for each in names:
            each.renews_ns = self._renewed(asked.namespace_id, above + each.key)
        self._told_of(asked.namespace_id, [above + each.key for each in names])
        return ToldPage(names, page.following, page.changed_ns, directories)

    def _has(self, held: HeldName) -> bool:
        if not held.ino:
            return True
        if self._holders.is_changed(held.ino):
            return False
        return self._files.has(held.ino, unpack_inode(held.record).version)


def _whole(held: HeldName) -> Ask:
    """Returns the request for all bytes of a file."""
    inode = unpack_inode(held.record)
    sealed = bool(inode.flags & Flag.SEALED)
    chunks = chunks_of(inode.size)
    return Ask(held.ino, inode.version, inode.size, 0, chunks, sealed=sealed)


def _told(t: Transaction, names: Sequence[Question]) -> list[HeldName | None]:
    return [held_names.told(t, *each) for each in names]
