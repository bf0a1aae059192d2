"""Groups of a user beyond the 16 that a client can name: this host's tables say which."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Node, best_mode
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.rpc import MOST_GROUPS, AuthSys
from tests.nfs.status import NfsError
from tests.nfs.v4 import Client41
from tests.nfs.v4_attributes import MODE, OWNER_GROUP
from tests.ports import free_port

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
GROUPS = range(5001, 5021)
MANY = AuthSys(uid=4001, gid=4001, groups=GROUPS[:MOST_GROUPS])
SOON_S = 20.0
WITH_TABLES = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    'for each in passwd group; do mount --bind "$0/$each" "/etc/$each" || exit; done; exec "$@"',
)


def group_table(members: dict[int, str]) -> str:
    return "root:x:0:\nmany:x:4001:\n" + "".join(
        f"g{gid}:x:{gid}:{user}\n" for gid, user in members.items()
    )


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """The directory of the node's /etc/passwd and /etc/group."""
    (tmp_path / "passwd").write_text("root:x:0:0::/:/bin/false\nmany:x:4001:4001::/:/bin/false\n")
    (tmp_path / "group").write_text(group_table(dict.fromkeys(GROUPS, "many")))
    return tmp_path


@pytest.fixture
def door(tables: Path) -> Iterator[Door]:
    """`models` has the groups of this host's tables, `cache` those that clients name."""
    port = free_port()
    node = Node.make(best_mode(), "--nfs", f"127.0.0.1:{port}")
    node.inside = (*WITH_TABLES, str(tables))
    made = Door(node, port, 0)
    try:
        node.up()
        made.kvfs("nfs", "export", "models", "--squash", "none", "--groups", "server")
        made.kvfs("nfs", "export", "cache", "--squash", "none", "--groups", "client")
        yield made
    finally:
        made.close()
        node.remove()


def closed_to_others(root: Client41, export: str, gid: int) -> bytes:
    """A new directory of which one group is to read and write."""
    made = root.mkdir(root.walk(export), f"of-{gid}")
    root.setattr(made, OWNER_GROUP.to(str(gid)), MODE.to(0o770))
    return made


def may(client: Client41, directory: bytes, name: str) -> bool:
    try:
        client.mkdir(directory, name)
    except NfsError as error:
        assert "ACCES" in error.name
        return False
    return True


def test_the_twentieth_group_counts_where_the_server_says_the_groups(
    door: Door, tables: Path
) -> None:
    root, many = door.v41(), door.v41(MANY)
    first, last = GROUPS[0], GROUPS[-1]
    for export, by_server in (("models", True), ("cache", False)):
        assert may(many, closed_to_others(root, export, first), "d")
        assert may(many, closed_to_others(root, export, last), "d") is by_server
    with pytest.raises(NfsError, match="NOENT"):  # the tables do not know them
        door.v41(AuthSys(uid=4002, gid=4002)).walk("models")
    # Who is taken out of a group has it no longer, and this client goes on.
    directory = root.walk(f"models/of-{last}")
    members = dict.fromkeys(GROUPS, "many") | {last: ""}
    (tables / "group").write_text(group_table(members))
    deadline = time.monotonic() + SOON_S
    number = 0
    while may(many, directory, f"d{number}"):
        assert time.monotonic() < deadline, "the group's members are believed for long"
        number += 1
        time.sleep(0.1)
    assert may(many, root.walk(f"models/of-{first}"), "d2")
