"""What processes and nodes say to each other: the bytes of one example of each message. Nodes of
two neighbouring versions work together, so a change here asks for another number of the protocol,
or for a field that the other side may pass over.
"""

import itertools
import os
from collections.abc import Iterator
from typing import Final

import msgspec
import pytest

from gateway import watchdog_process
from gateway.fuse.views import lock_opener_process
from gateway.holder import holder_process
from gateway.nfs import jail_process
from kvfs.base import control, errors
from kvfs.base.errors import KvfsError
from kvfs.base.version import CONTROL, PROTOCOL
from kvfs.cluster import peer_protocol
from kvfs.cluster.handshake import Answering, Dialing, Party
from kvfs.cluster.peer_protocol import Ask, Lent, PeerAddress
from kvfs.cluster.secrets import Secret, Secrets
from kvfs.meta.redis.log import Proposal
from kvfs.meta.replica import process_transactions
from kvfs.node.locate import LocalCopy
from kvfs.transfer.rdma import engine_process
from s3api.server import worker_messages
from s3api.server.counters import Tally
from tests.golden.golden import hold
from tests.golden.hexadecimal import shown

INO: Final = 3 << 48 | 42
SECRETS: Final = Secrets([Secret("c" * 16, b"k" * 32)])
AT: Final = PeerAddress(7, "192.0.2.7", 9002)
ASK: Final = Ask(INO, 2, 9_000_000, 1, 2, sealed=True)
DIGEST: Final = bytes(range(20))
LENT: Final = Lent(12345, 6, (4096, 8192))


def test_control() -> None:
    hold("control.txt", _control())


def test_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count(1)
    monkeypatch.setattr(os, "urandom", lambda size: bytes([next(counter)]) * size)
    hold("handshake.txt", _handshake())


def test_a_newer_node_may_say_more_of_itself() -> None:
    dialing = Dialing(SECRETS, Party("c" * 16, 7, 3, "n7"))
    answering = Answering(SECRETS, Party("c" * 16, 8, 4, "n8"))
    party, *others = msgspec.msgpack.decode(dialing.hello)
    dialing.hello = msgspec.msgpack.encode([[*party, "further"], *others, {"more": 1}])
    _, proof = dialing.conclude(answering.reply(dialing.hello))
    assert answering.conclude(proof).node == 7


def test_peers() -> None:
    hold("peers.txt", _peers())


def test_processes() -> None:
    hold("processes.txt", _processes())


def _control() -> Iterator[str]:
    yield f"version {CONTROL}; of any version: {', '.join(sorted(control._OF_ANY_VERSION))}"
    yield f"a line has at most {control.LINE_LIMIT} bytes"
    request = control._request("where", {"inodes": [INO]})
    assert control._decode_request(request) == control.ControlRequest(
        "where", {"inodes": [INO]}, CONTROL
    )
    yield request.decode().rstrip("\n")
    for response in (
        control.ControlResponse(result={"a": 1}),
        control.ControlResponse(error=control.ErrorBody("NotFound", "no such file")),
    ):
        line = control._encode(response)
        assert control._decode_response(line) == response
        yield line.decode()
    proposal = Proposal(
        {b"k": b"v", b"n": None}, [(b"a", b"b", 9, DIGEST)], {b"w": b"x"}, [(b"s", b"1")]
    )
    packed = process_transactions.pack(proposal)
    assert process_transactions.unpack(packed) == proposal
    yield from shown("a transaction", packed, "reads, ranges, writes, merges")


def _handshake() -> Iterator[str]:
    """Each message is what the other side needs for the next."""
    dialing = Dialing(SECRETS, Party("c" * 16, 7, 3, "n7", PROTOCOL, "0.1.0"))
    answering = Answering(SECRETS, Party("c" * 16, 8, 4, "n8", PROTOCOL, "0.1.0"))
    yield from shown("hello", dialing.hello, "cluster, node 7, incarnation 3, nonce, digests")
    reply = answering.reply(dialing.hello)
    yield from shown("reply", reply, "node 8, nonce, digest, proof")
    party, proof = dialing.conclude(reply)
    assert party.node == 8
    yield from shown("proof", proof)
    assert answering.conclude(proof).node == 7
    yield f"in a field: {peer_protocol.render_proof(proof).decode()}"


def _peers() -> Iterator[str]:
    yield f"protocol {PROTOCOL}"
    yield f"POST {peer_protocol.HELLO.decode()}"
    yield f"GET {peer_protocol.data_target(ASK).decode()}"
    assert peer_protocol.parse_data_target(peer_protocol.data_target(ASK)) == ASK
    yield f"POST {peer_protocol.method_target('sums').decode()}"
    for name, value in _fields():
        yield f"{name.decode()}: {value.decode()}"
    addresses = peer_protocol.render_addresses([AT])
    assert peer_protocol.parse_addresses(addresses) == [AT]
    yield from shown("redirect, 307", addresses, str(tuple(AT)))
    for kind in sorted(_errors(), key=lambda each: each.__name__):
        status, body = peer_protocol.render_error(kind("why"))
        assert isinstance(peer_protocol.parse_error(body), kind)
        yield f"error {kind.__name__}: {status}"
    yield from shown("error", peer_protocol.render_error(errors.NotFound("why"))[1])
    yield from shown("what a node has of a file", msgspec.msgpack.encode(LocalCopy("ssd", 0.5)))
    yield from shown(
        "to the mover", engine_process.REQUEST.pack(engine_process.READ, 1, 2, 3, 4), "read"
    )
    yield from shown("by the mover", engine_process.ANSWER.pack(1, 0), "request 1 is done")
    yield from shown("mover's hello", engine_process.HELLO.pack(b"tcp", 1, 2), "tcp, port, address")


def _processes() -> Iterator[str]:
    """What a node tells the processes that it starts, and hears from them: another program's, where
    it was replaced beneath the node."""
    yield f"S3 worker: version {worker_messages.VERSION}"
    for kind in (worker_messages.WorkerPlan, Tally):
        for field in msgspec.structs.fields(kind):
            yield f"    {kind.__name__}.{field.name}: {field.type}"
    for module in (
        *(engine_process, watchdog_process, holder_process, jail_process, lock_opener_process),
    ):
        usage = next(line for line in str(module.__doc__).splitlines() if line.startswith("    "))
        yield f"{module.__name__}: version {module.VERSION}"
        yield usage
    yield f"    a watchdog that is given another version's ends with {watchdog_process.REPLACED}"


def _fields() -> Iterator[tuple[bytes, bytes]]:
    yield peer_protocol.AT, peer_protocol.render_at(AT)
    assert peer_protocol.parse_at(7, peer_protocol.render_at(AT)) == AT
    yield peer_protocol.SUMS, peer_protocol.render_sums(bytes(range(16)))
    yield peer_protocol.STAMP, b"stamp"
    yield peer_protocol.MOVER, b"tcp"
    yield peer_protocol.LENT, peer_protocol.render_lent(LENT)
    assert peer_protocol.parse_lent(peer_protocol.render_lent(LENT), ASK) == LENT


def _errors() -> Iterator[type[KvfsError]]:
    for each in vars(errors).values():
        if isinstance(each, type) and issubclass(each, KvfsError):
            yield each
