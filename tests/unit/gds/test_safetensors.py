"""Headers of safetensors files: what is right is read, whatever is not is refused by name."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gds.format.safetensors import BITS, MOST_HEADER_BYTES, Header, header_length, parse_header
from kvfs.base.errors import Corrupt

WHERE = "model.safetensors"
LIKELY = b'0123456789",:[]{}-.eU8IF \x00\xff'


def header_of(entries: dict[str, Any], data_bytes: int, padding: int = 0) -> tuple[bytes, int]:
    """The JSON, and the size of the file."""
    text = json.dumps(entries).encode() + b" " * padding
    return text, 8 + len(text) + data_bytes


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": entry("F32", [2, 3], 0, 24), "b": entry("U8", [8], 24, 32)}


def read(text: bytes, size: int) -> Header:
    return parse_header([text], len(text), size, WHERE)


def refusal(entries: object, data_bytes: int = 32) -> str:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    with pytest.raises(Corrupt) as caught:
        read(text, 8 + len(text) + data_bytes)
    message = str(caught.value)
    assert message.startswith(WHERE + ":")
    return message


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    text, size = header_of(
        {"__metadata__": {"format": "pt"}, "b": GOOD["b"], "a": GOOD["a"]}, 32, 5
    )
    found = read(text, size)
    assert [each.name for each in found.tensors] == ["a", "b"]
    assert found.tensors[0].begin == found.data_begin == 8 + len(text)
    assert found.tensors[1].end == size
    assert found.metadata == {"format": "pt"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "F128"}, "unknown dtype"),
        ({"dtype": 3}, "unknown dtype"),
        ({"shape": [2, -3]}, "no list of sizes"),
        ({"shape": [2, True]}, "no list of sizes"),
        ({"shape": [2.0, 3]}, "no list of sizes"),
        ({"shape": [1 << 62] * 100_000}, "no list of sizes"),
        ({"shape": [1 << 62, 1 << 62]}, "no list of sizes"),
        ({"shape": [10**4000, 10**4000]}, "no list of sizes"),
        ({"shape": [0, 1 << 62, 1 << 62]}, "no list of sizes"),
        ({"shape": [2, 2]}, "bits"),
        ({"data_offsets": [24, 0]}, "data_offsets"),
        ({"data_offsets": [0]}, "data_offsets"),
        ({"data_offsets": [0, 1 << 70]}, "data_offsets"),
        ({"data_offsets": None}, "data_offsets"),
    ],
)
def test_a_lie_of_a_tensor_names_it(change: dict[str, Any], said: str) -> None:
    message = refusal(GOOD | {"a": GOOD["a"] | change})
    assert "'a'" in message
    assert said in message


def test_overlaps_holes_and_rests_are_refused() -> None:
    assert "overlaps" in refusal(GOOD | {"b": entry("U8", [9], 23, 32)})
    assert "hole" in refusal(GOOD | {"b": entry("U8", [7], 25, 32)})
    assert "hole" in refusal({"b": GOOD["b"]})
    assert "belong to no tensor" in refusal(GOOD, data_bytes=33)
    assert "truncated" in refusal(GOOD, data_bytes=31)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no JSON object"),
        (b"[]", "no JSON object"),
        (b"{", "no JSON"),
        (b'{"a": \xff}', "no JSON"),
        (b'{"a":' * 100_000, "no JSON"),
        (b'{"__metadata__": {}, "__metadata__": {}}', "twice"),
        (b'{"a": {"dtype": "U8", "dtype": "I8"}}', "twice"),
        (b'{"a": 1}', "dtype, shape and data_offsets"),
        (b'{"__metadata__": {"a": 1}}', "no object of texts"),
        (b'{"__metadata__": []}', "no object of texts"),
        ('{"a": 1}'.encode("utf-16-le"), "no JSON"),
        (b'{"\\ud800": 1}', "no JSON"),
        (b'{"__metadata__": {"a": "\\udc00"}}', "no JSON"),
        (b'{"a": {"more": NaN}}', "no JSON"),
        (b'{"__metadata__": {}} {}', "no JSON"),
        (b'{"__metadata__": {},}', "no JSON"),
        (b'{"__metadata__" {}}', "no JSON"),
        (b'{"__metadata__": {} "a": {}}', "no JSON"),
        (b"{3: {}}", "no JSON"),
        (b'{"__metadata__": {}}\xe2\x82', "no JSON"),
    ],
)
def test_what_is_no_header_is_refused(text: bytes, said: str) -> None:
    assert said in refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"a": GOOD["a"] | {"dtype": "F" * 100_000}}).encode(),
        json.dumps({"a": GOOD["a"] | {"shape": [1] * 100_000}}).encode(),
        json.dumps({"a" * 100_000: GOOD["a"] | {"shape": [7]}}).encode(),
        b'{"%b": {}, "%b": {}}' % (b"a" * 100_000, b"a" * 100_000),
        b'{"a": {"shape": [%b]}}' % (b"9" * 5000),
    ],
)
def test_a_refusal_is_short_and_for_the_files_reader(text: bytes) -> None:
    message = refusal(text)
    assert len(message) < 500
    assert "sys." not in message


def test_what_the_formats_own_library_passes_over_is_passed_over() -> None:
    long = entry("U8", [1] * 100, 0, 1)
    text, size = header_of({"__metadata__": None, "\N{OWL}": long | {"more": {"b": [1]}}}, 1)
    found = read(text, size)
    assert [(each.name, each.shape) for each in found.tensors] == [("\N{OWL}", (1,) * 100)]
    assert found.metadata == {}


def test_lengths_that_cannot_be_are_refused() -> None:
    for first, size, said in [
        (b"", 0, "0 bytes"),
        (b"1234567", 7, "7 bytes"),
        ((MOST_HEADER_BYTES + 1).to_bytes(8, "little"), 1 << 40, "are allowed"),
        (b"\xff" * 8, 1 << 40, "are allowed"),
        ((93).to_bytes(8, "little"), 100, "truncated"),
    ]:
        with pytest.raises(Corrupt, match=said):
            header_length(first, size, WHERE)
    assert header_length((92).to_bytes(8, "little"), 100, WHERE) == 92


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Any right header, in any order, and how many bytes of data it has."""
    entries, at = {}, 0
    for name in draw(st.lists(st.text(max_size=8), unique=True, max_size=8)):
        if name == "__metadata__":
            continue
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        bits = math.prod(shape) * BITS[dtype]
        if bits % 8:
            shape, bits = [*shape, 4], bits * 4
        entries[name] = entry(dtype, shape, at, at + bits // 8)
        at += bits // 8
    names = draw(st.permutations(list(entries)))
    return {name: entries[name] for name in names}, at


@given(headers(), st.integers(0, 9))
def test_every_right_header_is_read_as_it_was_written(
    header: tuple[dict[str, Any], int], padding: int
) -> None:
    entries, data_bytes = header
    text, size = header_of(entries, data_bytes, padding)
    found = read(text, size)
    assert {
        each.name: entry(
            each.dtype,
            list(each.shape),
            each.begin - found.data_begin,
            each.end - found.data_begin,
        )
        for each in found.tensors
    } == entries


@given(headers(), st.integers(1, 40))
def test_a_header_is_the_same_in_parts_of_any_size(
    header: tuple[dict[str, Any], int], part_bytes: int
) -> None:
    entries = {"__metadata__": {"\N{OWL}": "\N{GRINNING FACE}"}, **header[0]}
    text = json.dumps(entries, ensure_ascii=False, indent=1).encode()
    size = 8 + len(text) + header[1]
    parts = [text[at : at + part_bytes] for at in range(0, len(text), part_bytes)]
    assert parse_header(parts, len(text), size, WHERE) == read(text, size)


@given(headers(), st.integers(0, 1 << 32))
def test_a_damaged_header_is_refused_or_still_describes_the_whole_file(
    header: tuple[dict[str, Any], int], seed: int
) -> None:
    """Whatever bytes change: nothing but Corrupt is raised, and what is accepted has no overlaps,
    no holes, and nothing beyond the file."""
    text, size = header_of(header[0], header[1])
    chance = random.Random(seed)
    damaged = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        damaged[chance.randrange(len(damaged))] = chance.choice(
            b'0123456789",:[]{}-.eU8IF \x00\xff'
        )
    middle = chance.randrange(1, len(damaged))
    try:
        found = read(bytes(damaged), size)
    except Corrupt:
        with pytest.raises(Corrupt):
            in_two(bytes(damaged), middle, size)
        return
    assert_sound(found, size)
    assert in_two(bytes(damaged), middle, size) == found


def in_two(text: bytes, middle: int, size: int) -> Header:
    return parse_header([text[:middle], text[middle:]], len(text), size, WHERE)


def assert_sound(found: Header, size: int) -> None:
    at = found.data_begin
    for tensor in found.tensors:
        assert tensor.begin == at
        assert (tensor.end - tensor.begin) * 8 == math.prod(tensor.shape) * BITS[tensor.dtype]
        at = tensor.end
    assert at == size
