"""The public face of the HTTP/1.1 server and client."""

from kvfs.wire.body import Body
from kvfs.wire.client import Answer, ClientConnection, connect
from kvfs.wire.connection import Counters, Handler, OnResponse, Refuse
from kvfs.wire.errors import (
    BadChunk,
    BodyStalled,
    BodyTooLarge,
    BodyTruncated,
    Lost,
    Refused,
    WireError,
)
from kvfs.wire.head import Field, Head, Memo, Session
from kvfs.wire.limits import Limits
from kvfs.wire.response import FileRange, Prepared, Response, plain_refusal
from kvfs.wire.server import BACKLOG, listen, serve
from kvfs.wire.tls import server_context

__all__ = [
    "BACKLOG",
    "Answer",
    "BadChunk",
    "Body",
    "BodyStalled",
    "BodyTooLarge",
    "BodyTruncated",
    "ClientConnection",
    "Counters",
    "Field",
    "FileRange",
    "Handler",
    "Head",
    "Limits",
    "Lost",
    "Memo",
    "OnResponse",
    "Prepared",
    "Refuse",
    "Refused",
    "Response",
    "Session",
    "WireError",
    "connect",
    "listen",
    "plain_refusal",
    "serve",
    "server_context",
]
