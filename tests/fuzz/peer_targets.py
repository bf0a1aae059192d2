"""The parsers of what nodes, the engine and files say: HTTP, frames, records, log, safetensors."""

import json
import random
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from gds.format import safetensors
from kvfs.base.errors import UNDECODABLE, KvfsError
from kvfs.cluster import handshake, peer_protocol, secrets
from kvfs.cluster.handshake import Answering, Dialing, Party
from kvfs.cluster.peer_protocol import Ask, PeerAddress
from kvfs.holdings import delta_codec
from kvfs.holdings.fingerprints import RANGES
from kvfs.holdings.messages import Deltas, HoldingsAsk, Message, RangeContents
from kvfs.http.chunks import ChunkFraming
from kvfs.http.connection_errors import RequestRefused
from kvfs.http.limits import Limits
from kvfs.http.parser import HeadParser, head_end
from kvfs.meta import records
from kvfs.meta.redis import location, log
from kvfs.meta.redis.line import RespParser, ServerLost
from kvfs.node.homes import home_protocol
from kvfs.node.names import name_protocol
from kvfs.node.siblings import copy_protocol
from tests.fuzz.campaign import Target

_LIMITS: Final = Limits(head_bytes=4096, target_bytes=1024)
_OURS: Final = secrets.Secret("0" * 16, bytes(secrets.KEY_SIZE))
_ASK: Final = Ask(5, 1, 40 << 20, 2, 3, True, False)
_ME: Final = Party("0" * 16, 1, 1, "host-1")
_pack: Final = msgspec.msgpack.Encoder().encode


# --- HTTP


def _request(draw: random.Random) -> bytes:
    method = draw.choice((b"GET", b"PUT", b"OPTIONS"))
    target = draw.choice((b"/a/b?c=d", b"*", b"http://host/x", b"/%e2%82%ac"))
    lines = [
        *(b"Host: a", b"Content-Length: 3", b"Transfer-Encoding: chunked", b"Expect: 100-continue"),
        *(b"Connection: close", b"X-A: b", b"x-amz-date: 20300101T000000Z"),
    ]
    chosen = draw.sample(lines, draw.randrange(1, 5))
    version = draw.choice((b"HTTP/1.1", b"HTTP/1.0"))
    return b"\r\n".join([b"%b %b %b" % (method, target, version), *chosen, b"", b""])


def _parse_request(data: bytes) -> object:
    end = head_end(data, 0, _LIMITS)
    if end < 0:
        return None
    parser = HeadParser(_LIMITS)
    first = parser.parse(data[:end], ("h", 1), False)
    again = parser.parse(data[:end], ("h", 1), False)
    assert (first.method, first.target) == (again.method, again.target)
    return first.method


def _chunks(draw: random.Random) -> bytes:
    pieces = [draw.randbytes(draw.randrange(1, 20)) for _ in range(draw.randrange(4))]
    extension = draw.choice((b"", b";a=b"))
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in pieces)
    return body + b"0\r\n" + draw.choice((b"", b"x-a: b\r\n")) + b"\r\n"


def _frame_chunks(data: bytes) -> object:
    """Takes a body whole, and byte by byte: both end alike."""
    whole = _framed(data, len(data))
    assert _framed(data, 1) == whole
    return whole[1]


def _framed(data: bytes, step: int) -> tuple[bytes, str]:
    framing, payload, at = ChunkFraming(_LIMITS), b"", 0
    for end in [*range(step, len(data), max(step, 1)), len(data)]:
        while at < end and not framing.ended:
            if framing.left:
                taken = data[at : min(end, at + framing.left)]
                payload += taken
                framing.left -= len(taken)
                at += len(taken)
                continue
            try:
                moved = framing.advance(data[:end], at)
            except RequestRefused as error:
                return payload, f"refused {error.status}"
            if moved < 0:
                break
            at = moved
    return payload, "ended" if framing.ended else "open"


# --- between nodes


def _words(draw: random.Random) -> bytes:
    target = peer_protocol.data_target(_ASK)
    return draw.choice(
        (
            *(b"target " + target, b"method " + peer_protocol.method_target("names")),
            *(b"at " + peer_protocol.render_at(PeerAddress(1, "host", 9002)), b"takes 4096"),
            b"sums " + peer_protocol.render_sums(bytes(48)),
            b"lent 1 2 a b",
            b"addresses " + peer_protocol.render_addresses([PeerAddress(1, "h", 1)]),
            b"error " + _pack(["NotFound", "gone"]),
            *(b"result AAAA", b"proof AAAA"),
        )
    )


