"""Hosts on one machine: a network namespace for each, joined by a bridge in a namespace of its own.

Nothing is changed outside these namespaces: the addresses (of the range for tests of networks, RFC
2544) exist in them alone. All is found again by its names, so that one process may make a network
and another one cut it or take it away.

A host's mount namespace is the machine's: a mount that is made there is seen by all. `ip netns
exec` would hide it; `nsenter --net` does not.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

Ways = Literal["both", "in", "out"]
_NAMES: Final = Path("/run/netns")
_NETWORK: Final = "198.18.0"
_CLONE_NEWNET: Final = 0x4000_0000
_COMMAND_S: Final = 30.0
_TOOLS: Final = ("ip", "tc", "nft", "nsenter")


class Lacking(Exception):
    """This machine cannot have such a network; the text says why."""


class Network:
    """Hosts by name: a number, or a word such as `engine`. `tag` tells networks of one machine
    apart."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._hub = f"kvfs-{tag}-hub"

    # ---- what there is

    @property
    def exists(self) -> bool:
        return (_NAMES / self._hub).exists()

    def hosts(self) -> list[str]:
        """Those that were added, in order of their names."""
        start = f"kvfs-{self._tag}-"
        names = os.listdir(_NAMES) if _NAMES.exists() else []
        found = [name.removeprefix(start) for name in names if name.startswith(start)]
        return sorted(set(found) - {"hub"}, key=lambda name: (len(name), name))

    def address(self, host: str) -> str:
        number = int(host) if host.isdecimal() else 250
        assert 0 < number < 255, host
        return f"{_NETWORK}.{number}"

    def inside(self, host: str) -> tuple[str, ...]:
        """What to put before a command that is to run on a host."""
        return "nsenter", f"--net={_NAMES / self._name(host)}", "--"

    def processes(self, host: str) -> list[int]:
        """All that run on a host, those that have ended but are not gone among them."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self._name(host)).split()]

    # ---- made and taken away

    def make(self, hosts: Iterable[str]) -> None:
        """Those of the hosts that are missing. Raises Lacking."""
        lacking = why_not()
        if lacking:
            raise Lacking(lacking)
        if not self.exists:
            _run("ip", "netns", "add", self._hub)
            _batch(
                self._hub,
                "link set dev lo up",
                "link add name bridge type bridge",
                "link set dev bridge up",
            )
        for host in hosts:
            if not (_NAMES / self._name(host)).exists():
                self._add(host)

    def _add(self, host: str) -> None:
        name = self._name(host)
        _run("ip", "netns", "add", name)
        _batch(
            self._hub,
            f"link add name {_port(host)} type veth peer name eth0 netns {name}",
            f"link set dev {_port(host)} master bridge up",
        )
        _batch(
            name,
            "link set dev lo up",
            f"address add {self.address(host)}/24 dev eth0",
            "link set dev eth0 up",
        )

    def remove(self) -> None:
        """The namespaces and their links; processes there must have ended."""
        for host in (*self.hosts(), "hub"):
            if (_NAMES / self._name(host)).exists():
                _run("ip", "netns", "delete", self._name(host))

    # ---- what may happen to it

    def cut(self, host: str, ways: Ways = "both") -> None:
        """Packets to (`in`), from (`out`) a host or both are dropped, and nobody is told."""
        self.heal(host)
        hooks = {"in": ["input"], "out": ["output"], "both": ["input", "output"]}[ways]
        chains = "\n".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; policy drop; "
            f'{"iifname" if hook == "input" else "oifname"} "lo" accept; }}'
            for hook in hooks
        )
        _run(*self.inside(host), "nft", "-f", "-", given=f"table inet cut {{\n{chains}\n}}\n")

    def heal(self, host: str) -> None:
        """The end of `cut`."""
        if not self.is_whole(host):
            _run(*self.inside(host), "nft", "delete", "table", "inet", "cut")

    def is_whole(self, host: str) -> bool:
        return "inet cut" not in _run(*self.inside(host), "nft", "list", "tables")

    def limit(self, host: str, mbit_s: float) -> None:
        """The speed of a host's link, each way; 0: none."""
        for name, device in ((self._name(host), "eth0"), (self._hub, _port(host))):
            command = ("tc", "-n", name, "qdisc")
            if not mbit_s:
                _run(*command, "delete", "dev", device, "root")
                continue
            burst = max(128 << 10, int(mbit_s * 1e6 / 8 / 250))
            speed = ("rate", f"{mbit_s}mbit", "burst", str(burst), "latency", "100ms")
            _run(*command, "replace", "dev", device, "root", "tbf", *speed)

    # ---- this process on a host

    def socket(self, host: str, family: int = socket.AF_INET) -> socket.socket:
        """A TCP socket of a host: it stays there, whoever uses it."""
        made: list[socket.socket] = []

        def make() -> None:
            enter(_NAMES / self._name(host))
            made.append(socket.socket(family, socket.SOCK_STREAM))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]

    def enter(self, host: str) -> None:
        """From now on what this thread connects and listens to is the host's."""
        enter(_NAMES / self._name(host))

    def _name(self, host: str) -> str:
        return f"kvfs-{self._tag}-{host}"


def _port(host: str) -> str:
    """The hub's end of a host's cable."""
    return f"to-{host}"


def why_not() -> str:
    """Why this machine cannot have such a network; empty where it can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    name = f"kvfs-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        try:
            _batch(name, "link add name a type veth peer name b", "link add name c type bridge")
            _run("nsenter", f"--net={_NAMES / name}", "--", "nft", "add", "table", "inet", "t")
        finally:
            _run("ip", "netns", "delete", name)
    except OSError as error:
        return str(error)
    return ""


def enter(namespace: Path) -> None:
    """This thread alone."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, f"setns: {os.strerror(code)}")
    finally:
        os.close(fd)


@contextlib.contextmanager
def network(tag: str, hosts: Sequence[str]) -> Iterator[Network]:
    """One that is gone afterwards. Raises Lacking."""
    made = Network(tag)
    try:
        made.make(hosts)
        yield made
    finally:
        made.remove()


def _batch(namespace: str, *commands: str) -> None:
    _run("ip", "-n", namespace, "-batch", "-", given="".join(f"{each}\n" for each in commands))


def _run(*command: str, given: str = "") -> str:
    """What it prints. Raises OSError with what it says."""
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
