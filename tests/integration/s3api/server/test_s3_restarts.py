"""S3 through restarts of its workers, and of its node: nothing is refused, and no request fails."""

import http.client
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from gateway.fuse.channel import mode_probe
from kvfs.base.config import Config
from s3api.server import listener_passing
from tests.cluster.waiting import wait_until
from tests.conftest import LONG
from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.s3 import REGION, S3, serving

RESTARTS = 30 if LONG else 3
CLIENTS = 6
BODY = os.urandom(100_000)


class Asking(threading.Thread):
    """Asks over connections that it keeps, and that it makes anew where an answer says so or, each
    tenth time, by itself; never asks twice."""

    def __init__(self, s3: S3, bucket: str, number: int) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.answered = 0
        self.slowest_s = 0.0
        self._s3 = s3
        self._target = f"/{bucket}/object-{number}"
        self._connection: http.client.HTTPConnection | None = None
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        self._check(lambda: self._ask("PUT", BODY))
        while not self._ended.is_set():
            for method in ("GET", "PUT", "HEAD", "GET"):
                self._check(lambda method=method: self._ask(method, BODY))
        if self._connection is not None:
            self._connection.close()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _check(self, do: Callable[[], str]) -> None:
        began = time.monotonic()
        try:
            problem = do()
        except (OSError, http.client.HTTPException) as error:
            problem, self._connection = repr(error), None
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.answered += 1
        if problem:
            self.wrong.append(problem)

    def _ask(self, method: str, body: bytes) -> str:
        """Returns what is wrong with the answer."""
        data = body if method == "PUT" else b""
        request = AWSRequest(method, self._s3.endpoint + self._target, {}, data)
        request.headers["x-amz-content-sha256"] = "UNSIGNED-PAYLOAD"
        pair = self._s3.users["main"]
        S3SigV4Auth(Credentials(pair.access_key, pair.secret), "s3", REGION).add_auth(request)
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._s3.host, self._s3.port, timeout=60)
        self._connection.request(method, self._target, data, dict(request.headers.items()))
        answer = self._connection.getresponse()
        found = answer.read()
        if answer.will_close or self.answered % 10 == 0:
            self._connection.close()
            self._connection = None
        if answer.status != 200:
            return f"{method}: {answer.status} {found[:200]!r}"
        return f"{method}: other bytes" if method == "GET" and found != body else ""


@contextmanager
def asked(s3: S3) -> Iterator[list[Asking]]:
    """Clients ask as long as the block lasts; none of their requests failed."""
    bucket = s3.new_bucket()
    clients = [Asking(s3, bucket, number) for number in range(CLIENTS)]
    try:
        yield clients
    finally:
        for each in clients:
            each.end()
    wrong = [problem for each in clients for problem in each.wrong]
    assert not wrong, wrong[:5]
    print(f"{sum(each.answered for each in clients)} requests,", end=" ")
    print(f"slowest {max(each.slowest_s for each in clients):.2f} s")


def has_gone_on(clients: list[Asking], more_than: int) -> None:
    """Each of them has had so many answers, at the latest soon after."""
    wait_until(lambda: all(each.answered > more_than for each in clients), "all are answered")


def test_workers_are_replaced_and_no_request_fails() -> None:
    with serving("--s3-workers", "2") as s3:
        s3.add_user("main")
        with asked(s3) as clients:
            for _ in range(RESTARTS):
                before = s3.node.status()["s3"]["workers"]
                done = kvfs("s3", "restart", "--store", str(s3.node.store))
                assert done.returncode == 0, done.stderr
                after = s3.node.status()["s3"]["workers"]
                assert len(after) == 2
                assert not set(after) & set(before)
            has_gone_on(clients, 4 * RESTARTS)
        told = s3.node.status()["s3"]
        assert (told["restarts"], told["answering_workers"]) == (0, 2)


def test_a_node_is_replaced_and_no_request_fails() -> None:
    with serving("--s3-workers", "2") as s3:
        s3.add_user("main")
        node = s3.node
        with asked(s3) as clients:
            for number in range(RESTARTS):
                workers = 1 + number % 3  # all listeners are served, by however many
                flags = (*node.flags, "--s3-workers", str(workers), "--replace")
                done = kvfs("up", "--daemon", *node.place(), "--mode", node.mode, *flags)
                assert done.returncode == 0, done.stderr
                before, node.pid = node.pid, int(node.status()["pid"])
                assert node.pid != before
                assert len(node.status()["s3"]["workers"]) == workers
                assert node.status()["s3"]["endpoint"] == s3.endpoint
            has_gone_on(clients, RESTARTS)


def test_a_store_may_have_a_long_path() -> None:
    """Longer than the path of a socket may be."""
    node = Node.make(best_mode(), "--s3", "127.0.0.1:0", "--admin", "off", "--s3-workers", "1")
    short, node.home = node.home, node.home / ("long" * 30)
    try:
        node.mount.mkdir(parents=True)
        node.up()
        endpoint = node.status()["s3"]["endpoint"]
        flags = (*node.flags, "--replace")
        done = kvfs("up", "--daemon", *node.place(), "--mode", node.mode, *flags)
        assert done.returncode == 0, done.stderr
        before, node.pid = node.pid, int(node.status()["pid"])
        assert node.pid != before
        assert node.status()["s3"]["endpoint"] == endpoint
    finally:
        node.remove()
        shutil.rmtree(short, ignore_errors=True)


def test_nothing_is_taken_over_where_there_is_no_store_yet(tmp_path: Path) -> None:
    assert listener_passing.take(Config(store=tmp_path / "none")) is None


def test_a_node_hands_its_mount_over_and_no_request_fails() -> None:
    found = mode_probe.takeover()
    if not found.available:
        pytest.skip(found.reason)
    with serving("--takeover-s", "60") as s3:
        s3.add_user("main")
        node = s3.node
        if node.mode == "libfuse":
            pytest.skip("a mount by libfuse ends with its daemon")
        with asked(s3) as clients:
            done = kvfs("restart", "--store", str(node.store))
            assert done.returncode == 0, done.stderr
            before, node.pid = node.pid, int(node.status()["pid"])
            assert node.pid != before
            assert node.status()["s3"]["endpoint"] == s3.endpoint
            has_gone_on(clients, 0)
