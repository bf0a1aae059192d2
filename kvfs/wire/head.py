"""The head of a request."""

from dataclasses import dataclass

Field = tuple[bytes, bytes]


@dataclass(slots=True)
class Head:
    method: str
    target: bytes
    """Path and query exactly as sent; of the absolute form, what follows the authority."""
    headers: list[Field]
    """In the order sent, names in lower case, values without surrounding blanks."""
    fields: dict[bytes, bytes]
    """The same by name; of a name sent more than once, the values joined with `, `."""
    content_length: int | None
    """None where none was sent."""
    chunked: bool
    persistent: bool
    """The client may go on with this connection."""
    http_1_0: bool
    expects_continue: bool
    peer: tuple[str, int]
    """Host and port; of a peer on a unix socket, an empty host and port 0."""
    secure: bool
    """It came over TLS."""
    handled: object = None
    """What the handler says of it, for `OnResponse`."""

    def get(self, name: bytes) -> bytes | None:
        """The value of the field called `name`, in lower case; None where none was sent."""
        return self.fields.get(name)
