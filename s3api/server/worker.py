"""A worker: one process that serves the S3 API on given listeners.

Started by `s3api.server.supervisor` as `python -m s3api.server.worker`;
`s3api.server.worker_messages` has their messages. It ends in order when its standard input does:
when the supervisor closes it, or dies; and when the supervisor has died and the kernel keeps its
end open, for a thread that it cannot end.
"""

import contextlib
import gc
import logging
import os
import socket
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from kvfs.base import log_lines, priority
from kvfs.base.encryption import KEY_NAME, open_key
from kvfs.base.processes import OtherProcess, hide_memory
from kvfs.http.api import (
    CertificateFiles,
    Counters,
    Head,
    Limits,
    OnResponse,
    ServerTls,
    serve,
)
from kvfs.objects.object_store import ObjectStore
from s3api.auth.authorization import Access
from s3api.auth.key_holders import Identities
from s3api.http.buffer_pool import BufferPool
from s3api.http.dispatch import Application
from s3api.http.request_context import WorkerContext
from s3api.http.side_digest import Hashing
from s3api.server.access_log import AccessLog
from s3api.server.counters import Recorder
from s3api.server.lifecycle_worker import Expiring
from s3api.server.log_delivery import LogDelivery
from s3api.server.worker_messages import READY, VERSION, PlanVersion, WorkerPlan
from s3api.storage.batch_delete import Deleter
from s3api.storage.bucket_settings import SettingsReader
from s3api.storage.commit_notifier import Teller
from s3api.storage.read_consistency import Freshness

_THREADS: Final = 16
_LASTING_THREADS: Final = 8
"""Threads for copies and completions: a disk that copies so much at once copies no faster for
more."""
_LOOK_S: Final = 1.0
"""Interval of checks of the supervisor, which cannot tell of its end while the kernel holds one of
its threads."""
_PARTING_S: Final = 1.0
"""Time for which a worker that ends waits for the next request of a connection that was used."""
_BODY_BYTES: Final = (5 << 40) + (1 << 30)
"""The largest object, and the framing of aws-chunked: the operations check S3's own limits."""


def main() -> None:
    """Runs the process."""
    line = _first_line()
    if not line.endswith(b"\n"):
        return  # the supervisor gave up, or died, before it said anything
    told = msgspec.json.decode(line, type=PlanVersion).version
    if told != VERSION:  # before the plan is read, which may have another form
        log_lines.begin("ERROR", f"s3[{os.getpid()}] ")
        logging.getLogger(__name__).error(
            "the program was replaced beneath the running node, which gives its S3 workers plans of"
            " version %d; this one reads %d: restart the node",
            told,
            VERSION,
        )
        return
    plan = msgspec.json.decode(line, type=WorkerPlan)
    os.chdir("/")
    priority.follow()
    hide_memory()  # keys of users are in it
    log_lines.begin(plan.log_level, f"s3[{os.getpid()}] ")
    store = ObjectStore(Path(plan.store))
    try:
        trio.run(_serve, plan, store)
    finally:
        store.close()


async def _serve(plan: WorkerPlan, store: ObjectStore) -> None:
    identities = Identities(store, open_key(Path(plan.store) / KEY_NAME))
    teller = Teller(store)
    service = WorkerContext(
        store=store,
        identities=identities,
        access=Access(),
        buffers=BufferPool(),
        hashing=Hashing(),
        domains=tuple(plan.domains),
        region=plan.region,
        version_2=plan.version_2,
        object_ownership=plan.object_ownership,
        bucket_mode=plan.bucket_mode,
        encrypted=plan.encrypted,
        threads=trio.CapacityLimiter(_THREADS),
        lasting=trio.CapacityLimiter(_LASTING_THREADS),
        teller=teller,
        deleter=Deleter(store, teller),
        freshness=Freshness(store),
        settings=SettingsReader(store),
    )
    application = Application(service)
    listeners = [socket.socket(fileno=fd) for fd in plan.listeners]
    tls = None
    if plan.certificate:
        files = CertificateFiles(Path(plan.certificate), Path(plan.private_key))
        tls = ServerTls(files.context)
    counters = Counters()
    recorder = Recorder(counters, store.misses)
    delivery = LogDelivery(store, service.settings, plan.region, identities.administrator)
    # Responses are shown to it from the first bucket on that is logged.
    service.settings.logged = partial(recorder.tell_too, delivery.record)
    stop = trio.Event()
    serving = partial(
        serve,
        listeners,
        application.handle,
        Limits(body_bytes=_BODY_BYTES, parting_s=_PARTING_S),
        steps=True,
        refuse=application.refuse,
        tls=tls,
        on_response=_on_response(recorder, plan.access_log),
        counters=counters,
        stop=stop,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.teller.run)
        nursery.start_soon(service.deleter.run)
        nursery.start_soon(service.freshness.run)
        nursery.start_soon(delivery.run, plan.log_delivery_s)
        nursery.start_soon(Expiring(store, plan.lifecycle_day_s).run)
        async with trio.open_nursery() as requests:
            await requests.start(serving)
            await _attend_while_it_lives(recorder, plan.supervisor)
            stop.set()
        await delivery.finish()
        nursery.cancel_scope.cancel()


def _on_response(recorder: Recorder, access_log: str) -> OnResponse:
    if not access_log:
        return recorder.record
    record = AccessLog(access_log).record

    def both(head: Head | None, status: int, sent_bytes: int, seconds: float) -> None:
        recorder.record(head, status, sent_bytes, seconds)
        record(head, status, sent_bytes, seconds)

    return both


def _first_line() -> bytes:
    """Returns the first line of the standard input, whole unless that ends first; nothing after it
    is read."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return bytes(line)


async def _attend_while_it_lives(recorder: Recorder, supervisor: int) -> None:
    """Like `_attend`, until the supervisor's process has ended."""
    try:
        process = OtherProcess(supervisor)
    except ProcessLookupError:
        return
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            while not process.has_ended():
                with trio.move_on_after(_LOOK_S):
                    await trio.lowlevel.wait_readable(process.pidfd)
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        await _attend(recorder)
        nursery.cancel_scope.cancel()
    process.close()


async def _attend(recorder: Recorder) -> None:
    """Answers the supervisor until it ends the conversation, or dies."""
    asked, answers = trio.lowlevel.FdStream(os.dup(0)), trio.lowlevel.FdStream(os.dup(1))
    async with asked, answers:
        gc.freeze()  # what is there by now stays: no collection looks at it again
        with contextlib.suppress(trio.BrokenResourceError):
            await answers.send_all(READY)
            async for part in asked:
                for _ in range(part.count(b"\n")):
                    await answers.send_all(msgspec.json.encode(recorder.tally()) + b"\n")


if __name__ == "__main__":
    main()
