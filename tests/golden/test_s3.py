"""The S3 API by its tables: which operations are served, how each is asked for, which of its
parameters and header fields this server speaks of, and which errors there are. How they behave,
other tests show."""

import ast
import functools
from collections.abc import Iterator
from typing import Final

from s3api.http import error_map, s3_errors
from s3api.model.routing import IGNORABLE, STS, routes
from s3api.model.service_model import Operation, Shape, ShapeMember, service
from s3api.operations import HANDLERS, SPECIAL
from s3api.operations.documented import FATES
from s3api.operations.sts import ACTIONS
from tests.golden.golden import HERE, hold

_HEADERS: Final = ("header", "headers")
_BEGINNINGS: Final = ("response-", "x-amz-checksum-", "x-amz-copy-source-")


def test_operations() -> None:
    hold("s3_operations.txt", _operations())


def test_parameters_that_change_nothing() -> None:
    """And those that no request passes over, though they name no operation."""
    lines = [f"passed over: {name}" for name in sorted(IGNORABLE)]
    hold("s3_parameters.txt", lines)
    assert all(routes().knows(name) for name in IGNORABLE)


def test_errors() -> None:
    codes = [f"{code}  {status}" for code, (status, _) in sorted(s3_errors.CODES.items())]
    rows = [
        f"{kind.__name__}  {code}  {s3_errors.CODES[code][0]}"
        for kind, code in sorted(error_map.CODES.items(), key=lambda item: item[0].__name__)
    ]
    hold("s3_errors.txt", ["code  status", *codes, "", "error of the core  code  status", *rows])


def _operations() -> Iterator[str]:
    for name, operation in sorted(service().operations.items()):
        if name in HANDLERS and operation.served:
            yield from _operation(operation)
    for name in sorted({*SPECIAL} - {STS}):
        yield f"{name}: not one of the model's"
    for name in sorted(ACTIONS):
        yield f"{name}: of STS, POST to /"


def _operation(operation: Operation) -> Iterator[str]:
    path = {"service": "/", "bucket": "/BUCKET", "key": "/BUCKET/KEY"}[operation.scope]
    query = "&".join(
        f"{name}={value}" if value else name for name, value in operation.query.items()
    )
    fate = f"  {FATES[operation.name]}" if operation.name in FATES else f"  {operation.status}"
    yield f"{operation.name}: {operation.method} {path}{'?' * bool(query)}{query}{fate}"
    for what, names in (
        ("parameters", _of(operation.input, "querystring")),
        ("fields", _of(operation.input, *_HEADERS)),
        ("document", _document(operation.input)),
        ("answers with fields", _of(operation.output, *_HEADERS)),
        ("answers with document", _document(operation.output)),
    ):
        if names:
            yield f"    {what}: {', '.join(names)}"


def _of(shape: Shape | None, *locations: str) -> list[str]:
    """Names of what travels there; those that have to be there with a `*`."""
    if shape is None:
        return []
    found = {
        f"{_name(member)}{'*' * (name in shape.required)}"
        for name, member in shape.members.items()
        if member.location in locations and _is_spoken_of(name, member.location_name.lower())
    }
    return sorted(found)


def _is_spoken_of(member: str, name: str) -> bool:
    """Whether either stands in the server's sources, or what the second begins with: of the model
    it passes over the rest."""
    texts, beginnings = _texts()
    return member in texts or name in texts or name.startswith(beginnings)


@functools.cache
def _texts() -> tuple[frozenset[str], tuple[str, ...]]:
    """The texts in the server's sources, and those that names of header fields begin with."""
    texts: set[str] = set()
    for path in HERE.parent.parent.joinpath("s3api").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                value = node.value
                texts.add(value if isinstance(value, str) else value.decode("latin-1"))
    beginnings = (each for each in texts if each.endswith("-") and each.startswith(_BEGINNINGS))
    return frozenset(texts), tuple(beginnings)


def _name(member: ShapeMember) -> str:
    return f"{member.location_name}NAME" if member.location == "headers" else member.location_name


def _document(shape: Shape | None) -> list[str]:
    """The members of the body, or the one that is all of it."""
    if shape is None:
        return []
    if shape.payload:
        return [shape.payload]
    return sorted(
        member.location_name or name
        for name, member in shape.members.items()
        if not member.location
    )
