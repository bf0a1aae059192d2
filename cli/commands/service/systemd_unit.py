"""The systemd unit of a node: its text, from the settings.

It uses nothing that gives the service a mount namespace of its own (ProtectSystem=, PrivateTmp=,
ProtectKernelTunables= and the like): systemd passes mounts on into such a namespace and none out of
it, so the node's mount would appear to the node alone. Capabilities, system calls, devices,
namespaces and address families are limited instead. Nor does it use RestrictSUIDSGID=: Ganesha
would be refused what NFS clients ask for, a directory whose files get its group (chmod g+s).
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from gateway import privileges
from gateway.node_start import HANDED_OVER
from kvfs.base.config import SYSTEM_FILE, Config
from kvfs.base.errors import Invalid

NAME: Final = "kvfs.service"
HEADER: Final = "# Written by `kvfs setup`. Changes belong into a drop-in: systemctl edit kvfs\n"
TAKEOVER_S: Final = 60
"""The setting of a service that nobody gave another one: a package is replaced, and systemd starts
the next daemon, in less."""
MOST_DESCRIPTORS: Final = 1 << 20
"""Each file that programs have open on the mount is one."""

_CALLS: Final = "@system-service @mount open_by_handle_at pidfd_getfd seccomp"
"""The last three: locks of views, the holder of a mount's device, names that NFS may not have."""


def _kill_mode(config: Config) -> Iterator[str]:
    yield "# The node ends its own processes in order; a signal to all would cut requests off."
    if config.takeover_s:
        yield "# The holder of the mount outlives it (takeover_s), and waits for its next start."
        yield "KillMode=process"
    else:
        yield "KillMode=mixed"


def text(config: Config, program: Path, config_file: Path) -> str:
    """Returns the unit of a node that `program` (`kvfs`) runs with the settings in a file. Raises
    Invalid: a path would be lines of the unit."""
    return HEADER + "\n".join(_lines(config, program, config_file)) + "\n"


def _lines(config: Config, program: Path, config_file: Path) -> Iterator[str]:
    # Without the option the file may be missing: all settings have defaults.
    named = "" if config_file == SYSTEM_FILE else f" --config {_argument(config_file)}"
    yield from (
        "[Unit]",
        "Description=KVFS node",
        "Wants=network-online.target",
        "After=network-online.target",
        f"RequiresMountsFor={' '.join(_quoted(each) for each in _places(config))}",
        "",
        "[Service]",
        "Type=notify",
        f"ExecStart={_argument(program)} up{named}",
        "Restart=on-failure",
        "RestartSec=2",
        "# `kvfs restart`: the next one goes on with its mount.",
        f"RestartForceExitStatus={HANDED_OVER}",
        f"SuccessExitStatus={HANDED_OVER}",
        "# The event loop says each 10 s that it runs; while the node waits for its cluster's",
        "# engine, the deadline of the start moves with it.",
        "WatchdogSec=120",
        "TimeoutStopSec=90",
        *_kill_mode(config),
        "",
        "# Programs wait for the node: it goes first, and dies last when memory is short. Its nice",
        "# value is the setting `priority`.",
        "CPUWeight=500",
        "IOWeight=500",
        "OOMScoreAdjust=-900",
        f"LimitNOFILE={MOST_DESCRIPTORS}",
        "# A dump would hold secrets.",
        "LimitCORE=0",
        "",
        "# Nothing that gives the service a mount namespace (ProtectSystem=, PrivateTmp=, ...):",
        "# its mount would appear to nobody else.",
    )
    for reason, names in privileges.KEPT.items():
        yield f"# {reason}"
        yield f"CapabilityBoundingSet={' '.join(f'CAP_{name}' for name in names)}"
    yield from (
        "NoNewPrivileges=yes",
        f"SystemCallFilter={_CALLS}",
        "SystemCallErrorNumber=EPERM",
        "SystemCallArchitectures=native",
        "DevicePolicy=closed",
        "DeviceAllow=/dev/fuse rw",
        *(["DeviceAllow=char-infiniband_verbs rw"] if config.transport == "rdma" else ()),
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "# mnt: the jail of NFS",
        "RestrictNamespaces=mnt",
        "RestrictRealtime=yes",
        "LockPersonality=yes",
        "ProtectHostname=yes",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    )


def _places(config: Config) -> Iterable[Path]:
    """Returns the directories whose disks are to be mounted first. Not the mountpoint: the unit
    would depend on its own mount."""
    lent = (Path(place.root) for place in (*config.tier, *config.shared))
    return dict.fromkeys((config.store, config.mount.parent, *lent))


def _argument(path: Path) -> str:
    """Returns a word of a command, in which systemd looks for variables."""
    return _quoted(path).replace("$", "$$")


def _quoted(path: Path) -> str:
    if not str(path).isprintable():
        raise Invalid(f"{str(path)!a}: a service's paths are printable characters")
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if not set(escaped) & set(" '\"") else f'"{escaped}"'


if __name__ == "__main__":
    # The unit of a package: `python -m cli.commands.service.systemd_unit PROGRAM`.
    _config = Config(store=Path("/var/lib/kvfs"), takeover_s=TAKEOVER_S)
    sys.stdout.write(text(_config, Path(sys.argv[1]), SYSTEM_FILE))
