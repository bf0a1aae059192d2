"""The bodies of browser uploads: multipart/form-data (RFC 7578), as it comes.

The fields before the file are small and gathered; the file itself is only found: its writer gets
views of it. Bytes after the file are passed over, as S3 does. No I/O here.
"""

import mmap
import re
from collections.abc import Mapping
from email.message import Message
from typing import Final
from urllib.parse import unquote

from s3api.http.s3_errors import S3Error

FIELDS_BYTES: Final = 64 << 10
"""Most bytes before the file's."""
_FIELDS: Final = 1000
_FILE: Final = "file"
_is_boundary: Final = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]").fullmatch
_PARAMETER: Final = re.compile(r';\s*([A-Za-z*]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')
_ESCAPED: Final = re.compile(r'\\(["\\])')


def boundary_of(content_type: bytes) -> bytes:
    """Returns the boundary that a Content-Type names. Raises MalformedPOSTRequest."""
    header = Message()
    header["content-type"] = content_type.decode("latin-1")
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not _is_boundary(boundary):
        raise _malformed()
    return boundary.encode()


Buffer = bytearray | mmap.mmap


class Fields:
    """Reads up to the file's first byte."""

    def __init__(self, boundary: bytes) -> None:
        self.delimiter: Final = b"\r\n--" + boundary
        """The delimiter that ends the file."""
        self.found: dict[str, str] = {}
        """The fields by name in lower case."""
        self.file_name = ""
        self._at = 0
        """Behind the last delimiter; 0: before the first."""

    def feed(self, data: Buffer, end: int) -> int | None:
        """Returns the position in `data` where the file begins, of which the first `end` bytes have
        come; None: go on. To be called again with the same data and the bytes that have come behind
        it. Raises MalformedPOSTRequest, IncorrectNumberOfFilesInPostRequest,
        MaxPostPreDataLengthExceededError."""
        while (file := self._part(data, end)) is None:
            pass
        if (end if file < 0 else file) > FIELDS_BYTES:
            raise S3Error("MaxPostPreDataLengthExceededError")
        return None if file < 0 else file

    def _part(self, data: Buffer, end: int) -> int | None:
        """Takes the next part: returns where the file begins, -1 if it is incomplete, None:
        taken."""
        if not self._at:
            return self._begin(data, end)
        at = self._at
        if end - at < 2:
            return -1
        if data[at : at + 2] == b"--":
            raise S3Error("IncorrectNumberOfFilesInPostRequest")
        if data[at : at + 2] != b"\r\n":
            raise _malformed()
        blank = data.find(b"\r\n\r\n", at, end)
        if blank < 0:
            return -1
        name, self.file_name = _disposition(bytes(data[at + 2 : blank]))
        if name == _FILE:
            return blank + 4
        # An empty value's delimiter begins with the blank line's end.
        close = data.find(self.delimiter, blank + 2, end)
        if close < 0:
            return -1
        self._add(name, bytes(data[blank + 4 : close]))
        self._at = close + len(self.delimiter)
        return None

    def _begin(self, data: Buffer, end: int) -> int | None:
        first = self.delimiter[2:]
        at = data.find(first, 0, end)
        if at < 0:
            return -1
        self._at = at + len(first)
        return None

    def _add(self, name: str, value: bytes) -> None:
        if name in self.found or len(self.found) >= _FIELDS:
            raise _malformed()
        self.found[name] = _text(value)


def put_file_name(key: str, file_name: str) -> str:
    """Returns the key with the uploaded file's name, without its directories, for `${filename}`."""
    return key.replace("${filename}", re.split(r"[/\\]", file_name)[-1])


def _disposition(head: bytes) -> tuple[str, str]:
    """Returns the name of a part in lower case, and the name of its file."""
    for line in _text(head).split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            found = _parameters(value)
            if value.lstrip().lower().startswith("form-data") and found.get("name"):
                return found["name"].lower(), found.get("filename", "")
    raise _malformed()


def _parameters(value: str) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name, quoted, plain in _PARAMETER.findall(value):
        text = _ESCAPED.sub(r"\1", quoted) or plain
        if name.lower() == "filename*" and text.lower().startswith("utf-8''"):
            found["filename"] = unquote(text[7:])
        else:
            found.setdefault(name.lower(), text)
    return found


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _malformed() from None


def _malformed() -> S3Error:
    return S3Error("MalformedPOSTRequest")
