"""Limits of what a peer may send, and of how long each wait may last."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, counts and seconds. Deadlines are checked by one task, so they may pass a tick late:
    an eighth of the shortest, a second at most."""

    head_bytes: int = 32 << 10
    """Request line and header fields: 431."""
    header_count: int = 100
    """Header fields, and apart from them trailer fields: 431."""
    target_bytes: int = 16 << 10
    """Path and query: 414."""
    body_bytes: int = 5 << 30
    """A request's body: 413."""
    chunk_line_bytes: int = 256
    """The line before each chunk, its extensions included: 400."""
    trailer_bytes: int = 8 << 10
    """The fields after the last chunk: 431."""
    connections: int = 1024
    """Served at once; as many again wait for them, and then in the listeners' backlog."""
    idle_s: float = 60.0
    """Between requests, closed in silence."""
    first_head_s: float = 2.0
    """Seconds from the first byte of a connection's first head to its last (408)."""
    head_s: float = 10.0
    """Likewise of further heads; before the first byte of the first, closed in silence; and for
    the handshake of TLS."""
    shed_idle_s: float = 1.0
    """Seconds of idleness, or without a head, after which connections end where others wait to be
    served."""
    shed_stalled_s: float = 2.0
    """Likewise those in whose request neither side moved `progress_bytes`."""
    stall_s: float = 30.0
    """Waiting for the peer while `progress_bytes` of a body, or less at its end, come or go."""
    progress_bytes: int = 16 << 10
    drain_bytes: int = 256 << 10
    """Bytes of a body that the handler left unread: read and dropped, so that the connection lives
    on."""
    linger_s: float = 2.0
    """After the last response, while the peer still sends: read and dropped, so that it sees it."""
    linger_bytes: int = 64 << 20
    stop_s: float = 10.0
    """For requests in flight when the server is told to stop."""

    def __post_init__(self) -> None:
        assert 0 < self.target_bytes < self.head_bytes
        assert 0 < self.chunk_line_bytes <= self.trailer_bytes
        assert 0 <= self.drain_bytes <= self.linger_bytes
        assert min(self.header_count, self.connections, self.progress_bytes) > 0
        assert min(self.idle_s, self.head_s, self.stall_s, self.linger_s) > 0
        assert min(self.first_head_s, self.shed_idle_s, self.shed_stalled_s) > 0

    @property
    def tick_s(self) -> float:
        """How often deadlines are looked at."""
        shortest = min(self.idle_s, self.first_head_s, self.head_s, self.stall_s, self.linger_s)
        return min(1.0, shortest / 8)
