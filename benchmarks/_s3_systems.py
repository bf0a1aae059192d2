"""The servers of objects that are measured: a KVFS node, nginx with sendfile, SeaweedFS, the
gateway of JuiceFS, rclone. Each on a port of its own of the loopback interface, with its data below
its own directory, and else its defaults.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import _wheels
from benchmarks._guard import Guard
from benchmarks._interleave import JUICEFS, NGINX, RCLONE, SEAWEEDFS
from benchmarks._s3_http import Connection, Refused
from benchmarks._s3_signing import REGION, signed_headers
from benchmarks._systems import Kvfs, System, Unavailable, format_juicefs, last_line
from s3api.auth.presign import presign

CACHE: Final = "kvfs"
"""The bucket's namespace is a cache: an object survives a kill when it is answered for, not a power
cut; so do the peers' objects at most."""
DURABLE: Final = "kvfs, durable"
"""An object is on the disk when it is answered for."""

_HOST: Final = "127.0.0.1"
_VALID_S: Final = 86_400
_START_S: Final = 60.0
_STOP_S: Final = 1.0
_CAPACITY: Final = "64GiB"


class Keys(NamedTuple):
    access: str
    secret: str


_PEER_KEYS: Final = Keys("benchmark", "benchmark-secret")


class Server(System):
    """Serves one bucket. Everything but `name` is valid between start and stop."""

    def __init__(self, name: str, base: Path, bucket: str = "bench") -> None:
        super().__init__(name, base)
        self.bucket = bucket
        self.keys = _PEER_KEYS
        self.address = (_HOST, 0)

    @property
    def endpoint(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}"

    def target(self, method: str, key: str = "", query: Iterable[tuple[bytes, bytes]] = ()) -> str:
        """Of a request: path and query, signed. Without a key: of the bucket."""
        path = f"/{self.bucket}/{key}" if key else f"/{self.bucket}"
        url = presign(
            method,
            self.endpoint,
            path.encode(),
            *self.keys,
            region=REGION,
            now=time.time(),
            expires_s=_VALID_S,
            query=query,
        )
        return url.removeprefix(self.endpoint)

    def head(self, method: str, key: str, length: int = 0) -> bytes:
        """Of a request that sends `length` bytes."""
        return self.head_of(method, self.target(method, key), f"Content-Length: {length}")

    def signed_line(self, method: str, key: str, now: float) -> str:
        """A request that is signed in its header: the target, and each header, behind tabs."""
        path = f"/{self.bucket}/{key}"
        headers = signed_headers(self.address, self.keys, method, path, now)
        return "\t".join((path, *(f"{name}: {value}" for name, value in headers.items())))

    def head_of(self, method: str, target: str, *headers: str) -> bytes:
        lines = [f"{method} {target} HTTP/1.1", "Host: {}:{}".format(*self.address), *headers]
        return "\r\n".join([*lines, "", ""]).encode()

    def store(self, keys: Sequence[str], body: Any, times: int = 1) -> None:
        """The objects, `times` the body each."""
        connection = Connection(self.address)
        for key in keys:
            connection.exchange(self.head("PUT", key, times * len(body)), body, times)
        connection.close()

    def client(self) -> Any:
        """boto3's, as its users make it."""
        import boto3  # half a second, which only some rows need
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.keys.access,
            aws_secret_access_key=self.keys.secret,
            config=Config(s3={"addressing_style": "path"}),
        )


class KvfsServer(Server):
    """A node whose bucket is the cache namespace that it comes with."""

    def __init__(self, base: Path) -> None:
        super().__init__(CACHE, base, "cache")
        self._port = _free_port()
        arguments = ("--capacity", _CAPACITY, "--s3", f"{_HOST}:{self._port}", "--admin", "off")
        self._node = Kvfs(CACHE, base, "auto", *arguments)

    def start(self, guard: Guard) -> None:
        self._node.start(guard)
        self.address = (_HOST, self._port)
        lines = self._node.command("s3", "env", "--s3", f"{_HOST}:{self._port}").splitlines()
        told = dict(line.removeprefix("export ").split("=", 1) for line in lines)
        self.keys = Keys(told["AWS_ACCESS_KEY_ID"], told["AWS_SECRET_ACCESS_KEY"])

    def stop(self) -> None:
        self._node.stop()

    def daemon(self) -> int | None:
        return self._node.daemon()


class DurableBucket(Server):
    """Another bucket of a node that was started."""

    def __init__(self, node: KvfsServer) -> None:
        super().__init__(DURABLE, node.root, "durable")
        self._node = node

    def start(self, _guard: Guard) -> None:
        if self._node.daemon() is None:
            raise Unavailable("the node did not start")
        self.address, self.keys = self._node.address, self._node.keys
        _create_bucket(self)

    def daemon(self) -> int | None:
        return self._node.daemon()


