"""News for other nodes: at once after a rest, together under load, none to one that is away."""

import errno
from collections.abc import Awaitable, Callable
from typing import Any

import trio
import trio.testing

from kvfs.base.errors import Unavailable
from kvfs.node.names.name_protocol import News, parse_news
from kvfs.node.names.peer_outbox import LATER_S, PeerOutbox

INTERVAL_S = 0.5


class Node:
    """What it was sent, and when; what it answers."""

    def __init__(self) -> None:
        self.got: list[tuple[float, list[bytes]]] = []
        self.heard: list[News] = []
        self.answers: News | None = None
        self.refuses = self.fails = False

    async def call(self, _node: int, _method: str, params: Any, _deadline_s: float) -> Any:
        await trio.lowlevel.checkpoint()
        if self.refuses:
            raise Unavailable("it is away")
        self.got.append((trio.current_time(), params.stones))
        return self.answers

    async def hear(self, answer: Any) -> None:
        if self.fails:
            raise OSError(errno.EIO, "the disk fails")
        self.heard.append(answer)

    def outbox(self) -> PeerOutbox:
        return PeerOutbox(self.call, lambda: INTERVAL_S, self.hear)


Scene = Callable[[Node, PeerOutbox], Awaitable[None]]


def run(scene: Scene) -> None:
    async def main() -> None:
        node = Node()
        outbox = node.outbox()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.run)
            await trio.testing.wait_all_tasks_blocked()
            await scene(node, outbox)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_first_message_goes_at_once_and_the_next_go_together() -> None:
    run(go_together)


async def go_together(node: Node, outbox: PeerOutbox) -> None:
    began = trio.current_time()
    for number in range(4):
        outbox.tell_stone(2, b"%d" % number)
        await trio.sleep(INTERVAL_S / 10)
    await trio.sleep(INTERVAL_S)
    (first, one), (second, others) = node.got
    assert (one, others) == ([b"0"], [b"1", b"2", b"3"])
    assert (first, second) == (began, began + INTERVAL_S)
    assert outbox.counters["name_news_sent"] == 4


def test_who_takes_nothing_is_sent_nothing_for_a_while() -> None:
    run(take_nothing)


async def take_nothing(node: Node, outbox: PeerOutbox) -> None:
    node.refuses = True
    outbox.tell_stone(2, b"lost")
    await trio.testing.wait_all_tasks_blocked()
    node.refuses = False
    outbox.tell_stone(2, b"too early")
    await trio.sleep(1)
    outbox.tell_stone(2, b"again")
    await trio.testing.wait_all_tasks_blocked()
    assert [stones for _, stones in node.got] == [[b"again"]]
    assert outbox.counters["name_news_dropped"] == 2


def test_what_waits_for_a_node_goes_with_the_answer_to_its_own_news() -> None:
    run(go_with_the_answer)


async def go_with_the_answer(node: Node, outbox: PeerOutbox) -> None:
    outbox.tell_stone(2, b"first")
    await trio.sleep(INTERVAL_S / 2)
    outbox.tell_stone(2, b"second")
    answer = outbox.answer(2)
    assert answer is not None
    assert answer.stones == [b"second"]
    assert outbox.answer(2) is None
    await trio.sleep(10 * INTERVAL_S)
    assert [stones for _, stones in node.got] == [[b"first"]]


def test_what_is_no_hurry_waits_for_a_request_of_either_node() -> None:
    run(wait_for_a_request)


async def wait_for_a_request(node: Node, outbox: PeerOutbox) -> None:
    outbox.tell_sum(2, b"first")
    await trio.sleep(0.9 * LATER_S)
    assert not node.got
    answer = outbox.answer(2)
    assert answer is not None
    assert answer.sums
    await trio.sleep(10)
    assert not node.got
    began = trio.current_time()
    outbox.tell_sum(2, b"second")
    await trio.sleep(LATER_S / 2)
    outbox.tell_stone(2, b"hurry")
    await trio.testing.wait_all_tasks_blocked()
    assert node.got == [(began + LATER_S / 2, [b"hurry"])]
    outbox.tell_sum(2, b"third")
    await trio.sleep(INTERVAL_S + LATER_S)
    assert len(node.got) == 2


def test_the_answer_of_a_node_is_heard() -> None:
    run(hear_the_answer)


async def hear_the_answer(node: Node, outbox: PeerOutbox) -> None:
    node.answers = parse_news([b"", b"", [b"theirs"]])
    outbox.tell_stone(2, b"ours")
    await trio.testing.wait_all_tasks_blocked()
    assert [each.stones for each in node.heard] == [[b"theirs"]]


def test_an_answer_that_a_failing_disk_kept_from_being_taken_ends_nothing() -> None:
    run(take_with_a_failing_disk)


async def take_with_a_failing_disk(node: Node, outbox: PeerOutbox) -> None:
    node.answers, node.fails = parse_news([b"", b"", [b"theirs"]]), True
    outbox.tell_stone(2, b"ours")
    await trio.testing.wait_all_tasks_blocked()
    node.fails = False
    await trio.sleep(10 * INTERVAL_S)
    outbox.tell_stone(2, b"later")
    await trio.testing.wait_all_tasks_blocked()
    assert [each.stones for each in node.heard] == [[b"theirs"]]


def test_what_waits_for_a_node_that_does_not_answer_is_bounded() -> None:
    run(wait_for_ever)


async def wait_for_ever(_node: Node, outbox: PeerOutbox) -> None:
    outbox.tell_stone(2, b"first")
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(1000):
        outbox.tell_stone(2, bytes(1 << 10))
    answer = outbox.answer(2)
    assert answer is not None
    assert len(answer.stones) == 512
    assert outbox.counters["name_news_dropped"] == 488
