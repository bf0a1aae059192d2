"""The public face of the HTTP/1.1 server and client."""

from kvfs.http.body import RequestBody
from kvfs.http.connection import Counters, Handler, OnResponse, Refuse
from kvfs.http.connection_errors import (
    BadChunk,
    BodyStalled,
    BodyTooLarge,
    BodyTruncated,
    ConnectionLost,
    RequestRefused,
    Untrusted,
    WireError,
)
from kvfs.http.head import ConnectionState, Field, Head, Memo
from kvfs.http.http_client import ClientConnection, ResponseHead, connect
from kvfs.http.limits import Limits
from kvfs.http.response import FileRange, Prepared, Response, plain_refusal
from kvfs.http.server import BACKLOG, listen, serve
from kvfs.http.tls_contexts import CertificateFiles, ServerTls, expires_s, server_context

__all__ = [
    "BACKLOG",
    "BadChunk",
    "BodyStalled",
    "BodyTooLarge",
    "BodyTruncated",
    "CertificateFiles",
    "ClientConnection",
    "ConnectionLost",
    "ConnectionState",
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
    "RequestBody",
    "RequestRefused",
    "Response",
    "ResponseHead",
    "ServerTls",
    "Untrusted",
    "WireError",
    "connect",
    "expires_s",
    "listen",
    "plain_refusal",
    "serve",
    "server_context",
]
