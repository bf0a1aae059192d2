"""The command line against real nodes: start, stop, settings, mistakes and their remedies."""

import errno
import fcntl
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.datastore.files import DataFiles
from tests.integration import posix
from tests.integration.harness import MODES, Node, best_mode, is_mounted, kvfs

MODE = best_mode()


@pytest.fixture
def node() -> Iterator[Node]:
    """A store and a mountpoint; not started."""
    made = Node.make(MODE)
    yield made
    made.remove()


def refused(*arguments: str) -> tuple[int, str]:
    """Exit code and message of a command that must fail: one line, no traceback."""
    done = kvfs(*arguments)
    if done.returncode == 0 and "up" in arguments:
        stop_unexpected(arguments)
    assert done.returncode != 0, done.stdout
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvfs: ")
    return done.returncode, lines[0]


def stop_unexpected(arguments: tuple[str, ...]) -> None:
    """A node that should have been refused must not outlive its test."""
    at = arguments.index("--store")
    kvfs("down", *arguments[at : at + 4])


# ---- start and stop


def test_up_returns_when_the_mount_answers_and_down_takes_it_away(node: Node) -> None:
    done = kvfs("up", "--daemon", *node.place(), "--mode", MODE)
    assert done.returncode == 0, done.stderr
    told = kvfs("status", "--json", "--store", str(node.store))
    node.pid = json.loads(told.stdout)["pid"]
    assert node.pid == node.status()["pid"]
    assert f"  mount   {node.mount}" in done.stdout
    assert f"  store   {node.store}" in done.stdout
    assert "  engine  LMDB" in done.stdout
    assert sorted(os.listdir(node.mount)) == ["cache", "models"]
    (node.mount / "models" / "weights").write_bytes(b"w")
    node.down()
    assert os.listdir(node.mount) == []
    node.up()
    assert (node.mount / "models" / "weights").read_bytes() == b"w"


