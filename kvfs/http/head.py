"""The head of a request."""

from collections.abc import Mapping, Sequence

import msgspec

from kvfs.http.full_server import Origin

Field = tuple[bytes, bytes]


class Memo:
    """A place where a handler keeps its findings about a head, for equal ones to come."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: object = None


class ConnectionState:
    """A place where a handler keeps facts that hold for the whole of a connection."""

    __slots__ = ("_origin", "proven", "value")

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self.proven = False
        """Whether the caller has proven its identity."""
        self.value: object = None

    def prove(self) -> None:
        """Notes that the caller has proven its identity: on a full server, it precedes
        strangers."""
        self.proven = self._origin.proven = True


class Head(msgspec.Struct):
    """The head of a request. Equal heads may share `headers` and `fields`: they must not be
    changed."""

    method: str
    target: bytes
    """Path and query exactly as sent; in the absolute form, the part after the authority."""
    headers: Sequence[Field]
    """The fields in the order sent, names in lower case, values without surrounding blanks."""
    fields: Mapping[bytes, bytes]
    """The same by name; values of a name sent more than once are joined with `, `."""
    content_length: int | None
    """The Content-Length; None if none was sent."""
    chunked: bool
    persistent: bool
    """Whether the client may go on with this connection."""
    http_1_0: bool
    expects_continue: bool
    peer: tuple[str, int]
    """Host and port; for a peer on a unix socket, an empty host and port 0."""
    secure: bool
    """Whether it came over TLS."""
    memo: Memo | None = None
    """Shared by all heads of the same bytes, if such are likely to come; else None."""
    session: ConnectionState | None = None
    """The session of the connection that it came on: set by the server."""
    handled: object = None
    """The handler's record of this request, for `OnResponse`."""

    def get(self, name: bytes) -> bytes | None:
        """Returns the value of the field called `name`, in lower case; None if none was sent."""
        return self.fields.get(name)
