"""Runs one parser over many inputs, and tells of every end that it does not declare.

An input is a seed of the target's grammar, or an earlier input that had a new outcome, mutated. An
outcome is the kind of a result, or of a refusal with the first words of its message: what ends in a
new way is worth changing further. A piece of PIECE inputs depends on seed, target and its number
alone.
"""

import random
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.fuzz.mutation import mutated

PIECE: Final = 2_000
_LONGEST_S: Final = 30
"""Seconds of the processor that a piece may take longest, of which one takes a tenth of a second:
an input in it hangs."""
_MOST_KEPT: Final = 300
_NEAR: Final = 0.8
"""The share of inputs that are mutated; the others are as the grammar makes them."""


@dataclass(frozen=True)
class Target:
    """One parser."""

    name: str
    seed: Callable[[random.Random], bytes]
    """Makes an input of the grammar."""
    run: Callable[[bytes], object]
    """Parses, and asserts what must hold of the result. What it returns tells outcomes apart."""
    refusals: tuple[type[Exception], ...]
    """The errors that it declares."""
    words: Sequence[bytes] = ()
    """Words of its language."""


class Finding(NamedTuple):
    """An input that ended in another way than its parser declares."""

    target: str
    data: bytes
    error: str


@dataclass
class Tally:
    """The count of a run."""

    inputs: int = 0
    refused: int = 0
    outcomes: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)


def run_piece(target: Target, seed: int, number: int, tally: Tally, inputs: int = PIECE) -> None:
    """Runs one piece; a target has at most one finding of a kind."""
    draw = random.Random(f"{seed} {target.name} {number}")
    kept = [target.seed(draw) for _ in range(8)]
    known = {each.error for each in tally.findings}
    data = b""
    try:
        with _deadline():
            for data in _inputs(target, draw, kept, inputs):
                tally.inputs += 1
                outcome = _outcome(target, data, tally)
                if outcome not in tally.outcomes:
                    tally.outcomes.add(outcome)
                    if len(kept) < _MOST_KEPT:
                        kept.append(data)
    except Exception as error:
        found = Finding(target.name, data, "".join(traceback.format_exception(error)))
        if found.error not in known:
            tally.findings.append(found)


def _inputs(target: Target, draw: random.Random, kept: list[bytes], count: int) -> Iterator[bytes]:
    for _ in range(count):
        data = draw.choice(kept) if draw.random() < 0.7 else target.seed(draw)
        if draw.random() < _NEAR:
            data = mutated(draw, data, [*target.words, draw.choice(kept)])
        yield data


def _outcome(target: Target, data: bytes, tally: Tally) -> str:
    """Raises what is no refusal."""
    try:
        found = target.run(data)
        return str(found)[:24] if isinstance(found, str | int) else type(found).__name__
    except target.refusals as error:
        tally.refused += 1
        return f"{type(error).__name__} {str(error)[:24]}"


@contextmanager
def _deadline() -> Iterator[None]:
    """Raises TimeoutError in the block after _LONGEST_S."""

    def late(*_: object) -> None:
        raise TimeoutError(f"an input took longer than {_LONGEST_S} s")

    before = signal.signal(signal.SIGVTALRM, late)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, before)
