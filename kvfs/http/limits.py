"""Limits of what a peer may send, and of the duration of each wait."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, counts and seconds. One task checks the deadlines, so they may pass a tick late: an
    eighth of the shortest, a second at most."""

    head_bytes: int = 32 << 10
    """Request line and header fields; beyond: 431."""
    header_count: int = 100
    """Header fields, and separately trailer fields; beyond: 431."""
    target_bytes: int = 16 << 10
    """Path and query; beyond: 414."""
    body_bytes: int = 5 << 30
    """A request's body; beyond: 413."""
    chunk_line_bytes: int = 256
    """The line before each chunk, with its extensions; beyond: 400."""
    trailer_bytes: int = 8 << 10
    """The fields after the last chunk; beyond: 431."""
    connections: int = 1024
    """Connections served at once; as many again wait for them, and then in the listeners'
    backlog."""
    idle_s: float = 60.0
    """Seconds between requests; then the connection is closed silently."""
    first_head_s: float = 2.0
    """Seconds from the first byte of a connection's first head to its last (408)."""
    head_s: float = 10.0
    """The same for further heads; before the first byte of the first, closed silently; and for the
    handshake of TLS."""
    shed_idle_s: float = 1.0
    """Seconds of idleness, or without a head, after which connections end if others wait to be
    served."""
    shed_stalled_s: float = 2.0
    """The same for those in whose request neither side moved `progress_bytes`."""
    stall_s: float = 30.0
    """Seconds of waiting for the peer for each `progress_bytes` of a body, or the rest at its
    end."""
    progress_bytes: int = 16 << 10
    drain_bytes: int = 256 << 10
    """Bytes of a body that the handler left unread, which are read and dropped, so that the
    connection lives on."""
    linger_s: float = 2.0
    """Seconds after the last response in which the peer's bytes are read and dropped, so that it
    sees the response."""
    linger_bytes: int = 64 << 20
    stop_s: float = 10.0
    """Seconds for requests in flight when the server is told to stop."""
    parting_s: float = 0.0
    """Seconds for which a connection then waits for another request, from its last one on: the
    answer to that tells its client to make a new connection. A client whose request and the end of
    an idle connection cross each other has lost the request."""

    def __post_init__(self) -> None:
        assert 0 < self.target_bytes < self.head_bytes
        assert 0 < self.chunk_line_bytes <= self.trailer_bytes
        assert 0 <= self.drain_bytes <= self.linger_bytes
        assert min(self.header_count, self.connections, self.progress_bytes) > 0
        assert min(self.idle_s, self.head_s, self.stall_s, self.linger_s) > 0
        assert min(self.first_head_s, self.shed_idle_s, self.shed_stalled_s) > 0

    @property
    def tick_s(self) -> float:
        """Seconds between two checks of deadlines."""
        shortest = min(self.idle_s, self.first_head_s, self.head_s, self.stall_s, self.linger_s)
        return min(1.0, shortest / 8)
