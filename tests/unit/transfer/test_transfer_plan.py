"""Which chunks are asked for next, and of whom."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from kvfs.base.errors import Conflict, Corrupt, NotFound, Unavailable
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.transfer.chunk_plan import ChunkPlan, ChunkSpan
from kvfs.transfer.sources import PeerSource, Sources, Standing


def taken(plan: ChunkPlan, most: int = 1) -> list[int]:
    """All that is asked for, in its order."""
    chunks: list[int] = []
    while (span := plan.take(most)) is not None:
        chunks += range(span.first, span.end)
    return chunks


def with_chunks(chunks: int, *here: int) -> ChunkPlan:
    plan = ChunkPlan(chunks)
    for chunk in here:
        plan.put(chunk)
    return plan


def test_a_file_is_asked_for_in_its_order() -> None:
    assert taken(ChunkPlan(5), 2) == [0, 1, 2, 3, 4]


def test_who_waits_comes_first_then_what_is_likely() -> None:
    plan = ChunkPlan(10)
    plan.expect(ChunkSpan(7, 2))
    plan.urge(ChunkSpan(4, 1))
    assert taken(plan) == [4, 7, 8, 0, 1, 2, 3, 5, 6, 9]


def test_what_is_here_is_not_asked_for() -> None:
    plan = with_chunks(10, 0, 1, 7, 8)
    assert plan.here == 4
    assert plan.left() == 6
    assert taken(plan, 16) == [2, 3, 4, 5, 6, 9]
    assert [chunk for chunk in range(10) if plan.has(chunk)] == [0, 1, 7, 8]


def test_what_was_given_back_is_asked_for_first() -> None:
    plan = ChunkPlan(4)
    assert taken(plan) == [0, 1, 2, 3]
    plan.put(2)
    plan.give_back(ChunkSpan(1, 3))
    plan.urge(ChunkSpan(0, 4))
    assert taken(plan) == [1, 3]


def test_who_may_not_answer_gets_what_is_wanted_last() -> None:
    plan = ChunkPlan(5)
    plan.urge(ChunkSpan(3, 2))
    plan.expect(ChunkSpan(2, 1))
    assert [plan.take_last() for _ in range(4)] == [
        ChunkSpan(2, 1),
        ChunkSpan(1, 1),
        ChunkSpan(0, 1),
        None,
    ]
    assert taken(plan, 5) == [3, 4]
    plan.give_back(ChunkSpan(2, 3))
    assert plan.take_last() is None, "who waited for it waits again"


def test_how_much_is_here_in_a_row() -> None:
    plan = with_chunks(6, 0, 2, 3, 4)
    assert [plan.run(first, 3) for first in range(6)] == [1, 0, 3, 2, 1, 0]
    assert plan.has_all(ChunkSpan(2, 3))
    assert not plan.has_all(ChunkSpan(2, 4))


@given(
    st.integers(0, 40),
    st.lists(
        st.tuples(
            st.sampled_from(["urge", "expect", "take", "last", "put", "back"]), st.integers(0, 39)
        )
    ),
)
def test_a_chunk_is_asked_of_one_at_a_time(chunks: int, steps: Iterable[tuple[str, int]]) -> None:
    plan, asked, here = ChunkPlan(chunks), set[int](), set[int]()
    for step, number in steps:
        if step in ("take", "last"):
            span = plan.take(number + 1) if step == "take" else plan.take_last()
            new = set(range(span.first, span.end)) if span else set()
            assert not new & (asked | here)
            assert len(new) <= number + 1
            asked |= new
        elif number < chunks and step in ("urge", "expect"):
            getattr(plan, step)(ChunkSpan(number, min(3, chunks - number)))
        elif number in asked:
            asked.discard(number)
            if step == "put":
                plan.put(number)
                here.add(number)
            else:
                plan.give_back(ChunkSpan(number, 1))
    assert {chunk for chunk in range(chunks) if plan.has(chunk)} == here
    assert plan.here == len(here)
    assert set(taken(plan, 7)) == set(range(chunks)) - asked - here


# --- of whom ---


def at(*nodes: int) -> list[PeerAddress]:
    return [PeerAddress(node, "host", 1) for node in nodes]


def nodes(sources: Iterable[PeerSource]) -> list[int]:
    return [source.address.node for source in sources]


def test_a_small_file_is_asked_of_one_a_large_one_of_all() -> None:
    assert nodes(Sources(at(1, 2, 3), 3, me=9).activate(0.0)) == [1]
    assert nodes(Sources(at(1, 2, 3), 100, me=9).activate(0.0)) == [1, 2, 3]


def test_a_node_does_not_ask_itself() -> None:
    assert nodes(Sources(at(1, 2), 100, me=1).activate(0.0)) == [2]


def test_who_is_out_is_replaced() -> None:
    sources = Sources(at(1, 2), 1, me=9)
    (first,) = sources.activate(0.0)
    first.failed(NotFound("no"), 0, 0)
    assert first.standing is Standing.OUT
    assert nodes(sources.activate(0.0)) == [2]


def test_a_failure_that_may_pass_is_tried_again_once() -> None:
    source = PeerSource(at(1)[0])
    source.standing = Standing.ACTIVE
    source.failed(Unavailable("lost"), 1.0, 2.0)
    source.failed(Unavailable("lost with the first"), 1.5, 2.1)
    assert source.standing is Standing.ACTIVE
    source.came(1 << 22, 0.1, 2.5)
    source.failed(Unavailable("later"), 3.0, 4.0)
    assert source.standing is Standing.ACTIVE
    source.failed(Unavailable("again"), 5.0, 6.0)
    assert source.standing is Standing.OUT


def test_who_was_too_slow_is_on_trial_beside_others_until_it_brings_something() -> None:
    sources = Sources(at(1, 2), 100, me=9)
    slow, other = sources.activate(0.0)
    sources.too_slow(slow, 5.0)
    assert nodes(sources.activate(5.9)) == []
    assert nodes(sources.activate(6.1)) == [1]
    assert sources.is_on_trial(slow)
    assert not sources.is_on_trial(other)
    slow.came(1 << 22, 0.01, 7.0)
    assert not sources.is_on_trial(slow)


def test_who_is_alone_is_not_on_trial() -> None:
    sources = Sources(at(1, 2), 100, me=9)
    one, other = sources.activate(0.0)
    for source in (one, other):
        sources.too_slow(source, 5.0)
    assert nodes(sources.activate(6.1)) == [1, 2]
    assert not sources.is_on_trial(one), "somebody has to bring what is waited for"


def test_who_is_in_doubt_is_asked_last_for_other_files_too() -> None:
    sources = Sources(at(1, 2), 3, me=9, in_doubt={1})
    assert nodes(sources.activate(0.0)) == [2]
    assert nodes(sources.activate_another(0.0)) == [1]


def test_who_sends_us_away_is_asked_again_when_the_others_are_out() -> None:
    sources = Sources(at(1), 100, me=9)
    (first,) = sources.activate(0.0)
    sources.redirected(first, at(5, 6))
    assert (first.standing, first.insist) == (Standing.RESERVE, True)
    (relay,) = sources.activate(0.0)
    assert relay.address.node == 5
    relay.failed(NotFound("no"), 0, 0)
    assert nodes(sources.activate(0.0)) == [6]
    sources.of(Standing.ACTIVE)[0].failed(NotFound("no"), 0, 0)
    assert nodes(sources.activate(0.0)) == [1]


def test_who_sends_us_to_those_that_are_known_to_have_it_goes_on() -> None:
    """They read it a moment ago: else one of three holders would give all of it."""
    sources = Sources(at(1, 2, 3), 100, me=9)
    first, second, third = sources.activate(0.0)
    sources.redirected(first, at(3, 2))
    sources.redirected(second, at(3))
    assert sources.of(Standing.ACTIVE) == [first, second, third]
    assert [each.insist for each in (first, second, third)] == [True, True, False]
    sources.redirected(third, at(5, 2))
    assert third.standing is Standing.RESERVE, "another one gets it just now"


def test_who_sends_us_to_nobody_goes_on() -> None:
    sources = Sources(at(1), 100, me=9)
    (first,) = sources.activate(0.0)
    sources.redirected(first, at(9))
    assert (first.standing, first.insist) == (Standing.ACTIVE, True)


def test_who_was_too_slow_is_asked_again_after_a_while_or_in_need() -> None:
    sources = Sources(at(1, 2), 8, me=9)
    slow, other = sources.activate(0.0)
    sources.too_slow(slow, 0.0)
    assert sources.activate(0.5) == []
    assert sources.activate(1.5) == [slow]
    sources.too_slow(slow, 1.5)
    assert sources.activate(2.6) == []
    other.failed(NotFound("no"), 0, 0)
    assert sources.activate(2.6) == [slow]


def test_a_fast_one_gets_a_second_stream_and_keeps_it() -> None:
    source = PeerSource(at(1)[0])
    source.streams = 1
    assert source.streams_wanted == 1
    source.came(4 << 20, 0.04, 1.0)
    assert source.streams_wanted == 2
    source.streams = 2
    source.came(4 << 20, 0.08, 1.1)
    assert source.streams_wanted == 2
    source.came(4 << 20, 0.8, 1.2)
    assert source.streams_wanted == 1


def test_fast_ones_are_asked_for_more_at_a_time() -> None:
    source = PeerSource(at(1)[0])
    assert source.span_limit(100, 0, 6, alone=False) == 1
    source.came(4 << 20, 0.01, 1.0)
    assert source.span_limit(1000, 0, 6, alone=False) == 10
    assert source.span_limit(12, 0, 6, alone=False) == 1
    assert source.span_limit(4, 8, 2, alone=True) == 6
    source.came(4 << 20, 100.0, 1.0)
    assert source.span_limit(1000, 0, 6, alone=False) == 1


def test_what_is_told_where_nobody_is_left() -> None:
    sources = Sources(at(1, 2, 3), 100, me=9)
    assert isinstance(sources.failure(), NotFound)
    for source, error in zip(
        sources.activate(0.0), [NotFound("no"), Conflict("size"), Corrupt("bytes")], strict=True
    ):
        source.failed(error, 0, 0)
    assert isinstance(sources.failure(), Corrupt)
