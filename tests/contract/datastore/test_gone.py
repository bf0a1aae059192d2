"""Why names went, told from process to process of one store; and what is counted of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.base.errors import NotFound, OtherVersion
from kvfs.datastore.removal_reasons import GoneNames, made_ready
from kvfs.meta import keys
from kvfs.policy.miss_reasons import SLOTS
from kvfs.vfs.miss_counters import Misses, no_misses

ENTRY = keys.file_entry(1 << 48 | 5, b"block")
OTHER = keys.file_entry(1 << 48 | 6, b"block")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gone"


def counted(gone: GoneNames, *entries: bytes) -> dict[str, int]:
    one, all_at_once = Misses(gone), Misses(gone)
    for entry in entries:
        one.missed(entry)
    all_at_once.missed_all(entries)
    assert one.counts == all_at_once.counts
    return one.take()


def test_another_process_finds_the_reason(path: Path) -> None:
    made_ready(path).add([ENTRY], "evicted")
    code = (
        "import sys; from pathlib import Path;"
        "from kvfs.datastore.removal_reasons import GoneNames;"
        "from kvfs.vfs.miss_counters import Misses; misses = Misses(GoneNames(Path(sys.argv[1])));"
        f"misses.missed({ENTRY!r}); misses.missed({OTHER!r});"
        "assert misses.take() == {'evicted': 1, 'never_stored': 1}"
    )
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code, str(path)) == 0


def test_any_process_says_why_and_the_last_word_counts(path: Path) -> None:
    node, worker = made_ready(path), GoneNames(path)
    node.add([ENTRY], "evicted")
    worker.add([ENTRY, OTHER], "expired")
    assert counted(node, ENTRY, OTHER) == {"expired": 2}


def test_it_outlives_the_node(path: Path) -> None:
    first = made_ready(path)
    first.add([ENTRY], "damaged")
    first.close()
    assert counted(made_ready(path), ENTRY) == {"damaged": 1}


@pytest.mark.parametrize("size", [0, 4096, 4 * SLOTS + 4])
def test_what_has_another_size_is_not_believed(path: Path, size: int) -> None:
    path.write_bytes(b"\xff" * size)
    reader = GoneNames(path)
    assert counted(reader, ENTRY) == {"never_stored": 1}
    made_ready(path).add([ENTRY], "evicted")
    assert counted(reader, ENTRY) == {"never_stored": 1}
    assert counted(GoneNames(path), ENTRY) == {"evicted": 1}


def test_without_a_file_a_process_remembers_what_it_did(path: Path) -> None:
    alone = GoneNames(path)
    alone.add([ENTRY], "expired")
    assert counted(alone, ENTRY, OTHER) == {"expired": 1, "never_stored": 1}
    assert not path.exists()


def test_without_room_the_node_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A page without a block would be a SIGBUS later."""
    code = (
        "import resource, sys; from pathlib import Path; import signal;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "from kvfs.datastore.removal_reasons import made_ready; path = Path(sys.argv[1]);"
        f"gone = made_ready(path); gone.add([{ENTRY!r}], 'evicted'); assert not path.exists()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "gone")], check=True)
    assert "told to no other process" in capfd.readouterr().err


def test_who_may_only_read_reads(path: Path) -> None:
    made_ready(path).add([ENTRY], "evicted")
    script = (
        "import os, sys; from pathlib import Path;"
        "from kvfs.datastore.removal_reasons import GoneNames;"
        "from kvfs.vfs.miss_counters import Misses; os.setuid(65534);"
        "gone = GoneNames(Path(sys.argv[1])); misses = Misses(gone);"
        f"gone.add([{OTHER!r}], 'expired'); misses.missed_all([{ENTRY!r}, {OTHER!r}]);"
        "assert misses.take() == {'evicted': 1, 'never_stored': 1}, misses.counts"
    )
    if os.geteuid():
        pytest.skip("only root can become somebody who may not write")
    path.chmod(0o644)
    for above in (path.parent, *path.parent.parents):
        if above.stat().st_mode & 0o005 != 0o005:
            above.chmod(0o755)
        if above.name.startswith("pytest-of-"):
            break
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)


def test_what_is_remembered_goes_before_what_the_error_says(path: Path) -> None:
    gone = made_ready(path)
    gone.add([ENTRY], "expired")
    misses = Misses(gone)
    remembered, forgotten = OtherVersion("x"), OtherVersion("x")
    remembered.at, forgotten.at = ENTRY, OTHER
    misses.missed_all([remembered, forgotten, NotFound("x")])
    assert misses.take() == {"expired": 1, "other_version": 1, "never_stored": 1}
    assert misses.counts == no_misses()