def test_the_first_namespaces_are_a_cache_and_a_durable_one(node: Node) -> None:
    node.up()
    kinds = {each["name"]: each["kind"] for each in node.status()["namespaces"]}
    assert kinds == {"cache": "cache", "models": "durable"}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_in_the_foreground_a_signal_unmounts(node: Node, sent: signal.Signals) -> None:
    command = [sys.executable, "-c", "from cli.main import main; main()", "up", *node.place()]
    environment = {**os.environ, "KVFS_CONFIG": os.devnull, "KVFS_S3": "off"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("kvfs ")
        assert is_mounted(node.mount)
        process.send_signal(sent)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert not is_mounted(node.mount)
    assert (node.store / "clean").exists()


def test_a_mount_left_by_a_kill_is_recovered_by_the_next_up(node: Node) -> None:
    node.up()
    (node.mount / "models" / "kept").write_bytes(b"k")
    node.kill()
    assert is_mounted(node.mount)
    with pytest.raises(OSError, match="not connected"):
        os.statvfs(node.mount)
    node.up()
    assert (node.mount / "models" / "kept").read_bytes() == b"k"


def test_down_takes_away_what_a_kill_left(node: Node) -> None:
    node.up()
    node.kill()
    done = kvfs("down", *node.place())
    assert done.returncode == 0, done.stderr
    assert f"removed the stale mount at {node.mount}" in done.stdout
    assert not is_mounted(node.mount)


def test_down_twice_does_no_harm(node: Node) -> None:
    node.up()
    node.down()
    done = kvfs("down", *node.place())
    assert done.returncode == 0
    assert "no node runs" in done.stdout


def test_two_nodes_run_side_by_side(node: Node) -> None:
    other = Node.make(MODE)
    try:
        node.up()
        other.up()
        (node.mount / "cache" / "here").touch()
        assert os.listdir(other.mount / "cache") == []
    finally:
        other.remove()


def test_a_missing_mountpoint_is_made(node: Node) -> None:
    node.mount.rmdir()
    node.up()
    assert is_mounted(node.mount)


# ---- mount and umount of a running node


def test_a_node_runs_without_a_mount_until_it_is_given_one(node: Node) -> None:
    done = kvfs("up", "--daemon", "--no-mount", *node.place(), "--mode", MODE)
    assert done.returncode == 0, done.stderr
    node.pid = node.status()["pid"]
    assert node.status()["mount"] is None
    assert not is_mounted(node.mount)
    code, message = refused("umount", "--store", str(node.store))
    assert (code, message) == (3, "kvfs: this node has no mount")

    done = kvfs("mount", str(node.mount), "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"mounted {node.mount}: {MODE}")
    assert "()" not in done.stdout
    assert node.status()["mount"]["mountpoint"] == str(node.mount)
    (node.mount / "cache" / "x").touch()

    code, message = refused("mount", str(node.home / "second"), "--store", str(node.store))
    assert code == 4
    assert "has a mount already" in message

    assert kvfs("umount", "--store", str(node.store)).returncode == 0
    assert not is_mounted(node.mount)
    assert node.status()["mount"] is None
    code, message = refused("umount", "--store", str(node.store))
    assert (code, message) == (3, "kvfs: this node has no mount")
    done = kvfs("mount", "--store", str(node.store))
    assert done.stdout.startswith(f"mounted {node.mount}: "), "where the node was told to mount"
    assert (node.mount / "cache" / "x").exists()


def test_a_mount_in_use_is_taken_away_only_when_told_so(node: Node) -> None:
    node.up()
    store = ("--store", str(node.store))
    file = node.mount / "models" / "open"
    held = open(file, "wb", buffering=0)  # noqa: SIM115
    held.write(b"one")
    code, message = refused("umount", *store)
    assert code == 4
    assert "in use" in message
    held.write(b"two")
    assert node.status()["mount"]
    assert kvfs("umount", "--lazy", *store).returncode == 0
    with pytest.raises(OSError, match="not connected"):
        held.close()
    assert not is_mounted(node.mount)
    assert kvfs("mount", str(node.mount), *store).returncode == 0
    assert file.read_bytes() == b"onetwo"


def test_a_node_survives_an_unmount_from_outside(node: Node) -> None:
    node.up()
    subprocess.run(["umount", str(node.mount)], check=True)
    assert kvfs("mount", str(node.mount), "--store", str(node.store)).returncode == 0
    assert is_mounted(node.mount)
    assert "was unmounted from outside" in node.log


# ---- mistakes


def test_a_mount_over_what_is_there_says_what_it_hides(node: Node) -> None:
    (node.mount / "precious").write_text("kept")
    done = kvfs("up", "--daemon", *node.place())
    assert done.returncode == 0, done.stderr
    assert f"{node.mount} is not empty: the mount hides 'precious'" in done.stdout
    assert sorted(os.listdir(node.mount)) == ["cache", "models"]
    assert "hides 'precious'" in kvfs("status", "--store", str(node.store)).stdout
    assert "hides 'precious'" in node.log
    kvfs("umount", "--store", str(node.store))
    assert "hides 'precious'" in kvfs("mount", "--store", str(node.store)).stderr
    node.down()
    assert (node.mount / "precious").read_text() == "kept"
    (node.mount / "another").touch()  # what was somebody's stays open to them


@posix.needs_root
def test_nothing_is_written_below_while_the_mount_is_away(node: Node) -> None:
    node.up()
    (node.mount / "cache" / "block").write_bytes(b"x")
    for end in (node.down, node.kill):
        end()
        subprocess.run(["umount", "--lazy", node.mount], check=False, capture_output=True)
        with posix.refused(errno.EPERM):
            (node.mount / "cache").mkdir(parents=True)
        with posix.refused(errno.EPERM):
            (node.mount / "file").touch()
        assert os.listdir(node.mount) == []
        node.up()
        assert (node.mount / "cache" / "block").read_bytes() == b"x"
        assert node.status()["mount"]["hides"] == []


@posix.needs_root
def test_without_the_flag_the_directory_below_is_closed_to_other_users(node: Node) -> None:
    up = up_command(node, "--daemon")
    bound = "setpriv --bounding-set=-linux_immutable --inh-caps=-linux_immutable"
    subprocess.run(["sh", "-ec", f"exec {bound} {up}"], check=True, stdout=subprocess.DEVNULL)
    node.pid = node.status()["pid"]
    node.down()
    assert stat.S_IMODE(node.mount.stat().st_mode) == 0
    assert b"chmod" in os.getxattr(node.mount, "user.kvfs.mountpoint")
    node.up()  # with the flag, from here on
    assert node.status()["mount"]["hides"] == []


def test_a_start_that_fails_after_the_mount_leaves_nothing_new(node: Node) -> None:
    node.mount.rmdir()
    new = Node(node.mode, node.home / "a" / "b")
    missing = str(node.home / "missing.pem")
    tls = ("--s3", "127.0.0.1:0", "--s3-certificate", missing, "--s3-private-key", missing)
    code, message = refused("up", "--daemon", *new.place(), *tls)
    assert code != 0
    assert "missing.pem" in message
    assert os.listdir(node.home) == []


def test_a_mountpoint_that_is_a_file_is_refused(node: Node) -> None:
    node.mount.rmdir()
    node.mount.touch()
    code, message = refused("up", "--daemon", *node.place())
    assert code == 4
    assert "is not a directory" in message
    node.mount.unlink()
    inside = str(node.home / "file" / "mnt")
    (node.home / "file").touch()
    code, message = refused("up", "--daemon", "--store", str(node.store), "--mount", inside)
    assert code == 4
    assert "is not a directory" in message
    assert not node.store.exists()


def test_a_mountpoint_that_cannot_be_made_leaves_no_store(node: Node) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    node.store.mkdir()
    os.chown(node.store, 65534, 65534)
    node.mount.rmdir()
    up = up_command(node)
    code, message = confined(f"exec setpriv --reuid 65534 --regid 65534 --clear-groups {up}")
    assert code == 5, message
    assert f"no permission to mount at {node.mount}" in message
    assert os.listdir(node.store) == []


def test_a_store_within_a_mount_is_refused(node: Node) -> None:
    node.up()
    inside = node.mount / "models" / "store"
    elsewhere = str(node.home / "elsewhere")
    for flags in (["--daemon"], []):
        code, message = refused("up", *flags, "--store", str(inside), "--mount", elsewhere)
        assert code == 2
        assert f"{inside} lies in a mount of KVFS" in message
    assert not inside.exists()


def test_a_mount_over_its_own_store_is_refused(node: Node) -> None:
    code, message = refused("up", "--daemon", "--store", str(node.store), "--mount", str(node.home))
    assert code == 2
    assert "hide its own store" in message
    inside = str(node.store / "data" / "m")
    code, message = refused("up", "--daemon", "--store", str(node.store), "--mount", inside)
    assert code == 2
    assert "lies in the store" in message


def test_a_second_node_on_a_store_is_refused(node: Node) -> None:
    node.up()
    elsewhere = node.home / "elsewhere"
    code, message = refused("up", "--daemon", "--store", str(node.store), "--mount", str(elsewhere))
    assert code == 4
    assert f"in use by process {node.pid}" in message
    assert "kvfs down" in message
    assert refused("up", "--daemon", *node.place()) == (code, message)


def test_a_second_node_at_a_mountpoint_is_refused(node: Node) -> None:
    node.up()
    other = str(node.home / "other")
    code, message = refused("up", "--daemon", "--store", other, "--mount", str(node.mount))
    assert code == 4
    assert "--mount" in message
    assert sorted(os.listdir(node.mount)) == ["cache", "models"]


def test_a_foreign_directory_as_store_is_refused(node: Node) -> None:
    node.store.mkdir()
    (node.store / "thesis.tex").write_text("x")
    code, message = refused("up", "--daemon", *node.place())
    assert code == 2
    assert "thesis.tex" in message
    assert "--store" in message
    assert os.listdir(node.store) == ["thesis.tex"]


def test_a_damaged_engine_is_rebuilt_or_named(node: Node) -> None:
    node.up()
    (node.mount / "models" / "kept").write_bytes(b"k")
    node.down()
    with open(node.store / "meta" / "data.mdb", "r+b") as file:
        file.write(os.urandom(16384))
    node.up()
    assert (node.mount / "models" / "kept").read_bytes() == b"k"
    node.down()
    for path in (node.store / "meta").iterdir():
        path.write_bytes(os.urandom(16384))
    code, message = refused("up", "--daemon", *node.place())
    assert code == 8
    assert str(node.store / "meta") in message


def test_asking_a_store_without_a_node_names_the_remedy(node: Node) -> None:
    code, message = refused("status", "--store", str(node.store))
    assert code == 7
    assert f"kvfs up --store {node.store}" in message


def confined(script: str) -> tuple[int, str]:
    """Exit code and the message of a foreground `up` that must fail, run by a shell script in a
    mount namespace of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make a mount namespace")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", f"mount --make-rprivate /\n{script}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        # Ports of its own: that another node has the usual ones would be told, too.
        env={**os.environ, "KVFS_S3": "127.0.0.1:0", "KVFS_ADMIN": "127.0.0.1:0"},
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


def up_command(node: Node, *flags: str) -> str:
    code = "from cli.main import main; main()"
    return shlex.join([sys.executable, "-c", code, "up", *node.place(), *flags])


def test_without_the_device_the_message_says_what_to_do(node: Node) -> None:
    code, message = confined(f"mount -t tmpfs none /dev\n{up_command(node)}")
    assert code == 3
    assert "/dev/fuse does not exist" in message
    assert "modprobe fuse" in message
    assert not node.store.exists()


@pytest.mark.parametrize("flags", [[], ["--daemon"]])
def test_a_start_without_the_mount_leaves_nothing_new(node: Node, flags: list[str]) -> None:
    node.mount.rmdir()
    missing = Node(node.mode, node.home / "a" / "b")
    code, _ = confined(f"mount -t tmpfs none /dev\n: >/dev/null\n{up_command(missing, *flags)}")
    assert code == 3
    assert os.listdir(node.home) == []
    node.store.mkdir()
    code, _ = confined(f"mount -t tmpfs none /dev\n: >/dev/null\n{up_command(node, *flags)}")
    assert code == 3
    assert os.listdir(node.home) == ["store"]
    assert os.listdir(node.store) == []


def test_a_start_without_the_mount_leaves_an_old_store_alone(node: Node) -> None:
    node.up()
    (node.mount / "models" / "empty").mkdir()
    node.down()
    code, _ = confined(f"mount -t tmpfs none /dev\n{up_command(node)}")
    assert code == 3
    node.up()
    assert (node.mount / "models" / "empty").is_dir()


def test_without_permission_the_message_says_what_to_do(node: Node) -> None:
    """As root in a container that was given no capabilities."""
    code, message = confined(f"exec setpriv --bounding-set=-all {up_command(node)}")
    assert code == 5, message
    assert str(node.mount) in message
    assert "root" in message


def test_a_mount_made_in_a_container_is_seen_outside_and_again_after_a_kill(node: Node) -> None:
    """As docker-compose.yml has it: the directory above the mountpoint is bound, and shared."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make a mount namespace")
    outside, inside = node.home / "outside", node.home / "inside"
    inside.mkdir()
    outside.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "outside", outside], check=True)
    try:
        subprocess.run(["mount", "--make-shared", outside], check=True)
        up = up_command(node, "--daemon", "--mount", str(inside / "kvfs"))
        script = f"mount --rbind {outside} {inside}\nexec {up}"
        for _ in range(2):
            subprocess.run(
                ["unshare", "--mount", "--propagation", "unchanged", "sh", "-ec", script],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            node.pid = node.status()["pid"]
            assert os.listdir(outside / "kvfs") == ["cache", "models"]
            node.kill()
            with posix.refused(errno.ENOTCONN, errno.ECONNABORTED):
                os.listdir(outside / "kvfs")
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", outside], check=True)


def test_passthrough_is_refused_where_it_cannot_be_had(node: Node) -> None:
    up = up_command(node, "--mode", "passthrough")
    code, message = confined(f"exec setpriv --bounding-set=-all {up}")
    assert code == 2
    assert "CAP_SYS_ADMIN" in message
    assert "--mode auto" in message


def test_a_read_only_store_is_named(node: Node) -> None:
    node.up()
    node.down()
    store = shlex.quote(str(node.store))
    remount = f"mount --bind {store} {store}\nmount -o remount,bind,ro {store}"
    for flags in ([], ["--daemon"]):
        code, message = confined(f"{remount}\n{up_command(node, *flags)}")
        assert code == 5
        assert str(node.store) in message
        assert "read-only filesystem: remount it" in message


def test_a_full_disk_is_named(node: Node) -> None:
    node.store.mkdir()
    mount = f"mount -t tmpfs -o size=8k,mode=0700 none {shlex.quote(str(node.store))}"
    code, message = confined(f"{mount}\n{up_command(node)}")
    assert code == 6
    assert str(node.store) in message


# ---- doctor


def paths(node: Node) -> dict[str, dict[str, object]]:
    done = kvfs("doctor", "--json", "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    return {path["name"]: path for path in json.loads(done.stdout)["paths"]}


EXAMINED = {
    "passthrough",
    "relay",
    "libfuse",
    "direct writes",
    "direct reads",
    "cache drop",
    "watchdog",
    "access lists",
    "readahead",
    "priority",
    "descriptors",
    "reflink",
    "spare data files",
    "copy_file_range",
    "xattrs",
    "O_DIRECT",
    "leases",
    "journal",
    "nfs",
    "s3 workers",
    "s3 TLS",
    "s3 sendfile",
    "s3 hardware CRC",
    "s3 symbolic links",
    "s3 SSE",
    "transport rdma",
    "kernel TLS",
    "system calls",
    "hidden memory",
    "cuda",
    "torch with CUDA",
    "GPUDirect Storage",
    "pinned copies",
    "huge pages",
    "native AIO",
    "NUMA",
    "takeover",
}


def test_doctor_says_what_is_active(node: Node) -> None:
    node.up()
    found = paths(node)
    assert set(found) == EXAMINED
    assert [name for name in MODES if found[name]["active"]] == [MODE]
    for path in found.values():
        assert path["reason"]
        assert path["available"] or path["remedy"], path
    done = kvfs("doctor", "--store", str(node.store))
    assert len(done.stdout.splitlines()) == len(found)


def test_doctor_examines_a_machine_without_a_node(node: Node) -> None:
    found = paths(node)
    assert set(found) == EXAMINED
    assert found["passthrough"]["active"] is None
    assert not node.store.exists()
    assert "no node runs" in kvfs("doctor", "--store", str(node.store)).stdout


# ---- settings


def test_a_typo_in_the_configuration_names_the_nearest_key(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text('capacty = "1GiB"\n')
    code, message = refused("up", "--config", str(file), *node.place())
    assert code == 2
    assert message == f"kvfs: {file}: capacty: no such setting; did you mean capacity?"


def test_config_shows_where_each_setting_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text('capacity = "1GiB"\n')
    done = kvfs("config", "--config", str(file), "--mode", "relay", "--json")
    shown = json.loads(done.stdout)
    assert shown["settings"]["capacity"] == "1GiB"
    assert shown["origins"]["capacity"] == f"{file}: capacity"
    assert shown["origins"]["mode"] == "flag: --mode"
    assert shown["origins"]["suid"] == "default"


def test_what_config_prints_is_a_configuration_file(tmp_path: Path) -> None:
    first = kvfs("config", "--capacity", "70%", "--mount", "/somewhere")
    file = tmp_path / "kvfs.toml"
    file.write_text(first.stdout)
    again = json.loads(kvfs("config", "--config", str(file), "--json").stdout)
    assert again["settings"]["capacity"] == "70%"
    assert again["settings"]["mount"] == "/somewhere"


def test_config_shows_no_password(tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text('engine = "rediss://me:not:to@be-seen@host/3?prefix=p"\n')
    for how in ((), ("--json",)):
        done = kvfs("config", "--config", str(file), *how)
        assert '"rediss://me:xxxxx@host/3?prefix=p"' in done.stdout
        assert "not:to" not in done.stdout
        assert "be-seen" not in done.stdout + done.stderr


# ---- namespaces


def test_what_is_wrong_with_a_namespace_is_said_in_text(node: Node) -> None:
    node.up()
    node.down()
    store = ("--store", str(node.store))
    code, message = refused("namespace", "create", "cache", *store)
    assert (code, message) == (4, "kvfs: there is a namespace 'cache' already")
    code, message = refused("namespace", "create", ".", *store)
    assert (code, message) == (2, "kvfs: '.' cannot be a name")
    done = kvfs("namespace", "set", "cache", *store)
    assert done.returncode == 2
    for option in ("--kind", "--capacity", "--eviction", "--owner", "--mode"):
        assert option in done.stderr.splitlines()[-1]


def test_namespaces_are_made_changed_and_removed_beside_a_running_node(node: Node) -> None:
    node.up()
    store = ("--store", str(node.store))
    assert not (node.mount / "kv").exists()
    done = kvfs("namespace", "create", "kv", "--kind", "cache", "--capacity", "4GiB", *store)
    assert done.returncode == 0, done.stderr
    # The kernel had cached that the name does not exist: it was told.
    assert (node.mount / "kv").is_dir()

    flags = ("--mode", "0700", "--owner", "1234:1235", "--capacity", "1GiB")
    assert kvfs("namespace", "set", "/kv", *flags, *store).returncode == 0
    facts = json.loads(kvfs("namespace", "show", "kv", "--json", *store).stdout)
    assert facts["kind"] == "cache"
    assert facts["capacity_bytes"] == 1 << 30
    assert (facts["uid"], facts["gid"], facts["mode"]) == (1234, 1235, "0700")

    (node.mount / "kv" / "block").write_bytes(b"b")
    code, message = refused("namespace", "remove", "kv", *store)
    assert (code, message) == (4, "kvfs: the namespace kv is not empty")
    (node.mount / "kv" / "block").unlink()
    assert kvfs("namespace", "remove", "kv", *store).returncode == 0
    assert not (node.mount / "kv").exists()


def test_a_namespace_made_by_mkdir_is_durable(node: Node) -> None:
    node.up()
    (node.mount / "mine").mkdir()
    facts = json.loads(
        kvfs("namespace", "show", "mine", "--json", "--store", str(node.store)).stdout
    )
    assert facts["kind"] == "durable"


def test_namespaces_are_listed_without_a_node(node: Node) -> None:
    node.up()
    node.down()
    done = kvfs("namespace", "list", "--store", str(node.store))
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["NAME", "KIND"],
        ["/cache", "cache"],
        ["/models", "durable"],
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("create", "a/b"), 2, "not the name of a namespace"),
        (("create", "cache"), 4, "cache"),
        (("create", "x", "--kind", "volatile"), 2, "durable or cache"),
        (("create", "x", "--eviction", "lfu"), 2, "'lfu' is not built"),
        (("create", "x", "--capacity", "50%"), 2, "is a size"),
        (("create", "x", "--mode", "999"), 2, "octal"),
        (("create", "x", "--owner", "nobody-of-that-name"), 2, "nobody-of-that-name"),
        (("show", "nonesuch"), 3, "nonesuch"),
        (("remove", "nonesuch"), 3, "nonesuch"),
    ],
)
def test_mistakes_with_namespaces(
    node: Node, arguments: tuple[str, ...], code: int, words: str
) -> None:
    node.up()
    node.down()
    assert refused("namespace", *arguments, "--store", str(node.store))[0] == code
    assert words in refused("namespace", *arguments, "--store", str(node.store))[1]


# ---- odds and ends


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (("sttus",), "no such command as 'sttus'; did you mean status?"),
        (("namespace", "crate"), "did you mean create?"),
        (("namespace", "rm"), "there are: create, list, remove, set, show"),
        (("up", "--stor", "/x"), "--store"),
    ],
)
def test_a_mistyped_command_names_what_was_meant(typed: tuple[str, ...], hint: str) -> None:
    done = kvfs(*typed)
    assert done.returncode == 2
    assert hint in done.stderr


