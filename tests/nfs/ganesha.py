"""NFS-Ganesha over directories, for tests: on a port of its own, in a mount namespace of its own.

Version 3 wants a portmapper to register with, and Ganesha ends where there is none. In its mount
namespace /run is a directory of the test's, with a socket that answers each registration with
"done": nothing of the machine's is asked or told, and callers name the ports.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.nfs.mount import MountClient
from tests.nfs.nlm import Locker
from tests.nfs.rpc import ROOT, AuthSys, Connection, framed
from tests.nfs.v3 import Client
from tests.nfs.xdr import Packer, Unpacker
from tests.ports import free_port

SERVER: Final = "ganesha.nfsd"
_APART: Final = ("unshare", "--mount", "--propagation", "slave")
_START_S: Final = 60.0
_READY: Final = "NFS SERVER INITIALIZED"


def why_not() -> str:
    """Why this machine cannot have such a server; empty where it can."""
    if os.getuid() != 0:
        return "NFS-Ganesha needs root"
    missing = [name for name in (SERVER, "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages nfs-ganesha, nfs-ganesha-vfs)"
    tried = subprocess.run(
        ("unshare", "--mount", "true"), capture_output=True, text=True, timeout=30, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


@dataclass
class Ganesha:
    """A server that runs; `exports` are the names of directories, as clients mount them."""

    root: Path
    exports: dict[str, Path]
    port: int
    mount_port: int
    lock_port: int
    process: "subprocess.Popen[bytes]"
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def connection(self, credentials: AuthSys | None = ROOT) -> Connection:
        """Closed with the server."""
        return self._open.enter_context(Connection("127.0.0.1", self.port, credentials))

    def v3(self, credentials: AuthSys | None = ROOT) -> Client:
        return Client(self.connection(credentials))

    def mounts(self) -> MountClient:
        return MountClient(self._open.enter_context(Connection("127.0.0.1", self.mount_port)))

    def locker(self, host: str, process: int) -> Locker:
        """An owner of locks of version 3."""
        connection = self._open.enter_context(Connection("127.0.0.1", self.lock_port))
        return Locker(connection, host, process)

    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")

    def end(self) -> None:
        self._open.close()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(root: Path, exports: dict[str, Path], more: str = "") -> Iterator[Ganesha]:
    """`root`: an empty directory for all that is the server's; `more`: blocks of configuration."""
    port, mount_port, lock_port = ports = [free_port() for _ in range(3)]
    for name in ("run", "recovery"):
        (root / name).mkdir()
    (root / "conf").write_text(configuration(root, exports, ports) + more)
    with _registrar(root / "run" / "rpcbind.sock"):
        command = 'mount --bind "$1/run" /run && exec "$2" -F -f "$1/conf" -L "$1/log" -p "$1/pid"'
        process = subprocess.Popen(
            (*_APART, "sh", "-c", command, "sh", str(root), shutil.which(SERVER) or SERVER),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        server = Ganesha(root, exports, port, mount_port, lock_port, process)
        try:
            _await(server, lambda: _READY in server.log())
            yield server
        finally:
            server.end()


def configuration(root: Path, exports: dict[str, Path], ports: Sequence[int]) -> str:
    """Without a grace period, and with nothing cached that the directory itself would tell.

    `ports`: of NFS, MOUNT and the lock manager.
    """
    blocks = [
        f"""NFS_CORE_PARAM {{
    Protocols = 3, 4; NFS_Port = {ports[0]}; MNT_Port = {ports[1]}; NLM_Port = {ports[2]};
    Bind_addr = 127.0.0.1; Enable_UDP = false; Enable_RQUOTA = false; mount_path_pseudo = true;
}}
NFSv4 {{
    Graceless = true; Minor_Versions = 0, 1; Only_Numeric_Owners = true;
    RecoveryBackend = fs; RecoveryRoot = {root / "recovery"};
}}
EXPORT_DEFAULTS {{ Attr_Expiration_Time = 0; }}
MDCACHE {{ Dir_Chunk = 0; }}
"""
    ]
    blocks += [
        f"""EXPORT {{
    Export_Id = {number}; Path = {path}; Pseudo = /{name}; Protocols = 3, 4;
    Access_Type = RW; Squash = None; SecType = sys; FSAL {{ Name = VFS; }}
}}
"""
        for number, (name, path) in enumerate(exports.items(), start=1)
    ]
    return "".join(blocks)


def _await(server: Ganesha, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        if (server.root / "log").exists() and ready():
            return
        if server.process.poll() is not None or time.monotonic() > deadline:
            said = server.log() if (server.root / "log").exists() else ""
            raise RuntimeError(f"{SERVER} did not start:\n{said[-4000:]}")
        time.sleep(0.02)


# ---- what registers ports


@contextlib.contextmanager
def _registrar(path: Path) -> Iterator[None]:
    """A portmapper that says yes to everything, on a local socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # A path may be longer than a socket's address.
    with _working_directory(path.parent):
        listener.bind(path.name)
    listener.listen()
    thread = threading.Thread(target=_register, args=(listener,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@contextlib.contextmanager
def _working_directory(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def _register(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            caller, _ = listener.accept()
            threading.Thread(target=_say_yes, args=(caller,), daemon=True).start()


def _say_yes(caller: socket.socket) -> None:
    with caller, caller.makefile("rb") as calls, contextlib.suppress(OSError):
        while head := calls.read(4):
            call = Unpacker(calls.read(int.from_bytes(head, "big") & 0x7FFF_FFFF))
            accepted = Packer().uint(call.uint()).uint(1).uint(0).uint(0).uint(0).uint(0)
            caller.sendall(framed(bytes(accepted.boolean(True))))
