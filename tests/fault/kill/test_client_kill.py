"""A client that is killed at each step of a change: nothing is torn, nothing stays behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from tests.contract import client_store

_STEPS = """
import os, signal, sys
import kvfs
from kvfs.session import session
from kvfs.vfs import stage
from kvfs.vfs import post_commit
from kvfs.datastore import files

def dies(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name, count=1):
    '''Die in the call of this number.'''
    real, calls = getattr(owner, name), []

    def patched(*arguments, **named):
        calls.append(0)
        if len(calls) == count:
            dies()
        return real(*arguments, **named)

    setattr(owner, name, patched)

def after(owner, name, count=1):
    real, calls = getattr(owner, name), []

    def patched(*arguments, **named):
        result = real(*arguments, **named)
        calls.append(0)
        if len(calls) == count:
            dies()
        return result

    setattr(owner, name, patched)

client = kvfs.Client(sys.argv[1])
client.put("/cache/warm", b"up")
step, change = sys.argv[2:4]
exec(step)
exec(change)
"""
PUT = {
    "before the record": "before(session.Session, 'write')",
    "after the record": "after(session.Session, 'write')",
    "after the data file": "after(files.DataFiles, 'create')",
    "before a byte": "before(os, 'pwrite')",
    "after the data": "before(session.Session, 'write', 2)",
    "published": "after(session.Session, 'write', 2)",
    "before the node is told": "before(post_commit.Finisher, 'finish')",
    "after the node was told": "after(post_commit.Finisher, 'finish')",
}
DONE = ("published", "before the node is told", "after the node was told")
DROP = {
    "the old one not unlinked": "before(files.DataFiles, 'unlink')",
    "the old one unlinked": "after(files.DataFiles, 'unlink')",
    "its index entry gone": "after(session.Session, 'use_index')",
}
NEW, OLD = b"n" * 300_000, b"o" * 100_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return client_store.make(tmp_path_factory.mktemp("store") / "store")


@pytest.fixture
def whole(store: Path) -> Iterator[None]:
    """After the test and a start, nothing is left of what was killed, and nothing is missing."""
    yield
    client_store.restart(store)
    assert client_store.problems(store) == []
    with kvfs.Client(store) as client:
        names = [path for space in ("cache", "models") for path in client.list(f"/{space}")]
        assert client_store.data_files(store) == len(names)
        for name in names:
            assert name.name != b"new"
            path = b"/cache/" + name.name
            if client.exists([path]) == [True]:
                client.remove(path)


def killed(store: Path, step: str, change: str) -> None:
    client_store.run_killed(_STEPS, str(store), step, change)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("step", PUT)
def test_a_new_file_is_there_whole_or_not_at_all(store: Path, step: str) -> None:
    killed(store, PUT[step], f"client.put('/cache/new', {NEW[:1]!r} * {len(NEW)})")
    with kvfs.Client(store) as client:
        assert client.exists(["/cache/new"]) == [step in DONE]
        if step in DONE:
            assert client.get("/cache/new") == NEW
            client.rename("/cache/new", "/cache/renamed")


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("step", PUT | DROP)
def test_a_replaced_file_is_the_old_or_the_new_one(store: Path, step: str) -> None:
    with kvfs.Client(store) as client:
        client.put("/cache/file", OLD)
    killed(store, (PUT | DROP)[step], f"client.put('/cache/file', {NEW[:1]!r} * {len(NEW)})")
    with kvfs.Client(store) as client:
        done = step in DONE or step in DROP
        assert client.get("/cache/file") == (NEW if done else OLD)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("step", PUT)
def test_many_files_are_there_together_or_not_at_all(store: Path, step: str) -> None:
    change = f"client.put_many((f'/cache/many-{{n}}', {NEW[:1]!r} * {len(NEW)}) for n in range(5))"
    killed(store, PUT[step], change)
    with kvfs.Client(store) as client:
        keys = [f"/cache/many-{number}" for number in range(5)]
        assert client.get_many(keys) == [NEW if step in DONE else None] * 5


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("step", ["not committed", "committed", *DROP])
def test_a_removed_file_is_there_or_gone(store: Path, step: str) -> None:
    steps = {
        "not committed": "before(session.Session, 'write')",
        "committed": "before(post_commit.Finisher, 'finish')",
        **DROP,
    }
    with kvfs.Client(store) as client:
        client.put("/cache/file", OLD)
    killed(store, steps[step], "client.remove('/cache/file')")
    with kvfs.Client(store) as client:
        assert client.exists(["/cache/file"]) == [step == "not committed"]


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("step", ["not committed", "committed", *DROP])
def test_a_renamed_file_has_one_of_its_names(store: Path, step: str) -> None:
    steps = {
        "not committed": "before(session.Session, 'write')",
        "committed": "before(post_commit.Finisher, 'finish')",
        **DROP,
    }
    with kvfs.Client(store) as client:
        client.put("/cache/source", NEW)
        client.put("/cache/target", OLD)
    killed(store, steps[step], "client.rename('/cache/source', '/cache/target')")
    with kvfs.Client(store) as client:
        done = step != "not committed"
        assert client.get_many(["/cache/source", "/cache/target"]) == (
            [None, NEW] if done else [NEW, OLD]
        )
