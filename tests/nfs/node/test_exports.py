"""Exports that change, go or are renamed under clients, and what is refused with one line."""

import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import CannotStart, Node, best_mode, kvfs
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.rpc import AuthSys, RpcError
from tests.nfs.status import NfsError
from tests.nfs.v4 import Client41, Opened, Owner
from tests.nfs.v4_operations import Unchecked
from tests.ports import free_port

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
ALICE = AuthSys(uid=4001, gid=4001)
_numbers = itertools.count()


@pytest.fixture
def name(plain_door: Door) -> str:
    """A namespace of the test's own, exported, everybody's."""
    made = f"changing{next(_numbers)}"
    plain_door.exported(made, mode=0o777)
    return made


def opened(client: Client41, name: str, file: str) -> Opened:
    return client.open(client.walk(name), file, Owner(), creation=Unchecked())


# ---- changes


def test_a_namespace_is_renamed_while_clients_have_files_open(plain_door: Door, name: str) -> None:
    client, old = plain_door.v41(ALICE), plain_door.v3(ALICE)
    file = opened(client, name, "x")
    client.write(file.handle, 0, b"before", stateid=file.stateid)
    handle = old.lookup(plain_door.mounts().mount(f"/{name}").handle, "x").handle
    new = f"{name}-new"
    (plain_door.node.mount / name).rename(plain_door.node.mount / new)
    wait_until(lambda: new in client.names(client.walk()), "it is exported by its new name")
    paths = {each.path for each in plain_door.mounts().exports()}
    assert f"/{new}" in paths
    assert f"/{name}" not in paths
    assert client.names(client.walk(name)) == ["x"], "who has it mounted by the old name goes on"
    client.write(file.handle, 6, b" and after", stateid=file.stateid)
    client.close(file)
    assert old.read(handle, 0, 100).data == b"before and after"
    assert old.lookup(plain_door.mounts().mount(f"/{new}").handle, "x").handle == handle
    assert (plain_door.node.mount / new / "x").read_bytes() == b"before and after"
    (plain_door.exported(name) / "another").touch()
    assert client.names(client.walk(name)) == ["another"]
    assert client.names(client.walk(new)) == ["x"]


def test_a_namespace_is_removed_while_it_is_exported(plain_door: Door, name: str) -> None:
    client, old = plain_door.v41(ALICE), plain_door.v3(ALICE)
    root = plain_door.mounts().mount(f"/{name}").handle
    root4 = client.walk(name)
    (plain_door.node.mount / name).rmdir()
    wait_until(lambda: name not in client.names(client.walk()), "it is exported no more")
    for ask in (lambda: old.getattr(root), lambda: client.getattr(root4)):
        with pytest.raises((NfsError, RpcError), match=r"STALE|BADHANDLE|AUTH"):
            ask()
    assert name not in plain_door.kvfs("nfs", "list")
    (plain_door.node.mount / name).mkdir()
    assert name not in plain_door.kvfs("nfs", "list")
    assert name not in client.names(client.walk())
    (plain_door.node.mount / name).rmdir()


def test_what_an_export_allows_changes_under_its_clients(plain_door: Door, name: str) -> None:
    client, old = plain_door.v41(ALICE), plain_door.v3(ALICE)
    file = opened(client, name, "x")
    root = plain_door.mounts().mount(f"/{name}").handle
    handle = old.lookup(root, "x").handle
    for number, squash in enumerate(("all", "root")):
        plain_door.kvfs("nfs", "export", name, "--read-only", "--squash", squash)
        with pytest.raises(NfsError, match="ROFS"):
            client.write(file.handle, 0, b"x", stateid=file.stateid)
        with pytest.raises(NfsError, match="ROFS"):
            old.write(handle, 0, b"x")
        with pytest.raises(NfsError, match="ROFS"):
            old.mkdir(root, "d")
        plain_door.kvfs("nfs", "export", name, "--squash", "root")
        client.write(file.handle, 0, b"%d" % number, stateid=file.stateid)
        assert old.read(handle, 0, 10).data == b"%d" % number
    client.close(file)


