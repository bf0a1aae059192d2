"""Byte ranges of GET, HEAD and copies.

S3 ignores a `Range` that is malformed or names several ranges: the object is sent whole, with 200.
A well-formed range outside the object is InvalidRange (416). `x-amz-copy-source-range` is strict:
first and last byte, inside the source.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from s3api.http.s3_errors import S3Error, invalid_argument

# Python refuses to convert more than 4,300 digits; so long a number is no range.
_RANGE: Final = re.compile(r"\s*bytes\s*=\s*([0-9]{0,4000})-([0-9]{0,4000})\s*", re.IGNORECASE)
_COPY_RANGE: Final = re.compile(r"bytes=([0-9]{1,4000})-([0-9]{1,4000})")


class ByteRange(NamedTuple):
    """`length` bytes from `offset`; a length of 0 only in a part of 0 bytes."""

    offset: int
    length: int

    def content_range(self, size: int) -> str | None:
        """Returns the Content-Range header for an object of `size` bytes; None for no bytes."""
        if not self.length:
            return None
        return f"bytes {self.offset}-{self.offset + self.length - 1}/{size}"


def parse_range(header: str, size: int) -> ByteRange | None:
    """Returns the bytes that a Range header asks of an object of `size` bytes; None: all, with
    status 200.

    Raises InvalidRange, with the Content-Range of RFC 9110, section 15.5.17."""
    match = _RANGE.fullmatch(header)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        length = min(int(match[2]), size)
        if not length:
            raise _unsatisfiable(header, size)
        return ByteRange(size - length, length)
    first = int(match[1])
    last = int(match[2]) if match[2] else None
    if last is not None and last < first:
        return None
    if first >= size:
        raise _unsatisfiable(header, size)
    end = size if last is None else min(last + 1, size)
    return ByteRange(first, end - first)


def parse_copy_range(header: str, size: int) -> ByteRange:
    """Returns the bytes of a copy's source of `size` bytes. Raises InvalidArgument,
    InvalidRange."""
    match = _COPY_RANGE.fullmatch(header)
    if match is None or int(match[2]) < int(match[1]):
        raise invalid_argument(
            "x-amz-copy-source-range",
            header,
            "The x-amz-copy-source-range value must be of the form bytes=first-last where first and"
            " last are the zero-based offsets of the first and last bytes to copy",
        )
    first, last = int(match[1]), int(match[2])
    if last >= size:
        raise _unsatisfiable(header, size)
    return ByteRange(first, last + 1 - first)


def part_range(part_sizes: Sequence[int], number: int) -> ByteRange:
    """Returns the bytes of part `number`, from 1; an object that was put whole is one part.

    Raises InvalidPart. (AWS answers InvalidPartNumber, 416; the public conformance suites ask for
    400, and no client tells them apart.)"""
    if not 1 <= number <= len(part_sizes):
        raise S3Error(
            "InvalidPart",
            "The requested partnumber is not satisfiable",
            extra={"PartNumberRequested": str(number), "ActualPartCount": str(len(part_sizes))},
        )
    return ByteRange(sum(part_sizes[: number - 1]), part_sizes[number - 1])


def _unsatisfiable(header: str, size: int) -> S3Error:
    return S3Error(
        "InvalidRange",
        "The requested range is not satisfiable",
        extra={"RangeRequested": header, "ActualObjectSize": str(size)},
        headers={"content-range": f"bytes */{size}"},
    )
