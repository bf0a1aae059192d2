"""The rows of `requests` that S3 has: what a small object costs the worker that serves it."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from benchmarks import _call_counter
from benchmarks._call_counter import Counted
from benchmarks._interleave import BEFORE, Group, Row
from benchmarks._request_rows import (
    COUNTED,
    Measured,
    at_most,
    new_names,
    processor_s,
)
from benchmarks._s3_http import Connection
from benchmarks._s3_signing import REGION, SKEW_S, signed_headers
from benchmarks._systems import System
from s3api.auth.presign import presign

_BODY: Final = os.urandom(4096)
_VALID_S: Final = 86_400
_MICRO: Final = 1e6
_clock = time.perf_counter_ns


Signed = Literal["anew", "url anew", "url"]
"""How requests are signed: each anew in its header, as clients do; by a presigned URL that is made
anew for each; or by one URL, which all repeat."""


class _Flow(NamedTuple):
    name: str
    method: str
    signed: Signed
    is_same: bool
    """Whether all ask for one object."""
    calls: float
    commits: float

    @property
    def body(self) -> bytes:
        return _BODY if self.method == "PUT" else b""


def groups(count: int) -> list[Group]:
    """In the order of the table; each asks so often in a round."""
    return [_group(flow, count) for flow in _FLOWS]


def profile(system: Measured, pattern: str) -> Iterator[tuple[str, Sequence[tuple[str, float]]]]:
    """Of the flows whose name has the pattern in it, which functions are called how often for each
    request."""
    for flow in _FLOWS:
        if pattern in flow.name:
            connection = Connection(system.address)
            try:
                functions = sum(_count(flow, system, connection).values(), Counter[str]())
            finally:
                connection.close()
            yield flow.name, [(name, n / COUNTED) for name, n in functions.most_common()]


def _group(flow: _Flow, count: int) -> Group:
    calls = Row(f"{flow.name}: calls of the worker", "", False, at_most(flow.calls), BEFORE)
    commits = Row(f"{flow.name}: commits", "", False, at_most(flow.commits), BEFORE)
    processor = Row(f"{flow.name}: CPU of all", "µs", False, {}, BEFORE)
    middle = Row(f"{flow.name}: p50", "µs", False, {}, BEFORE)
    late = Row(f"{flow.name}: p99", "µs", False, {}, BEFORE)

    def measure(system: System) -> Mapping[str, float]:
        assert isinstance(system, Measured)
        body = flow.body
        connection = Connection(system.address)
        try:
            counted = _count(flow, system, connection)
            heads = _heads(flow, system, connection, count)
            pids, times = system.processes(), []
            before = processor_s(pids)
            for head in heads:
                began = _clock()
                connection.exchange(head, body)
                times.append(_clock() - began)
            taken_s = processor_s(pids) - before
        finally:
            connection.close()
        return {
            calls.name: _call_counter.calls(counted, counted) / COUNTED,
            commits.name: _call_counter.commits(counted) / COUNTED,
            processor.name: _MICRO * taken_s / count,
            middle.name: statistics.median(times) / 1000,
            late.name: statistics.quantiles(times, n=100)[98] / 1000,
        }

    return Group((calls, commits, processor, middle, late), measure)


def _count(flow: _Flow, system: Measured, connection: Connection) -> Counted:
    heads = _heads(flow, system, connection, COUNTED)
    return system.counted_worker(lambda: [connection.exchange(head, flow.body) for head in heads])


def _heads(flow: _Flow, system: Measured, connection: Connection, count: int) -> list[bytes]:
    """Of so many requests; what they ask for is stored, and those that repeat were asked before."""
    keys = new_names("", 1 if flow.is_same else count)
    if flow.method != "PUT":
        for key in keys:
            connection.exchange(_presigned(system, "PUT", key, _VALID_S, len(_BODY)), _BODY)
    asked = keys * (count // len(keys))
    if flow.signed == "url":
        head = _presigned(system, flow.method, keys[0], _VALID_S, len(flow.body))
        connection.exchange(head)
        return [head] * count
    if flow.signed == "url anew":
        return [
            _presigned(system, flow.method, key, _VALID_S - number, len(flow.body))
            for number, key in enumerate(asked)
        ]
    began = time.time()  # a second each: no two signatures are equal
    return [
        _signed(system, flow.method, key, began - number % SKEW_S, len(flow.body))
        for number, key in enumerate(asked)
    ]


def _presigned(system: Measured, method: str, key: str, expires_s: int, length: int) -> bytes:
    endpoint = "http://{}:{}".format(*system.address)
    url = presign(
        method,
        endpoint,
        f"/cache{key}".encode(),
        *system.keys,
        region=REGION,
        now=time.time(),
        expires_s=expires_s,
    )
    return _head(method, url.removeprefix(endpoint), (_host(system), f"Content-Length: {length}"))


def _signed(system: Measured, method: str, key: str, now: float, length: int) -> bytes:
    path = f"/cache{key}"
    headers = signed_headers(system.address, system.keys, method, path, now)
    lines = [f"{name}: {value}" for name, value in headers.items()]
    return _head(method, path, (*lines, f"Content-Length: {length}"))


def _host(system: Measured) -> str:
    return "Host: {}:{}".format(*system.address)


def _head(method: str, target: str, lines: Iterable[str]) -> bytes:
    return "\r\n".join((f"{method} {target} HTTP/1.1", *lines, "", "")).encode()


_FLOWS: Final = (
    _Flow("S3 GET 4 KiB, signed anew", "GET", "anew", True, 120, 0),
    _Flow("S3 GET 4 KiB, new URLs", "GET", "url anew", True, 120, 0),
    _Flow("S3 GET 4 KiB, repeated", "GET", "url", True, 60, 0),
    _Flow("S3 PUT 4 KiB", "PUT", "anew", False, 220, 2),
    _Flow("S3 DELETE 4 KiB", "DELETE", "anew", False, 220, 2),
)
