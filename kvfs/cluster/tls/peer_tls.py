"""TLS of one node: the contexts for the connections that it makes and takes.

They are made anew when the cluster's secrets are others, and daily, when a connection begins; open
connections go on with theirs. So nothing has to watch over a certificate's end. Keys never leave
the process's memory.

Invariants
- TLS 1.3; each side shows a certificate of an authority whose secret is valid, and checks the
  other's. The handshake of `cluster.handshake`, inside, then tells which node it is.
- While the cluster has several secrets, nodes may know different ones: the node that dials names
  the secret (in the server's name) of which both certificates are, and tries the next if it is
  not known there. The oldest first, since the nodes that were told nothing yet know it.
"""

import os
import ssl
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvfs.base.config import PeerTlsMode
from kvfs.base.errors import Unavailable
from kvfs.cluster.secrets import Secret, Secrets
from kvfs.cluster.tls.certificates import Authority, Issued
from kvfs.http.api import ServerTls

RENEWAL_S: Final = 86400.0
"""Time after which a certificate is made anew."""


class _Contexts(NamedTuple):
    """The contexts of certificates that were issued at one time."""

    secrets: Secrets
    issued_s: float
    expires_s: float
    clients: list[tuple[str, ssl.SSLContext]]
    """For each secret, the oldest first, its name and the context."""
    server: ssl.SSLContext


class PeerTls:
    """The TLS of one node. For one event loop."""

    def __init__(
        self,
        mode: PeerTlsMode,
        secrets: Callable[[], Secrets],
        node: int,
        speaks: Callable[[int], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`secrets`: those that are valid now. `speaks`: whether another node says of itself that
        it speaks TLS."""
        self._mode = mode
        self._secrets = secrets
        self._name = f"node {node}"
        self._speaks = speaks
        self._clock = clock
        self._made: _Contexts | None = None

    @property
    def is_required(self) -> bool:
        """Whether nothing else is spoken."""
        return self._mode == "require"

    def to_node(self, node: int) -> list[tuple[str, ssl.SSLContext]]:
        """Returns what to try in turn for a connection to another node: the server's name and the
        context; nothing: a plain connection. Raises Unavailable: no context can be made now."""
        if self._mode == "off" or not (self.is_required or self._speaks(node)):
            return []
        return self._contexts().clients

    def server(self, refused: Callable[[str, str], None]) -> ServerTls | None:
        """Returns the server's part; `refused` as there. Plain connections come in too: whoever
        serves them tells those that may not how to mend it."""
        if self._mode == "off":
            return None
        return ServerTls(lambda: self._contexts().server, plain_too=True, refused=refused)

    def report(self) -> dict[str, Any]:
        """Returns its part of the node's status. Raises Unavailable."""
        expires_s = None if self._mode == "off" else self._contexts().expires_s
        return {"mode": self._mode, "certificate_expires_s": expires_s}

    def _contexts(self) -> _Contexts:
        made, secrets, now_s = self._made, self._secrets(), self._clock()
        # Also when the clock was set back.
        is_fresh = made is not None and 0 <= now_s - made.issued_s < RENEWAL_S
        if made is None or not is_fresh or made.secrets != secrets:
            try:
                made = self._made = self._make(secrets, now_s)
            except OSError as error:  # no descriptor is left, or OpenSSL may not use Ed25519
                raise Unavailable(
                    f"no certificate for other nodes can be made (peer_tls): {error}"
                ) from error
        return made

    def _make(self, secrets: Secrets, now_s: float) -> _Contexts:
        authorities = {secret: Authority(secret) for secret in reversed(secrets)}
        trusted = b"".join(each.certificate for each in authorities.values()).decode()
        issued = {secret: each.issue(self._name, now_s) for secret, each in authorities.items()}
        servers = {
            _server_name(secret): _context(ssl.PROTOCOL_TLS_SERVER, trusted, each)
            for secret, each in issued.items()
        }
        server = next(iter(servers.values()))
        server.sni_callback = _chooses(servers)
        return _Contexts(
            secrets,
            now_s,
            min(each.expires_s for each in issued.values()),
            [
                (_server_name(secret), _context(ssl.PROTOCOL_TLS_CLIENT, trusted, each))
                for secret, each in issued.items()
            ],
            server,
        )


def _server_name(secret: Secret) -> str:
    return f"{secret.digest.hex()}.kvfs"


def _chooses(
    servers: dict[str, ssl.SSLContext],
) -> Callable[[ssl.SSLObject, str | None, ssl.SSLContext], int | None]:
    """Returns the function that gives a connection the certificate of the secret that was named."""

    def choose(connection: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> int | None:
        if name is None:
            return None
        if name not in servers:
            return int(ssl.AlertDescription.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)
        connection.context = servers[name]
        return None

    return choose


def _context(protocol: int, trusted: str, issued: Issued) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the authority vouches for a node, the handshake for which one
    context.verify_mode = ssl.CERT_REQUIRED
    # HTTP's own lengths tell what was cut off.
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are kept: none is resumed
    context.load_verify_locations(cadata=trusted)
    with os.fdopen(os.memfd_create("kvfs-certificate"), "wb") as file:
        file.write(issued.certificate + issued.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
