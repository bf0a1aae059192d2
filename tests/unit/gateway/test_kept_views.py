"""What a process beside the daemon is to keep of its views."""

from typing import Any

from gateway.fuse.views.kept_views import KeptItem, KeptViews


def test_the_next_keeper_gets_what_is_of_views_alone() -> None:
    """The log of a server that an earlier daemon began ends with that server, as does its
    descriptor."""
    keeper: Any = object()
    of_views = {"view/1": KeptItem(b"", (3, 4)), "lock/1/7": KeptItem(b"", (5,))}
    views = KeptViews()
    views.went_on({"log": KeptItem(b"", (6,)), **of_views}, keeper)
    assert views.begin(keeper) == of_views
