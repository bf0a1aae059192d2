"""The shape of an answer in JSON: its keys, and of which types their values are."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def lines(answers: list[Any], opaque: Collection[str] = ()) -> Iterator[str]:
    """A line for each value, by its path; of what is in a list, and of several answers, all are
    one. What is at the paths `opaque` is not looked into."""
    found: dict[str, set[str]] = {}
    for answer in answers:
        _find(answer, "", opaque, found)
    for path, kinds in found.items():
        told = kinds - {"null"} or kinds
        yield f"    {path}: {' or '.join(sorted(told)) or 'empty'}"


def _find(value: Any, path: str, opaque: Collection[str], found: dict[str, set[str]]) -> None:
    if isinstance(value, Mapping) and path not in opaque:
        for key, each in value.items():
            _find(each, f"{path}.{key}".lstrip("."), opaque, found)
    elif isinstance(value, list):
        found.setdefault(f"{path}[]", set())
        for each in value:
            _find(each, f"{path}[]", opaque, found)
        if isinstance(next(iter(value), None), Mapping):
            del found[f"{path}[]"]
    else:
        found.setdefault(path, set()).add(_kind(value))


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, bool):
        return "true or false"
    return "number" if isinstance(value, int | float) else "text"
