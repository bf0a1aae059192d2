"""A few inputs for each parser, the same at each run, which is to tell of the change that it tests;
`./dev fuzz --inputs N` gives them many others."""

import pytest

from tests.fuzz.__main__ import ALL
from tests.fuzz.campaign import Tally, Target, run_piece

_INPUTS = 400
_SEED = 1


@pytest.mark.parametrize("target", ALL, ids=lambda target: target.name)
def test_each_input_ends_as_the_parser_declares(target: Target) -> None:
    tally = Tally()
    run_piece(target, _SEED, 0, tally, _INPUTS)
    assert [(each.data, each.error) for each in tally.findings] == []
    assert len(tally.outcomes) > 1, "all inputs end alike: the grammar does not reach the parser"