def test_the_list_of_commands_says_what_each_does_in_a_whole_sentence() -> None:
    commands = kvfs("--help").stdout.partition("Commands:")[2].partition("Exit codes")[0]
    assert "up              Start a node on a store, mount it and serve it over S3." in commands
    assert "..." not in commands


def test_help_documents_the_exit_codes() -> None:
    done = kvfs("--help")
    assert done.returncode == 0
    assert "Exit codes:" in done.stdout
    for name in ("up", "down", "doctor", "namespace", "fsck"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    done = kvfs("completion", shell)
    assert done.returncode == 0
    assert "_KVFS_COMPLETE" in done.stdout


def test_the_daemon_does_not_hold_its_caller(node: Node) -> None:
    """`kvfs up --daemon | cat` ends: the daemon keeps neither output nor anything else open."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        command = [sys.executable, "-c", "from cli.main import main; main()", "up", "--daemon"]
        subprocess.run([*command, *node.place()], close_fds=False, check=True, timeout=60)
        node.pid = node.status()["pid"]
        os.close(writer)
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
    descriptors = Path(f"/proc/{node.pid}/fd")
    targets = {os.readlink(descriptors / name) for name in ("0", "1", "2")}
    assert targets == {"/dev/null", str(node.store / "run" / "kvfs.log")}


def test_a_store_locked_by_somebody_is_seen_by_down(node: Node) -> None:
    """`down` gives up after its deadline, naming the process, when the node does not go."""
    node.up()
    node.down()
    with open(node.store / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, message = refused("down", *node.place(), "--timeout", "0.2")
    assert code == 7
    assert "has not stopped" in message


# ---- fsck


def test_fsck_finds_nothing_in_a_store_that_was_used(node: Node) -> None:
    node.up()
    (node.mount / "models" / "a").write_bytes(b"a" * 5000)
    (node.mount / "models" / "d").mkdir()
    (node.mount / "cache" / "b").write_bytes(b"b")
    node.down()
    done = kvfs("fsck", "--checksums", "--store", str(node.store))
    assert (done.returncode, done.stdout) == (0, "the store is whole\n")


def test_fsck_reports_and_repairs(node: Node) -> None:
    node.up()
    (node.mount / "cache" / "b").write_bytes(b"b")
    node.down()
    files = DataFiles(node.store / "data")
    os.close(files.create(1 << 48 | 0xFFFFF, 0))
    files.close()
    store = ("--store", str(node.store))
    done = kvfs("fsck", *store)
    assert done.returncode == 1
    assert "--repair" in done.stdout
    done = kvfs("fsck", "--repair", "--json", *store)
    assert done.returncode == 0, done.stdout
    assert all(json.loads(line)["repaired"] for line in done.stdout.splitlines())
    assert kvfs("fsck", *store).stdout == "the store is whole\n"


def test_fsck_leaves_a_running_node_alone(node: Node) -> None:
    node.up()
    code, message = refused("fsck", "--store", str(node.store))
    assert code == 4
    assert f"in use by process {node.pid}" in message


def test_the_node_may_have_as_many_files_open_as_the_system_lets_it(node: Node) -> None:
    node.up()
    limits = Path(f"/proc/{node.pid}/limits").read_text().splitlines()
    soft, hard = next(line for line in limits if line.startswith("Max open files")).split()[3:5]
    assert soft == hard
