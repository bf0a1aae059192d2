"""Serialises the members of an operation's output to status, headers and document, which botocore's
parser turns back into the same members.

For each operation the model's shapes are compiled once into small functions. Times in documents are
ISO 8601 with milliseconds, in headers HTTP's dates, unless the shape says otherwise. Characters
that XML 1.0 cannot hold (most control characters) are written as character references, as S3 does:
a client that lists such keys asks for `encoding-type=url`, which is the caller's to apply, with
`url_encode`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec

from s3api.http.s3_errors import DECLARATION, Headers
from s3api.model.service_model import XMLNS, Operation, ServiceModel, Shape, ShapeMember, service
from s3api.model.time_formats import http_date, iso8601
from s3api.model.xml import escape_attribute, escape_text

Text = Callable[[Any], str]
Write = Callable[[Any], str]

# Root elements that the model does not name, from the response syntax in the API reference. Any
# other is that of the document which a Put of the same configuration takes, or the payload's name.
_ROOTS: Final = {
    "CompleteMultipartUpload": "CompleteMultipartUploadResult",
    "CreateMultipartUpload": "InitiateMultipartUploadResult",
    "CreateSession": "CreateSessionResult",
    "DeleteObjects": "DeleteResult",
    "GetBucketLocation": "LocationConstraint",
    "GetObjectAttributes": "GetObjectAttributesResponse",
    "ListBucketAnalyticsConfigurations": "ListBucketAnalyticsConfigurationResult",
    "ListBucketInventoryConfigurations": "ListInventoryConfigurationsResult",
    "ListBucketMetricsConfigurations": "ListMetricsConfigurationsResult",
    "ListBuckets": "ListAllMyBucketsResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
    "ListObjectVersions": "ListVersionsResult",
    "ListObjects": "ListBucketResult",
    "ListObjectsV2": "ListBucketResult",
    "ListParts": "ListPartsResult",
}
_XML: Final = (b"content-type", b"application/xml")
_JSON: Final = (b"content-type", b"application/json")


class _Header(msgspec.Struct, frozen=True):
    wire: bytes
    text: Text


class Serialiser:
    """Serialises the answers of one operation."""

    def __init__(self, operation: Operation, model: ServiceModel) -> None:
        shape = operation.output or Shape("structure")
        self.status = operation.status
        self.ranged = "ContentRange" in shape.members
        self.headers: dict[str, _Header] = {}
        self.metadata: dict[str, bytes] = {}
        for name, member in shape.members.items():
            if member.location == "header":
                text = _scalar(model.shapes[member.shape], model.shapes, "rfc822")
                self.headers[name] = _Header(member.location_name.lower().encode(), text)
            elif member.location == "headers":
                self.metadata[name] = member.location_name.lower().encode()
        self.document = _document(operation, shape, model)
        self.payload = shape.payload if self.document else ""
        is_text = self.payload and model.shapes[shape.members[self.payload].shape].type == "string"
        self.content_type = _JSON if is_text else _XML

    def serialise(self, result: Mapping[str, Any]) -> tuple[int, Headers, bytes]:
        """See `serialise`."""
        headers: Headers = []
        for name, value in result.items():
            if value is None:
                continue
            if header := self.headers.get(name):
                headers.append((header.wire, header.text(value).encode("latin-1", "replace")))
            elif prefix := self.metadata.get(name):
                headers += [
                    (prefix + key.encode("latin-1"), text.encode("latin-1", "replace"))
                    for key, text in value.items()
                ]
        status = 206 if self.ranged and "ContentRange" in result else self.status
        if self.document is None or (self.payload and result.get(self.payload) is None):
            return status, headers, b""
        headers.append(self.content_type)
        return status, headers, self.document(result)


def serialise(operation: str, result: Mapping[str, Any]) -> tuple[int, Headers, bytes]:
    """Returns status, headers and body of an answer. `result` has botocore's members; None is
    absent, and a payload that streams is passed over: its body is the caller's.

    A document begins with errors.DECLARATION: an answer that must begin before it is known may send
    that and white space first, then the rest of the document.
    """
    return serialiser(operation).serialise(result)


@functools.cache
def serialiser(operation: str) -> Serialiser:
    """Returns the serialiser of an operation of the model. Raises KeyError for another name."""
    model = service()
    return Serialiser(model.operations[operation], model)


def url_encode(text: str) -> str:
    """Returns a key, prefix, delimiter or marker in the form of `encoding-type=url`: `/` and
    characters that a URL leaves alone stay."""
    return quote(text, safe="/-_.~*")


def root_of(operation: str) -> str:
    """Returns the root element of an operation's document."""
    return _root(service().operations[operation], service())


# --- documents


