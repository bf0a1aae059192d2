"""Content that other nodes have published since a file was opened.

It is opened beside the open file, as another inode of the kernel (`kernel_inodes`): the former
content stays with the programs that have it open. Where that is impossible, the new content is
copied into the data file that is open (`content_renewal`).
"""

from collections.abc import Awaitable, Callable
from typing import Final

from gateway.fuse.files.content_renewal import Renewing
from gateway.fuse.files.kernel_inodes import InodeOpener, Outdated
from gateway.fuse.files.open_file import OpenFile
from gateway.fuse.files.open_table import OpenTable
from gateway.fuse.files.unrecorded_closes import Unrecorded
from kvfs.base.errors import Stale
from kvfs.meta.engine import Engine
from kvfs.tree import tree

FORMER: Final = "other nodes have replaced what is open: look its name up again"


class FormerContents:
    """The former contents of one mount's files."""

    def __init__(
        self,
        engine: Engine,
        table: OpenTable,
        renewing: Renewing,
        unrecorded: Unrecorded,
        fetch_rest: Callable[[OpenFile], Awaitable[None]],
    ) -> None:
        """`fetch_rest` returns when the missing bytes of an open file are on their way again."""
        self._engine = engine
        self._table = table
        self._renewing = renewing
        self._unrecorded = unrecorded
        self._fetch_rest = fetch_rest

    def part(self, ino: int, version: int) -> None:
        """Makes look-ups of a file whose record has this version lead to no former content."""
        file = self._table.files.get(ino)
        if file is None or file.version >= version or not file.handles:
            return
        if not file.writers and not file.is_draft:
            self._part(file)

    def _part(self, file: OpenFile) -> bool:
        """Leaves a former content to the programs that have it open. Returns False if it has to be
        renewed instead."""
        table = self._table
        able = (each.can_part(file) for each in table.kernels)
        if not table.kernels or file.ino in self._unrecorded or not all(able):
            return False
        for each in table.kernels:
            each.part(file)
        del table.files[file.ino]
        table.formers.setdefault(file.ino, []).append(file)
        file.is_former = True
        return True

    async def rejoin(self, former: OpenFile, opener: InodeOpener, *, writable: bool) -> None:
        """Gives the newest content to a program that opens an inode of a former content by a
        descriptor. Raises Stale if the name is to be looked up."""
        table = self._table
        is_beside = former.ino in table.files
        if self._keeps(former, opener) and not writable:
            return
        outdated = opener.outdated()
        if outdated is Outdated.TAKE and not writable:
            return
        if outdated is not Outdated.RENEW or (is_beside and writable):
            raise Stale(FORMER)
        if not is_beside:
            table.let_go(former.ino)
            for each in table.kernels:
                each.rejoin(former)
            table.end_former(former)
            former.is_former = False
            table.files[former.ino] = former
        await table.in_use(former, self._renewing.renew)

    def _keeps(self, file: OpenFile, opener: InodeOpener) -> bool:
        """Returns whether a view's kernel, which has a content open, goes on with it: programs on
        the mount have opened it too, and read what they opened."""
        return opener.kernel is not self._table.kernels[0] and file.handles > file.viewed

    async def renewed(self, file: OpenFile, opener: InodeOpener | None) -> OpenFile | None:
        """Returns the open file with the content that other nodes have published since; None if it
        is to be opened anew. Raises Stale if its name is to be looked up."""
        table = self._table
        inode = await self._engine.read(lambda t: tree.read_inode(t, file.ino))
        if inode.version <= file.version or file.writers or file.is_draft:
            if file.is_partial:
                await table.in_use(file, self._fetch_rest)
            if file.is_remembered:
                await table.in_use(file, self._renewing.forgotten)
            return file
        if not file.handles and not file.users:
            table.discard(file)
            return None
        if opener is None or not opener.holds(file):
            if self._part(file):
                return None
        elif self._keeps(file, opener):
            return file
        elif table.kernels and (outdated := opener.outdated()) is not Outdated.RENEW:
            if outdated is Outdated.LOOK_UP:
                raise Stale(FORMER)
            return file
        await table.in_use(file, self._renewing.renew)
        return file
