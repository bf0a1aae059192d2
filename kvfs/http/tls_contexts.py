"""Contexts for TLS."""

import calendar
import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_UTC_TIME: Final = 0x17
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The TLS of a server."""

    context: Callable[[], ssl.SSLContext]
    """Returns the context for a connection that begins: others may follow, and those that are open
    go on with theirs."""
    plain_too: bool = False
    """Whether connections without TLS are served on the same port."""
    refused: Callable[[str, str], None] = lambda _host, _reason: None
    """Told of the host of a peer whose certificate was not accepted, or that did not accept ours,
    and the reason."""


class CertificateFiles:
    """The context for a certificate and its key in files, read again once they are others."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises what `server_context` raises."""
        self._files: Final = certificate, key
        self._state = self._stat()
        self._context = server_context(certificate, key)

    def context(self) -> ssl.SSLContext:
        """Returns the context for the files as they are: those before, as long as new ones cannot
        be used, for example because only one of them was replaced yet."""
        state = self._stat()
        if state != self._state:
            self._state = state
            try:
                self._context = server_context(*self._files)
                log.info("the certificate %s was read anew", self._files[0])
            except OSError as error:
                log.warning("%s cannot be used, the one before it stays: %s", self._files[0], error)
        return self._context

    def _stat(self) -> tuple[tuple[int, int, int], ...] | None:
        try:
            found = [os.stat(each) for each in self._files]
        except OSError:
            return None
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Returns a context of TLS 1.2 and newer for `certificate` (PEM, with its chain) and its `key`.

    Raises OSError, or ssl.SSLError (which is one) if they do not belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Of a peer that ends without a word the answer is still sent: HTTP's own lengths tell what was
    # cut off. Renegotiation costs us more than the peer, and TLS 1.3 has none.
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate, key)
    return context


def expires_s(certificate: Path) -> float:
    """Returns the time when the first certificate of a PEM file ends, in seconds of the epoch.
    Raises OSError, ValueError (there is none)."""
    text = certificate.read_text(encoding="ascii", errors="replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    der = ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)])
    whole, _ = _content(der)
    told, _ = _content(whole)
    _, at = _content(told)  # the version, in certificates that have extensions
    if told[:1] != b"\xa0":
        at = 0
    for _ in range(3):  # serial number, algorithm, issuer
        at += _content(told[at:])[1]
    validity, _ = _content(told[at:])
    last = validity[_content(validity)[1] :]
    digits = _content(last)[0].decode("ascii")
    if last[0] == _UTC_TIME:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    return float(calendar.timegm(time.strptime(digits, "%Y%m%d%H%M%SZ")))


def _content(der: bytes) -> tuple[bytes, int]:
    """Returns the content of the first element, and where the next one begins. Raises
    ValueError."""
    if len(der) < 2:
        raise ValueError("no certificate")
    length, begin = der[1], 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[2:begin], "big")
    if len(der) < begin + length:
        raise ValueError("no certificate")
    return der[begin : begin + length], begin + length
