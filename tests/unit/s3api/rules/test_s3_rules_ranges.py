"""Byte ranges, held against a plain reading of RFC 9110."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.rules.ranges import ByteRange, parse_copy_range, parse_range, part_range


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-9", (0, 10)),
        ("bytes=0-99999999999999999999999", (0, 10)),
        ("bytes=3-", (3, 7)),
        ("bytes=-3", (7, 3)),
        ("bytes=-99", (0, 10)),
        ("BYTES=1-2", (1, 2)),
        (" bytes = 1-2 ", (1, 2)),
        ("bytes=5-4", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("bytes=a-b", None),
        ("bytes=٣-", None),
        ("bits=0-1", None),
        ("0-1", None),
        ("", None),
        ("bytes=" + "9" * 5000 + "-", None),
    ],
)
def test_forms(header: str, expected: tuple[int, int] | None) -> None:
    assert parse_range(header, 10) == expected


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=10-", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=-1", 0)]
)
def test_unsatisfiable(header: str, size: int) -> None:
    with pytest.raises(S3Error) as caught:
        parse_range(header, size)
    assert (caught.value.code, caught.value.status) == ("InvalidRange", 416)
    assert caught.value.headers == {"content-range": f"bytes */{size}"}
    assert caught.value.extra["ActualObjectSize"] == str(size)


small = st.integers(0, 12)


@given(st.none() | small, st.none() | small, small)
def test_brute_force(first: int | None, last: int | None, size: int) -> None:
    def text(number: int | None) -> str:
        return "" if number is None else str(number)

    body = bytes(range(size))
    header = f"bytes={text(first)}-{text(last)}"
    if first is None and last is None:
        chosen: bytes | None = None
    elif first is None:
        chosen = body[-last:] if last else b""
    elif last is not None and last < first:
        chosen = None
    else:
        chosen = bytes(at for at in body if at >= first and (last is None or at <= last))
    if chosen == b"":
        with pytest.raises(S3Error):
            parse_range(header, size)
        return
    found = parse_range(header, size)
    if found is None or chosen is None:
        assert found is chosen
        return
    assert body[found.offset : found.offset + found.length] == chosen
    assert found.content_range(size) == f"bytes {chosen[0]}-{chosen[-1]}/{size}"


@given(st.text(max_size=20), st.integers(0, 100))
def test_any_text_is_answered(header: str, size: int) -> None:
    for text in (header, "bytes=" + header):
        try:
            found = parse_range(text, size)
        except S3Error as error:
            assert error.code == "InvalidRange"
        else:
            assert found is None or 0 <= found.offset < found.offset + found.length <= size


def test_copy_ranges() -> None:
    assert parse_copy_range("bytes=0-9", 10) == ByteRange(0, 10)
    for header in ("0-2", "bytes=0", "bytes=2-1", "bytes=hello-", "bytes=0-2,3-5", "bytes=-5"):
        with pytest.raises(S3Error) as caught:
            parse_copy_range(header, 10)
        assert (caught.value.code, caught.value.status) == ("InvalidArgument", 400)
    with pytest.raises(S3Error) as caught:
        parse_copy_range("bytes=0-21", 5)
    assert caught.value.code == "InvalidRange"


def test_parts() -> None:
    assert part_range([5, 0, 3], 1) == (0, 5)
    assert part_range([5, 0, 3], 2) == (5, 0)
    assert part_range([5, 0, 3], 2).content_range(8) is None
    assert part_range([5, 0, 3], 3) == (5, 3)
    for number in (0, 4):
        with pytest.raises(S3Error) as caught:
            part_range([5, 0, 3], number)
        assert (caught.value.code, caught.value.status) == ("InvalidPart", 400)
