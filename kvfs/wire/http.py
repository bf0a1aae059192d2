"""The public face of the HTTP/1.1 server."""

from kvfs.wire.body import Body
from kvfs.wire.connection import Counters, Handler, OnResponse, Refuse
from kvfs.wire.errors import (
    BadChunk,
    BodyStalled,
    BodyTooLarge,
    BodyTruncated,
    Refused,
    WireError,
)
from kvfs.wire.head import Field, Head, Memo
from kvfs.wire.limits import Limits
from kvfs.wire.response import FileRange, Prepared, Response, plain_refusal
from kvfs.wire.server import BACKLOG, listen, serve
from kvfs.wire.tls import server_context

__all__ = [
    "BACKLOG",
    "BadChunk",
    "Body",
    "BodyStalled",
    "BodyTooLarge",
    "BodyTruncated",
    "Counters",
    "Field",
    "FileRange",
    "Handler",
    "Head",
    "Limits",
    "Memo",
    "OnResponse",
    "Prepared",
    "Refuse",
    "Refused",
    "Response",
    "WireError",
    "listen",
    "plain_refusal",
    "serve",
    "server_context",
]
