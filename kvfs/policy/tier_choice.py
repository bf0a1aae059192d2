"""The place of new files, and how much has to leave a fast place. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvfs.base.media import Place
from kvfs.policy import eviction


class TierRoom(NamedTuple):
    """A place and its space in bytes, as last measured."""

    place: Place
    used: int
    capacity: int
    refusal: str | None = None
    """The reason why its disk takes no files, or gives none."""

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.used)

    @property
    def takes_files(self) -> bool:
        """Whether new files may still be made in it: half of its headroom is left to those that are
        being written."""
        return self.refusal is None and self.free > eviction.headroom(self.capacity) // 2

    @property
    def excess(self) -> int:
        """Bytes that should leave it."""
        return eviction.excess(self.used, self.capacity)


def targets(
    media: Mapping[int, Sequence[str]], rooms: Sequence[TierRoom], own_free: int
) -> dict[int, str]:
    """Returns the root of the place where new files go, by namespace id; none for the store's own
    directory, which has so many bytes free."""
    found: dict[int, str] = {}
    for namespace_id, wanted in media.items():
        for medium in wanted or ("ssd",):
            best = roomiest(medium, rooms)
            if medium == "ssd" and (best is None or best.free <= own_free):
                break
            if best is not None:
                found[namespace_id] = best.place.root
                break
    return found


def roomiest(medium: str, rooms: Sequence[TierRoom]) -> TierRoom | None:
    """Returns the place of a medium that takes files and has the most space; None: there is
    none."""
    able = [each for each in rooms if each.place.medium == medium and each.takes_files]
    return max(able, key=lambda each: each.free, default=None)
