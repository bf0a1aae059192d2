"""Routes a request to its operation, by method, address and parameters.

The table comes from the model's HTTP bindings. An operation is told from its neighbours by
selectors: the fixed parameters of its URI (`acl`, `list-type=2`), the query parameters that it
requires (`uploadId`) and, for copies, the header `x-amz-copy-source`. The one with most selectors
present wins.

Invariant: a request for one thing never gets another. A parameter that names an operation, of any
scope or of another server, is never passed over; nor are a version, and headers that the answer
shall have. Parameters that name nothing (`v=2`, `utm_source`) are, as S3 does.
"""

import functools
from collections.abc import Mapping, Set
from typing import Final

import msgspec

from s3api.http.s3_errors import S3Error, invalid_argument
from s3api.model.service_model import Operation, ServiceModel, service

# Not in the model, for no SDK has them: a form's upload and a browser's CORS question. Names and
# semantics: RESTObjectPOST and RESTOPTIONSobject of the S3 API reference.
POST_OBJECT: Final = "PostObject"
OPTIONS_OBJECT: Final = "OptionsObject"
STS: Final = "Sts"
"""Stands for all operations of that service: S3 has none of this name."""

_COPY_SOURCE: Final = b"x-amz-copy-source"

# Parameters that change nothing about which operation is meant.
IGNORABLE: Final = frozenset(
    {
        "AWSAccessKeyId",  # presigning of version 2
        "Expires",
        "Signature",
        "versionId",
        *("bucket", "etag", "key"),  # of where a form's upload sends its browser
        "metadata",  # an extension of lists that MinIO's clients send to every server
        "allow-unordered",  # Ceph's: the order of bytes is one of those that it allows
    }
)
_OF_OTHERS: Final = frozenset({"append", "position"})
"""Parameters that would make Ceph append to an object: S3 would replace it."""
_RESPONSE: Final = "response-"


class Route(msgspec.Struct, frozen=True):
    """One operation of a method and scope, with the selectors that tell it from its neighbours."""

    name: str
    fixed: dict[str, str]
    required: frozenset[str]
    copies: bool
    parameters: frozenset[str]

    @property
    def names(self) -> Set[str]:
        return self.fixed.keys() | self.required

    @property
    def selectors(self) -> int:
        return len(self.names) + self.copies


class Routes:
    """Every operation that a request can lead to."""

    def __init__(self, model: ServiceModel) -> None:
        self._table: dict[tuple[str, str], list[Route]] = {}
        self._by_names: dict[tuple[str, str, frozenset[str]], list[Route]] = {}
        self._subresources: dict[str, set[str]] = {"service": set(), "bucket": set(), "key": set()}
        self._parameters = set(IGNORABLE)
        for operation in model.operations.values():
            if operation.served:
                self._add(operation)
        for (method, scope), found in self._table.items():
            found.sort(key=lambda route: -route.selectors)
            for route in found:
                names = frozenset(route.names & self._subresources[scope])
                self._by_names.setdefault((method, scope, names), []).append(route)
        every = _OF_OTHERS.union(*self._subresources.values())
        self._every = every
        assert not every & IGNORABLE, "a sub-resource would be ignored"
        self._elsewhere = {scope: every - own for scope, own in self._subresources.items()}

    def _add(self, operation: Operation) -> None:
        members = operation.input.members
        in_query = {n: m.location_name for n, m in members.items() if m.location == "querystring"}
        required = frozenset(in_query[name] for name in operation.input.required & in_query.keys())
        source = members.get("CopySource")
        taken = frozenset(in_query.values())
        route = Route(operation.name, operation.query, required, source is not None, taken)
        self._table.setdefault((operation.method, operation.scope), []).append(route)
        self._subresources[operation.scope] |= operation.query.keys()
        if not operation.query:
            # Nothing but these stands between such an operation and its plain neighbour.
            self._subresources[operation.scope] |= required
        self._parameters |= taken

    def find(self, method: str, scope: str, query: Mapping[str, str], copies: bool) -> str:
        """Returns the operation's name. Raises what `route` raises."""
        names = query.keys()
        if elsewhere := names & self._elsewhere[scope]:
            raise S3Error("NotImplemented", extra={"Header": min(elsewhere)})
        asked = frozenset(names & self._subresources[scope])
        if method in ("GET", "HEAD"):
            # The number of a part says where an upload goes, but of a read only how much of it.
            asked -= {"partNumber"}
        for found in self._by_names.get((method, scope, asked), ()):
            if found.copies > copies or not found.required <= names:
                continue
            for name, value in found.fixed.items():
                if value and query[name] != value:
                    break
            else:
                if names:
                    _check_taken(found, query)
                return found.name
        raise self._refusal(method, scope, query, asked)

    def knows(self, name: str) -> bool:
        """Returns whether a parameter of this name means anything."""
        known = name in self._parameters or name in self._every
        return known or name.startswith(_RESPONSE)

    def _refusal(
        self, method: str, scope: str, query: Mapping[str, str], asked: Set[str]
    ) -> S3Error:
        """Returns why no operation answers, though S3 has the parameters."""
        routes = self._table.get((method, scope), [])
        for found in routes:
            for name, value in found.fixed.items():
                if value and query.get(name, value) != value:
                    return invalid_argument(name, query[name])
            lacking = found.required - query.keys()
            if lacking and asked and found.names >= asked:
                message = f"This operation needs the parameter {min(lacking)}"
                return invalid_argument(min(lacking), "", message)
        if len(asked) > 1:
            names = ", ".join(sorted(asked))
            message = f"Conflicting query string parameters: {names}"
            return invalid_argument("ResourceType", min(asked), message)
        return S3Error("MethodNotAllowed")


def route(
    method: str,
    bucket: str | None,
    key: str | None,
    query: Mapping[str, str],
    headers: Mapping[bytes, bytes],
) -> str:
    """Returns the name of the operation that a request asks for: one of the model's, POST_OBJECT or
    OPTIONS_OBJECT. `headers` have lower-case names.

    Raises NotImplemented for a sub-resource that the address does not have, MethodNotAllowed for
    one that does not have the method, InvalidArgument for parameters that contradict each other.
    """
    if method == "OPTIONS" and bucket is not None:
        return OPTIONS_OBJECT
    if key is not None and not query:
        return _of_object(method, _COPY_SOURCE in headers)
    scope = "service" if bucket is None else "bucket" if key is None else "key"
    if method == "POST" and scope == "bucket" and not _asks(query):
        if headers.get(b"content-type", b"").lower().startswith(b"multipart/form-data"):
            return POST_OBJECT
        condition = "Bucket POST must be of the enclosure-type multipart/form-data"
        raise S3Error("PreconditionFailed", extra={"Condition": condition})
    return routes().find(method, scope, query, _COPY_SOURCE in headers)


@functools.lru_cache(64)
def _of_object(method: str, copies: bool) -> str:
    """Returns the operation on an object that no parameter names."""
    return routes().find(method, "key", {}, copies)


@functools.cache
def routes() -> Routes:
    """Returns the table of the installed model."""
    return Routes(service())


def _asks(query: Mapping[str, str]) -> bool:
    return any(name not in IGNORABLE and routes().knows(name) for name in query)


def _check_taken(found: Route, query: Mapping[str, str]) -> None:
    for name in query.keys() - found.parameters:
        if name == "versionId" or name.startswith(_RESPONSE):
            message = f"This operation does not have the parameter {name}"
            raise invalid_argument(name, query[name], message)
