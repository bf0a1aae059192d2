"""The NFS door: the same files as by the mount, at once, to whom they are exported and nobody
else."""

import os
import signal
import struct
import subprocess
from pathlib import Path

import pytest

from kvfs import Client
from tests.cluster.waiting import wait_until
from tests.integration.client.test_client import sealed
from tests.integration.harness import is_mounted, kvfs
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.rpc import ROOT, AuthSys, RpcError
from tests.nfs.status import NfsError
from tests.nfs.v4 import Owner
from tests.nfs.v4_attributes import SIZE
from tests.nfs.v4_operations import Share, Unchecked

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
EVERY = ["v3", "v40", "v41"]
ALICE = AuthSys(uid=4001, gid=4001)


def server_of(door: Door) -> int:
    """The process that serves; 0: none does."""
    return int(door.node.status()["nfs"]["pid"])


@pytest.fixture
def home(door: Door, request: pytest.FixtureRequest) -> Path:
    """An empty directory of an exported namespace, by the mount: everybody's."""
    path = door.node.mount / "shared" / request.node.name.replace("/", "-")
    path.mkdir()
    path.chmod(0o777)
    return path


class Side:
    """What the tests do by either version."""

    def __init__(self, door: Door, version: str, home: Path, export: str = "shared") -> None:
        """`home`: a directory in the root of the export."""
        self.client = getattr(door, version)(ALICE)
        by_v3 = version == "v3"
        root = door.mounts().mount(f"/{export}").handle if by_v3 else self.client.walk(export)
        self.home_name = home.name
        self.home = self.lookup(root, home.name)

    def lookup(self, directory: bytes, name: str) -> bytes:
        found = self.client.lookup(directory, name)
        return found if isinstance(found, bytes) else found.handle

    def read(self, handle: bytes) -> bytes:
        data = self.client.read(handle, 0, 1 << 16).data
        assert isinstance(data, bytes)
        return data

    def make(self, name: str, data: bytes) -> bytes:
        """A new file with this content, committed."""
        if hasattr(self.client, "minor"):
            opened = self.client.open(self.home, name, Owner(), Share.BOTH, creation=Unchecked())
            self.client.write(opened.handle, 0, data, stateid=opened.stateid)
            self.client.close(opened)
            return bytes(opened.handle)
        handle = self.client.create(self.home, name).handle
        self.client.write(handle, 0, data)
        self.client.commit(handle)
        return bytes(handle)


@pytest.fixture(params=EVERY)
def side(request: pytest.FixtureRequest, door: Door, home: Path) -> Side:
    return Side(door, request.param, home)


def test_files_are_the_mounts(side: Side, home: Path) -> None:
    (home / "local").write_bytes(b"by the mount")
    assert side.read(side.lookup(side.home, "local")) == b"by the mount"
    side.make("remote", b"by NFS")
    assert (home / "remote").read_bytes() == b"by NFS"


def test_what_the_mount_changes_shows_at_once(side: Side, home: Path) -> None:
    with pytest.raises(NfsError, match="NOENT"):
        side.lookup(side.home, "later")
    (home / "later").write_bytes(b"1")

    def has_gone() -> bool:
        try:
            side.lookup(side.home, "later")
        except NfsError:
            return True
        return False

    wait_until(lambda: not has_gone(), "it has come")
    wait_until(lambda: side.read(side.lookup(side.home, "later")) == b"1", "it is read")
    (home / "later").unlink()
    wait_until(has_gone, "it has gone")


def test_what_nfs_changes_shows_on_the_mount(side: Side, home: Path) -> None:
    assert not (home / "later").exists()
    side.make("later", b"12345")
    later = home / "later"
    wait_until(lambda: later.exists() and later.stat().st_size == 5, "it is there")
    side.client.rename(side.home, "later", side.home, "other")
    wait_until(lambda: os.listdir(home) == ["other"], "it is renamed")
    side.client.remove(side.home, "other")
    wait_until(lambda: os.listdir(home) == [], "it has gone")


