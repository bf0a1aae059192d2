"""The S3 API and the admin port beside a node: a companion of its mount
(`gateway.service.Companion`).

| step of the start | obstacle |
|---|---|
| 1 certificate and access log checked | an error that names the file |
| 2 ports bound | Busy: the port is taken |
| 3 first user made, if there is none | |
| 4 workers started, ready | Unavailable |
| 5 admin port served | |

It imports nothing that only the workers need to answer requests: the daemon stays small.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from kvfs.base.config import ADMIN_USUAL, S3_USUAL, Address, Config, Listening
from kvfs.base.errors import Busy, Invalid
from kvfs.datastore.kernel.disk_encryption import encrypted_by
from kvfs.http.api import expires_s, serve, server_context
from kvfs.meta.blocking_engine import FromThread
from kvfs.node import Node
from kvfs.node.status import status_of
from s3api.auth.credentials import Credentials
from s3api.server import listener_passing
from s3api.server.admin_port import LIMITS, Admin
from s3api.server.counters import Tally
from s3api.server.listener_passing import Listeners
from s3api.server.supervisor import Supervisor, close_all, open_listeners
from s3api.server.users import Users
from s3api.server.worker_messages import WorkerPlan

if TYPE_CHECKING:
    from kvfs.meta.engine import Engine

_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""The addresses at which a server that listens everywhere is found from this machine."""
log = logging.getLogger(__name__)


def is_wanted(config: Config) -> bool:
    """Returns whether the settings ask for S3 or for the admin port."""
    return config.s3 != "off" or isinstance(config.admin, Address)


class _Place(msgspec.Struct):
    socket: str
    """The path of a socket where the process listens that is to have the S3 port."""


