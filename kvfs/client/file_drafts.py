"""Files in the making as a client names them: by the paths under which they are to appear."""

import errno
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from kvfs.base.errors import NoSpace
from kvfs.datastore.layout import translate
from kvfs.meta.engine import Transaction
from kvfs.session.session import Session
from kvfs.vfs import stage_records
from kvfs.vfs.post_commit import Changed
from kvfs.vfs.stage import SMALL_BYTES, Draft, Drafts
from kvfs.vfs.stage_records import NewFile, Options, StagingTarget, WrittenData

_SMALL_TOGETHER_BYTES: Final = 4 << 20
"""More bytes than this are reserved before the first is written, however small the files are."""
_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))


class FileDraft(NamedTuple):
    """One file in the making."""

    target: StagingTarget
    options: Options
    body: Draft


class FileDrafts:
    """Makes, publishes and discards drafts for one client; any thread."""

    def __init__(self, session: Session, stage: Drafts) -> None:
        self._session = session
        self._stage = stage

    def begin(
        self, wanted: Sequence[tuple[StagingTarget, int]], options: Options, *, grows: bool = False
    ) -> list[FileDraft]:
        """Returns drafts of these files of so many bytes. Errors that can be foreseen are raised
        here. `grows`: they may well get longer.

        Raises NotFound, NotADirectory, IsADirectory, Exists, NotPermitted, NameTooLong, Invalid,
        NoSpace, ReadOnly, Unavailable, OSError; then nothing is left.
        """
        targets, sizes = zip(*wanted, strict=True)
        small = max(sizes) <= SMALL_BYTES and sum(sizes) <= _SMALL_TOGETHER_BYTES

        def check(t: Transaction) -> list[NewFile]:
            return list(map(stage_records.check, repeat(t), targets, sizes, repeat(options)))

        try:
            bodies = self._begin_small(check) if small and not grows else self._stage.begin(check)
        except (NoSpace, OSError) as error:
            raise self._full(error, targets) from None
        return list(map(FileDraft, targets, repeat(options), bodies))

    def _begin_small(self, check: Callable[[Transaction], list[NewFile]]) -> list[Draft]:
        files = self._session.foresee(check)
        if any(file.namespace != files[0].namespace for file in files[1:]):
            return self._stage.begin(check)
        return self._stage.begin_small(files)

    def publish(self, drafts: Sequence[FileDraft]) -> None:
        """Puts the files under their names, all in one transaction; then the drafts are spent, even
        after an error. Raises what `begin` raises, and Conflict; Unavailable also when all is done
        but the node did not answer in time."""
        author = self._session.author()

        def place(written: Sequence[WrittenData], t: Transaction, changed: Changed) -> None:
            for draft, file in zip(drafts, written, strict=True):
                stage_records.place(t, draft.target, file, draft.options, author, changed)

        self._stage.publish([draft.body for draft in drafts], place)

    def discard(self, drafts: Sequence[FileDraft]) -> None:
        """Undoes `begin`, except for drafts that were published."""
        self._stage.discard([draft.body for draft in drafts])

    def grow(self, draft: FileDraft, size: int) -> None:
        """Reserves space before the file grows beyond its reservation. Raises NoSpace,
        Unavailable."""
        if size > draft.body.reserved:
            try:
                self._stage.grow(draft.body, size)
            except NoSpace as error:
                raise self._full(error, [draft.target]) from None

    def sync(self, draft: FileDraft) -> None:
        """Makes a durable file's data survive power loss. Raises OSError."""
        self._stage.sync(draft.body)

    def failed(self, draft: FileDraft, error: OSError) -> Exception:
        """Returns the error to raise for the system's error on its data file."""
        return self._meant(error, str(draft.target))

    def _meant(self, error: OSError, shown: str) -> Exception:
        if error.errno not in _FULL:
            return error
        meant = translate(error, self._session.store.root)
        return type(meant)(f"{shown}: {meant}")

    def _full(self, error: NoSpace | OSError, targets: Sequence[StagingTarget]) -> Exception:
        """Returns the same error for lack of space, with the targets named."""
        others = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
        shown = f"{targets[0]}{others}"
        if isinstance(error, OSError):
            return self._meant(error, shown)
        return NoSpace(f"{shown}: {error}")