def test_a_handle_of_what_was_removed_is_stale(side: Side, home: Path) -> None:
    removed, unlinked = side.make("x", b"first"), side.make("y", b"first")
    side.client.remove(side.home, "x")
    (home / "x").write_bytes(b"second")
    with pytest.raises(NfsError, match="STALE"):
        side.read(removed)
    (home / "y").unlink()
    (home / "y").write_bytes(b"second")

    def is_stale() -> bool:
        """Ganesha may have it open for a second more, and reads what it was then."""
        try:
            assert side.read(unlinked) == b"first"
        except NfsError as error:
            return "STALE" in error.name
        return False

    wait_until(is_stale, "the handle is stale")


def test_in_relay_mode_no_side_reads_what_was_before() -> None:
    with Door.make(mode="relay") as door:
        path = door.exported("open", "--squash", "none") / "x"
        path.write_bytes(b"a" * 8192)
        client = door.v41()
        opened = client.open(client.walk("open"), "x", Owner(), Share.BOTH)
        for turn in (b"b", b"c"):
            client.write(opened.handle, 0, turn * 8192, stateid=opened.stateid)
            wait_until(lambda turn=turn: path.read_bytes() == turn * 8192, "it is written")
            with path.open("r+b") as file:
                file.write(turn.upper())
            assert client.read(opened.handle, 0, 2).data == turn.upper() + turn
        client.close(opened)


def test_while_a_sealed_file_is_written_anew_the_other_side_sees_it(door: Door) -> None:
    paths = [door.node.mount / "open" / f"sealed-{number}" for number in range(2)]
    for path in paths:
        path.write_bytes(b"1")
    with Client(door.node.store) as observer:
        for path in paths:
            sealed(observer, f"/open/{path.name}")
    by_nfs, by_mount = paths
    client = door.v41()
    handle = client.walk(f"open/{by_mount.name}")
    assert (by_nfs.stat().st_size, client.getattr(handle, (SIZE,))[SIZE]) == (1, 1)
    opened = client.open(client.walk("open"), by_nfs.name, Owner(), Share.BOTH)
    client.write(opened.handle, 0, b"12345", stateid=opened.stateid)
    wait_until(lambda: by_nfs.stat().st_size == 5, "the mount sees it")
    client.close(opened)
    with by_mount.open("r+b", buffering=0) as file:
        file.write(b"12345")
        wait_until(lambda: client.getattr(handle, (SIZE,))[SIZE] == 5, "the client sees it")


# ---- what is exported


def test_nothing_is_there_but_what_is_exported(door: Door) -> None:
    client = door.v41()
    assert set(client.names(client.walk())) == {"open", "shared", "squashed", "readonly"}
    with pytest.raises(NfsError, match="NOENT"):
        client.walk("hidden")
    with pytest.raises(NfsError):
        door.mounts().mount("/hidden")
    assert {"/shared", "/squashed"} <= {each.path for each in door.mounts().exports()}


def test_version_3_does_not_serve_exports_whose_root_is_root(door: Door) -> None:
    with pytest.raises(NfsError):
        door.mounts().mount("/open")
    handle = door.v41().walk("open")
    with pytest.raises((NfsError, RpcError)):
        door.v3().getattr(handle)


def test_an_export_comes_and_goes_beside_an_open_client(door: Door) -> None:
    client = door.v41()
    root = client.walk("open")
    opened = client.open(root, "held", Owner(), creation=Unchecked())
    door.exported("passing", "--squash", "none")
    assert "passing" in client.names(client.walk())
    door.kvfs("nfs", "unexport", "passing")
    assert "passing" not in client.names(client.walk())
    client.write(opened.handle, 0, b"still", stateid=opened.stateid)
    client.close(opened)
    assert (door.node.mount / "open" / "held").read_bytes() == b"still"


