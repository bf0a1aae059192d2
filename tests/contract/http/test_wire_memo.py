"""Heads that come again byte for byte: what a handler keeps with them, and for whom."""

import pytest

from kvfs.http.head import Head
from kvfs.http.limits import Limits
from kvfs.http.parser import HeadParser, parse_head

LIMITS = Limits()
HERE = ("::1", 1)
THERE = ("::1", 2)


def block(line: str, *fields: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "Host: a", *fields, "", ""]).encode()


def parsed(heads: HeadParser, data: bytes, peer: tuple[str, int] = HERE) -> Head:
    """As the server gets it, which must be as it is parsed for itself."""
    head = heads.parse(data, peer, False)
    alone = parse_head(data, LIMITS, peer, False)
    alone.memo = head.memo
    assert head == alone
    return head


@pytest.mark.parametrize("line", ["GET /a?X-Amz-Signature=1", "HEAD /a"])
def test_equal_heads_share_what_is_kept_with_them(line: str) -> None:
    heads = HeadParser(LIMITS)
    first = parsed(heads, block(line))
    assert first.memo is not None
    first.memo.value, first.handled = "kept", "this one"
    second = parsed(heads, block(line), THERE)
    assert second.memo is first.memo
    assert (second.handled, second.peer) == (None, THERE)
    other = parsed(heads, block(line, "Range: bytes=0-1"))
    assert other.memo is not None
    assert other.memo.value is None


@pytest.mark.parametrize(
    "data",
    [
        block("GET /a", "Authorization: AWS4-HMAC-SHA256 ..."),
        block("GET /a", "authorization: AWS4-HMAC-SHA256 ..."),
        block("PUT /a", "Content-Length: 1"),
        block("GET /a", "X-Long: " + "a" * 8000),
    ],
)
def test_what_does_not_come_again_is_not_kept(data: bytes) -> None:
    heads = HeadParser(LIMITS)
    assert parsed(heads, data).memo is None


def test_what_is_remembered_is_bounded() -> None:
    heads = HeadParser(LIMITS)
    first = parsed(heads, block("GET /first")).memo
    for number in range(5000):
        heads.parse(block(f"GET /{number}"), HERE, False)
    assert parsed(heads, block("GET /first")).memo is not first
