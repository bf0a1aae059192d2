"""The journal of a mount that outlives its daemon, as the next daemon finds it."""

import os

import msgspec
import pytest

from gateway import takeover
from gateway.fuse.channel import device, mode_probe
from gateway.holder import mount_journal
from gateway.holder.mount_journal import (
    AGAIN,
    JournaledDirectory,
    JournaledFile,
    JournaledNote,
    MountJournal,
    State,
    is_of,
    mark_of,
    unmarked,
)
from gateway.node_start import HAND_OVER, TAKE_OVER, Successor
from kvfs.base.config import Config
from kvfs.base.errors import NoLocks, NotSupported
from kvfs.meta.asked_requests import Sent, asking
from kvfs.policy.lock_journal import JournaledLock


class _About(msgspec.Struct):
    name: str


def _reopened(journal: MountJournal) -> MountJournal:
    """The journal as another process has it."""
    return MountJournal(os.dup(journal.fd))


def test_what_is_open_is_found_and_what_was_closed_is_not() -> None:
    journal = MountJournal.made()
    files = [JournaledFile(ino, 7, 1, os.O_RDWR, ino == 3, 0, 100 + ino) for ino in range(1, 5)]
    entries = [journal.opened(each) for each in files]
    journal.released(entries[1])
    first, second = journal.registered(1, 11), journal.registered(2, 12)
    journal.withdrawn(first)
    directory = JournaledDirectory(9, 8, 512, (1 << 64) - 1, b"key", 77)
    entry = journal.listed(-1, directory)
    journal.listed(entry, directory._replace(first=1024, after=b"later"))

    found = _reopened(journal)
    assert dict(found.files()) == {entries[i]: files[i] for i in (0, 2, 3)}
    assert list(found.backings()) == [(second, 2, 12)]
    assert dict(found.directories()) == {entry: directory._replace(first=1024, after=b"later")}
    # Entries that were free are taken again before new ones.
    assert found.opened(files[1]) == entries[1]
    assert found.registered(5, 13) == first
    assert len(dict(_reopened(found).files())) == 4


def test_a_journal_has_room_for_very_many_and_says_when_it_is_full() -> None:
    journal = MountJournal.made()
    for number in range(1 << 14):
        assert journal.listed(-1, JournaledDirectory(1, 1, 0, 0, b"", number + 1)) == number
    assert journal.listed(-1, JournaledDirectory(1, 1, 0, 0, b"", 1 << 20)) == -1
    assert len(list(_reopened(journal).directories())) == 1 << 14


def test_notes_of_all_daemons_before_are_kept() -> None:
    journal = MountJournal.made()
    for generation, request in enumerate((40, 50, 60)):
        asking.set(request)
        journal.note(1000 + request)
        os.pwrite(journal.fd, (generation + 1).to_bytes(4, "little"), 4)  # as the holder does
        journal = _reopened(journal)
        journal.take_over()
    assert _inos(journal) == {40: 1040, 50: 1050, 60: 1060}
    assert journal.first_handle() > 3 << 40
    journal.answered(50 | AGAIN)  # as it comes again
    assert _inos(journal) == {40: 1040, 60: 1060}


def _inos(journal: MountJournal) -> dict[int, int]:
    found = _reopened(journal)
    found.take_over()
    return {request: note.ino for request, note in found.notes().items()}


def test_requests_under_way_at_a_time_have_a_note_each_until_they_are_answered() -> None:
    journal = MountJournal.made()
    for request in range(1, 101):
        asking.set(request)
        journal.note(1000 + request)
    for request in range(1, 101, 2):
        journal.answered(request)
    assert _inos(journal) == {request: 1000 + request for request in range(2, 101, 2)}
    asking.set(7)
    journal.note(5)
    journal.note(6)  # run again
    assert _inos(journal)[7] == 6


def test_notes_of_requests_that_never_come_again_end() -> None:
    journal = MountJournal.made()
    asking.set(9)
    journal.note(1)
    os.pwrite(journal.fd, (31).to_bytes(4, "little"), 4)
    assert _inos(journal) == {9: 1}
    os.pwrite(journal.fd, (32).to_bytes(4, "little"), 4)
    assert _inos(journal) == {}


def test_what_became_of_a_change_that_was_sent_is_noted() -> None:
    journal = MountJournal.made()
    sent = Sent(3, b"00000000feedbeef", 12, 1)
    for request in (1, 2):
        asking.set(request)
        journal.note(50)
        journal.sent(request, sent)
    journal.done(2)
    journal.sent(3, sent)  # of which nothing was noted
    journal.note_append(4, 777)
    found = _reopened(journal)
    found.take_over()
    notes = found.notes()
    assert notes[1] == JournaledNote(50, sent, State.SENT)
    assert notes[2] == JournaledNote(50, sent, State.DONE)
    assert (notes[4].ino, notes[4].state) == (777, State.PLACED)
    assert 3 not in notes


