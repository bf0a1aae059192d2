"""Who gets a file from its holder, and who is sent to others."""

from kvfs.policy.fanout_tree import SMALL_BYTES, Spreading

FILE = (1234, 1)
LARGE = SMALL_BYTES + 1


def ask(
    spreading: Spreading[str], node: int, now: float = 0.0, *, insist: bool = False
) -> list[str]:
    return spreading.ask(FILE, LARGE, node, f"host-{node}", now, insist)


def test_readers_form_a_chain() -> None:
    spreading: Spreading[str] = Spreading()
    assert ask(spreading, 1) == []
    assert ask(spreading, 2) == ["host-1"]
    assert ask(spreading, 3) == ["host-2", "host-1"]
    assert ask(spreading, 1) == []
    assert spreading.redirected == 2


def test_nobody_is_sent_to_who_asked_after_it() -> None:
    spreading: Spreading[str] = Spreading()
    for node in range(1, 6):
        ask(spreading, node)
    for node in range(1, 6):
        assert all(int(host[5:]) < node for host in ask(spreading, node))


def test_who_insists_is_served_and_counts() -> None:
    spreading: Spreading[str] = Spreading()
    assert ask(spreading, 1) == []
    assert ask(spreading, 2, insist=True) == []
    assert ask(spreading, 3) == ["host-2", "host-1"]


def test_a_reader_that_has_gone_makes_room() -> None:
    spreading: Spreading[str] = Spreading()
    assert ask(spreading, 1) == []
    assert ask(spreading, 2, now=1.0) == ["host-1"]
    assert ask(spreading, 2, now=10.0) == []


def test_small_files_go_to_more_at_a_time() -> None:
    spreading: Spreading[str] = Spreading()
    answers = [spreading.ask(FILE, SMALL_BYTES, node, f"host-{node}", 0.0) for node in range(10)]
    assert [bool(answer) for answer in answers] == [*[False] * 8, True, True]


def test_files_are_apart() -> None:
    spreading: Spreading[str] = Spreading()
    assert spreading.ask((1, 1), LARGE, 1, "a", 0.0) == []
    assert spreading.ask((2, 1), LARGE, 2, "b", 0.0) == []


def test_who_has_no_address_is_served_and_named_to_nobody() -> None:
    spreading: Spreading[str] = Spreading()
    assert spreading.ask(FILE, LARGE, 1, None, 0.0) == []
    assert ask(spreading, 2) == []


def test_what_is_remembered_has_a_bound() -> None:
    spreading: Spreading[str] = Spreading()
    for number in range(3000):
        spreading.ask((number, 0), LARGE, 1, "a", 0.0)
    for node in range(1000):
        ask(spreading, node)
    assert len(spreading) <= 1024 + 256
