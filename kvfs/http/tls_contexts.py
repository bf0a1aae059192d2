"""Contexts for TLS."""

import ssl
from pathlib import Path


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns a context of TLS 1.2 and newer for `certificate` (PEM, with its chain) and its `key`.

    Raises OSError, or ssl.SSLError (which is one) if they do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Of a peer that ends without a word the answer is still sent: HTTP's own lengths tell what was
    # cut off. Renegotiation costs us more than the peer, and TLS 1.3 has none.
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF | ssl.OP_NO_RENEGOTIATION
    context.load_cert_chain(certificate, key)
    return context
