"""A worker: one process that serves the S3 API on listeners that it was given.

Started by `s3api.supervisor` as `python -m s3api.worker`, with its plan as a line of JSON on its
standard input. It says `ready` on its standard output, and ends in order when its standard input
does: when the supervisor closes it, or dies.
"""

import logging
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from kvfs.encryption import open_key
from kvfs.objects.store import ObjectStore
from kvfs.wire.http import Limits, serve, server_context
from s3api.access import Access
from s3api.call import Service
from s3api.identities import Identities
from s3api.receiving import Buffers
from s3api.service import Application
from s3api.telling import Teller

READY: Final = b"ready\n"
KEY_NAME: Final = "secret.key"
"""In the store: the key with which secrets are encrypted."""
_THREADS: Final = 16
_BODY_BYTES: Final = (5 << 40) + (1 << 30)
"""The largest object, and the framing of aws-chunked: S3's own limits are the operations'."""
log = logging.getLogger(__name__)


class Plan(msgspec.Struct, kw_only=True):
    """What a worker is told."""

    store: str
    listeners: list[int]
    """Descriptors of listening sockets."""
    domains: list[str]
    region: str
    version_2: bool
    certificate: str = ""
    """PEM files; empty: no TLS."""
    private_key: str = ""
    log_level: str = "INFO"


def main() -> None:
    """The process."""
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=Plan)
    logging.basicConfig(
        level=plan.log_level.upper(),
        format=f"%(asctime)s %(levelname)s s3[{os.getpid()}] %(name)s: %(message)s",
    )
    store = ObjectStore(Path(plan.store))
    try:
        trio.run(_serve, plan, store)
    finally:
        store.close()


async def _serve(plan: Plan, store: ObjectStore) -> None:
    identities = Identities(store.session, open_key(Path(plan.store) / KEY_NAME))
    service = Service(
        store=store,
        identities=identities,
        access=Access(),
        buffers=Buffers(),
        domains=tuple(plan.domains),
        region=plan.region,
        version_2=plan.version_2,
        threads=trio.CapacityLimiter(_THREADS),
        teller=Teller(store),
    )
    application = Application(service)
    listeners = [socket.socket(fileno=fd) for fd in plan.listeners]
    tls = (
        server_context(Path(plan.certificate), Path(plan.private_key)) if plan.certificate else None
    )
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.teller.run)
        nursery.start_soon(_wait_for_end, stop)
        async with trio.open_nursery() as serving:
            await serving.start(
                partial(
                    serve,
                    listeners,
                    application.handle,
                    Limits(body_bytes=_BODY_BYTES),
                    refuse=application.refuse,
                    tls=tls,
                    stop=stop,
                )
            )
            sys.stdout.buffer.write(READY)
            sys.stdout.buffer.flush()
        nursery.cancel_scope.cancel()


async def _wait_for_end(stop: trio.Event) -> None:
    """Set `stop` when standard input ends."""
    while True:
        await trio.lowlevel.wait_readable(0)
        if not os.read(0, 4096):
            stop.set()
            return


if __name__ == "__main__":
    main()
