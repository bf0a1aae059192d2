"""The public face of the HTTP/1.1 server and client."""

from kvfs.http.body import Body
from kvfs.http.connection import Counters, Handler, OnResponse, Refuse
from kvfs.http.connection_errors import (
    BadChunk,
    BodyStalled,
    BodyTooLarge,
    BodyTruncated,
    Lost,
    Refused,
    WireError,
)
from kvfs.http.head import Field, Head, Memo, Session
from kvfs.http.http_client import Answer, ClientConnection, connect
from kvfs.http.limits import Limits
from kvfs.http.response import FileRange, Prepared, Response, plain_refusal
from kvfs.http.server import BACKLOG, listen, serve
from kvfs.http.tls_contexts import server_context

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
