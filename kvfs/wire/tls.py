"""Contexts for TLS."""

import ssl
from pathlib import Path


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 and newer for `certificate` (PEM, with its chain) and its `key`.

    Raises OSError, or ssl.SSLError (which is one) where they do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context
