"""The documents that requests carry, compiled from the model's shapes into small functions.

A document has the root element that the operation names, with any namespace or none. Elements that
a structure does not have are passed over, as S3 does; an element that occurs twice, lacks what the
shape requires, or holds another value than its type or enumeration allows makes it malformed.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from s3api.http.s3_errors import S3Error
from s3api.model.service_model import Operation, Shape, ShapeMember
from s3api.model.time_formats import parse_timestamp
from s3api.model.xml import Element, read_xml

# Enough for 10,000 parts with their checksums, and for 1,000 keys of 1,024 bytes in references.
LIST_LIMIT_BYTES: Final = 4 << 20
_LISTS: Final = frozenset({"CompleteMultipartUpload", "DeleteObjects"})
# Enough for 1,000 rules of a bucket's lifecycle.
DOCUMENT_LIMIT_BYTES: Final = 1 << 20
INTEGER_LIMIT: Final = (1 << 31) - 1
LONG_LIMIT: Final = (1 << 63) - 1

# Regions are names of the server's own: that of the model's list says nothing here.
_OPEN_ENUMS: Final = frozenset({"BucketLocationConstraint"})
_ACL_OPERATIONS: Final = frozenset({"PutBucketAcl", "PutObjectAcl"})

Convert = Callable[[str], Any]
Read = Callable[[Element], Any]
TakePayload = Callable[[dict[str, Any], bytes], None]


def body_limit(operation: str) -> int:
    """Returns the most bytes that the document of a request may have."""
    return LIST_LIMIT_BYTES if operation in _LISTS else DOCUMENT_LIMIT_BYTES


def payload_reader(operation: Operation, shapes: Mapping[str, Shape]) -> TakePayload | None:
    """Returns the function that adds the members of a request's body to the others; None if there
    are none to add: the operation has no body, or one that streams. It raises S3Error."""
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


def _whole_document(root: str, read: Read, error: str) -> TakePayload:
    def take(members: dict[str, Any], body: bytes) -> None:
        members.update(read(_root(body, root, error)))

    return take


def _document_payload(name: str, root: str, read: Read, required: bool, error: str) -> TakePayload:
    def take(members: dict[str, Any], body: bytes) -> None:
        if body:
            members[name] = read(_root(body, root, error))
        elif required:
            raise S3Error("MissingRequestBodyError")

    return take


def _text_payload(name: str, required: bool) -> TakePayload:
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


def _reader(member: ShapeMember, shapes: Mapping[str, Shape], error: str) -> Read:
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
        return truth
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


def _is_flat(member: ShapeMember, shapes: Mapping[str, Shape]) -> bool:
    shape = shapes[member.shape]
    return shape.type == "list" and (member.flattened or shape.flattened)


def _text_element(text: str) -> Element:
    element = Element("", {})
    element.text = text
    return element


def truth(value: str) -> bool:
    lowered = value.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError(value)
    return lowered == "true"
