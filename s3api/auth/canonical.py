"""A request in the form that signature version 4 signs: path, query, headers in one encoding.

Follows "Create a canonical request" of the IAM user guide, with S3's exceptions: the path is
encoded once and keeps empty segments, `.` and `..`. Clients encode differently (lower-case
hexadecimal, `+` for a space, needless escapes): everything is decoded and encoded anew, but only if
a look at the bytes finds that it is not canonical already.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import unquote_to_bytes

Headers = Sequence[tuple[bytes, bytes]]
Parameter = tuple[bytes, bytes, bytes]
"""Name, `=`, value; both encoded canonically."""

_PLAIN: Final = rb"A-Za-z0-9\-._~"
# Upper-case escapes of all that is neither plain nor `/`; of `/` in the query alone.
_ESCAPE: Final = rb"%(?:[01][0-9A-F]|2[0-9A-C]|3[A-F]|40|5[B-E]|60|7[B-DF]|[89A-F][0-9A-F])"
is_canonical_path: Final = re.compile(rb"(?:[%b/]++|%b)++" % (_PLAIN, _ESCAPE)).fullmatch
"""Whether a path, as it was sent, is in canonical encoding and not empty."""
_WORD: Final = rb"(?:[%b]++|%b|%%2F)*+" % (_PLAIN, _ESCAPE)
_is_canonical_query: Final = re.compile(rb"(?:%b=%b(?:&%b=%b)*+)?" % ((_WORD,) * 4)).fullmatch
_escape_path: Final = re.compile(rb"[^%s/]" % _PLAIN).sub
_escape_value: Final = re.compile(rb"[^%s]" % _PLAIN).sub


def _escaped(match: re.Match[bytes]) -> bytes:
    return b"%%%02X" % match[0][0]


def encode_path(path: bytes) -> bytes:
    """Returns a decoded path, encoded: all but A-Z a-z 0-9 - . _ ~ / is escaped."""
    return _escape_path(_escaped, path)


def encode(value: bytes) -> bytes:
    """Returns a decoded name or value of the query, encoded: `/` is escaped too."""
    return _escape_value(_escaped, value)


def decode(value: bytes) -> bytes:
    """Returns a name or value of the query, decoded."""
    return value and unquote_to_bytes(value.replace(b"+", b" "))


def canonical_path(path: bytes) -> bytes:
    """Returns a path as it was sent, in canonical encoding."""
    if is_canonical_path(path):
        return path
    return encode_path(unquote_to_bytes(path)) or b"/"


def parameters(query: bytes) -> list[Parameter]:
    """Returns the query's parameters in the order sent."""
    if not query:
        return []
    found = [part.partition(b"=") for part in query.split(b"&") if part]
    if _is_canonical_query(query):
        return found
    return [(encode(decode(name)), b"=", encode(decode(value))) for name, _, value in found]


def canonical_query(sent: Iterable[Parameter]) -> bytes:
    """Returns the query sorted by name, then value."""
    return b"&".join(map(b"".join, sorted(sent)))


def by_name(headers: Headers) -> dict[bytes, bytes]:
    """Returns headers (names in lower case) by name; the values of one name are joined with
    commas."""
    found = dict(headers)
    if len(found) != len(headers):
        gathered: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            gathered.setdefault(name, []).append(trimmed(value))
        found = {name: b",".join(values) for name, values in gathered.items()}
    return found


def trimmed(value: bytes) -> bytes:
    """Returns the value without white space around it, and with single spaces inside."""
    return b" ".join(value.split())


def canonical_request(
    method: bytes,
    path: bytes,
    query: bytes,
    names: Sequence[bytes],
    headers: dict[bytes, bytes],
    payload: bytes,
) -> bytes:
    """Returns the canonical request. `path` and `query` are canonical, `names` are the signed
    headers (one that is absent counts as empty), `payload` is the digest or its substitute."""
    lines = [method, path, query]
    for name in names:
        value = b" ".join(headers.get(name, b"").split())
        lines.append(b"%b:%b" % (name, value))
    lines += (b"", b";".join(names), payload)
    return b"\n".join(lines)
