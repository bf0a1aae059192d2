"""The clock that tells other processes when their node last heard its engine."""

from pathlib import Path

from kvfs.datastore.replica_clock import HeardWriter, heard_at


def test_a_namespace_is_told_of_as_it_is_now_when_another_is_told_of_no_more(
    tmp_path: Path,
) -> None:
    path = tmp_path / "heard"
    writer = HeardWriter(path)
    writer.tell(5.0, {1: 1.0, 2: 2.0, 3: 3.0})
    writer.tell(15.0, {2: 12.0, 3: 13.0})
    assert [heard_at(path, number) for number in range(4)] == [15.0, 15.0, 12.0, 13.0]
    writer.tell(25.0, {2: 22.0})
    assert heard_at(path, 3) == 25.0


def test_what_an_earlier_run_of_the_node_told_is_past(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    HeardWriter(path).tell(5.0, {1: 1.0, 2: 2.0})
    HeardWriter(path).tell(15.0, {1: 11.0})
    assert heard_at(path, 2) == 15.0


def test_what_is_being_cut_off_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    HeardWriter(path).tell(5.0, {3: 3.0})
    old = path.read_bytes()[8:]
    HeardWriter(path).tell(15.0, {3: 13.0})
    path.write_bytes(path.read_bytes() + old)
    assert heard_at(path, 3) == 13.0
