"""The remains of an earlier daemon's views, with which the next one goes on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.fuse.channel.resent_requests import Became
from gateway.fuse.files.open_file import Handle
from gateway.fuse.views.kept_views import KeptItem, ViewKeeper
from gateway.holder.mount_journal import is_of, unmarked
from kvfs.meta.records import namespace_of


class GoneOn(NamedTuple):
    """The remains of an earlier daemon's views."""

    keeper: ViewKeeper
    items: Mapping[str, KeptItem]
    handles: Sequence[tuple[int, Handle]]
    """The handles that views' kernels have, with the numbers of their requests."""
    notes: Mapping[int, Became]
    """The fates of views' requests that were noted, by request."""

    def handles_of(self, namespace: int) -> list[tuple[int, Handle]]:
        """Returns those of one view."""
        return [
            (unmarked(request), handle)
            for request, handle in self.handles
            if namespace_of(handle.number) == namespace
        ]

    def notes_of(self, namespace: int) -> dict[int, Became]:
        """Returns those of one view."""
        return {
            unmarked(request): note
            for request, note in self.notes.items()
            if is_of(request, namespace)
        }