def _parse_words(data: bytes) -> object:
    kind, _, value = data.partition(b" ")
    if kind == b"target":
        ask = peer_protocol.parse_data_target(value)
        assert peer_protocol.parse_data_target(peer_protocol.data_target(ask)) == ask
        return None
    readers: dict[bytes, Callable[[bytes], object]] = {
        b"method": peer_protocol.parse_method_target,
        b"at": lambda text: peer_protocol.parse_at(1, text),
        b"takes": peer_protocol.parse_takes,
        b"sums": lambda text: peer_protocol.parse_sums(text, _ASK, 12 << 20),
        b"lent": lambda text: peer_protocol.parse_lent(text, _ASK),
        b"addresses": peer_protocol.parse_addresses,
        b"result": peer_protocol.parse_result,
        b"proof": peer_protocol.parse_proof,
    }
    found = readers.get(kind, peer_protocol.parse_error)(value)
    return type(found).__name__


def _packed_value(draw: random.Random, depth: int = 0) -> Any:
    scalars: tuple[Any, ...] = (0, 1, -1, 1 << 40, True, None, "text", b"bytes", b"\0" * 16, 1.5)
    if depth > 3 or draw.random() < 0.5:
        return draw.choice(scalars)
    return [_packed_value(draw, depth + 1) for _ in range(draw.randrange(6))]


def _message(draw: random.Random) -> bytes:
    samples: tuple[Any, ...] = (
        *([1, b"", b"", []], [[[1, b"a/b"]]], [[[1, b"a", b"", 10]]], [3, b"\0" * 16]),
        *([[1, b"path", 0, 0, b"0" * 16, 5]], [[], b"\1\0\5\0"], [b"a", b"b"]),
        _packed_value(draw),
    )
    return _pack(draw.choice(samples))


def _parse_message(data: bytes) -> object:
    """Reads it as each of the messages that nodes exchange."""
    try:
        value = msgspec.msgpack.decode(data)
    except UNDECODABLE:
        return "none"
    taken = []
    for name, read in _MESSAGES.items():
        try:
            read(value)
        except KvfsError:
            continue
        taken.append(name)
    return " ".join(taken)


_MESSAGES: Final[dict[str, Callable[[Any], object]]] = {
    "news": name_protocol.parse_news,
    "confirm": name_protocol.parse_confirm,
    "pages": name_protocol.parse_asked_pages,
    "confirmed": lambda value: name_protocol.parse_confirmed(value, 1),
    "messages": name_protocol.parse_messages,
    "asked": home_protocol.parse_asked,
    "told": lambda value: home_protocol.parse_told(value, 1),
    "offers": copy_protocol.parse_offers,
    "wanted": copy_protocol.parse_wanted,
    "outcomes": lambda value: copy_protocol.parse_outcomes(value, 1),
    "promises": lambda value: copy_protocol.parse_promises(value, 1),
}


def _hello(draw: random.Random) -> bytes:
    dialing = Dialing(secrets.Secrets((_OURS,)), _ME)
    if draw.random() < 0.5:
        return b"h" + dialing.hello
    return b"r" + Answering(secrets.Secrets((_OURS,)), _ME).reply(dialing.hello)


def _shake(data: bytes) -> object:
    if data[:1] == b"r":
        Dialing(secrets.Secrets((_OURS,)), _ME).conclude(data[1:])
        raise AssertionError("an answer to another hello was believed")
    answering = Answering(secrets.Secrets((_OURS,)), _ME)
    return len(answering.reply(data[1:])) < handshake.LIMIT


def _holdings(draw: random.Random) -> bytes:
    """A message without its checksum, by which all that is changed would be refused."""
    store, epoch, since = draw.randrange(1 << 16), draw.randrange(1 << 32), draw.randrange(9)
    some = np.array(sorted(draw.sample(range(1 << 40), 3)), np.uint64)
    in_range = some // RANGES * RANGES + 3
    messages: tuple[Message, ...] = (
        HoldingsAsk(store, epoch, draw.choice((None, since))),
        HoldingsAsk(store, epoch, None, (1, 5)),
        Deltas(store, epoch, since + 1, since + 3, some, some[:0], draw.choice((None, 7))),
        RangeContents(store, epoch, since, 3, in_range),
    )
    return delta_codec.encode(draw.choice(messages))[:-8]


def _decode_holdings(data: bytes) -> object:
    whole = data + xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
    found = delta_codec.decode(whole)
    again = delta_codec.encode(found)
    assert delta_codec.encode(delta_codec.decode(again)) == again
    return type(found).__name__


# --- the engine


def _answer(draw: random.Random) -> bytes:
    values: list[Any] = [b"OK", 5, None, [b"a", [b"b", 7]], b"x" * draw.randrange(300)]
    return b"".join(_resp(draw.choice(values)) for _ in range(draw.randrange(1, 4)))


def _resp(value: Any) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(_resp, value))
    return b"$%d\r\n%b\r\n" % (len(value), value)


def _read_answers(data: bytes) -> object:
    parser, found = RespParser(), 0
    parser.feed(data)
    while parser.take() is not RespParser.PENDING:
        found += 1
    return found


