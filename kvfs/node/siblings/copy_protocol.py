"""The requests between nodes about copies of blocks. No I/O.

| method | parameters | answer |
|---|---|---|
| `take-copies` | a list of `CopyOffer` | of each an `CopyOutcome` |
| `keep-copies` | a list of `WantedPromise` | of each a `CopyPromise` |
| `siblings` | encoded `SiblingNews` | nothing |
"""

from enum import IntEnum
from typing import Any, Final, TypeVar

import msgspec

from kvfs.base.errors import UNDECODABLE, Corrupt, Invalid
from kvfs.node.names.name_protocol import check_question, converted
from kvfs.tree.copies.held_names import HeldName

T = TypeVar("T")
TAKE_COPIES: Final = "take-copies"
KEEP_COPIES: Final = "keep-copies"
SIBLINGS: Final = "siblings"
MOST_OFFERED: Final = 128
"""Blocks of one request."""
MOST_ASKED: Final = 512
MOST_TOLD: Final = 1024


class CopyOffer(msgspec.Struct, array_like=True):
    """A block that another node is asked to take a copy of."""

    namespace_id: int
    path: bytes
    held: HeldName
    """The file as the asking node tells it, with the siblings that have it."""

    @property
    def name(self) -> tuple[int, bytes]:
        return self.namespace_id, self.path


class CopyOutcome(IntEnum):
    """The end of an offer."""

    COMING = 0
    """It is on its way: ask again."""
    HERE = 1
    """The node has the content on its disk."""
    OTHER = 2
    """The node has other content under this name, and keeps that."""
    REFUSED = 3
    """The node takes no copy now."""


class WantedPromise(msgspec.Struct, array_like=True):
    """A content without whose copy a node could do, if another one keeps its own."""

    namespace_id: int
    path: bytes
    size: int
    checksum: bytes


class CopyPromise(IntEnum):
    """The answer to that."""

    NONE = 0
    KEPT = 1
    OTHER = 2
    """The node has other content under this name."""


class SiblingNews(msgspec.Struct, array_like=True):
    """The news of copies: who has them, or has them no more."""

    files: list[tuple[int, int]]
    """Their numbers and versions."""
    nodes: list[int]
    """Nodes that have them; none: the node that tells has them no more."""


_encode: Final = msgspec.msgpack.Encoder().encode
_news: Final = msgspec.msgpack.Decoder(SiblingNews)


def parse_offers(params: Any) -> list[CopyOffer]:
    """Raises Invalid."""
    return _checked(converted(params, "copies", list[CopyOffer]), MOST_OFFERED)


def parse_wanted(params: Any) -> list[WantedPromise]:
    """Raises Invalid."""
    return _checked(converted(params, "copies", list[WantedPromise]), MOST_ASKED)


def parse_outcomes(answer: Any, count: int) -> list[CopyOutcome]:
    """Raises Invalid."""
    return _of(converted(answer, "copies", list[CopyOutcome]), count)


def parse_promises(answer: Any, count: int) -> list[CopyPromise]:
    """Raises Invalid."""
    return _of(converted(answer, "copies", list[CopyPromise]), count)


def packed(messages: "list[CopyOffer] | list[WantedPromise]") -> Any:
    """Returns the parameters of a request."""
    return msgspec.to_builtins(messages, builtin_types=(bytes,))


def encode_news(news: SiblingNews) -> bytes:
    """Returns a message of the method `siblings`."""
    return _encode(news)


def decode_news(raw: bytes) -> SiblingNews:
    """Raises Corrupt."""
    try:
        return _news.decode(raw)
    except UNDECODABLE as error:
        raise Corrupt(f"this is not what nodes tell each other of copies: {error}") from None


def _checked(messages: list[T], most: int) -> list[T]:
    if len(messages) > most:
        raise Invalid(f"{len(messages)} blocks in one request: {most} at most")
    for each in messages:
        check_question(each.namespace_id, each.path)  # type: ignore[attr-defined]
    return messages


def _of(answers: list[T], count: int) -> list[T]:
    if len(answers) != count:
        raise Invalid("a node answers for other blocks than were asked for")
    return answers
