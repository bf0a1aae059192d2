"""Files that have their names from the beginning, and are empty then: what a program on a mount
makes and fills. (`stage` makes files that appear when they are whole.)

| step | on disk | in the engine | what repairs it after a kill here |
|---|---|---|---|
| 1 record noted | nothing | unpublished, with its name or as an orphan | the next start drops it |
| 2 data file made | empty file | the same | the same |
| 3 written, closed: published | the data | published | nothing: it is complete |

On a lone node step 1 is put off until something else is committed (`transact_unseen`), and a record
with the flag RESERVED stays as it is: its maker was told. A data file that cannot be made takes
its name with it.
"""

from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import msgspec

from kvfs.base.errors import Exists
from kvfs.datastore.files import DataFiles
from kvfs.meta.engine import Engine, NearEngine, Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Flag, Inode
from kvfs.tree import tree
from kvfs.tree.private_files import is_given_way, make_way


class NoDataFile(Exception):
    """A data file could not be made, and the name of its file is still there."""

    def __init__(self, error: Exception, undoing: Coroutine[Any, Any, object]) -> None:
        super().__init__(str(error))
        self._error = error
        self._undoing = undoing

    async def undo(self) -> NoReturn:
        """Removes the name. Raises the reason, or what that raises."""
        await self._undoing
        raise self._error


class VisibleFiles:
    """Makes such files in one node. Used from the event loop."""

    def __init__(
        self,
        engine: Engine,
        local: EmbeddedEngine,
        near: NearEngine,
        files: DataFiles,
        undo: Callable[[int, bytes], Coroutine[Any, Any, object]],
    ) -> None:
        """`local`: the embedded engine, which on a lone node is the engine itself. `near`: what
        commits at once. `undo` removes the name of a file whose data file could not be made."""
        self._engine = engine
        self._local = local
        self._near = near
        self._files = files
        self._undo = undo

    def make_now(self, parent: int, name: bytes, ino: int, inode: Inode) -> int | None:
        """Makes a file at once, and completes its record; returns its data file, open for reading
        and writing. None, and nothing is done, if other nodes have to be asked. Raises what
        `tree.add` raises, NoSpace, ReadOnly, NoDataFile."""
        made = self._near.try_now(lambda t: tree.add(t, parent, name, ino, inode), private=ino)
        if not made.is_done:
            return None
        try:
            return self._files.create(ino, 0)
        except Exception as error:
            raise NoDataFile(error, self._undo(parent, name)) from error

    async def make(
        self,
        parent: int,
        name: bytes,
        ino: int,
        inode: Inode,
        *,
        reserves: bool,
        noted: Callable[[Transaction], None],
    ) -> tuple[int, Inode]:
        """Makes a file in a cluster; returns its data file and its completed record. `reserves`:
        the other nodes know at once that the name is taken; else, if two make one name, both
        succeed, and the file that is closed last stays. `noted` is called in step 1.

        Raises what `tree.add` raises, NoSpace, ReadOnly, OSError, Unavailable."""

        def note(t: Transaction) -> Inode:
            made = msgspec.structs.replace(inode, flags=Flag.RESERVED if reserves else 0)
            tree.add(t, parent, name, ino, made)
            noted(t)
            return made

        def note_over(t: Transaction) -> Inode:
            make_way(t, parent, name)
            return note(t)

        try:
            made = await self._engine.transact(note, private=0 if reserves else ino)
        except Exists:
            if reserves or not await self._engine.read(lambda t: is_given_way(t, parent, name)):
                raise
            made = await self._engine.transact(note_over)
        try:
            return self._files.create(ino, 0), made
        except BaseException:
            await self._undo(parent, name)
            raise

    async def make_nameless(
        self, parent: int, ino: int, inode: Inode, noted: Callable[[int], None]
    ) -> int:
        """Makes a file that a link may name later, or that goes with its last close (O_TMPFILE),
        and completes its record; returns its data file. `noted` is told of the orphan. Raises
        NotFound, NotPermitted, NoSpace, ReadOnly, Unavailable, OSError."""

        def note(t: Transaction) -> None:
            tree.add_unlinked(t, parent, ino, inode)

        if self._engine is self._local:
            self._local.transact_unseen(note)
        else:
            await self._engine.transact(note, private=ino)
        noted(ino)
        return self._files.create(ino, 0)
