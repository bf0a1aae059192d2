"""The power goes at a random moment under a program that writes as it should, from a printed seed:
what was acknowledged is there, whole; with the journal damaged beside, too, or the start is refused
and says so. Nothing of a durable namespace is unlinked.

The disks lose the power in one of the ways in which they do: nothing more reaches them, or the
filesystem's own log still does, or all that was written (a snapshot). `./dev test --long` runs
many.
"""

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.meta.lmdb.journal import generations
from tests.conftest import LONG, SEED
from tests.fault.disks import EVERYTHING, LOG_FLUSHED, NO_LOG_FLUSH
from tests.fault.machine import Machine, machine, write
from tests.integration.harness import CannotStart, kvfs

_CASES: Final = 25 if LONG else 1
_KINDS: Final = [("ext4", 1), ("ext4", 2), ("xfs", 1), ("xfs", 2)]
"""Filesystems, and how many disks have them."""
_DAMAGED: Final = {("ext4", 1): "cut", ("ext4", 2): "flip", ("xfs", 1): "flip", ("xfs", 2): "cut"}
"""What befalls the journal of each."""
_CAMPAIGNS: Final = [
    (kind, disks, damage)
    for kind, disks in _KINDS
    for damage in (("", "cut", "flip") if LONG else ("", _DAMAGED[kind, disks]))
]
_NAMES: Final = [f"name-{number}" for number in range(10)]
_LONGEST: Final = 150_000

Content = bytes | None
"""None: the name is not there."""


class Writer(threading.Thread):
    """Puts, replaces and removes files of a durable namespace until the disk fails it, and knows
    what each name may hold."""

    def __init__(self, directory: Path, seed: str) -> None:
        super().__init__()
        self.allowed: dict[str, set[Content]] = {name: {None} for name in _NAMES}
        """By name: one, once it was acknowledged; several while that is not known."""
        self.begun: list[tuple[str, Content]] = []
        self.acknowledged: list[str] = []
        """The names, in the order in which they were."""
        self.changed = threading.Condition()
        self._directory = directory
        self._random = random.Random(seed)

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._change(self._random.choice(_NAMES), self._random.random())

    def _change(self, name: str, kind: float) -> None:
        content = None if kind < 0.2 else self._random.randbytes(self._random.randrange(_LONGEST))
        with self.changed:
            self.begun.append((name, content))
            self.allowed[name].add(content)
        path = self._directory / name
        if content is None:
            path.unlink(missing_ok=True)
        elif kind < 0.3 and not path.exists():
            path.write_bytes(content)  # closed and never synced: it is whole, or not there
            return
        else:
            draft = path.with_name(f"draft-{name}")
            write(draft, content)
            draft.rename(path)
            if kind < 0.4:
                return  # the old content or the new, and never none
        fd = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        with self.changed:
            self.allowed[name] = {content}
            self.acknowledged.append(name)
            self.changed.notify_all()

    def wait_for(self, acknowledged: int) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: len(self.acknowledged) >= acknowledged or not self.is_alive(), 60
            )
            assert len(self.acknowledged) >= acknowledged, "the writer failed"


def lose_power_under(made: Machine, writer: Writer, flags: list[int]) -> dict[str, set[Content]]:
    """What each name may hold: as it was acknowledged before, since a sync that is under way at
    that moment may return as if it were done, and whatever was begun since."""
    with writer.changed:
        allowed = {name: set(contents) for name, contents in writer.allowed.items()}
        begun = len(writer.begun)
    made.lose_power(flags, writer.join)
    for name, content in writer.begun[begun:]:
        allowed[name].add(content)
    return allowed


def damage_journal(made: Machine, kind: str, source: random.Random) -> None:
    journal = made.meta / f"journal.{generations(made.meta, 'journal')[-1]}"
    at = source.randrange(journal.stat().st_size)
    print(f"{kind} of {journal.name} at {at} of {journal.stat().st_size}")
    if kind == "cut":
        os.truncate(journal, at)
    else:
        raw = bytearray(journal.read_bytes())
        raw[at] ^= 1 << source.randrange(8)
        journal.write_bytes(raw)


def start_again(made: Machine) -> bool:
    """Whether it was refused, told, and repaired."""
    try:
        made.node.up()
    except CannotStart as refused:
        assert "is damaged at byte" in str(refused)
        done = kvfs("fsck", "--repair", "--store", str(made.node.store))
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            made.node.up()
        except CannotStart as nothing_left:  # cut into the first start's own commits
            assert "kvfs rebuild" in str(nothing_left)
            done = kvfs("rebuild", "--store", str(made.node.store))
            assert done.returncode == 0, done.stdout + done.stderr
            made.node.up()
        return True
    return False


def found_in(directory: Path) -> dict[str, Content]:
    there = {each.name for each in directory.iterdir()}
    return {name: (directory / name).read_bytes() if name in there else None for name in _NAMES}


def blobs(made: Machine) -> Iterator[bytes]:
    """The content of every data file, in quarantine or not."""
    for disk in made.disks:
        for path in disk.mountpoint.glob("data/*/*"):
            yield path.read_bytes()


@pytest.mark.parametrize("case", range(_CASES))
@pytest.mark.parametrize(("kind", "disks", "damage"), _CAMPAIGNS)
def test_what_was_acknowledged_outlives_the_power(
    tmp_path: Path, kind: str, disks: int, damage: str, case: int
) -> None:
    seed = f"{SEED} {kind} {disks} {damage} {case}"
    source = random.Random(seed)
    with machine(tmp_path, kind, disks) as made:
        made.node.up()
        if disks > 1:
            place = ("--store", str(made.node.store))
            done = kvfs("namespace", "set", "models", "--media", "ssd", *place)
            assert done.returncode == 0, done.stderr
        if source.random() < 0.5:
            made.write_back()
        writer = Writer(made.models, seed)
        writer.start()
        writer.wait_for(source.randrange(5, 60))
        flags = [source.choice((EVERYTHING, LOG_FLUSHED, NO_LOG_FLUSH)) for _ in made.disks]
        print(f"seed {SEED}, the disks lose power in the ways {flags}")
        allowed = lose_power_under(made, writer, flags)
        if damage:
            damage_journal(made, damage, source)
        refused = start_again(made)
        found = found_in(made.models)
        wrong = {name for name in _NAMES if found[name] not in allowed[name]}
        if not damage:
            assert not wrong
        elif not refused:
            told = bool(made.node.status()["engine"]["damaged_metadata"])
            assert told or wrong <= set(writer.acknowledged[-1:]), "the last sync's alone"
        kept = set(blobs(made)) | {None}
        for name, contents in allowed.items():
            assert contents & kept, f"{name} is on no disk"
        made.node.down()
        done = kvfs("fsck", "--store", str(made.node.store))
        assert done.returncode == 0, done.stdout + done.stderr