def views(door: Door) -> dict[str, bool]:
    """Where the node has mounted what it exports, and whether that takes no changes (proc(5))."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, superblock = line.partition(" - ")
        if mount.split()[4].startswith(f"{door.node.store}/run/nfs/exports/"):
            found[mount.split()[4]] = "ro" in superblock.split()[2].split(",")
    return found


def test_a_read_only_export_takes_no_changes_beneath_the_server_either(plain_door: Door) -> None:
    before = views(plain_door)
    name = f"changing{next(_numbers)}"
    plain_door.exported(name, "--read-only", mode=0o777)
    (view,) = views(plain_door).keys() - before.keys()
    assert views(plain_door)[view]
    (plain_door.node.mount / name / "x").write_bytes(b"by the mount")
    plain_door.kvfs("nfs", "export", name)
    client = plain_door.v41(ALICE)
    assert client.read(client.walk(f"{name}/x"), 0, 100).data == b"by the mount"
    file = opened(client, name, "y")
    plain_door.kvfs("nfs", "export", name, "--read-only")
    assert not views(plain_door)[view], "a file is open for writing"
    client.close(file)
    wait_until(lambda: views(plain_door)[view], "the view is read-only")
    plain_door.kvfs("nfs", "export", name)
    assert not views(plain_door)[view]
    file = opened(client, name, "z")
    client.write(file.handle, 0, b"x", stateid=file.stateid)
    client.close(file)


def test_a_client_that_is_allowed_no_more_gets_nothing(plain_door: Door, name: str) -> None:
    client, old = plain_door.v41(ALICE), plain_door.v3(ALICE)
    file = opened(client, name, "x")
    client.write(file.handle, 0, b"secret", stateid=file.stateid)
    handle = old.lookup(plain_door.mounts().mount(f"/{name}").handle, "x").handle
    plain_door.kvfs("nfs", "export", name, "--allow", "10.9.0.0/16", "--allow", "fd00:1::/32")
    asks: list[Callable[[], object]] = [
        lambda: client.read(file.handle, 0, 6, file.stateid),
        lambda: client.walk(name),
        lambda: old.read(handle, 0, 6),
        lambda: plain_door.mounts().mount(f"/{name}"),
    ]
    for ask in asks:
        with pytest.raises((NfsError, RpcError)):
            ask()
    assert f"/{name}" not in {each.path for each in plain_door.mounts().exports()}
    told = plain_door.kvfs("nfs", "list")
    assert "10.9.0.0/16" in told
    assert "fd00:1::/32" in told
    plain_door.kvfs("nfs", "export", name, "--allow", "127.0.0.1", "--allow", "::1")
    assert old.read(handle, 0, 6).data == b"secret"


# ---- what is refused


@pytest.mark.parametrize(
    "network",
    ["10.0.0.0/33", "10.0.0/8", "fd00::/129", "fd00:::1", "fd00::1/64", "a host", "*", "", "1e3"],
)
def test_a_network_that_is_malformed_is_refused(plain_door: Door, network: str) -> None:
    before = plain_door.kvfs("nfs", "list")
    place = ("--store", str(plain_door.node.store))
    done = kvfs("nfs", "export", "shared", f"--allow={network}", *place)
    assert done.returncode
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert network in done.stderr
    assert "network" in done.stderr
    assert plain_door.kvfs("nfs", "list") == before


def refusal(node: Node) -> str:
    """The one line with which it does not start."""
    try:
        with pytest.raises(CannotStart) as caught:
            node.up()
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)
    finally:
        node.remove()


def test_the_server_goes_before_other_programs_as_the_node_does(plain_door: Door) -> None:
    status = plain_door.node.status()
    server = status["nfs"]["pid"]
    nice = os.getpriority(os.PRIO_PROCESS, server)
    assert nice == os.getpriority(os.PRIO_PROCESS, status["pid"])
    groups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if groups.exists() and groups.read_text().strip() == "1":
        assert int(Path(f"/proc/{server}/autogroup").read_text().split()[-1]) == nice


def test_without_ganesha_a_node_says_how_to_get_it() -> None:
    hidden = 'mount --bind /dev/null /usr/bin/ganesha.nfsd && exec "$@"'
    node = Node.make(best_mode(), "--nfs", f"127.0.0.1:{free_port()}")
    node.inside = ("unshare", "--mount", "--propagation", "slave", "sh", "-c", hidden, "sh")
    told = refusal(node)
    assert "ganesha.nfsd is not installed" in told
    assert "apt-get install nfs-ganesha nfs-ganesha-vfs" in told


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = "--nfs", f"127.0.0.1:{free_port()}", "--nfs-v3", "--nfs-mount-port", str(port)
        assert f"127.0.0.1:{port}" in refusal(Node.make(best_mode(), *place))
        assert f"127.0.0.1:{port}" in refusal(Node.make(best_mode(), "--nfs", f"127.0.0.1:{port}"))


@pytest.mark.parametrize("address", ["192.0.2.7:2049", "no.such.host.invalid:2049", "127.0.0.1:no"])
def test_an_address_that_is_none_of_this_machine_is_refused(address: str) -> None:
    assert address.partition(":")[0] in refusal(Node.make(best_mode(), "--nfs", address))


def test_an_export_of_what_is_no_namespace_is_refused(plain_door: Door) -> None:
    (plain_door.node.mount / "shared" / "below").mkdir(exist_ok=True)
    Path(plain_door.node.mount, "odd name").mkdir()
    place = ("--store", str(plain_door.node.store))
    for each in ("nowhere", "shared/below", "/", "..", "odd name"):
        done = kvfs("nfs", "export", each, *place)
        assert done.returncode, each
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "Traceback" not in done.stderr
    os.rmdir(plain_door.node.mount / "odd name")
