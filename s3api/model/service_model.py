"""The service model of S3 that ships with botocore, as far as a server needs it.

The file is botocore/data/s3/2006-03-01/service-2.json (compressed in newer releases), the format
that of botocore.model. It is read once, at first use, without importing botocore: decoding into
these structs skips the documentation (measured: 9 ms and 1 MB; botocore's own loader and session
take 0.3 s).

It knows shapes and bindings, and nothing of requests.
"""

import functools
import gzip
import importlib.util
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl

import msgspec

XMLNS: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
_MODEL: Final = "data/s3/2006-03-01/service-2.json"

# For endpoints of another kind (directory buckets, object lambda): no request to a bucket of
# general purpose leads to them.
_ELSEWHERE: Final = frozenset({"ListDirectoryBuckets", "WriteGetObjectResponse"})


class XmlNamespace(msgspec.Struct, frozen=True):
    uri: str
    prefix: str = ""


class ShapeMember(msgspec.Struct, frozen=True, rename="camel"):
    """A member of a structure, or of a list: its shape and its location.

    `location` is uri, querystring, header, headers (a prefix) or, in the body, empty.
    """

    shape: str
    location: str = ""
    location_name: str = ""
    flattened: bool = False
    streaming: bool = False
    xml_attribute: bool = False
    xml_namespace: XmlNamespace | None = None


class Shape(msgspec.Struct, frozen=True, rename="camel"):
    type: str
    members: dict[str, ShapeMember] = {}
    required: frozenset[str] = frozenset()
    payload: str = ""
    member: ShapeMember | None = None
    flattened: bool = False
    location_name: str = ""
    timestamp_format: str = ""
    enum: frozenset[str] = frozenset()
    eventstream: bool = False
    min: float = 0
    max: float | None = None
    xml_namespace: XmlNamespace | None = None


class _Http(msgspec.Struct, frozen=True, rename="camel"):
    method: str
    request_uri: str
    response_code: int = 200


class _Reference(msgspec.Struct, frozen=True, rename="camel"):
    shape: str
    location_name: str = ""


class ChecksumTraits(msgspec.Struct, frozen=True, rename="camel"):
    """The model's entry on an operation's checksums."""

    request_checksum_required: bool = False
    request_algorithm_member: str = ""


class _Operation(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    http: _Http
    input: _Reference
    output: _Reference | None = None
    deprecated: bool = False
    http_checksum: ChecksumTraits = ChecksumTraits()


class _Model(msgspec.Struct, frozen=True):
    operations: dict[str, _Operation]
    shapes: dict[str, Shape]


class Operation(msgspec.Struct, frozen=True):
    """One operation with its HTTP binding.

    `scope` is what it addresses: "service", "bucket" or "key". `query` holds the fixed parameters
    of its URI (their value empty if they have none). `body_root` names the root element of the
    request if the operation's input is itself the document.
    """

    name: str
    method: str
    scope: str
    query: dict[str, str]
    status: int
    input: Shape
    output: Shape | None
    output_name: str
    body_root: str
    checksum: ChecksumTraits
    served: bool


class ServiceModel:
    """Every operation and shape of the model, by name."""

    def __init__(self, model: _Model) -> None:
        self.shapes = model.shapes
        self.operations = {
            name: _operation(found, model.shapes) for name, found in model.operations.items()
        }


@functools.cache
def service() -> ServiceModel:
    """Returns the model; the first call reads it from the installed botocore.

    Raises ModuleNotFoundError without botocore, FileNotFoundError if it lacks the model.
    """
    return ServiceModel(msgspec.json.decode(_read(), type=_Model))


def _read() -> bytes:
    found = importlib.util.find_spec("botocore")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("botocore is not installed: S3's service model ships with it")
    plain = Path(found.submodule_search_locations[0], _MODEL)
    if plain.exists():
        return plain.read_bytes()
    return gzip.decompress(plain.with_name(plain.name + ".gz").read_bytes())


def _operation(found: _Operation, shapes: dict[str, Shape]) -> Operation:
    path, _, query = found.http.request_uri.partition("?")
    scopes = {"/": "service", "/{Bucket}": "bucket", "/{Bucket}/{Key+}": "key"}
    return Operation(
        name=found.name,
        method=found.http.method,
        scope=scopes.get(path, "other"),
        query=dict(parse_qsl(query, keep_blank_values=True)),
        status=found.http.response_code,
        input=shapes[found.input.shape],
        output=shapes[found.output.shape] if found.output else None,
        output_name=found.output.shape if found.output else "",
        body_root=found.input.location_name,
        checksum=found.http_checksum,
        served=not found.deprecated and found.name not in _ELSEWHERE,
    )