def test_a_read_only_export_changes_nothing(door: Door) -> None:
    client = door.v41()
    root = client.walk("readonly")
    with pytest.raises(NfsError, match="ROFS"):
        client.mkdir(root, "d")


def test_root_is_squashed_unless_it_is_said_otherwise(door: Door) -> None:
    (door.node.mount / "squashed").chmod(0o755)
    client = door.v41()
    with pytest.raises(NfsError, match="ACCES"):
        client.mkdir(client.walk("squashed"), "d")
    client.mkdir(client.walk("open"), "by-root")
    assert (door.node.mount / "open" / "by-root").stat().st_uid == 0


def test_users_are_who_they_say(door: Door) -> None:
    directory = door.node.mount / "open" / "of-alice"
    directory.mkdir()
    os.chown(directory, 4001, 4001)
    bob = AuthSys(uid=4002, gid=4002)
    with pytest.raises(NfsError, match="ACCES"):
        client = door.v41(bob)
        client.mkdir(client.walk("open/of-alice"), "d")
    client = door.v41(ALICE)
    client.mkdir(client.walk("open/of-alice"), "d")
    assert (directory / "d").stat().st_uid == 4001


def test_a_client_of_another_network_enters_nothing(door: Door) -> None:
    door.exported("elsewhere", "--allow", "10.9.0.0/16")
    client = door.v41()
    assert "elsewhere" not in client.names(client.walk())
    with pytest.raises(NfsError):
        client.walk("elsewhere")
    door.kvfs("nfs", "unexport", "elsewhere")


def test_an_export_to_everybody_is_served_beside_the_others(door: Door) -> None:
    for networks in (("0.0.0.0/0", "::/0"), ("::/0", "0.0.0.0/0"), ("0.0.0.0/0",)):
        door.exported("everybody", *(f"--allow={each}" for each in networks))
        client = door.v41()
        assert {"everybody", "open"} <= set(client.names(client.walk()))
        client.walk("everybody")
    door.kvfs("nfs", "unexport", "everybody")


# ---- no way out of an export


def under(handle: bytes, of: bytes) -> bytes:
    """The second handle under the first one's export, whose number lies in bytes 2 and 3 of what
    Ganesha makes."""
    return of[:2] + handle[2:4] + of[4:]


def with_inode(handle: bytes, ino: int) -> bytes:
    """The handle with another inode of the same filesystem: as FUSE encodes it, the number's high
    half first, and generation 0, at the end of what byte 4 tells the length of."""
    end = 5 + handle[4]
    kernels = struct.pack("<III", ino >> 32, ino & 0xFFFFFFFF, 0)
    assert handle[end - 4 : end] == kernels[-4:]
    return handle[: end - 12] + kernels + handle[end:]


@pytest.mark.parametrize("version", EVERY)
def test_a_handle_leads_nowhere_else(door: Door, version: str) -> None:
    (door.node.mount / "squashed" / "secret").write_bytes(b"secret")
    (door.node.mount / "hidden" / "secret").write_bytes(b"secret")
    client = getattr(door, version)()
    if version == "v3":
        mounts = door.mounts()
        here, there = (mounts.mount(f"/{name}").handle for name in ("shared", "squashed"))
        secret = client.lookup(there, "secret").handle
    else:
        here, there = (client.walk(name) for name in ("shared", "squashed"))
        secret = client.lookup(there, "secret")
    hidden, squashed = (door.node.mount / name / "secret" for name in ("hidden", "squashed"))
    forged = [under(here, secret), under(here, there)]
    forged += [with_inode(here, path.stat().st_ino) for path in (hidden, squashed)]
    forged.append(with_inode(here, hidden.parent.stat().st_ino))
    for each in forged:
        with pytest.raises(NfsError, match=r"STALE|BADHANDLE"):
            client.getattr(each)


