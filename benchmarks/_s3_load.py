"""The load on a server of objects: wrk for GET; processes with a connection each for PUT and
DELETE; lists; boto3.

URLs are signed before the timed part. All of it shares the processors with the server.
"""

import json
import re
import secrets
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import md5
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks._processes import Task, TaskFailed, together
from benchmarks._s3_http import Connection
from benchmarks._s3_signing import SKEW_S
from benchmarks._s3_systems import Server
from benchmarks._systems import processor_s

CONNECTIONS: Final = 8
_WRK_THREADS: Final = 2
_SIGNED_TIMES: Final = 20
_WRK_GRACE_S: Final = 60.0
_SAMPLE_EVERY_S: Final = 0.1
_KEYS_A_PAGE: Final = 1000
_NEXT_PAGE: Final = re.compile(rb"<NextContinuationToken>(.+?)</NextContinuationToken>")
_WRK_SCRIPT: Final = r"""
local requests, turn, threads = {}, 0, 0
function setup(thread)
  thread:set("first", threads)
  threads = threads + 1
end
function init(arguments)
  for line in io.lines(arguments[1]) do
    local target, headers = nil, {}
    for field in line:gmatch("[^\t]+") do
      local name, value = field:match("^([^:/]+): (.*)$")
      if name then headers[name] = value else target = field end
    end
    requests[#requests + 1] = wrk.format("GET", target, headers)
  end
  turn = first * 7
end
function request()
  turn = turn + 1
  return requests[turn % #requests + 1]
end
function done(summary)
  local errors = summary.errors
  io.write(string.format(
    '\n{"seconds": %f, "requests": %d, "bytes": %d, "refused": %d, "broken": %d}\n',
    summary.duration / 1e6, summary.requests, summary.bytes, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
"""


class Got(NamedTuple):
    """What a time of GETs brought."""

    requests_per_s: float
    bytes_per_s: float
    processor_s_per_gb: float
    """Of the server."""


class Memory(NamedTuple):
    """The most that the processes of a server held, in bytes."""

    resident: int
    """The sum of what each has, pages that they share counted in each."""
    proportional: int
    """Shared pages are divided among those that share them."""


# --- GET ----------------------------------------------------------------------------------------


def get(
    server: Server,
    keys: Sequence[str],
    size: int,
    seconds: int,
    *,
    connections: int = CONNECTIONS,
    ranges: Sequence[str] = ("",),
    anew: bool = False,
) -> Got:
    """GETs of these keys, and of each of these ranges, over and over; each brings `size` bytes.
    `anew`: signed in the header, for each key at several times, so that no request is the same as
    one of the thousands before it; else by one presigned URL for each key.

    Raises TaskFailed where one is refused, or brings less, or the time brings nothing."""
    if anew:
        now = time.time()
        times = [now - SKEW_S * number / _SIGNED_TIMES for number in range(_SIGNED_TIMES)]
        lines = [server.signed_line("GET", key, each) for each in times for key in keys]
    else:
        lines = [
            f"{target}\tRange: {each}" if each else target
            for target in (server.target("GET", key) for key in keys)
            for each in ranges
        ]
    before = processor_s(server.processes())
    told = _wrk(server, lines, seconds, connections)
    used = processor_s(server.processes()) - before
    if told["refused"] or told["broken"]:
        raise TaskFailed(f"of the GETs, {told}")
    if told["bytes"] < max(1, told["requests"] * size):
        raise TaskFailed(f"{told['bytes']} bytes for {told['requests']} GETs of {size} bytes")
    return Got(
        told["requests"] / told["seconds"],
        told["bytes"] / told["seconds"],
        used / (told["bytes"] / 1e9),
    )


