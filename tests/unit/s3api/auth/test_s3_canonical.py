"""The canonical form of a request: what is taken as it is must be what encoding anew would give."""

from urllib.parse import quote, unquote_to_bytes

from hypothesis import given, settings
from hypothesis import strategies as st

from s3api.auth.canonical import by_name, canonical_path, canonical_query, parameters

SENT = st.lists(
    st.one_of(
        st.integers(0, 255).map(lambda byte: b"%%%02X" % byte),
        st.integers(0, 255).map(lambda byte: b"%%%02x" % byte),
        st.sampled_from([b"/", b"a", b"Z", b"9", b"-", b"~", b"+", b"=", b"&", b"%", b"%4", b"."]),
        st.binary(min_size=1, max_size=1),
    ),
    max_size=8,
).map(b"".join)


def encoded(value: bytes, safe: str) -> bytes:
    return quote(unquote_to_bytes(value), safe=safe).encode()


@settings(max_examples=300, deadline=None)
@given(SENT)
def test_paths(path: bytes) -> None:
    assert canonical_path(path) == (encoded(path, "/") or b"/")


@settings(max_examples=300, deadline=None)
@given(SENT)
def test_queries(query: bytes) -> None:
    expected = []
    for part in query.split(b"&"):
        name, _, value = part.replace(b"+", b"%20").partition(b"=")
        if part:
            expected.append((encoded(name, ""), encoded(value, "")))
    wanted = b"&".join(b"%b=%b" % pair for pair in sorted(expected))
    assert canonical_query(parameters(query)) == wanted


def test_each_escape() -> None:
    for byte in range(256):
        escape = b"%%%02X" % byte
        assert canonical_path(b"/" + escape) == b"/" + encoded(escape, "/")
        assert parameters(b"a=" + escape) == [(b"a", b"=", encoded(escape, ""))]


def test_headers_by_name() -> None:
    assert by_name([(b"a", b" 1 "), (b"b", b"2")]) == {b"a": b" 1 ", b"b": b"2"}
    assert by_name([(b"a", b" 1 "), (b"a", b"2  3")]) == {b"a": b"1,2 3"}