def test_above_an_export_is_nothing_of_the_host(door: Door) -> None:
    client = door.v41()
    root = client.walk("open")
    above = client.lookup_parent(root)
    assert set(client.names(above)) >= {"open", "squashed"}
    with pytest.raises(NfsError, match="NOENT"):
        client.lookup_parent(above)
    old = door.v3()
    handle = door.mounts().mount("/shared").handle
    try:
        assert old.lookup(handle, "..").handle == handle
    except NfsError:
        pass


@pytest.mark.parametrize(
    "name",
    [
        "../squashed/secret",
        "/etc/passwd",
        "../../etc/passwd",
        "/proc/self/environ",
        "/proc/self/fd/0",
        "../..",
        "../.",
        "/tmp",
        "/",
        "d/../../x",
        "d/x",
        "d/..",
    ],
)
def test_no_name_of_version_3_leads_out_of_an_export(door: Door, name: str) -> None:
    (door.node.mount / "shared" / "d").mkdir(exist_ok=True)
    root = door.mounts().mount("/shared").handle
    for credentials in (ROOT, ALICE):
        client = door.v3(credentials)
        with pytest.raises(NfsError):
            client.lookup(root, name)
        with pytest.raises(NfsError):
            client.create(root, name + ".new")
        with pytest.raises(NfsError):
            client.mkdir(root, name + "-made")
    assert not Path("/etc/passwd.new").exists()


def test_what_has_a_slash_is_no_name_and_stops_nobody(door: Door) -> None:
    closed = door.node.mount / "shared" / "closed"
    closed.mkdir(mode=0o700)
    (closed / "there").touch()
    root = door.mounts().mount("/shared").handle
    client = door.v3(ALICE)
    for name in ("closed/..", "closed/there", "closed/not-there"):
        with pytest.raises(NfsError, match="ACCES"):
            client.lookup(root, name)
    with pytest.raises(NfsError, match="ACCES"):
        client.lookup(client.lookup(root, "closed").handle, "there")


def test_whoever_knows_where_the_other_export_lies_does_not_get_there(door: Door) -> None:
    with open("/proc/self/mountinfo") as table:
        mounted = [line.split()[4] for line in table if "/run/nfs/exports/" in line]
    names = [each.rpartition("/")[2] for each in mounted if str(door.node.home) in each]
    assert len(names) == 4
    root = door.mounts().mount("/shared").handle
    for credentials in (ROOT, ALICE):
        client = door.v3(credentials)
        for name in names:
            with pytest.raises(NfsError):
                client.mkdir(root, f"../{name}/made")
            with pytest.raises(NfsError):
                client.create(root, f"../{name}/made")
            with pytest.raises(NfsError):
                client.remove(root, f"../{name}/secret")


def test_beneath_a_view_that_has_gone_is_nothing_of_the_host() -> None:
    with Door.make() as door:
        directory = door.exported("open", "--squash", "none")
        (directory / "x").write_bytes(b"kept")
        before = door.node.status()["nfs"]["pid"]
        (view,) = (door.node.store / "run/nfs/exports").iterdir()
        subprocess.run(["umount", "--lazy", view], check=True)
        wait_until(lambda: server_of(door) not in (0, before), "another serves")
        client = door.v41()
        assert client.read(client.walk("open/x"), 0, 10).data == b"kept"


def test_a_copy_of_a_directory_is_not_exported(door: Door) -> None:
    value = os.getxattr(door.node.mount / "open", "trusted.kvfs.nfs")
    copy = door.node.mount / "copied"
    copy.mkdir()
    os.setxattr(copy, "trusted.kvfs.nfs", value)
    assert "copied" not in door.kvfs("nfs", "list")


# ---- listings


