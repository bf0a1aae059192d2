"""The ranges of a home (`kvfs.holdings.home_map`), and which of them it may tell of: of one that
it gained it tells nothing until it has heard what each living node holds there.

| range | the table | told |
|---|---|---|
| of others | has none of it | no |
| gained while a lost one is still being removed | has none of it | no |
| gained | changes are applied, contents asked for | no |
| of which all living nodes told, or for `_MOST_S` none did | has all | yes |
| lost | its claims go | no |
"""

from typing import Final

import trio

from kvfs.holdings.home_map import Share, no_ranges
from kvfs.node.homes.set_follower import SetFollower
from kvfs.node.names.name_members import NameMembers

_MOST_S: Final = 60.0
"""Time after which nodes are not waited for that live, and have not told all."""


class HomeShare:
    """The ranges of one home."""

    def __init__(self, follower: SetFollower, members: NameMembers) -> None:
        """`follower`: that of a turned table that is empty."""
        self.follower: Final = follower
        self.ready = no_ranges()
        """The ranges of which this node may tell."""
        self._members = members
        self._wanted = no_ranges()
        self._applied = no_ranges()
        self._until = 0.0
        follower.received.set_share(self._applied)

    @property
    def applied(self) -> Share:
        """The ranges of which changes are applied."""
        return self._applied

    @property
    def is_ready(self) -> bool:
        """Whether it may tell of all ranges that it should."""
        return bool((self.ready == self._wanted).all())

    def want(self, ranges: Share) -> None:
        """Makes these its ranges."""
        self._wanted = ranges
        self.ready = self.ready & ranges
        self._apply(self._applied & ranges)
        self.look()

    def look(self) -> None:
        """Gains what could not be gained before, and tells of what is whole by now."""
        is_clean = not self.follower.table.is_losing
        if is_clean and (self._wanted & ~self._applied).any():
            self._apply(self._wanted)
            self._until = trio.current_time() + _MOST_S
        elif not (self._applied == self.ready).all() and (
            self.follower.knows_all() or trio.current_time() > self._until
        ):
            self.ready = self._applied

    def _apply(self, ranges: Share) -> None:
        if not (ranges == self._applied).all():
            self._applied = ranges
            self.follower.received.set_share(ranges)
