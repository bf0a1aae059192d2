"""The fields of a browser's form, however its bytes come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.model.form_data import FIELDS_BYTES, Fields, boundary_of, put_file_name

BOUNDARY = b"xYz0"
NAMES = st.text("abcdefghijklmnopqrstuvwxyz-$", min_size=1, max_size=12).filter(
    lambda name: name != "file"
)
VALUES = st.text(max_size=40)


def part(name: str, value: bytes, extra: str = "") -> bytes:
    head = f'--xYz0\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def read(body: bytes, cuts: list[int]) -> tuple[Fields, int | None]:
    """As it comes in pieces that end at `cuts`."""
    fields, data, found = Fields(BOUNDARY), bytearray(body), None
    for end in sorted({cut % (len(body) + 1) for cut in cuts} | {len(body)}):
        if found is None:
            found = fields.feed(data, end)
    return fields, found


@settings(max_examples=100)
@given(
    st.dictionaries(NAMES, VALUES, max_size=5),
    st.binary(max_size=50),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_fields_are_found_however_they_are_split(
    wanted: dict[str, str], file: bytes, cuts: list[int]
) -> None:
    if any("\r\n--xYz0" in value for value in wanted.values()):
        return
    head = b"".join(part(name, value.encode()) for name, value in wanted.items())
    body = head + part("file", file, '; filename="a b.txt"') + b"--xYz0--\r\n"
    fields, found = read(body, cuts)
    assert found is not None
    assert fields.found == wanted
    assert fields.file_name == "a b.txt"
    assert body[found:].startswith(file + fields.delimiter)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=5))
def test_anything_is_read_or_refused(noise: bytes, cuts: list[int]) -> None:
    for body in (noise, b"--xYz0" + noise, b"--xYz0\r\n" + noise, part("a", noise) + noise):
        try:
            read(body, cuts)
        except S3Error as error:
            assert error.status == 400


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ('; filename="foo.txt"', "foo.txt"),
        ("; filename=foo.txt", "foo.txt"),
        ("; filename*=utf-8''f%C3%BC.txt", "fü.txt"),
        ('; filename="a\\"b"', 'a"b'),
        ("", ""),
    ],
)
def test_names_of_files(extra: str, name: str) -> None:
    fields, _ = read(part("File", b"", extra), [])
    assert fields.file_name == name


def test_the_name_of_the_file_in_the_key() -> None:
    assert put_file_name("a/${filename}", "C:\\tmp\\b.txt") == "a/b.txt"
    assert put_file_name("${filename}${filename}", "x/y") == "yy"
    assert put_file_name("plain", "y") == "plain"


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
        (b"multipart/form-data; BOUNDARY=----WebKit0", b"----WebKit0"),
    ],
)
def test_boundaries(content_type: bytes, boundary: bytes) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    [b"", b"multipart/form-data", b"multipart/form-data; boundary=", b"x; boundary=" + b"a" * 71],
)
def test_boundaries_that_are_none(content_type: bytes) -> None:
    with pytest.raises(S3Error, match="MalformedPOSTRequest"):
        boundary_of(content_type)


def test_what_stands_before_the_file_is_limited() -> None:
    endless = part("a", b"b" * FIELDS_BYTES)
    for body in (endless, endless + part("file", b"x"), b"x" * (FIELDS_BYTES + 1)):
        with pytest.raises(S3Error, match="MaxPostPreDataLengthExceededError"):
            read(body, [])
