"""A promised hit is a delivered hit: matches with leases, against everything that takes files."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import kvfs
from kvfs.base import clock
from kvfs.base.errors import Invalid, NotFound
from kvfs.client.match import Match
from kvfs.datastore.kernel import membarrier
from kvfs.datastore.leases import holder, table
from kvfs.datastore.leases.holder import ReadLeases
from kvfs.datastore.leases.marks import Marks
from kvfs.datastore.leases.taker import LeaseTaker
from kvfs.session.session import Session
from kvfs.tree import lifecycle
from tests.contract import client_store

KEYS = [f"/cache/chain/{number:04}" for number in range(4)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    with client_store.sound(tmp_path / "store") as root:
        yield root


@pytest.fixture
def client(store: Path) -> Iterator[kvfs.Client]:
    with kvfs.Client(store) as made:
        made.put_many([(key, key.encode()) for key in KEYS], parents=True)
        yield made


class Evictor:
    """The steps of the node's evictor, one by one, on the first key."""

    def __init__(self, client: kvfs.Client, barrier: Callable[[], bool] | None = None) -> None:
        self._session: Session = client._core.session
        run = self._session.store.run
        self.marks = Marks.open(run / "marks")
        self.taker = LeaseTaker(run, self.marks, barrier or membarrier.barrier)
        self.ino = client.stat(KEYS[0]).ino

    def evict(self) -> bool:
        """All steps; whether the file went."""
        with self.taker.taking([self.ino]) as kept:
            if self.ino not in kept:
                self.commit()
        return self.ino not in kept

    def commit(self) -> None:
        self._session.write(lambda t: lifecycle.evict(t, self.ino, time.time_ns()))
        self._session.files.unlink(self.ino, 0)


@pytest.fixture
def evictor(client: kvfs.Client) -> Iterator[Evictor]:
    made = Evictor(client)
    yield made
    made.marks.close()


def before(
    monkeypatch: pytest.MonkeyPatch, of: type, step: str, hook: Callable[[], object]
) -> None:
    """Has the hook run once, when a match comes to this step."""
    real, hooks = getattr(of, step), [hook]

    def hooked(*arguments: Any) -> Any:
        if hooks:
            hooks.pop()()
        return real(*arguments)

    monkeypatch.setattr(of, step, hooked)


@contextlib.contextmanager
def marking_before(
    monkeypatch: pytest.MonkeyPatch, evictor: Evictor, step: str
) -> Iterator[list[set[int]]]:
    """Has the evictor mark its file when a match comes to this step, until the block ends; gives
    what it leaves, once it has marked."""
    kept: list[set[int]] = []
    with contextlib.ExitStack() as taking:
        mark = evictor.taker.taking([evictor.ino])
        before(monkeypatch, ReadLeases, step, lambda: kept.append(taking.enter_context(mark)))
        yield kept


def delivered(client: kvfs.Client, match: Match) -> bool:
    """Whether all that was promised is there."""
    got = client.get_many(match)
    return got == [key.encode() for key in KEYS[: len(match)]]


# ---- the table of orders in `kvfs.datastore.leases.taker`


def test_a_lease_before_the_node_reads_them_keeps_the_file(
    client: kvfs.Client, evictor: Evictor
) -> None:
    with client.match(KEYS) as match:
        assert (len(match), match.promised, match.refusal) == (4, 4, "")
        assert not evictor.evict()
        assert delivered(client, match)
    assert evictor.evict()


def test_a_lease_between_mark_and_reading_is_a_miss_or_keeps_the_file(
    client: kvfs.Client,
) -> None:
    found: list[Match] = []

    def meanwhile() -> bool:
        if not found:
            found.append(client.match(KEYS))
        return membarrier.barrier()

    client.match(KEYS).release()  # the table is made with the lock that the node has then
    evictor = Evictor(client, meanwhile)
    assert evictor.evict()
    assert [(len(match), match.promised) for match in found] == [(0, 0)]
    evictor.marks.close()