def _log_answer(draw: random.Random) -> bytes:
    entry = [b"5-1", b"token", b"before", [[b"key", b"value", b"gone", None]], b"1"]
    return _pack([b"ok", [entry] * draw.randrange(3), b"10", b"own", [[b"k", b"v"]]])


def _read_log(data: bytes) -> object:
    found = log.read_answer(data)
    assert all(isinstance(each.number, int) for each in found.entries)
    return found.status


def _log_entry(draw: random.Random) -> bytes:
    writes = _pack([[b"key", b"value"], [b"other", None]])
    fields = [b"t", b"token", b"b", b"before", b"w", writes, b"v", b"1"][: draw.choice((6, 8))]
    return _pack([[b"7-1", fields]])


def _read_entry(data: bytes) -> object:
    try:
        found = msgspec.msgpack.decode(data, type=list[tuple[bytes, list[bytes]]])
    except UNDECODABLE:
        return None
    return len(log.read_entries(found))


def _url(draw: random.Random) -> bytes:
    return draw.choice(
        (
            *(b"redis://user:pw@host:6379/1?prefix=a", b"unix:///tmp/s?password-file=/x"),
            *(b"redis+sentinel://a:1,b:2/name", b"redis+cluster://[::1]:7,h", b"rediss://h?ca=/f"),
        )
    )


def _read_url(data: bytes) -> object:
    text = data.decode("utf-8", "surrogateescape")
    if not text.startswith("unix://"):  # whose path may be like anything
        assert ":pw@" not in location.shown(text)
    return location.parse(text).kind.name


# --- what lies on the disk


_RECORDS: Final[dict[bytes, tuple[Any, Callable[[bytes], Any]]]] = {
    b"i": (
        records.Inode(
            mode=33188,
            uid=0,
            gid=0,
            nlink=1,
            atime_ns=1,
            mtime_ns=1,
            ctime_ns=1,
            parent=2,
            name=b"n",
        ),
        records.unpack_inode,
    ),
    b"n": (records.Namespace(name=b"n", media=["ram"], tags={1: b"x"}), records.unpack_namespace),
    b"s": (records.Usage(bytes=5, inodes=1), records.unpack_usage),
    b"q": (records.NodeUsage(bytes=1), records.unpack_node_usage),
    b"p": (records.Holding(version=1, blocks=b"\1"), records.unpack_holding),
    b"a": (records.User(access_keys=["k"], created_ns=1), records.unpack_user),
    b"k": (records.AccessKey(user="u", secret=b"s", created_ns=1), records.unpack_access_key),
}


def _record(draw: random.Random) -> bytes:
    kind = draw.choice(sorted(_RECORDS))
    return kind + records.pack(_RECORDS[kind][0])


def _read_record(data: bytes) -> object:
    read = _RECORDS.get(data[:1], _RECORDS[b"i"])[1]
    found = read(data[1:])
    assert read(records.pack(found)) == found
    return type(found).__name__


def _tensors(draw: random.Random) -> bytes:
    begin, header = 0, {}
    for number in range(draw.randrange(4)):
        shape = [draw.randrange(5) for _ in range(draw.randrange(3))]
        size = 2
        for each in shape:
            size *= each
        header[f"t{number}"] = {
            "dtype": "F16",
            "shape": shape,
            "data_offsets": [begin, begin + size],
        }
        begin += size
    if draw.random() < 0.5:
        header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(begin)


def _read_tensors(data: bytes) -> object:
    length = safetensors.header_length(data, len(data), "input")
    found = safetensors.parse_header([data[8 : 8 + length]], length, len(data), "input")
    for each in found.tensors:
        assert 8 + length <= each.begin <= each.end <= len(data)
    return len(found.tensors)


TARGETS: Final = (
    Target("http head", _request, _parse_request, (RequestRefused,), (b"\r\n", b"Host: b\r\n")),
    Target("http chunks", _chunks, _frame_chunks, (), (b"\r\n", b"0\r\n\r\n", b"ffffffff\r\n")),
    Target("peer words", _words, _parse_words, (KvfsError,), (b"?size=", b"&first=")),
    Target("peer messages", _message, _parse_message, ()),
    Target("handshake", _hello, _shake, (KvfsError,)),
    Target("holdings", _holdings, _decode_holdings, (KvfsError,)),
    Target(
        "engine answers",
        _answer,
        _read_answers,
        (ServerLost,),
        (b"*1\r\n", b"$5\r\n", b"-ERR x\r\n"),
    ),
    Target("log answer", _log_answer, _read_log, (KvfsError,)),
    Target("log entries", _log_entry, _read_entry, (KvfsError,)),
    Target("engine url", _url, _read_url, (KvfsError,), (b"://", b"@", b"?prefix=", b"%00")),
    Target("records", _record, _read_record, UNDECODABLE),
    Target(
        "safetensors", _tensors, _read_tensors, (KvfsError,), (b'"data_offsets"', b"null", b"[1e9]")
    ),
)
