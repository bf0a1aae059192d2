"""From a request to the members of its operation's input, by name and typed.

For each operation the model's shapes are compiled once into small functions. Members are what
botocore's users write: `parse` is the inverse of botocore's serialiser, but for a payload that
streams (`Body`), which stays with the connection.

Header values are Latin-1 strings, whatever their bytes: what a client sent, be it UTF-8, goes back
to it unchanged.

Errors are S3's: InvalidArgument for what stands in the query or a header (or the code that S3 has
for that header), MalformedXML for what stands in the document (MalformedACLError for ACLs).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from s3api.errors import S3Error, invalid_argument
from s3api.model.service import Member, Operation, Shape, service
from s3api.model.timestamps import parse_timestamp
from s3api.model.xml import Element, read_xml

# Enough for 10,000 parts with their checksums, and for 1,000 keys of 1,024 bytes in references.
LIST_LIMIT_BYTES: Final = 4 << 20
_LISTS: Final = frozenset({"CompleteMultipartUpload", "DeleteObjects"})
# Enough for 1,000 rules of a bucket's lifecycle.
DOCUMENT_LIMIT_BYTES: Final = 1 << 20
INTEGER_LIMIT: Final = (1 << 31) - 1
LONG_LIMIT: Final = (1 << 63) - 1

Convert = Callable[[str], Any]
Read = Callable[[Element], Any]

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
# A date that is none is no condition (RFC 9110, 13.1.3 and 13.1.4).
_LENIENT_DATES: Final = frozenset({"if-modified-since", "if-unmodified-since"})
# Regions are names of the server's own: that of the model's list says nothing here.
_OPEN_ENUMS: Final = frozenset({"BucketLocationConstraint"})
_ACL_OPERATIONS: Final = frozenset({"PutBucketAcl", "PutObjectAcl"})


class _Field(msgspec.Struct, frozen=True):
    """A member that travels in the query or a header."""

    member: str
    convert: Convert
    empty_is_absent: bool
    lenient: bool = False


class Parser:
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
        outside = {name for name, m in shape.members.items() if m.location in _PLACES}
        self._required = sorted(shape.required & outside)
        self._places = {name: m.location_name for name, m in shape.members.items()}
        self.payload = _payload(operation, shapes)
        self.streams = bool(shape.payload) and shape.members[shape.payload].streaming

    def _add(self, name: str, member: Member, shapes: Mapping[str, Shape]) -> None:
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
        body: bytes,
    ) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for name, wire in self.uri:
            members[name] = bucket if wire == "Bucket" else key
        for wire, value in query.items():
            if field := self.query.get(wire):
                _take(members, field, wire, value)
        self._take_headers(members, headers)
        for name in self._required:
            if name not in members:
                wire = self._places[name]
                raise S3Error("InvalidRequest", f"The request lacks the parameter or header {wire}")
        if self.payload is not None:
            if len(body) > body_limit(self.operation):
                raise S3Error("MaxMessageLengthExceeded")
            self.payload(members, body)
        return members

    def _take_headers(self, members: dict[str, Any], headers: Mapping[bytes, bytes]) -> None:
        metadata: dict[str, str] = {}
        name, prefix = self.metadata or ("", b"\n")
        for wire, raw in headers.items():
            if field := self.headers.get(wire):
                _take(members, field, wire.decode("latin-1"), raw.decode("latin-1"))
            elif wire.startswith(prefix):
                metadata[wire[len(prefix) :].decode("latin-1")] = raw.decode("latin-1")
        if metadata:
            members[name] = metadata


_PLACES: Final = ("querystring", "header")


def parse(
    operation: str,
    bucket: str | None,
    key: str | None,
    query: Mapping[str, str],
    headers: Mapping[bytes, bytes],
    body: bytes = b"",
) -> dict[str, Any]:
    """The members of a request: strings, integers, booleans, aware datetimes, lists and dicts.

    `query` and the key are decoded, `headers` have lower-case names. `body` is the whole document
    of an operation that has one (at most `body_limit` bytes), and passed over where it streams.
    Absent members are absent. Raises S3Error.
    """
    return parser(operation).parse(bucket, key, query, headers, body)


@functools.cache
def parser(operation: str) -> Parser:
    """The parser of an operation of the model. Raises KeyError for another name."""
    model = service()
    return Parser(model.operations[operation], model.shapes)


def body_limit(operation: str) -> int:
    """The most bytes that the document of a request may have."""
    return LIST_LIMIT_BYTES if operation in _LISTS else DOCUMENT_LIMIT_BYTES


def payload_length(headers: Mapping[bytes, bytes]) -> int:
    """The size in bytes of the payload that an upload announces, without the framing of
    aws-chunked. Raises MissingContentLength and InvalidArgument."""
    chunked = headers.get(b"x-amz-content-sha256", b"").startswith(b"STREAMING-")
    name = b"x-amz-decoded-content-length" if chunked else b"content-length"
    raw = headers.get(name)
    if raw is None:
        raise S3Error("MissingContentLength")
    return _whole(name.decode(), LONG_LIMIT)(raw.decode("latin-1"))


# --- query and headers


def _take(members: dict[str, Any], field: _Field, wire: str, value: str) -> None:
    if field.empty_is_absent and not value:
        return
    try:
        members[field.member] = field.convert(value)
    except ValueError:
        if not field.lenient:
            raise invalid_argument(wire, value) from None


def _field(name: str, member: Member, shapes: Mapping[str, Shape]) -> _Field:
    shape, wire = shapes[member.shape], member.location_name.lower()
    convert = _converter(wire, member.shape, shapes)
    return _Field(name, convert, shape.type != "string", wire in _LENIENT_DATES)


def _converter(wire: str, shape_name: str, shapes: Mapping[str, Shape]) -> Convert:
    shape = shapes[shape_name]
    if shape.type == "list":
        assert shape.member is not None
        return _listed(_converter(wire, shape.member.shape, shapes))
    if shape.type in ("integer", "long"):
        limit = INTEGER_LIMIT if shape.type == "integer" else LONG_LIMIT
        return _whole(wire, limit if shape.max is None else int(shape.max), int(shape.min))
    if shape.type == "boolean":
        return _truth
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


def _truth(value: str) -> bool:
    lowered = value.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError(value)
    return lowered == "true"


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


# --- the document


def _payload(
    operation: Operation, shapes: Mapping[str, Shape]
) -> Callable[[dict[str, Any], bytes], None] | None:
    shape = operation.input
    error = "MalformedACLError" if operation.name in _ACL_OPERATIONS else "MalformedXML"
    if not shape.payload:
        if not operation.body_root:
            return None
        read = _structure_reader(shape, shapes, error)
        return _whole_document(operation.body_root, read, error)
    name, member = shape.payload, shape.members[shape.payload]
    if member.streaming:
        return None
    required = name in shape.required
    if shapes[member.shape].type == "string":
        return _text_payload(name, required)
    read = _structure_reader(shapes[member.shape], shapes, error)
    return _document_payload(name, member.location_name or name, read, required, error)


def _whole_document(root: str, read: Read, error: str) -> Callable[[dict[str, Any], bytes], None]:
    def take(members: dict[str, Any], body: bytes) -> None:
        members.update(read(_root(body, root, error)))

    return take


def _document_payload(
    name: str, root: str, read: Read, required: bool, error: str
) -> Callable[[dict[str, Any], bytes], None]:
    def take(members: dict[str, Any], body: bytes) -> None:
        if body:
            members[name] = read(_root(body, root, error))
        elif required:
            raise S3Error("MissingRequestBodyError")

    return take


def _text_payload(name: str, required: bool) -> Callable[[dict[str, Any], bytes], None]:
    def take(members: dict[str, Any], body: bytes) -> None:
        if not body and required:
            raise S3Error("MissingRequestBodyError")
        try:
            members[name] = body.decode()
        except UnicodeDecodeError:
            raise S3Error("MalformedPolicy", "Policies must be valid UTF-8") from None

    return take


def _root(body: bytes, name: str, error: str) -> Element:
    try:
        root = read_xml(body)
    except S3Error as malformed:
        raise S3Error(error, malformed.message if error == malformed.code else "") from None
    if root.name != name:
        raise S3Error(error)
    return root


class _Part(msgspec.Struct, frozen=True):
    """A member of a structure in a document."""

    name: str
    read: Read
    repeated: bool


def _structure_reader(shape: Shape, shapes: Mapping[str, Shape], error: str) -> Read:
    parts: dict[str, _Part] = {}
    attributes: dict[str, tuple[str, Read]] = {}
    for name, member in shape.members.items():
        if member.location:
            continue
        wire = (member.location_name or name).rpartition(":")[2]
        if member.xml_attribute:
            attributes[wire] = name, _reader(member, shapes, error)
        elif _is_flat(member, shapes):
            inner = shapes[member.shape].member
            assert inner is not None
            parts[wire] = _Part(name, _reader(inner, shapes, error), True)
        else:
            parts[wire] = _Part(name, _reader(member, shapes, error), False)
    required = sorted(shape.required & {part.name for part in parts.values()})
    required += sorted(shape.required & {name for name, _ in attributes.values()})

    def read(element: Element) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for child in element.children:
            part = parts.get(child.name)
            if part is None:
                continue
            if part.repeated:
                members.setdefault(part.name, []).append(part.read(child))
            elif part.name in members:
                raise S3Error(error)
            else:
                members[part.name] = part.read(child)
        for wire, (name, convert) in attributes.items():
            if wire in element.attributes:
                members[name] = convert(_text_element(element.attributes[wire]))
        for name in required:
            if name not in members:
                raise S3Error(error)
        return members

    return read


def _reader(member: Member, shapes: Mapping[str, Shape], error: str) -> Read:
    shape = shapes[member.shape]
    if shape.type == "structure":
        return _structure_reader(shape, shapes, error)
    if shape.type == "list":
        assert shape.member is not None
        inner = shape.member
        return _list_reader(inner.location_name or "member", _reader(inner, shapes, error))
    return _scalar_reader(_scalar(member.shape, shape), error)


def _list_reader(wire: str, read: Read) -> Read:
    def read_list(element: Element) -> list[Any]:
        return [read(child) for child in element.children if child.name == wire]

    return read_list


def _scalar_reader(convert: Convert, error: str) -> Read:
    def read(element: Element) -> Any:
        if element.children:
            raise S3Error(error)
        try:
            return convert(element.text)
        except ValueError:
            raise S3Error(error) from None

    return read


def _scalar(name: str, shape: Shape) -> Convert:
    if shape.type in ("integer", "long"):
        return _number(INTEGER_LIMIT if shape.type == "integer" else LONG_LIMIT)
    if shape.type == "boolean":
        return _truth
    if shape.type == "timestamp":
        return parse_timestamp
    if shape.enum and name not in _OPEN_ENUMS:
        return _member_of(shape.enum)
    return str


def _number(limit: int) -> Convert:
    def read(value: str) -> int:
        value = value.strip()
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise ValueError(value)
        number = int(value)
        if not -limit - 1 <= number <= limit:
            raise ValueError(value)
        return number

    return read


def _member_of(allowed: frozenset[str]) -> Convert:
    def read(value: str) -> str:
        value = value.strip()
        if value not in allowed:
            raise ValueError(value)
        return value

    return read


def _is_flat(member: Member, shapes: Mapping[str, Shape]) -> bool:
    shape = shapes[member.shape]
    return shape.type == "list" and (member.flattened or shape.flattened)


def _text_element(text: str) -> Element:
    element = Element("", {})
    element.text = text
    return element