def test_a_mark_between_lease_and_its_reading_is_a_miss(
    client: kvfs.Client, evictor: Evictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with marking_before(monkeypatch, evictor, "marked") as kept:
        match = client.match(KEYS)
        assert kept == [{evictor.ino}]
        assert not match


def test_a_whole_attempt_between_lease_and_reading_keeps_the_file(
    client: kvfs.Client, evictor: Evictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    went: list[bool] = []
    before(monkeypatch, ReadLeases, "marked", lambda: went.append(evictor.evict()))
    match = client.match(KEYS)
    assert went == [False]
    assert match.promised == 4
    assert delivered(client, match)


def test_a_mark_before_the_lease_is_a_miss(
    client: kvfs.Client, evictor: Evictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with marking_before(monkeypatch, evictor, "hold") as kept:
        match = client.match(KEYS)
        assert kept == [set()]
        assert not match
        evictor.commit()


def test_an_eviction_between_look_up_and_lease_is_a_miss(
    client: kvfs.Client, evictor: Evictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    went: list[bool] = []
    before(monkeypatch, ReadLeases, "hold", lambda: went.append(evictor.evict()))
    match = client.match(KEYS)
    assert went == [True]
    assert (len(match), match.promised) == (0, 0)


def test_an_eviction_before_the_look_up_is_a_miss(client: kvfs.Client, evictor: Evictor) -> None:
    assert evictor.evict()
    assert not client.match(KEYS)


def test_a_commit_that_changes_none_of_its_keys_costs_a_match_nothing(
    client: kvfs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, ReadLeases, "hold", lambda: client.put("/cache/other", b"1"))
    assert client.match(KEYS).promised == 4


# ---- names that go by their users' doing


def replace(client: kvfs.Client) -> None:
    client.put(KEYS[1], b"another content")
    client._core._finisher.flush()  # what was put off, the end of the orphan among it


def remove(client: kvfs.Client) -> None:
    client.remove(KEYS[1])
    client._core._finisher.flush()


def rename_over(client: kvfs.Client) -> None:
    client.put("/cache/new", b"another content")
    client.rename("/cache/new", KEYS[1])
    client._core._finisher.flush()


@pytest.mark.parametrize("change", [replace, remove, rename_over])
def test_what_was_matched_stays_readable_whatever_has_its_name(
    client: kvfs.Client, change: Callable[[kvfs.Client], None]
) -> None:
    with client.match(KEYS) as match:
        change(client)
        assert delivered(client, match)
        with match.open(1) as file:
            assert file.read() == KEYS[1].encode()


def test_it_stays_through_a_start_of_the_node(store: Path, client: kvfs.Client) -> None:
    with client.match(KEYS) as match:
        remove(client)
        client_store.run(
            "import sys; from pathlib import Path; from tests.contract import client_store;"
            "client_store.restart(Path(sys.argv[1]))",
            str(store),
        )
        assert delivered(client, match)
    files = client_store.data_files(store)
    client_store.run(
        "import sys; from pathlib import Path; from tests.contract import client_store;"
        "client_store.restart(Path(sys.argv[1]))",
        str(store),
    )
    assert client_store.data_files(store) == files - 1


@pytest.mark.parametrize("change", [replace, remove])
def test_a_change_between_look_up_and_lease_is_a_miss(
    client: kvfs.Client,
    change: Callable[[kvfs.Client], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before(monkeypatch, ReadLeases, "hold", lambda: change(client))
    match = client.match(KEYS)
    assert (len(match), match.promised) == (1, 1)
    assert delivered(client, match)


def test_what_is_gone_after_its_lease_is_a_miss_and_nothing_else(client: kvfs.Client) -> None:
    match = client.match(KEYS)
    match.release()
    replace(client)
    got = client.get_many(match)
    assert got == [KEYS[0].encode(), None, KEYS[2].encode(), KEYS[3].encode()]
    with pytest.raises(NotFound, match="not here any more"):
        match.open(1)


# ---- what is asked for


def test_a_chain_ends_at_its_first_missing_key(client: kvfs.Client) -> None:
    match = client.match([*KEYS[:2], "/cache/chain/absent", *KEYS[2:]])
    assert (len(match), match.known, match.promised) == (2, 2, 2)
    assert match.where() == ["disk", "disk"]
    assert delivered(client, match)
    with pytest.raises(Invalid):
        match.open(2)


@pytest.mark.parametrize(
    "keys",
    [[], ["/"], ["/cache"], ["/cache/chain"], ["/cache/absent/x"], ["/absent/x"], ["/cache/.."]],
)
def test_what_is_no_file_is_a_miss(client: kvfs.Client, keys: list[str]) -> None:
    match = client.match(keys)
    assert (len(match), match.known, match.promised, match.refusal) == (0, 0, 0, "")
    assert not match
    assert client.get_many(match) == []


def test_keys_may_repeat_and_be_spelled_in_any_way(client: kvfs.Client) -> None:
    client.put("/models/100%", b"odd", parents=True)
    assert client.match(["/models/100%"]).promised == 1
    match = client.match([KEYS[0], KEYS[0], KEYS[1].encode(), f"{KEYS[2][1:]}/", Path(KEYS[3])])
    assert match.promised == 5
    got = client.get_many(match)
    assert got == [KEYS[at].encode() for at in (0, 0, 1, 2, 3)]


def test_keys_are_of_one_namespace(client: kvfs.Client) -> None:
    client.put("/models/a", b"1")
    with pytest.raises(Invalid, match="one namespace"):
        client.match([KEYS[0], "/models/a"])
    with pytest.raises(Invalid, match="NUL"):
        client.match(["/cache/a\0b"])
    with pytest.raises(Invalid, match="a list of paths"):
        client.match(KEYS[0])


@pytest.mark.parametrize("lease_s", [-1, float("nan"), float("inf"), 86_400])
def test_a_lease_is_bounded(client: kvfs.Client, lease_s: float) -> None:
    with pytest.raises(Invalid, match="0 to 3600 seconds"):
        client.match(KEYS, lease_s)


def test_no_lease_is_taken_where_none_is_asked_for(client: kvfs.Client, evictor: Evictor) -> None:
    match = client.match(KEYS, 0)
    assert (len(match), match.promised, match.left_s) == (4, 0, 0.0)
    assert match.refusal == "no lease was asked for"
    assert evictor.evict()


def test_a_lease_ends_by_the_clock_of_the_boot(
    client: kvfs.Client, evictor: Evictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = client.match(KEYS, 30)
    assert 0 < match.left_s <= 30
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 2e9)  # a clock that somebody set
        patch.setattr(time, "time_ns", lambda: 2 * 10**18)
        assert evictor.taker.held([evictor.ino]) == {evictor.ino}
    later = clock.now() + 31
    monkeypatch.setattr(table, "now", lambda: later)
    assert evictor.evict()


# ---- the table of a process


def test_a_full_table_promises_nothing_more(
    client: kvfs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "SEGMENTS", 2)
    first, second = client.match(KEYS[:1]), client.match(KEYS[1:])
    third = client.match(KEYS)
    assert (len(third), third.promised) == (4, 0)
    assert "as many leases as it may have" in third.refusal
    first.release()
    first.release()
    assert client.match(KEYS).promised == 4
    assert second.promised == 3


def test_leases_are_on_a_part_of_the_store(
    store: Path, client: kvfs.Client, evictor: Evictor
) -> None:
    size = 512 * sum(inode.blocks for inode in client.match(KEYS, 0)._chain.inodes)
    evictor.marks.capacity = 4 * size + 2  # half of it is taken by two of them
    with client_store.python(f"{_OTHER}\nsignal.pause()", str(store), *KEYS) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"4\n"
        with client.match(KEYS) as first:
            assert first.promised == 4
            second = client.match(KEYS[:1])
            assert (len(second), second.promised) == (1, 0)
            assert "as much of the store as they may" in second.refusal
        assert client.match(KEYS).promised == 4
        other.kill()


def test_places_are_given_back_whatever_the_order(
    client: kvfs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "SEGMENTS", 64)
    for _ in range(3):
        held = []
        while (match := client.match(KEYS)).promised:
            held.append(match)
        assert len(held) == table.SEGMENTS
        for each in held[::2] + held[1::2]:
            each.release()
    leases = client._core.session.leases._table
    assert leases is not None
    assert leases._free == [(0, table.PLACES)]


def test_a_process_without_the_right_to_write_gets_no_promise(
    client: kvfs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_directory: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(holder, "ReadLeaseTable", refused)
    match = client.match(KEYS)
    assert (len(match), match.promised) == (4, 0)
    assert "Permission denied" in match.refusal
    assert delivered(client, match)


def test_a_store_whose_node_is_older_gives_no_promise(client: kvfs.Client, store: Path) -> None:
    os.unlink(store / "run" / "marks")
    match = client.match(KEYS)
    assert (len(match), match.promised) == (4, 0)
    assert "no node of this version" in match.refusal


def test_without_membarrier_both_sides_take_a_lock(
    client: kvfs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client._core.session
    session.leases = ReadLeases(session.store.run, register=lambda: False)
    evictor = Evictor(client, barrier=lambda: False)
    locked: list[bool] = []

    def look() -> None:
        with evictor.marks.alone() as is_alone:
            locked.append(not is_alone)

    before(monkeypatch, table.ReadLeaseTable, "hold", look)
    with client.match(KEYS) as match:
        assert locked == [True]
        assert match.promised == 4
        assert not evictor.evict()
    assert evictor.evict()
    evictor.marks.close()


# ---- processes

_OTHER = """
import os, signal, sys, kvfs
keys = sys.argv[2:]
client = kvfs.Client(sys.argv[1])
match = client.match(keys)
print(match.promised, flush=True)
"""


def leases(store: Path) -> int:
    return len(os.listdir(store / "run" / "leases"))


def test_another_process_keeps_it_and_its_end_ends_that(store: Path, evictor: Evictor) -> None:
    program = f"{_OTHER}\nsignal.pause()"
    with client_store.python(program, str(store), *KEYS) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"4\n"
        assert not evictor.evict()
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert leases(store) == 1
    assert evictor.evict()
    assert leases(store) == 0
    assert not evictor.marks.is_leasing


@pytest.mark.usefixtures("client")
def test_a_client_that_is_closed_keeps_nothing(store: Path) -> None:
    client_store.run(f"{_OTHER}\nclient.close()", str(store), *KEYS)
    assert leases(store) == 0


def test_a_child_has_leases_of_its_own_and_ends_none_of_its_parents(
    store: Path, evictor: Evictor
) -> None:
    program = f"""{_OTHER}
child = os.fork()
if child == 0:
    try:
        match.release()
        with client.match(keys) as own:
            assert own.promised == len(keys)
            assert len(os.listdir(sys.argv[1] + "/run/leases")) == 2
    finally:
        os.kill(os.getppid(), signal.SIGKILL)
    print("alone", flush=True)
    signal.pause()
signal.pause()
"""
    with client_store.python(program, str(store), *KEYS) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"4\n"
        assert other.stdout.readline() == b"alone\n"
        other.wait()
        assert evictor.evict()  # the parent's leases ended with it, though its child lives
        for name in os.listdir(store / "run" / "leases"):
            os.kill(int(name.split(".")[0]), signal.SIGKILL)


@pytest.mark.usefixtures("client")
def test_async(store: Path) -> None:
    async def main() -> None:
        async with kvfs.AsyncClient(store) as other:
            with await other.match(KEYS) as match:
                assert match.promised == 4
                assert await other.get_many(match) == [key.encode() for key in KEYS]
                assert match.left_s > 0
            assert match.left_s == 0

    trio.run(main)


# ---- a node that evicts meanwhile


def test_every_promise_is_kept_by_a_node_that_evicts(store: Path) -> None:
    """Chains of twice the capacity come and go while others are matched and read."""
    length, draw = 8, random.Random(5)
    chains = [[f"/cache/{chain}/{at}" for at in range(length)] for chain in range(32)]
    with client_store.running_node(store, "8MiB"), kvfs.Client(store) as client:
        promised = 0
        for turn in range(150):
            put(client, chains[turn % 32])
            wanted = chains[draw.choice(range(max(0, turn - 16), turn + 1)) % 32]
            with client.match(wanted) as match:
                put(client, chains[(turn + 1) % 32])
                got = client.get_many(match)
            assert got[: match.promised] == [content(name) for name in wanted[: match.promised]]
            promised += match.promised
        assert promised
        counters = client_store.node_of(store)["counters"]
        assert isinstance(counters, dict)
        assert counters["evicted_files_store_full"]


def put(client: kvfs.Client, names: list[str]) -> None:
    client.put_many([(name, content(name)) for name in names], parents=True)


def content(name: str) -> bytes:
    return name.encode().ljust(64 << 10, b".")