def test_a_listing_goes_on_while_its_directory_changes(side: Side, home: Path) -> None:
    stays = {f"stays-{number}" for number in range(600)}
    goes = {f"goes-{number}" for number in range(600)}
    for name in stays | goes:
        (home / name).touch()
    seen: list[str] = []
    page = side.client.page if hasattr(side.client, "minor") else side.client.readdir
    cookie, verifier = 0, bytes(8)
    while True:
        found = page(side.home, cookie, verifier)
        names = [each.name for each in found.entries]
        seen += names
        for name in goes & set(os.listdir(home)) if len(seen) < 400 else ():
            (home / name).unlink()
        if found.eof:
            break
        cookie, verifier = found.entries[-1].cookie, found.verifier
    listed = [name for name in seen if name not in (".", "..")]
    assert len(listed) == len(set(listed))
    assert stays <= set(listed)


def test_a_listing_goes_on_by_what_is_there_now(side: Side, home: Path) -> None:
    """Though all of it was listed before."""
    for number in range(100):
        (home / f"name-{number}").touch()
    listed = list(side.client.entries(side.home))
    after, left = listed[40], [each.name for each in listed[41:]]
    for name in left[:20]:
        side.client.remove(side.home, name)
    page = side.client.page if hasattr(side.client, "minor") else side.client.readdir
    assert [each.name for each in page(side.home, after.cookie).entries] == left[20:]


def test_a_listing_tells_of_the_change_just_before_it(side: Side, home: Path) -> None:
    (home / "0").touch()
    for number in range(40):
        side.client.rename(side.home, str(number), side.home, str(number + 1))
        assert side.client.names(side.home) == [str(number + 1)]


# ---- kills


def test_a_killed_server_is_replaced(door: Door) -> None:
    before = door.node.status()["nfs"]
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: server_of(door) not in (0, before["pid"]), "another serves")
    assert door.node.status()["nfs"]["restarts"] == before["restarts"] + 1
    client = door.v41()
    assert "open" in client.names(client.walk())


def test_handles_survive_a_kill_of_everything() -> None:
    with Door.make() as door:
        directory = door.exported("open", "--squash", "none")
        (directory / "x").write_bytes(b"kept")
        client = door.v41()
        handle = client.walk("open/x")
        served = door.node.status()["nfs"]["pid"]
        door.node.kill()
        wait_until(lambda: not Path(f"/proc/{served}").exists(), "the server has ended")
        door.node.up()
        again = door.v41()
        assert again.walk("open/x") == handle
        assert again.read(handle, 0, 10).data == b"kept"
        assert again.getattr(handle, (SIZE,))[SIZE] == 4


def test_nothing_is_left_of_it() -> None:
    with Door.make() as door:
        door.exported("open")
        pid = door.node.status()["nfs"]["pid"]
        door.node.down()
        assert not Path(f"/proc/{pid}").exists()
        assert not (door.node.store / "run" / "nfs").exists()
        with open("/proc/self/mountinfo") as table:
            assert str(door.node.home) not in table.read()


# ---- what is refused


def test_what_cannot_be_exported_is_refused(door: Door) -> None:
    place = ("--store", str(door.node.store))
    for arguments, told in (
        (("export", "nowhere"), "nowhere"),
        (("export", "open", "--allow", "10.0.0.0/99"), "10.0.0.0/99"),
        (("export", "open", "--allow", "10.0.0.1/8"), "host bits"),
        (("export", "open", "--allow", "fe80::1%a; }"), "scope"),
        (("export", "open", "--allow", "2001:db8::/112"), "no prefix longer than /99"),
        (("unexport", "hidden"), "not exported"),
    ):
        done = kvfs("nfs", *arguments, *place)
        assert done.returncode, arguments
        assert told in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_port_that_is_taken_is_named() -> None:
    with Door.make() as door:
        other = Door.make("--nfs", f"127.0.0.1:{door.port}")
        with pytest.raises(Exception, match=f"another program listens at 127.0.0.1:{door.port}"):
            other.__enter__()


def test_who_is_connected_is_listed(door: Door) -> None:
    client = door.v41()
    client.walk()
    assert "127.0.0.1" in door.kvfs("nfs", "clients")
    assert is_mounted(door.node.mount)