class S3Serving:
    """The S3 door of one node. A companion: call it."""

    def __init__(self, config: Config, inherited: list[socket.socket] | None = None) -> None:
        """`inherited`: listeners that a node before has passed on."""
        self._config = config
        self._inherited = inherited
        self._listeners: Listeners = []
        self._supervisor: Supervisor | None = None
        self._endpoint = self._admin_endpoint = ""
        self._encryption = ""
        self.first: Credentials | None = None
        """The key pair that this start made, to be shown once; None: there were users already."""

    async def __call__(self, node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        """Raises Busy, Invalid, Unavailable, OSError."""
        config = self._config
        async with trio.open_nursery() as nursery:
            tally: Callable[[], Awaitable[Tally]] | None = None
            if config.s3 != "off":
                self._check_files()
                self._encryption = _encryption(config)
                listeners = self._listeners = await self._open_listeners()
                scheme = "https" if config.s3_certificate else "http"
                self._endpoint = f"{scheme}://{_reached(listeners)}"
                try:
                    await self._make_first_user(node.store.root, node.engine)
                except BaseException:
                    close_all(listeners)
                    raise
                self._supervisor = Supervisor(self._plan, listeners)
                tally = self._supervisor.tally
                node.reports["s3"] = self._report
                node.control.handlers["replace_s3_workers"] = self._replace_workers
                node.control.handlers[listener_passing.METHOD] = self._pass_listeners
                await nursery.start(self._supervisor.run)
            if (where := _admin_of(config)) is not None:
                listeners = await _listeners(where, ADMIN_USUAL, 1)
                self._admin_endpoint = f"http://{_reached(listeners)}"
                node.reports["admin"] = self._report_admin
                handler = Admin(partial(status_of, node), tally).handle
                await nursery.start(serve, listeners[0], handler, LIMITS)
            task_status.started()

    async def _open_listeners(self) -> Listeners:
        """Raises Busy, Invalid."""
        config = self._config
        if self._inherited is not None:
            return listener_passing.shared_out(self._inherited, config.s3_workers)
        return await _listeners(config.s3, S3_USUAL, config.s3_workers)

    async def _pass_listeners(self, params: dict[str, Any]) -> bool:
        path = msgspec.convert(params, _Place).socket
        passed = partial(listener_passing.pass_on, path, str(self._config.s3), self._listeners)
        await trio.to_thread.run_sync(passed)
        return True

    def _check_files(self) -> None:
        """Finds and names faults in files that would make workers fail. Raises Invalid, OSError."""
        config = self._config
        if config.s3_certificate:
            try:
                server_context(Path(config.s3_certificate), Path(config.s3_private_key))
            except OSError as error:
                names = f"{config.s3_certificate} and {config.s3_private_key}"
                raise Invalid(f"no certificate with its key: {names}: {error}") from error
        if config.s3_access_log:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            os.close(os.open(config.s3_access_log, flags, 0o640))

    async def _make_first_user(self, root: Path, engine: "Engine") -> None:
        def make() -> Credentials | None:
            return Users(root, FromThread(engine)).first_start()

        self.first = await trio.to_thread.run_sync(make)

    def _plan(self, fds: list[int]) -> WorkerPlan:
        config = self._config
        return WorkerPlan(
            supervisor=os.getpid(),
            store=str(config.store),
            listeners=fds,
            domains=list(config.s3_domains),
            region=config.s3_region,
            version_2=config.s3_signature_v2,
            object_ownership=config.s3_object_ownership,
            bucket_mode=int(config.s3_bucket_mode, 8),
            encrypted=bool(self._encryption),
            certificate=config.s3_certificate,
            private_key=config.s3_private_key,
            access_log=config.s3_access_log,
            lifecycle_day_s=config.s3_lifecycle_day_s,
            log_delivery_s=config.s3_log_delivery_s,
            log_level=config.log_level,
        )

    async def _replace_workers(self, _params: dict[str, Any]) -> None:
        assert self._supervisor is not None
        await self._supervisor.replace_all()

    async def _report(self) -> dict[str, Any]:
        supervisor = self._supervisor
        assert supervisor is not None
        tally = await supervisor.tally()
        pids = supervisor.pids
        return {
            "endpoint": self._endpoint,
            "region": self._config.s3_region,
            "tls": bool(self._config.s3_certificate),
            "certificate_expires_s": _expires_s(self._config.s3_certificate),
            "encryption": self._encryption,
            "workers": pids,
            "wanted_workers": supervisor.wanted,
            "answering_workers": supervisor.answering,
            "restarts": supervisor.restarts,
            "rss_bytes": sum(map(_resident_bytes, pids)),
            "connections": tally.open_connections,
            "requests": tally.responses,
            "sent_bytes": tally.sent_bytes,
            "received_bytes": tally.received_bytes,
            "misses": tally.misses,
        }

    async def _report_admin(self) -> dict[str, Any]:
        return {"endpoint": self._admin_endpoint}


def _expires_s(certificate: str) -> float | None:
    """Returns when the certificate in a file ends; None: there is none that can be read."""
    try:
        return expires_s(Path(certificate)) if certificate else None
    except (OSError, ValueError):
        return None


def _encryption(config: Config) -> str:
    """Returns how everything that the store lies on is encrypted; empty: not all of it is, as far
    as is known. Other nodes and the cold tier cannot be asked here. Raises OSError."""
    if config.encrypted_storage != "auto":
        return "encrypted_storage = yes" if config.encrypted_storage == "yes" else ""
    if config.engine or config.cold:
        return ""
    roots = [str(config.store), *(place.root for place in (*config.tier, *config.shared))]
    found = [encrypted_by(root) for root in roots]
    return ", ".join(sorted(set(found))) if all(found) else ""


def _admin_of(config: Config) -> Listening | None:
    """Returns the address of the admin port; None: it is off."""
    if config.admin == "off" or (config.admin == "auto" and config.s3 == "off"):
        return None
    return config.admin


async def _listeners(where: Listening, usual: Address, count: int) -> list[list[socket.socket]]:
    """Returns listeners. `auto`: at the usual address, or at a free port if that is taken."""
    if isinstance(where, Address):
        return await open_listeners(where, count)
    try:
        return await open_listeners(usual, count, patient=False)
    except Busy:
        log.warning("%s is taken: any free port is used", usual)
        return await open_listeners(Address(usual.host, 0), count)


def _reached(listeners: list[list[socket.socket]]) -> Address:
    host, port, *_ = listeners[0][0].getsockname()
    return Address(_ANYWHERE.get(host, host), port)


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
