"""The admin port: health for probes, metrics for Prometheus. No secrets, no way to change anything.

/health/live   the process answers
/health/ready  the engine can be read, a node of a cluster holds its lease and learns what others
               commit, what is committed reaches the disk, the mount answers, and so do the workers;
               what lacks of NFS, and that S3's certificate ends soon, stands in the answer, but
               whoever balances load of S3 leaves the node in meanwhile
/health/read   the same, but for the engine: while it is away, files are read as they were
/health/nfs    NFS is served; exports that are not stand in the answer
/metrics       Prometheus' text format
"""

import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from kvfs.base.errors import KvfsError
from kvfs.http.api import Head, Limits, RequestBody, Response
from s3api.server import metrics
from s3api.server.counters import Tally

READY_S: Final = 3.0
"""Deadline for each part that is asked for."""
LIMITS: Final = Limits(body_bytes=0, connections=64, header_count=50, stop_s=1.0)
_SOON_S: Final = 30 * 86400.0
"""Time before a certificate's end from which on it is told."""
_LOOKS: Final = trio.CapacityLimiter(4)
"""Threads that check mounts; one that hangs in a mount takes none of the node's."""
_TEXT: Final = [(b"Content-Type", b"text/plain; charset=utf-8")]
_THERE: Final = b"there are /health/live, /health/ready, /health/read, /health/nfs and /metrics\n"
log = logging.getLogger(__name__)


class Admin:
    """Answers the requests of the admin port."""

    def __init__(
        self,
        status: Callable[[], Awaitable[dict[str, Any]]],
        tally: Callable[[], Awaitable[Tally]] | None,
    ) -> None:
        """`status` is the node's, `tally` the workers' (None: S3 is off)."""
        self._status = status
        self._tally = tally

    async def handle(self, head: Head, _body: RequestBody) -> Response:
        """Returns the answer to one request."""
        path = head.target.partition(b"?")[0]
        if head.method not in ("GET", "HEAD"):
            return Response(405, [*_TEXT, (b"Allow", b"GET, HEAD")], b"read only\n")
        if path == b"/health/live":
            return Response(200, _TEXT, b"alive\n")
        if path == b"/health/ready":
            return await self._health(_ready)
        if path == b"/health/read":
            return await self._health(_readable)
        if path == b"/health/nfs":
            return await self._health(_nfs)
        if path == b"/metrics":
            return await self._metrics()
        return Response(404, _TEXT, _THERE)

    async def _health(self, answer: Callable[[dict[str, Any]], Awaitable[Response]]) -> Response:
        try:
            with trio.fail_after(READY_S):
                status = await self._status()
        except (trio.TooSlowError, KvfsError) as error:
            return Response(
                503, _TEXT, f"not ready: the engine cannot be read ({error})\n".encode()
            )
        return await answer(status)

    async def _metrics(self) -> Response:
        status = await self._status()
        tally = None if self._tally is None else await self._tally()
        page = await trio.to_thread.run_sync(metrics.exposition, status, tally)
        return Response(200, [(b"Content-Type", metrics.CONTENT_TYPE)], page)


async def _ready(status: dict[str, Any]) -> Response:
    if lacking := await _lacking(status):
        return Response(503, _TEXT, f"not ready: {lacking}\n".encode())
    ends = certificate_ends(status.get("s3"))
    told = [*([f"S3: {ends}"] if ends else []), *_lacking_of_nfs(status.get("nfs"))]
    return Response(200, _TEXT, "\n".join(["ready", *told, ""]).encode())


def certificate_ends(s3: dict[str, Any] | None) -> str:
    """Returns that S3's certificate ends soon, or has ended; empty where it does not."""
    expires_s = (s3 or {}).get("certificate_expires_s")
    if expires_s is None or (left_s := expires_s - time.time()) > _SOON_S:
        return ""
    if left_s <= 0:
        return "the certificate has expired"
    return f"the certificate expires in {left_s / 86400:.0f} days"


async def _readable(status: dict[str, Any]) -> Response:
    if lacking := await _lacking_to_read(status):
        return Response(503, _TEXT, f"not readable: {lacking}\n".encode())
    away = _away(status)
    return Response(200, _TEXT, f"read only: {away}\n".encode() if away else b"readable\n")


async def _nfs(status: dict[str, Any]) -> Response:
    nfs = status.get("nfs")
    if nfs is None:
        return Response(404, _TEXT, b"NFS is off\n")
    told = "\n".join([*(["served"] if nfs["is_serving"] else []), *_lacking_of_nfs(nfs), ""])
    return Response(200 if nfs["is_serving"] else 503, _TEXT, told.encode())


async def _lacking(status: dict[str, Any]) -> str:
    """Returns the fault that makes the node not ready; empty where there is none."""
    if (failure := status["engine"]["journal_failure"]) is not None:
        return str(failure)
    return _away(status) or await _lacking_to_read(status)


def _away(status: dict[str, Any]) -> str:
    """Returns why the node takes no changes; empty where it takes them."""
    engine, cluster = status["engine"], status.get("cluster")
    if cluster is None or (cluster["holds_lease"] and not engine["is_away"]):
        return ""
    if engine["loss"] is not None:
        return str(engine["loss"])
    return f"the engine does not answer this node ({engine['silent_s']:.0f} s without a word)"


async def _lacking_to_read(status: dict[str, Any]) -> str:
    """Returns the fault that keeps files from being read; empty where there is none."""
    if (refusal := status["engine"].get("mirror_refusal")) is not None:
        return f"the metadata replica cannot take what other nodes commit ({refusal})"
    mount, s3 = status["mount"], status.get("s3")
    if mount is not None and not await _answers(mount["mountpoint"]):
        return f"the mount at {mount['mountpoint']} does not answer"
    if s3 is not None and s3["answering_workers"] < s3["wanted_workers"]:
        return f"{s3['answering_workers']} of {s3['wanted_workers']} S3 workers answer"
    return ""


def _lacking_of_nfs(nfs: dict[str, Any] | None) -> list[str]:
    """Returns the same for NFS (None: it is off), a line for each."""
    if nfs is None:
        return []
    if not nfs["is_serving"]:
        return [f"NFS is not served: {nfs['problem']}"]
    return [
        f"/{each['namespace']} is not served by NFS: {each['problem']}"
        for each in nfs["exports"]
        if each["problem"]
    ]


async def _answers(mountpoint: str) -> bool:
    """Returns whether a system call on the mount returns. The thread is left behind if it does
    not."""
    with trio.move_on_after(READY_S):
        try:
            await trio.to_thread.run_sync(
                os.statvfs, mountpoint, abandon_on_cancel=True, limiter=_LOOKS
            )
        except OSError:
            return False
        return True
    return False