def _wrk(server: Server, lines: Sequence[str], seconds: int, connections: int) -> dict[str, Any]:
    script, targets = server.root / "wrk.lua", server.root / "wrk.targets"
    script.write_text(_WRK_SCRIPT)
    targets.write_text("".join(f"{line}\n" for line in lines))
    command = ["wrk", "-t", str(_WRK_THREADS), "-c", str(connections), "-d", f"{seconds}s"]
    done = subprocess.run(
        [*command, "--timeout", "60s", "-s", str(script), server.endpoint, "--", str(targets)],
        capture_output=True,
        text=True,
        timeout=seconds + _WRK_GRACE_S,
        check=False,
    )
    if done.returncode:
        raise TaskFailed(f"wrk: {done.stderr.strip() or done.stdout.strip()}")
    told: dict[str, Any] = json.loads(done.stdout.rstrip().splitlines()[-1])
    return told


# --- PUT and DELETE -----------------------------------------------------------------------------


def fill(server: Server, keys: Sequence[str], body: Any) -> None:
    """Puts all of them."""
    shares = [keys[first::CONNECTIONS] for first in range(CONNECTIONS)]
    put(server, shares, body, float("inf"))


def new_keys(count: int) -> list[list[str]]:
    """A share for each connection, of `count` in all, none of which was ever used."""
    tag = secrets.token_hex(4)
    each = -(-count // CONNECTIONS)
    return [
        [f"new/{tag}-{connection}-{number:07d}.bin" for number in range(each)]
        for connection in range(CONNECTIONS)
    ]


def put(
    server: Server, shares: Sequence[Sequence[str]], body: Any, limit_s: float
) -> tuple[float, list[list[str]]]:
    """Objects per second, and the keys that were put, by connection."""
    return _each(server, "PUT", shares, body, limit_s)


def delete(server: Server, shares: Sequence[Sequence[str]]) -> float:
    """Keys per second."""
    return _each(server, "DELETE", shares, b"", float("inf"))[0]


def _each(
    server: Server, method: str, shares: Sequence[Sequence[str]], body: Any, limit_s: float
) -> tuple[float, list[list[str]]]:
    """A connection and a process for each share."""
    prepare = partial(_requests, server, method, body, limit_s)
    told = together([partial(prepare, share) for share in shares if share])
    rate = sum(done / seconds for done, seconds in told)
    return rate, [list(share[:done]) for share, (done, _) in zip(shares, told, strict=False)]


def _requests(
    server: Server, method: str, body: Any, limit_s: float, keys: Sequence[str]
) -> Callable[[], tuple[int, float]]:
    heads = [server.head(method, key, len(body)) for key in keys]
    connection = Connection(server.address)

    def work() -> tuple[int, float]:
        began, done = time.perf_counter(), 0
        for head in heads:
            connection.exchange(head, body)
            done += 1
            if time.perf_counter() - began > limit_s:
                break
        return done, time.perf_counter() - began

    return work


def delete_many(server: Server, keys: Sequence[str]) -> float:
    """Keys per second, a thousand in a request, one after the other."""
    requests = []
    for first in range(0, len(keys), _KEYS_A_PAGE):
        share = keys[first : first + _KEYS_A_PAGE]
        named = "".join(f"<Object><Key>{key}</Key></Object>" for key in share)
        body = f"<Delete><Quiet>true</Quiet>{named}</Delete>".encode()
        digest = b64encode(md5(body, usedforsecurity=False).digest()).decode()
        target = server.target("POST", query=[(b"delete", b"")])
        length = f"Content-Length: {len(body)}"
        requests.append((server.head_of("POST", target, length, f"Content-MD5: {digest}"), body))
    connection = Connection(server.address)
    began = time.perf_counter()
    answers = [connection.exchange(*request) for request in requests]
    elapsed = time.perf_counter() - began
    connection.close()
    for answer in answers:
        if b"<Error>" in answer:
            raise TaskFailed(answer[:300].decode(errors="replace"))
    return len(keys) / elapsed


# --- lists --------------------------------------------------------------------------------------


def list_all(server: Server, prefix: str, expected: int, limit_s: float) -> float:
    """Keys per second, a thousand a page, the pages one after the other; over and over. Raises
    TaskFailed where a key is missing.
    """
    connection = Connection(server.address)
    began, found = time.perf_counter(), 0
    while not found or time.perf_counter() - began < limit_s:
        listed = sum(page.count(b"<Key>") for page in _pages(server, connection, prefix))
        if listed != expected:
            raise TaskFailed(f"{listed} of {expected} keys listed")
        found += listed
    elapsed = time.perf_counter() - began
    connection.close()
    return found / elapsed


def _pages(server: Server, connection: Connection, prefix: str) -> Iterator[bytes]:
    query = [(b"list-type", b"2"), (b"prefix", prefix.encode()), (b"max-keys", b"1000")]
    token: list[tuple[bytes, bytes]] = []
    while True:
        target = server.target("GET", query=[*query, *token])
        page = connection.exchange(server.head_of("GET", target))
        yield page
        following = _NEXT_PAGE.search(page)
        if following is None:
            return
        token = [(b"continuation-token", following[1].replace(b"&amp;", b"&"))]


# --- boto3 --------------------------------------------------------------------------------------


def up_and_down(server: Server, source: Path, sink: Path) -> tuple[float, float]:
    """Bytes per second of boto3's transfers of a file, in parts and in parallel as it chooses."""
    client, size = server.client(), source.stat().st_size
    key = f"transfers/{secrets.token_hex(4)}"
    try:
        began = time.perf_counter()
        client.upload_file(str(source), server.bucket, key)
        up_s = time.perf_counter() - began
        began = time.perf_counter()
        client.download_file(server.bucket, key, str(sink))
        down_s = time.perf_counter() - began
        if sink.stat().st_size != size:
            raise TaskFailed(f"{sink.stat().st_size} of {size} bytes came back")
    finally:
        sink.unlink(missing_ok=True)
        client.delete_object(Bucket=server.bucket, Key=key)
        client.close()
    return size / up_s, size / down_s


# --- memory -------------------------------------------------------------------------------------


def memory_under_transfers(
    server: Server, keys: Sequence[str], body: Any, each_way: int, seconds: int
) -> Memory:
    """The peak while `each_way` connections GET these keys and as many PUT the body to new ones;
    those in flight at the end are given up.
    """
    names = [f"transfers/{secrets.token_hex(8)}" for _ in range(each_way)]
    tasks: list[Task] = [partial(_put_until, server, name, body, seconds) for name in names]
    tasks.append(lambda: lambda: get(server, keys, len(body), seconds, connections=each_way))
    tasks.append(lambda: lambda: _peak(server, seconds))
    *_, peak = together(tasks)
    return Memory(*peak)


def _put_until(server: Server, key: str, body: Any, seconds: float) -> Callable[[], int]:
    connection = Connection(server.address)
    head = server.head("PUT", key, len(body))

    def work() -> int:
        until, done = time.perf_counter() + seconds, 0
        while connection.send_while(head, body, lambda: time.perf_counter() < until):
            done += 1
        return done

    return work


def _peak(server: Server, seconds: float) -> Memory:
    until = time.perf_counter() + seconds
    resident = proportional = 0
    while time.perf_counter() < until:
        now = memory(server)
        resident = max(resident, now.resident)
        proportional = max(proportional, now.proportional)
        time.sleep(_SAMPLE_EVERY_S)
    return Memory(resident, proportional)


def memory(server: Server) -> Memory:
    """As it is now; a process that ends meanwhile is left out."""
    resident = proportional = 0
    for pid in server.processes():
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            continue
        resident += _kilobytes(text, "Rss:") * 1024
        proportional += _kilobytes(text, "Pss:") * 1024
    return Memory(resident, proportional)


def _kilobytes(text: str, name: str) -> int:
    """Of a line of smaps_rollup; 0 where it has none."""
    lines = (line.split() for line in text.splitlines())
    return next((int(line[1]) for line in lines if line[0] == name), 0)
