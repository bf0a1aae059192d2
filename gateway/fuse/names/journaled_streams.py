"""Open directories of a mount that outlives its daemon: the mount's journal has each, with the page
of its listing that was asked for last."""

from typing import Final

from gateway.fuse.names.directory_streams import (
    DOTS,
    DirectoryStream,
    DirectoryStreams,
    ListingEntry,
)
from gateway.holder.mount_journal import JournaledDirectory, MountJournal
from kvfs.meta.asked_requests import asking
from kvfs.node import Node

_NUMBER: Final = (1 << 63) - 1
"""The bits of a request's number that stay the same when it comes again."""


class JournaledStreams(DirectoryStreams):
    """The open directories of such a mount; it goes on with those that are in the journal."""

    def __init__(self, node: Node, journal: MountJournal) -> None:
        super().__init__(node)
        self._journal, self._next = journal, journal.first_handle() + 1
        self._entries: dict[int, int] = {}
        """The journal's entry of each stream, by its number."""
        self._opened_by: dict[int, int] = {}
        """The streams that an earlier daemon opened, by the number of the request."""
        for entry, each in list(journal.directories()):
            stream = self._streams[each.fh] = DirectoryStream(each.ino, None)
            stream.restored(each.first, each.after, each.sum)
            self._entries[each.fh] = entry
            self._opened_by[each.request & _NUMBER] = each.fh

    async def open(self, ino: int) -> int:
        """Enters it, too: it is about to be the kernel's."""
        fh = await super().open(ino)
        self._enter(fh, 0)
        return fh

    def opened_by(self, request: int) -> int:
        """Returns the stream that a request opened which an earlier daemon did not answer; 0:
        none."""
        return self._opened_by.get(request & _NUMBER, 0)

    def close(self, fh: int) -> None:
        """Removes it from the journal, too."""
        super().close(fh)
        entry = self._entries.pop(fh, -1)
        if entry >= 0:
            self._journal.unlisted(entry)

    async def read(self, fh: int, offset: int, limit: int) -> list[ListingEntry]:
        """Returns what lies in the page that is entered: what is asked next lies there too, or
        begins the next one."""
        page = await super().read(fh, offset, limit)
        end = self._enter(fh, offset) + DOTS
        return [each for each in page if each.following <= end]

    def _enter(self, fh: int, offset: int) -> int:
        """Enters what is asked of a stream. Returns the number after the page's last name."""
        stream = self._streams[fh]
        page, end = stream.page_of(offset)
        listed = JournaledDirectory(stream.ino, asking.get(), page.first, page.sum, page.after, fh)
        self._entries[fh] = self._journal.listed(self._entries.get(fh, -1), listed)
        return end