class Program(Server):
    """A server that is one command in the foreground."""

    _process: subprocess.Popen[bytes] | None = None

    def start(self, guard: Guard) -> None:
        super().start(guard)
        self.address = (_HOST, _free_port())
        command = self._command()
        with self._log().open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.root,
                env=os.environ | self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        guard.process(self._process.pid)
        self._wait()

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        """So that what it leaves behind lies in its own directory."""
        return {"HOME": str(self.root), "TMPDIR": str(self.root)}

    def _log(self) -> Path:
        return self.root / "log"

    def _is_up(self) -> bool:
        try:
            _create_bucket(self)
        except (OSError, Refused):
            return False
        return True

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(last_line(self._log().read_text(errors="replace")))
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._process.kill()  # some take a quarter of a minute; their data go anyway
        self._process.wait()

    def daemon(self) -> int | None:
        return None if self._process is None else self._process.pid


class Nginx(Program):
    """Files of a directory by sendfile, the native limit of a GET: no keys, no PUT."""

    def __init__(self, base: Path) -> None:
        super().__init__(NGINX, base, "files")

    def _command(self) -> list[str]:
        program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if program is None:
            raise Unavailable("there is no nginx here (Debian: nginx)")
        (self.root / "files").mkdir()
        configuration = self.root / "nginx.conf"
        configuration.write_text(self._configuration())
        return [program, "-p", str(self.root), "-e", "log", "-c", str(configuration)]

    def _configuration(self) -> str:
        user = "user root;" if os.geteuid() == 0 else ""
        temporary = " ".join(
            f"{name}_temp_path {self.root}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        return f"""{user} daemon off; worker_processes auto; pid {self.root}/pid;
            events {{ worker_connections 1024; }}
            http {{
                sendfile on; tcp_nopush on; access_log off; keepalive_requests 1000000000;
                {temporary}
                server {{ listen {_HOST}:{self.address[1]}; root {self.root}; }}
            }}"""

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError):
            Connection(self.address).close()
            return True
        return False

    def target(self, _method: str, key: str = "", query: Iterable[tuple[bytes, bytes]] = ()) -> str:
        assert not query, "plain files have none"
        return f"/{self.bucket}/{key}"

    def store(self, keys: Sequence[str], body: Any, times: int = 1) -> None:
        for key in keys:
            path = self.root / self.bucket / key
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb", buffering=0) as file:
                for _ in range(times):
                    file.write(body)


class SeaweedFs(Program):
    """Master, volume server, filer and S3 in one process."""

    def __init__(self, base: Path) -> None:
        super().__init__(SEAWEEDFS, base)
        self._internal_ports = {part: _free_port() for part in ("master", "volume", "filer", "s3")}

    def start(self, guard: Guard) -> None:
        # It makes these there whatever TMPDIR says, and forgets them where it is killed.
        for part, port in self._internal_ports.items():
            guard.file(Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock"))
        super().start(guard)

    def _command(self) -> list[str]:
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        credentials = {"accessKey": self.keys.access, "secretKey": self.keys.secret}
        identity = {"name": "bench", "credentials": [credentials], "actions": actions}
        (self.root / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self.root / "data").mkdir()
        ports = {f"{part}.port": _free_port() for part in ("master", "volume", "filer")}
        ports |= {f"{part}.port.grpc": port for part, port in self._internal_ports.items()}
        return [
            *(_wheels.command("weed"), f"-logdir={self.root}", "server", f"-ip={_HOST}"),
            *(f"-dir={self.root}/data", "-master.telemetry=false"),
            # Volumes that fit a scratch directory; their number is no limit then.
            *("-master.volumeSizeLimitMB=1024", "-volume.max=100", "-volume.preStopSeconds=0"),
            *(f"-{name}={port}" for name, port in ports.items()),
            *("-s3", f"-s3.port={self.address[1]}", f"-s3.localSocket={self.root}/s3.sock"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={self.root}/s3.json"),
        ]


class JuiceFsGateway(Program):
    """Metadata in SQLite, objects in files."""

    def __init__(self, base: Path) -> None:
        super().__init__(JUICEFS, base)

    def _command(self) -> list[str]:
        program, url = _wheels.command("juicefs"), f"sqlite3://{self.root / 'meta'}"
        format_juicefs(program, self.root, url)
        return [
            *(program, "gateway", "--multi-buckets", "--no-banner", "--no-usage-report"),
            *("--backup-meta", "0", "--cache-dir", str(self.root / "cache")),
            *(url, "{}:{}".format(*self.address)),
        ]

    def _environment(self) -> dict[str, str]:
        keys = {"MINIO_ROOT_USER": self.keys.access, "MINIO_ROOT_PASSWORD": self.keys.secret}
        return super()._environment() | keys


class RcloneServer(Program):
    """Files of a directory."""

    def __init__(self, base: Path) -> None:
        super().__init__(RCLONE, base)

    def _command(self) -> list[str]:
        program, data = _wheels.command("rclone"), self.root / "data"
        data.mkdir()
        return [
            *(program, "serve", "s3", "--config", str(self.root / "none")),
            *("--cache-dir", str(self.root / "cache"), "--auth-key", ",".join(self.keys)),
            *("--addr", "{}:{}".format(*self.address), str(data)),
        ]


def _create_bucket(server: Server) -> None:
    connection = Connection(server.address)
    try:
        connection.exchange(server.head("PUT", ""))
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
