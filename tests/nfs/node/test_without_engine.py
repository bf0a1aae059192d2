"""While the engine is away NFS serves a strict namespace as it was, and refuses changes."""

import contextlib
import signal

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.several import several
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.node.test_door import EVERY, Side
from tests.nfs.status import NfsError

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)


def test_files_are_read_on_and_nothing_is_changed() -> None:
    with several(0) as cluster, contextlib.ExitStack() as open_:
        door = open_.enter_context(Door.of(cluster))
        door.exported("strict", mode=0o777)
        door.kvfs("namespace", "set", "strict", "--coherence", "strict")
        home = door.node.mount / "strict" / "home"
        home.mkdir(mode=0o777)
        home.chmod(0o777)
        (home / "weights").write_bytes(b"weights")
        for version in EVERY:
            side = Side(door, version, home, "strict")
            assert side.read(side.lookup(side.home, "weights")) == b"weights"
        cluster.server.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: bool(door.node.status()["engine"]["is_away"]), "it is known")
            for version in EVERY:
                side = Side(door, version, home, "strict")  # version 4 leases what a client has
                assert side.read(side.lookup(side.home, "weights")) == b"weights"
                with pytest.raises(NfsError, match="NOENT"):
                    side.lookup(side.home, "absent")
                with pytest.raises(NfsError, match="ROFS"):
                    side.make("new", b"new")
                with pytest.raises(NfsError, match="ROFS"):
                    side.client.remove(side.home, "weights")
        finally:
            cluster.server.signal(signal.SIGCONT)
        wait_until(lambda: not door.node.status()["engine"]["is_away"], "it is heard again")
        assert Side(door, EVERY[0], home, "strict").make("new", b"new")