def test_a_journal_of_another_version_is_refused() -> None:
    journal = MountJournal.made()
    journal.describe(_About("mount"))
    assert msgspec.msgpack.decode(_reopened(journal).about(), type=_About) == _About("mount")
    os.pwrite(journal.fd, b"\x7f", 0)
    with pytest.raises(NotSupported):
        _reopened(journal)


def test_a_journal_of_the_version_before_is_gone_on_with() -> None:
    """Which had no locks."""
    journal = MountJournal.made()
    file = JournaledFile(1, 7, 1, os.O_RDWR, False, 0, 101)
    entry = journal.opened(file)
    os.pwrite(journal.fd, (4).to_bytes(4, "little"), 0)
    os.truncate(journal.fd, mount_journal.SIZES_OF[4])
    found = _reopened(journal)
    found.take_over()
    assert dict(found.files()) == {entry: file}
    lock = JournaledLock(3, True, 9, is_there=True)
    found.locks.enter(lock)
    again = _reopened(found)
    again.take_over()
    assert again.locks.all() == [lock]


def test_locks_are_found_and_those_of_views_go_with_them() -> None:
    journal = MountJournal.made()
    locks = [JournaledLock(n, n % 2 > 0, 9, n > 3, n, 1 << 62, 77) for n in range(1, 6)]
    asked = JournaledLock(7, True, 9, is_there=True)
    viewed = [JournaledLock(7, False, 4, is_there=True), JournaledLock(7, False, 4, start=3, fh=12)]
    for each in (*locks, asked, *viewed):
        journal.locks.enter(each)
    held = asked._replace(is_held=True)
    journal.locks.enter(held)
    journal.locks.remove(locks[2])
    found = _reopened(journal)
    found.take_over()
    assert sorted(found.locks.all()) == sorted([*locks[:2], *locks[3:], held, *viewed])
    found.locks.forget_views([3])
    found.locks.remove(held)  # which is one entry, held or not
    assert sorted(found.locks.all()) == sorted([*locks[:2], *locks[3:], *viewed])
    found.locks.forget_views([4])
    assert sorted(found.locks.all()) == sorted([*locks[:2], *locks[3:]])


def test_too_many_locks_are_refused() -> None:
    journal = MountJournal.made()
    for number in range(1 << 16):
        journal.locks.enter(JournaledLock(number, False, 1))
    with pytest.raises(NoLocks):
        journal.locks.enter(JournaledLock(1, True, 1))
    journal.locks.remove(JournaledLock(5, False, 1))
    journal.locks.enter(JournaledLock(1, True, 1))


def test_a_node_whose_mount_ends_with_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_probe, "kernel_version", lambda: (6, 18, 3))
    monkeypatch.setattr(device, "reaches_connections", lambda: True)
    assert takeover.obstacle(Config(cold="s3://bucket/prefix", engine="redis://host")) == ""
    assert "libfuse" in takeover.obstacle(Config(mode="libfuse"))


def test_a_kernel_or_a_container_without_the_means_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "reaches_connections", lambda: True)
    monkeypatch.setattr(mode_probe, "kernel_version", lambda: (6, 15, 9))
    assert "6.15" in takeover.obstacle(Config())
    assert mode_probe.takeover().remedy
    monkeypatch.setattr(mode_probe, "kernel_version", lambda: (6, 16, 0))
    assert takeover.obstacle(Config()) == ""
    monkeypatch.setattr(device, "reaches_connections", lambda: False)
    assert "list of connections" in takeover.obstacle(Config())


def test_the_next_daemon_has_the_arguments_of_this_one() -> None:
    words = ("up", "--daemon", "--store", "s", "--replace", TAKE_OVER, HAND_OVER)
    command = Successor(words, "/somewhere").command()
    assert command[-5:] == ["up", "--daemon", "--store", "s", TAKE_OVER]


def test_requests_of_two_views_with_one_number_have_notes_of_their_own() -> None:
    journal = MountJournal.made()
    for view in (3, 4):
        asking.set(40 | mark_of(view))
        journal.note(1000 + view)
    found = _inos(journal)
    assert sorted(found.values()) == [1003, 1004]
    assert [unmarked(each) for each in found] == [40, 40]
    assert [is_of(each | AGAIN, 3) for each in found] == [True, False]
    assert not any(is_of(each, 0) for each in (40, 40 | AGAIN))
    journal.answered(40 | AGAIN | mark_of(3))
    assert list(_inos(journal).values()) == [1004]
