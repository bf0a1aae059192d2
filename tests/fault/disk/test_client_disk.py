"""The Python API when the disk fails it: the power goes, the space runs out; and on one that can
share blocks."""

import ast
import os
from pathlib import Path

import pytest

import kvfs
from kvfs.base.errors import NoSpace
from kvfs.session import byte_transfer, session
from tests.contract import client_store
from tests.fault.disks import disk

MIB = 1 << 20
_VICTIM = """
import os, signal, sys
from pathlib import Path
import kvfs
from kvfs.session import session
from kvfs.vfs import post_commit
from tests.contract import client_store
from tests.fault.disks import cut

mountpoint = Path(sys.argv[1])

def die(*_, **__):
    cut(mountpoint)
    os.kill(os.getpid(), signal.SIGKILL)

client = kvfs.Client(client_store.make(mountpoint / "store"))
client.put("/models/kept", b"kept" * 100_000)
client.put("/models/file", b"old" * 100_000)
client.put("/cache/file", b"old" * 100_000)
exec(sys.argv[2])
"""
_AFTER = """
import sys
from pathlib import Path
from kvfs.meta.lmdb import boot
boot.boot_id = lambda: 12345
import kvfs
from tests.contract import client_store

store = Path(sys.argv[1]) / "store"
client_store.restart(store)
problems = client_store.problems(store)
with kvfs.Client(store) as client:
    names = ["/models/kept", "/models/file", "/models/new", "/cache/file", "/cache/new"]
    found = [None if data is None else bytes(data) for data in client.get_many(names)]
    print((problems, dict(zip(names, found))))
"""
_OLD, _NEW = b"old" * 100_000, b"new" * 100_000
_STEPS: dict[str, tuple[str, dict[str, list[bytes | None]]]] = {
    "put": (
        "client.put('/models/new', b'new' * 100_000); die()",
        {"/models/new": [_NEW]},
    ),
    "put many": (
        "client.put_many([('/models/new', b'new' * 100_000), ('/models/file', b'new' * 100_000)]);"
        "die()",
        {"/models/new": [_NEW], "/models/file": [_NEW]},
    ),
    "written by a file object": (
        "file = client.open('/models/new', 'wb'); file.write(b'new' * 100_000); file.close();die()",
        {"/models/new": [_NEW]},
    ),
    "renamed and synced": (
        "client.rename('/models/file', '/models/new'); client.sync(); die()",
        {"/models/new": [_OLD], "/models/file": [None]},
    ),
    "replaced, not yet acknowledged": (
        "session.Session.sync = die; client.put('/models/file', b'new' * 100_000)",
        {"/models/file": [_OLD, _NEW]},
    ),
    "replaced, the old one being dropped": (
        "client._core.session.files.unlink = die; client.put('/models/file', b'new' * 100_000)",
        {"/models/file": [_NEW]},
    ),
    "put into a cache": (
        "client.put('/cache/new', b'new' * 100_000);"
        "client.put('/cache/file', b'new' * 100_000); die()",
        {"/cache/new": [_NEW, None], "/cache/file": [_OLD, _NEW, None]},
    ),
}


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("step", _STEPS)
def test_what_was_acknowledged_outlives_the_power(tmp_path: Path, kind: str, step: str) -> None:
    change, allowed = _STEPS[step]
    with disk(tmp_path, kind) as made:
        client_store.run_killed(_VICTIM, str(made.mountpoint), change)
        made.power_cycle()
        output = client_store.run(_AFTER, str(made.mountpoint)).decode()
    problems, found = ast.literal_eval(output)
    assert problems == []
    assert found["/models/kept"] == b"kept" * 100_000
    for name, contents in allowed.items():
        assert found[name] in contents, name


def test_a_full_disk_is_named_and_nothing_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk(tmp_path, "ext4", 128 * MIB) as made:
        store = client_store.make(made.mountpoint / "store")
        with kvfs.Client(store) as client:
            with pytest.raises(NoSpace, match="store is full"):
                client.put("/models/a", bytes(200 * MIB))
            # Somebody else takes the space after it was found to be there.
            monkeypatch.setattr(client._core._stage._room, "refuse", lambda *_: None)
            with pytest.raises(NoSpace, match=r"/models/a: .*filesystem of the store .* is full"):
                client.put("/models/a", bytes(200 * MIB))
            with pytest.raises(NoSpace), client.open("/models/a", "wb") as file:
                for _ in range(200):
                    file.write(bytes(MIB))
            assert list(client.list("/models")) == []
            client.put("/models/a", bytes(MIB))
        assert client_store.data_files(store) == 1
        client_store.restart(store)
        assert client_store.problems(store) == []


def test_blocks_are_shared_where_the_filesystem_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("bytes were moved")

    with disk(tmp_path, "xfs") as made:
        store = client_store.make(made.mountpoint / "store")
        data = os.urandom(MIB)
        (made.mountpoint / "a").write_bytes(data)
        monkeypatch.setattr(f"{byte_transfer.__name__}.os.copy_file_range", refuse)
        monkeypatch.setattr(f"{byte_transfer.__name__}.os.sendfile", refuse)
        with kvfs.Client(store) as client:
            client.put_file(made.mountpoint / "a", "/cache/a")
            assert client.get("/cache/a") == data
            client.get_file("/cache/a", made.mountpoint / "b")
        assert (made.mountpoint / "b").read_bytes() == data
        assert not session._sessions
