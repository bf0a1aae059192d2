"""Whether there is an order of a history's operations that respects their times and that a
sequential model could have had: the search of Wing and Gong, with the memory of Lowe.

An operation that ended before another one began comes before it. One whose outcome is not known
comes anywhere after its beginning, or not at all.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Final, TypeVar

from tests.cluster.histories.events import Event

State = TypeVar("State", bound=Hashable)

_MOST_STATES: Final = 500_000


class Undecided(Exception):
    """There are too many orders for all of them to be tried."""


def explain(
    events: Sequence[Event],
    initial: State,
    step: Callable[[State, Event], Collection[State]],
) -> list[Event] | None:
    """Such an order (without what was perhaps never done), or None where there is none.

    `step` tells the states that an operation with this outcome may leave behind; none where it
    cannot have had this outcome in that state. Of an operation whose outcome is not known it tells
    what it leaves where it was done. Raises Undecided.
    """
    ordered = sorted(events, key=lambda event: event.began)
    everything = sum(1 << number for number, event in enumerate(ordered) if event.is_known)
    seen: set[tuple[int, State]] = set()
    path: list[Event] = []
    # Each level: what was done by then, and the moves that are left to try from there.
    levels = [(0, iter(_moves(ordered, 0, initial, step)))]
    while levels:
        done, moves = levels[-1]
        if done & everything == everything:
            return path
        move = next(moves, None)
        if move is None:
            levels.pop()
            if path:
                path.pop()
            continue
        number, state = move
        after = done | 1 << number
        if (after, state) in seen:
            continue
        seen.add((after, state))
        if len(seen) > _MOST_STATES:
            raise Undecided(f"{len(events)} operations, {everything.bit_count()} with an outcome")
        path.append(ordered[number])
        levels.append((after, iter(_moves(ordered, after, state, step))))
    return None


def _moves(
    ordered: Sequence[Event],
    done: int,
    state: State,
    step: Callable[[State, Event], Collection[State]],
) -> list[tuple[int, State]]:
    """What may come next: that which began before any of the rest had ended. What is known is tried
    first, in the order of the ends, which is the right one most of the time.

    A look or a refusal that may come next does: no order is lost so, since it never changes
    anything. Of what is not known only what changes something here may, and of those that are alike
    the first: whichever of them it was comes to the same.
    """
    first_end = min(
        (event.ended for number, event in enumerate(ordered) if not done >> number & 1),
        default=0.0,
    )
    found: list[tuple[float, int, State]] = []
    open_ones: set[tuple[str, str, str, int]] = set()
    for number, event in enumerate(ordered):
        if event.began > first_end:
            break
        if done >> number & 1:
            continue
        after = step(state, event)
        if event.is_known:
            if after and (event.action == "read" or event.is_refused):
                return [(number, state)]
        else:
            alike = event.action, event.name, event.other, event.value
            after = [] if alike in open_ones else [each for each in after if each != state]
            open_ones.add(alike)
        found.extend((event.ended, number, each) for each in after)
    found.sort(key=lambda move: move[:2])
    return [(number, after) for _, number, after in found]
