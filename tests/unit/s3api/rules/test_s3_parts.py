"""What is kept of an object's parts, and the sources of copies."""

import pytest

from s3api.http.s3_errors import S3Error
from s3api.rules import parts
from s3api.rules.copy_source import parse_copy_source


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [5],
        [8388608] * 127 + [1234],
        [5 << 20, 6 << 20, 5 << 20],
        list(range(10_000)),
        [7] * 10_000,
    ],
)
def test_sizes_come_back_and_fit_into_attributes(sizes: list[int]) -> None:
    kept = parts.attributes(sizes)
    assert parts.sizes_of(kept) == sizes
    assert all(len(value) < 64 << 10 for value in kept.values())
    assert parts.checksums_of(kept) == []


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 10_000])
def test_checksums_come_back_and_fit_into_attributes(count: int) -> None:
    checksums = [f"{number:043d}=" for number in range(count)]
    kept = parts.attributes([5] * count, checksums)
    assert parts.checksums_of(kept) == checksums
    assert all(len(value) < 64 << 10 for value in kept.values())


def test_equal_parts_take_few_bytes() -> None:
    assert parts.attributes([8 << 20] * 9999 + [1]) == {"parts": "8388608*9999,1"}


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("b/k", ("b", "k", "")),
        ("/b/k/l", ("b", "k/l", "")),
        ("b/%20", ("b", " ", "")),
        ("b/a+b", ("b", "a+b", "")),
        ("b%2Fk", ("b", "k", "")),
        ("b/%3FversionId", ("b", "?versionId", "")),
        ("b//k", ("b", "/k", "")),
        ("b/k?versionId=null", ("b", "k", "null")),
        ("b/%C3%BC", ("b", "\u00fc", "")),
        ("b/\u00c3\u00bc", ("b", "\u00fc", "")),
    ],
)
def test_sources_of_copies(header: str, found: tuple[str, str, str]) -> None:
    assert parse_copy_source(header) == found


@pytest.mark.parametrize("header", ["", "b", "b/", "/", "/b", "b/k?versionId=", "b/%ff"])
def test_what_is_no_source(header: str) -> None:
    with pytest.raises(S3Error) as caught:
        parse_copy_source(header)
    assert caught.value.code == "InvalidArgument"


def test_access_points_are_refused() -> None:
    with pytest.raises(S3Error) as caught:
        parse_copy_source("arn:aws:s3:us-east-1:1:accesspoint/p/object/k")
    assert caught.value.code == "NotImplemented"
