"""Parses a request into the members of its operation's input, by name and typed.

For each operation the model's shapes are compiled once into small functions. Members are what
botocore's users write: `parse` is the inverse of botocore's serialiser, except for a payload that
streams (`Body`), which stays with the connection.

Header values are Latin-1 strings, whatever their bytes: a value that a client sent, even UTF-8,
goes back to it unchanged.

Errors are S3's: InvalidArgument for members in the query or a header (or the code that S3 has for
that header), MalformedXML for members in the document (MalformedACLError for ACLs).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from s3api.http.s3_errors import S3Error, invalid_argument
from s3api.model.documents import (
    INTEGER_LIMIT,
    LONG_LIMIT,
    Convert,
    body_limit,
    payload_reader,
    truth,
)
from s3api.model.service_model import Operation, Shape, ShapeMember, service
from s3api.model.time_formats import parse_timestamp

# Where S3 has another error than InvalidArgument for an unknown value: code and message.
_UNKNOWN_VALUE: Final = {
    "x-amz-checksum-algorithm": (
        "InvalidRequest",
        "Checksum algorithm provided is unsupported. Please try again with any of the valid types",
    ),
    "x-amz-checksum-type": (
        "InvalidRequest",
        "Value for x-amz-checksum-type header is invalid.",
    ),
    "x-amz-sdk-checksum-algorithm": (
        "InvalidRequest",
        "Value for x-amz-sdk-checksum-algorithm header is invalid.",
    ),
    "x-amz-storage-class": ("InvalidStorageClass", ""),
    "x-amz-server-side-encryption": (
        "InvalidArgument",
        "The encryption method specified is not supported",
    ),
}
_UNKNOWN_VALUE_MESSAGE: Final = {
    "encoding-type": "Invalid Encoding Method specified in Request",
    "x-amz-metadata-directive": "Unknown metadata directive.",
    "x-amz-object-attributes": "Invalid attribute name specified.",
    "x-amz-object-lock-mode": "Unknown wormMode directive.",
    "x-amz-tagging-directive": "Unknown tagging directive.",
}
# Hints that a server may pass over: a value that S3 does not know is no error.
_HINTS: Final = frozenset({"x-amz-request-payer", "x-amz-checksum-mode"})
# Names of an algorithm are taken in either case.
_UPPERCASE: Final = frozenset({"x-amz-checksum-algorithm", "x-amz-sdk-checksum-algorithm"})
# Clients grant it with a new object as with any other ACL; the model has it for ACLs alone.
_GRANT_WRITE: Final = (b"x-amz-grant-write", "GrantWrite")
# A date that is none is no condition (RFC 9110, 13.1.3 and 13.1.4).
_LENIENT_DATES: Final = frozenset({"if-modified-since", "if-unmodified-since"})


class _Field(msgspec.Struct, frozen=True):
    """A member that travels in the query or a header."""

    member: str
    convert: Convert
    empty_is_absent: bool
    lenient: bool = False


class RequestParser:
    """Parses the requests of one operation. `streams` says that its payload is not read here."""

    def __init__(self, operation: Operation, shapes: Mapping[str, Shape]) -> None:
        shape = operation.input
        self.operation = operation.name
        self.uri: list[tuple[str, str]] = []
        self.query: dict[str, _Field] = {}
        self.headers: dict[bytes, _Field] = {}
        self.metadata: tuple[str, bytes] | None = None
        for name, member in shape.members.items():
            self._add(name, member, shapes)
        if "GrantWriteACP" in shape.members:
            wire, name = _GRANT_WRITE
            self.headers.setdefault(wire, _Field(name, str, False))
        outside = {name for name, m in shape.members.items() if m.location in _PLACES}
        self._required = sorted(shape.required & outside)
        self._places = {name: m.location_name for name, m in shape.members.items()}
        self.payload = payload_reader(operation, shapes)
        self.streams = bool(shape.payload) and shape.members[shape.payload].streaming

    def _add(self, name: str, member: ShapeMember, shapes: Mapping[str, Shape]) -> None:
        wire = member.location_name
        if member.location == "uri":
            self.uri.append((name, wire))
        elif member.location == "headers":
            self.metadata = name, wire.lower().encode()
        elif member.location in _PLACES:
            field = _field(name, member, shapes)
            if member.location == "querystring":
                self.query[wire] = field
            else:
                self.headers[wire.lower().encode()] = field

    def parse(
        self,
        bucket: str | None,
        key: str | None,
        query: Mapping[str, str],
        headers: Mapping[bytes, bytes],
    ) -> dict[str, Any]:
        """Returns all members but those of a document."""
        members: dict[str, Any] = {}
        for name, wire in self.uri:
            members[name] = bucket if wire == "Bucket" else key
        for wire, value in query.items():
            if field := self.query.get(wire):
                _take(members, field, wire, value)
        for header in headers:
            if header in self.headers:
                value = headers[header].decode("latin-1")
                _take(members, self.headers[header], header.decode("latin-1"), value)
        if self.metadata is not None and self.metadata[1] in b"\n".join(headers):
            name, prefix = self.metadata
            found = {
                header[len(prefix) :].decode("latin-1"): raw.decode("latin-1")
                for header, raw in headers.items()
                if header.startswith(prefix)
            }
            if found:
                members[name] = found
        for name in self._required:
            if name not in members:
                wire = self._places[name]
                raise S3Error("InvalidRequest", f"The request lacks the parameter or header {wire}")
        return members

    def take_document(self, members: dict[str, Any], body: bytes) -> None:
        """Adds the members of the document, if the operation has one."""
        if self.payload is not None:
            if len(body) > body_limit(self.operation):
                raise S3Error("MaxMessageLengthExceeded")
            self.payload(members, body)


_PLACES: Final = ("querystring", "header")


def parse(
    operation: str,
    bucket: str | None,
    key: str | None,
    query: Mapping[str, str],
    headers: Mapping[bytes, bytes],
    body: bytes = b"",
) -> dict[str, Any]:
    """Returns the members of a request: strings, integers, booleans, aware datetimes, lists and
    dicts.

    `query` and the key are decoded, `headers` have lower-case names. `body` is the whole document
    of an operation that has one (at most `body_limit` bytes), and ignored if it streams. Absent
    members are absent. Raises S3Error.
    """
    found = parser(operation)
    members = found.parse(bucket, key, query, headers)
    found.take_document(members, body)
    return members


@functools.cache
def parser(operation: str) -> RequestParser:
    """Returns the parser of an operation of the model. Raises KeyError for another name."""
    model = service()
    return RequestParser(model.operations[operation], model.shapes)


# --- query and headers


def _take(members: dict[str, Any], field: _Field, wire: str, value: str) -> None:
    if field.empty_is_absent and not value:
        return
    try:
        members[field.member] = field.convert(value)
    except ValueError:
        if not field.lenient:
            raise invalid_argument(wire, value) from None


def _field(name: str, member: ShapeMember, shapes: Mapping[str, Shape]) -> _Field:
    shape, wire = shapes[member.shape], member.location_name.lower()
    convert = _converter(wire, member.shape, shapes)
    is_choice = bool(shape.enum) and member.location == "querystring"
    empty_is_absent = shape.type != "string" or is_choice
    return _Field(name, convert, empty_is_absent, wire in _LENIENT_DATES)


def _converter(wire: str, shape_name: str, shapes: Mapping[str, Shape]) -> Convert:
    shape = shapes[shape_name]
    if shape.type == "list":
        assert shape.member is not None
        return _listed(_converter(wire, shape.member.shape, shapes))
    if shape.type in ("integer", "long"):
        limit = INTEGER_LIMIT if shape.type == "integer" else LONG_LIMIT
        return _whole(wire, limit if shape.max is None else int(shape.max), int(shape.min))
    if shape.type == "boolean":
        return truth
    if shape.type == "timestamp":
        return parse_timestamp
    if shape.enum and wire not in _HINTS:
        return _chosen(wire, shape.enum)
    return str


def _listed(convert: Convert) -> Convert:
    def read(value: str) -> list[Any]:
        return [convert(part.strip()) for part in value.split(",")]

    return read


def _whole(wire: str, limit: int, least: int = 0) -> Callable[[str], int]:
    message = f"Provided {wire} not an integer or within integer range"

    def read(value: str) -> int:
        if value.isascii() and value.isdigit() and len(value) < 20:
            number = int(value)
            if least <= number <= limit:
                return number
        raise invalid_argument(wire, value, message)

    return read


def _chosen(wire: str, allowed: frozenset[str]) -> Convert:
    def read(value: str) -> str:
        if wire in _UPPERCASE:
            value = value.upper()
        if value in allowed:
            return value
        code, message = _UNKNOWN_VALUE.get(wire, ("", ""))
        if code not in ("", "InvalidArgument"):
            raise S3Error(code, message)
        raise invalid_argument(wire, value, message or _UNKNOWN_VALUE_MESSAGE.get(wire, ""))

    return read
