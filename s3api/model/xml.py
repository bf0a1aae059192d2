"""Reads an XML document into a tree, within bounds, and escapes text for one.

expat does the parsing. A document type is refused before any of its declarations is read, and with
it every entity but the five that XML has; a document that is nested deeper or holds more elements
than any request of S3 needs is refused as soon as that shows. Namespaces are left aside: S3 takes
documents with and without them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final
from xml.parsers import expat

from s3api.http.s3_errors import S3Error

DEPTH_LIMIT: Final = 32
ELEMENT_LIMIT: Final = 200_000
_TEXT_BYTES: Final = 64 << 10
_NO_ATTRIBUTES: Final[Mapping[str, str]] = {}


class Element:
    """An element: local name, attributes by local name, elements within, and the text before the
    first of them."""

    __slots__ = ("attributes", "children", "name", "text")

    def __init__(self, name: str, attributes: Mapping[str, str]) -> None:
        self.name = name
        self.attributes = attributes
        self.children: Sequence[Element] = ()
        self.text = ""


def read_xml(document: bytes) -> Element:
    """Returns the root of a document. Raises MalformedXML."""
    builder = _Builder()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.buffer_size = _TEXT_BYTES
    parser.StartDoctypeDeclHandler = builder.doctype
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.characters
    try:
        parser.Parse(document, True)
    except (expat.ExpatError, LookupError, ValueError):
        # The last two: an encoding that Python does not know, or not as one byte a character.
        raise S3Error("MalformedXML") from None
    return builder.top.children[0]


class _Builder:
    def __init__(self) -> None:
        self.top = Element("", {})
        self._open = [self.top]
        self._count = 0

    def doctype(self, *_: object) -> None:
        raise S3Error("MalformedXML", "A document type is not allowed in this document.")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if len(self._open) > DEPTH_LIMIT or self._count > ELEMENT_LIMIT:
            raise S3Error("MalformedXML", "The document has too many elements.")
        local = {_local(key): text for key, text in attributes.items()} if attributes else None
        element = Element(_local(name), local or _NO_ATTRIBUTES)
        parent = self._open[-1]
        if isinstance(parent.children, list):
            parent.children.append(element)
        else:
            parent.children = [element]
        self._open.append(element)

    def end(self, _: str) -> None:
        self._open.pop()

    def characters(self, text: str) -> None:
        element = self._open[-1]
        # What stands between elements says nothing in S3; kept, it would be joined again and again.
        if not element.children:
            element.text += text


def _local(name: str) -> str:
    return name.rpartition(":")[2]


def escape_text(text: str) -> str:
    """Returns text as content of an element, so that it is read back unchanged."""
    return text if _PLAIN(text) else _SPECIAL.sub(_reference, text)


def escape_attribute(text: str) -> str:
    """Returns text as the value of an attribute in double quotes."""
    return text if _PLAIN(text) else _SPECIAL_IN_ATTRIBUTE.sub(_reference, text)


def _reference(found: re.Match[str]) -> str:
    character = found.group()
    return _ENTITIES.get(character) or f"&#x{ord(character):X};"


_ENTITIES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
# A carriage return would be read as a line's end; what else is here XML 1.0 cannot hold as such.
_SPECIAL: Final = re.compile("[&<>\x00-\x08\x0b-\x1f\x7f\ufffe\uffff]")
_SPECIAL_IN_ATTRIBUTE: Final = re.compile('[&<>"\x00-\x1f\x7f\ufffe\uffff]')
_PLAIN: Final = re.compile(r"[\w /.=~-]*\Z", re.ASCII).match
