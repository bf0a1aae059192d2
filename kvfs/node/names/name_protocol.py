"""The requests between nodes about names that they keep themselves. No I/O.

| method | parameters | answer |
|---|---|---|
| `confirm` | `Confirm` | of each name a `HeldName`, or nothing |
| `list-names` | `AskedPages` | of each directory a `ToldPage` |
| `tell-names` | `News` | that of the other node, or nothing |
| `ask-names` | one encoded `HoldingsAsk` | the messages that answer it |
| `ask-homes` | see `kvfs.node.homes.home_protocol` | who holds names |
| `ask-removed` | see `removal_exchange` | tombstones |
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from kvfs.base.errors import Invalid
from kvfs.tree.copies.held_names import HeldName
from kvfs.tree.copies.told_names import MOST_NAME, AskedPage, Detail, ToldPage, check_page

T = TypeVar("T")
CONFIRM: Final = "confirm"
TELL: Final = "tell-names"
ASK: Final = "ask-names"
ASK_HOMES: Final = "ask-homes"
ASK_REMOVED: Final = "ask-removed"
LIST: Final = "list-names"
MOST_NAMES: Final = 128
"""Names of one request: their paths fit into it, however long."""
MOST_PATH_BYTES: Final = 4096
MOST_ENTRIES: Final = 8192
"""Entries that one request for pages makes a node look at."""
Call = Callable[[int, str, Any, float], Awaitable[Any]]
"""Calls a method of a node, with its parameters and a deadline in seconds. Raises KvfsError."""
TakingCall = Callable[[int, str, Any, float, int], Awaitable[Any]]
"""A call that also says how many bytes of a file it takes along."""
Question = tuple[int, bytes]
"""A namespace's id, and a path in it."""


class Confirm(msgspec.Struct, array_like=True):
    """The request `confirm`."""

    lease_s: float
    """Seconds for which the files should stay where they are."""
    names: list[Question]


class AskedPages(msgspec.Struct, array_like=True):
    """The request `list-names`."""

    detail: Detail
    pages: list[AskedPage]


class News(msgspec.Struct, array_like=True):
    """The request `tell-names`, and its answer: news of nodes, also of others than the teller."""

    deltas: bytes
    """Changes of what they hold (`kvfs.holdings.delta_batch`); empty: none."""
    sums: bytes
    """Sums of what they removed (`removal_sums`); empty: none."""
    stones: list[bytes]
    """Encoded tombstones of what they removed."""


def parse_news(params: Any) -> News:
    """Raises Invalid."""
    return converted(params, "names", News)


def parse_confirm(params: Any) -> Confirm:
    """Raises Invalid."""
    asked = converted(params, "names", Confirm)
    if len(asked.names) > MOST_NAMES:
        raise Invalid(f"{len(asked.names)} names in one request: {MOST_NAMES} at most")
    for each in asked.names:
        check_question(*each)
    return asked


def check_question(namespace_id: int, path: bytes) -> None:
    """Raises Invalid unless there can be such a path in such a namespace."""
    if not 0 < namespace_id < 1 << 16:
        raise Invalid(f"there can be no namespace {namespace_id}")
    if not path or len(path) > MOST_PATH_BYTES:
        raise Invalid(f"a path has 1 to {MOST_PATH_BYTES} bytes, not {len(path)}")
    if max(map(len, path.split(b"/"))) > MOST_NAME:
        raise Invalid(f"a name has at most {MOST_NAME} bytes")


def parse_asked_pages(params: Any) -> AskedPages:
    """Raises Invalid."""
    asked = converted(params, "names", AskedPages)
    if len(asked.pages) > MOST_NAMES or sum(each.limit for each in asked.pages) > MOST_ENTRIES:
        raise Invalid(f"{len(asked.pages)} directories, or too many of their names, in one request")
    for each in asked.pages:
        check_question(each.namespace_id, each.path or b"/")
        if each.limit < 1 or len(each.start) > MOST_NAME + 2:
            raise Invalid("there is no such part of a directory")
    return asked


def parse_told_pages(answer: Any, asked: Sequence[AskedPage], detail: Detail) -> list[ToldPage]:
    """Returns what a node told of directories. Raises Invalid."""
    told = converted(answer, "names", list[ToldPage])
    if len(told) != len(asked):
        raise Invalid("a node tells of other directories than were asked for")
    for page, each in zip(told, asked, strict=True):
        check_page(each, page, detail)
    return told


def parse_confirmed(answer: Any, count: int) -> list[HeldName | None]:
    """Returns what a node told of `count` names. Raises Invalid."""
    told = converted(answer, "names", list[HeldName | None])
    if any(each is not None and not (each.ino or each.directories) for each in told):
        raise Invalid("a node tells of a directory, and not which")
    if len(told) != count:
        raise Invalid("a node tells of other names than were asked for")
    return told


def parse_messages(params: Any, count: int = 0) -> list[bytes]:
    """Returns the encoded messages of a request or an answer, just `count` of them if that is not
    0. Raises Invalid."""
    messages = converted(params, "names", list[bytes])
    if count and len(messages) != count:
        raise Invalid(f"{len(messages)} messages in place of {count}")
    return messages


def converted(value: Any, about: str, kind: type[T]) -> T:
    """Returns a request or an answer as this type; `about`: what nodes tell each other of by it.
    Raises Invalid."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Invalid(f"this is not what nodes tell each other of {about}: {error}") from None