def _document(
    operation: Operation, shape: Shape, model: ServiceModel
) -> Callable[[Mapping[str, Any]], bytes] | None:
    if shape.payload:
        return _payload_document(operation, shape, model)
    if all(member.location for member in shape.members.values()):
        return None
    root = _root(operation, model)
    if operation.name == "GetBucketLocation":
        return _location_document(root)
    write = _structure_writer(shape, model.shapes)
    start, end = f'<{root} xmlns="{XMLNS}">', f"</{root}>"
    return lambda result: DECLARATION + f"{start}{write(result)}{end}".encode()


def _payload_document(
    operation: Operation, shape: Shape, model: ServiceModel
) -> Callable[[Mapping[str, Any]], bytes] | None:
    name, member = shape.payload, shape.members[shape.payload]
    payload = model.shapes[member.shape]
    if member.streaming or payload.eventstream:
        return None
    if payload.type == "string":
        return lambda result: str(result[name]).encode()
    root = _root(operation, model)
    write = _structure_writer(payload, model.shapes)
    start, end = f'<{root} xmlns="{XMLNS}">', f"</{root}>"
    return lambda result: DECLARATION + f"{start}{write(result[name])}{end}".encode()


def _location_document(root: str) -> Callable[[Mapping[str, Any]], bytes]:
    """Returns the one document whose root holds the text itself."""

    def write(result: Mapping[str, Any]) -> bytes:
        region = escape_text(result.get("LocationConstraint") or "")
        return DECLARATION + f'<{root} xmlns="{XMLNS}">{region}</{root}>'.encode()

    return write


def _root(operation: Operation, model: ServiceModel) -> str:
    if operation.name in _ROOTS:
        return _ROOTS[operation.name]
    shape = operation.output
    assert shape is not None
    if shape.payload:
        return shape.members[shape.payload].location_name or shape.payload
    setter = model.operations.get(operation.name.replace("Get", "Put", 1))
    if operation.name.startswith("Get") and setter is not None and setter.input.payload:
        return setter.input.members[setter.input.payload].location_name
    return operation.output_name


def _structure_writer(shape: Shape, shapes: Mapping[str, Shape]) -> Write:
    writers: dict[str, Write] = {}
    for name, member in shape.members.items():
        if not member.location and not member.xml_attribute:
            writers[name] = _member_writer(member.location_name or name, member, shapes)

    def write(value: Mapping[str, Any]) -> str:
        # The model's order of elements, whatever that of the dictionary.
        return "".join(
            [put(value[name]) for name, put in writers.items() if value.get(name) is not None]
        )

    return write


def _member_writer(wire: str, member: ShapeMember, shapes: Mapping[str, Shape]) -> Write:
    shape = shapes[member.shape]
    if shape.type == "structure":
        write = _structure_writer(shape, shapes)
        attributes = _attributes_writer(member, shape)
        return lambda value: f"<{wire}{attributes(value)}>{write(value)}</{wire}>"
    if shape.type == "list":
        return _list_writer(wire, member, shape, shapes)
    text = _scalar(shape, shapes, "iso8601")
    if shape.type == "string":
        return lambda value: f"<{wire}>{escape_text(value)}</{wire}>"
    return lambda value: f"<{wire}>{text(value)}</{wire}>"


def _list_writer(
    wire: str, member: ShapeMember, shape: Shape, shapes: Mapping[str, Shape]
) -> Write:
    inner = shape.member
    assert inner is not None
    if member.flattened or shape.flattened:
        put = _member_writer(wire, inner, shapes)
        return lambda values: "".join([put(value) for value in values])
    put = _member_writer(inner.location_name or "member", inner, shapes)
    return lambda values: f"<{wire}>{''.join([put(value) for value in values])}</{wire}>"


def _attributes_writer(member: ShapeMember, shape: Shape) -> Write:
    """Returns the namespace of a structure that has one of its own, and its attributes
    (xsi:type)."""
    namespace = member.xml_namespace or shape.xml_namespace
    named = {n: m.location_name for n, m in shape.members.items() if m.xml_attribute}
    if not named:
        return lambda _: ""
    assert namespace is not None
    prefix = f' xmlns:{namespace.prefix}="{escape_attribute(namespace.uri)}"'

    def write(value: Mapping[str, Any]) -> str:
        present = [(wire, value[name]) for name, wire in named.items() if name in value]
        return prefix + "".join(f' {wire}="{escape_attribute(text)}"' for wire, text in present)

    return write


def _scalar(shape: Shape, shapes: Mapping[str, Shape], time_format: str) -> Text:
    if shape.type == "boolean":
        return lambda value: "true" if value else "false"
    if shape.type == "timestamp":
        form = shape.timestamp_format or time_format
        return http_date if form == "rfc822" else iso8601
    if shape.type == "list":
        assert shape.member is not None
        text = _scalar(shapes[shape.member.shape], shapes, time_format)
        return lambda values: ",".join([text(value) for value in values])
    return str
