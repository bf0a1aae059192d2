"""Views of read-only exports are read-only themselves, where the kernel lets them."""

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import trio

from gateway.fuse.views.view import MountViews
from gateway.nfs.exports import Exported
from kvfs.base.errors import Busy, KvfsError

_SETTLE_S: Final = (1.0, 60.0)
log = logging.getLogger(__name__)


class _Refused(NamedTuple):
    """A view that the kernel refused to make read-only, or writable again."""

    read_only: bool
    """The wish."""
    pause_s: float
    again_s: float
    """The moment of the next try, by trio's clock."""


class ReadOnlyViews:
    """The views that are, or should be."""

    def __init__(self) -> None:
        self._refused: dict[int, _Refused] = {}
        """The refused views by number of the export."""

    async def settle(self, views: MountViews, wanted: Sequence[Exported]) -> None:
        """Makes views of read-only exports refuse changes themselves, so that reads cost less.
        Ganesha refuses them in any case, so a refusal by the kernel (files are open for writing, or
        unlinked while they are open) stops nothing, and is retried less and less often: for each
        try the kernel forgets the view's names."""
        for each in wanted:
            read_only, now = each.export.read_only, trio.current_time()
            refused = self._refused.get(each.number)
            if refused is not None and refused.read_only != read_only:
                refused = None
            if each.number not in views or (refused is not None and now < refused.again_s):
                continue
            try:
                await views.set_read_only(each.number, read_only=read_only)
                self._refused.pop(each.number, None)
            except KvfsError as error:
                if refused is None and not isinstance(error, Busy):
                    log.warning("NFS: the view of /%s stays as it is: %s", each.name, error)
                first_s, longest_s = _SETTLE_S
                pause_s = first_s if refused is None else min(2 * refused.pause_s, longest_s)
                self._refused[each.number] = _Refused(read_only, pause_s, now + pause_s)
