"""What a rank of `kvfs model load` tells in the end."""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from cli.commands.models.model_rank import _load
from gds.io.timings import Spent, Stages

NOTHING = Spent(0, 0.0)
WANTED = {"path": "a", "device": "cuda:0", "rank": 0, "ranks": 1, "strategy": "auto", "verify": 0}


class Way(Enum):
    FIRST = "pinned copies"
    LAST = "copies that are not pinned"


class Taken(NamedTuple):
    way: Way
    reason: str


class Loading:
    """Loads nothing, by a way that turns out to be another."""

    @staticmethod
    def load_model(*_: Any, report: Callable[[object], None], **__: Any) -> dict[str, Any]:
        report(Taken(Way.FIRST, "as it was meant"))
        report(Taken(Way.LAST, "nothing can be pinned"))
        report(Stages(3, Spent(12, 1.0), NOTHING, NOTHING, NOTHING))
        return {}


def test_a_rank_tells_the_way_that_was_gone_in_the_end() -> None:
    found = _load(Loading, WANTED)
    assert (found["way"], found["why"]) == (Way.LAST.value, "nothing can be pinned")
    assert (found["stages"]["threads"], found["stages"]["read"]["bytes"]) == (3, 12)
