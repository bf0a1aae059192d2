"""Errors of a connection."""


class WireError(Exception):
    """Base of every error that the server raises on purpose."""


class ConnectionLost(WireError):
    """The connection cannot be used any more: the peer went away, or takes nothing."""


class Stalled(ConnectionLost):
    """The peer did not do its part within the deadline."""


class Untrusted(ConnectionLost):
    """A certificate was not accepted, by this side or by the peer."""


class RequestRefused(WireError):
    """A request is answered with `status`, and the connection is closed.

    A handler may raise it too; `reason` is a sentence for the client's author."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}"


class BodyTruncated(RequestRefused):
    """The peer closed before its body's end."""

    def __init__(self) -> None:
        super().__init__(400, "the connection ended before the body did")


class BodyStalled(RequestRefused):
    """The body came slower than the limits allow."""

    def __init__(self) -> None:
        super().__init__(408, "the body came too slowly")


class BodyTooLarge(RequestRefused):
    """The body is larger than allowed."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413, f"a body may hold {limit_bytes} bytes")


class BadChunk(RequestRefused):
    """A chunked body does not follow RFC 9112, section 7.1."""

    def __init__(self, reason: str) -> None:
        super().__init__(400, reason)
