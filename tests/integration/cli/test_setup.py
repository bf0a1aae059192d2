"""`kvfs setup` makes a service that systemd accepts, once, and leaves alone what others wrote."""

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cli.mount_helper import run as mount_kvfs
from kvfs.base.config import load
from tests.integration.harness import ROOT, Node, best_mode, is_mounted, kvfs

EXPOSURE = 62
"""The most of 100 that `systemd-analyze security` may say."""


def set_up(root: Path, *flags: str, code: int = 0) -> str:
    done = kvfs("setup", "--root", str(root), "--config", "/etc/kvfs.toml", *flags)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_service_is_written_once(tmp_path: Path) -> None:
    flags = (
        "--store",
        "/srv/a b",
        "--capacity",
        "10GiB",
        "--engine",
        "redis+sentinel://:secret@h,[::1]/n",
    )
    shown = set_up(tmp_path, *flags, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    set_up(tmp_path, *flags)
    files = [each for each in tmp_path.rglob("*") if not each.is_dir()]
    assert {str(each.relative_to(tmp_path)) for each in files} == {
        *("etc/kvfs.toml", "etc/systemd/system/kvfs.service", "sbin/mount.kvfs")
    }
    assert (tmp_path / "etc/kvfs.toml").stat().st_mode & 0o077 == 0  # it has a password
    for each in files:
        assert str(each) in shown
        if not each.is_symlink():
            text = each.read_text().replace(":secret@", ":xxxxx@")
            assert all(f"    {line}\n" in shown for line in text.splitlines())
    assert "secret@" not in shown
    settings = kvfs("config", "--config", str(tmp_path / "etc/kvfs.toml"), "--capacity", "1GiB")
    assert 'store = "/srv/a b"' in settings.stdout
    times = [each.lstat().st_mtime_ns for each in files]
    assert "wrote" not in set_up(tmp_path, *flags)
    assert [each.lstat().st_mtime_ns for each in files] == times
    assert "--capacity" in set_up(tmp_path, "--capacity", "11GiB", code=4)


def test_the_holder_of_a_mount_outlives_the_service(tmp_path: Path) -> None:
    set_up(tmp_path)
    config, _ = load(file=tmp_path / "etc/kvfs.toml", environ={})
    assert config.takeover_s > 0
    unit = (tmp_path / "etc/systemd/system/kvfs.service").read_text()
    assert "\nKillMode=process\n" in unit  # else systemd kills it with a node that died
    assert "\nRestartForceExitStatus=75\n" in unit  # of a node that hands its mount over


@pytest.mark.parametrize("flags", [("--takeover-s", "0"), ("--mode", "libfuse")])
def test_a_mount_may_end_with_the_service(tmp_path: Path, flags: tuple[str, str]) -> None:
    set_up(tmp_path, *flags)
    config, _ = load(file=tmp_path / "etc/kvfs.toml", environ={})
    assert config.takeover_s == 0
    unit = (tmp_path / "etc/systemd/system/kvfs.service").read_text()
    assert "\nKillMode=mixed\n" in unit


def test_a_unit_of_others_stays(tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/kvfs.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    assert str(unit) in set_up(tmp_path, code=4)
    assert unit.read_text() == "[Service]\nExecStart=/bin/true\n"
    assert not (tmp_path / "etc/kvfs.toml").exists()


def test_a_mount_helper_of_others_stays(tmp_path: Path) -> None:
    helper = tmp_path / "sbin/mount.kvfs"
    helper.parent.mkdir()
    helper.write_text("of others")
    assert str(helper) in set_up(tmp_path, code=4)
    assert helper.read_text() == "of others"
    assert not (tmp_path / "etc").exists()
    helper.unlink()
    helper.symlink_to("/elsewhere/bin/mount.kvfs")  # an older installation's
    set_up(tmp_path)
    assert os.readlink(helper) != "/elsewhere/bin/mount.kvfs"


def test_a_root_s_links_lead_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "host").mkdir()
    (tmp_path / "root/sbin").symlink_to(tmp_path / "host")
    assert str(tmp_path / "host") in set_up(tmp_path / "root", code=2)
    assert list((tmp_path / "host").iterdir()) == []
    assert not (tmp_path / "root/etc").exists()


def test_names_in_all_letters(tmp_path: Path) -> None:
    store = '/srv/größe 🗄 $HOME "50%" \\'
    set_up(tmp_path, "--store", store)
    config, _ = load(file=tmp_path / "etc/kvfs.toml", environ={})
    assert str(config.store) == store
    shown = kvfs("config", "--config", str(tmp_path / "etc/kvfs.toml"))
    assert tomllib.loads(shown.stdout)["store"] == store
    unit = (tmp_path / "etc/systemd/system/kvfs.service").read_text()
    # systemd looks for variables in commands alone.
    assert r'RequiresMountsFor="/srv/größe 🗄 $HOME \"50%%\" \\" /mnt' in unit
    odd = tmp_path / "odd"
    odd.mkdir()
    set_up(odd, "--store", "/srv/a\nExecStartPre=/bin/true", code=2)
    flags = ("--root", str(odd), "--config", "/etc/kvfs.toml", "--s3-access-log", "/a\udcff")
    done = kvfs("setup", *flags, inside=("env",))
    assert (done.returncode, "file can have" in done.stderr) == (2, True), done.stderr
    assert list(odd.iterdir()) == []


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    set_up(
        tmp_path,
        "--tier",
        "ssd=/srv/50% $HOME:1GiB",
        "--transport",
        "rdma",
        "--engine",
        "redis://h",
    )
    unit = str(tmp_path / "etc/systemd/system/kvfs.service")
    found = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", unit]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    namespaced = re.compile(
        "^(Private(?!Network)|Protect(?!Hostname|Clock)|ReadOnly|Inaccess)", re.MULTILINE
    )
    assert not namespaced.search(Path(unit).read_text())  # the mount would be the service's alone
    assert "RestrictSUIDSGID=" not in Path(unit).read_text()  # chmod g+s of an NFS client fails


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        place = ("--store", str(tmp_path / "store"), "--config", str(tmp_path / "kvfs.toml"))
        done = kvfs("setup", *place, "--s3", address)
    assert done.returncode == 7
    assert f"{address}: something listens there" in done.stderr
    assert not (tmp_path / "kvfs.toml").exists()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("rw,_netdev,nofail,x-systemd.automount,capacity=1GiB,s3-workers=1,nosuid", 0, ""),
        ("ro", 1, "mount --bind -o ro"),
        ("rw,nodev,noexec,nosuid,user", 1, "add exec after user"),
        ("rw,nodev,nosuid,user", 0, ""),
        ("capcity=1GiB", 1, "did you mean capacity?"),
        ("capacity", 1, "write capacity=VALUE"),
        ("capacity=much", 1, "--capacity"),
        ("store=/x", 1, "before the options"),
        ("remount", 1, "unmount"),
    ],
)
def test_options_of_mount(
    options: str, code: int, said: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert mount_kvfs([str(tmp_path), str(tmp_path / "mnt"), "-f", "-o", options]) == code
    assert said in capfd.readouterr().err


def test_a_password_in_the_options_is_in_no_list_of_processes() -> None:
    program = (
        "from cli import mount_helper as helper;"
        "helper.run = lambda: print(open('/proc/self/cmdline').read()); helper.main()"
    )
    options = "rw,engine=redis://:of-the-engine@h/0,s3=off"
    told = subprocess.run(
        [sys.executable, "-c", program, "/store", "/mnt", "-o", options],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert options.replace("of-the-engine", "x" * len("of-the-engine")) in told


def test_mount_and_fstab(tmp_path: Path) -> None:
    """In a mount namespace of its own, where /sbin has the helper."""
    made = Node.make(best_mode())
    try:
        (tmp_path / "sbin").mkdir()
        set_up(tmp_path)
        (tmp_path / "fstab").write_text(
            f"{made.store} {made.mount} kvfs mode={made.mode},s3=off,_netdev,nofail,x-x.y=1 0 0\n"
        )
        script = f"""
            set -eu
            mount -t overlay overlay -o lowerdir={tmp_path}/sbin:/usr/sbin /usr/sbin
            export KVFS_S3=off
            mount -T {tmp_path}/fstab {made.mount}
            echo one > {made.mount}/models/a
            mount -T {tmp_path}/fstab -a
            umount {made.mount}
            if test -e {made.mount}/models; then exit 90; fi
            mount -t kvfs {made.store} {made.mount} -o rw
            cat {made.mount}/models/a
            if mount -t kvfs {made.store} {tmp_path} 2> {tmp_path}/said; then exit 91; fi
            umount {made.mount}
        """
        done = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "bash", "-c", script],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "one" in done.stdout
        assert f"mounted at {made.mount}" in (tmp_path / "said").read_text()
        assert not is_mounted(made.mount)
        done = kvfs("down", *made.place())
        assert done.stdout == f"stopped the node on {made.store}\n"
    finally:
        made.remove()
