import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.base.errors import Invalid
from kvfs.base.units import Capacity, exact_size, format_size, parse_capacity, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("500M", 500 << 20),
        ("500MB", 500_000_000),
        ("1.5K", 1536),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_are_understood(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "4 XiB", "4GiBs", "1,5G", "0x10"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(Invalid, match="4GiB"):
        parse_size(text)


def test_a_share_is_taken_of_the_disk() -> None:
    assert parse_capacity("90%").of(1000) == 900
    assert parse_capacity("4GiB").of(1000) == 4 << 30


@pytest.mark.parametrize("text", ["0%", "101%", "0", "-5%", "%"])
def test_an_impossible_capacity_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_capacity(text)


@given(st.integers(min_value=1, max_value=1 << 60))
def test_a_capacity_reads_back_as_written(size_bytes: int) -> None:
    assert parse_size(exact_size(size_bytes)) == size_bytes
    assert parse_capacity(str(Capacity(size_bytes=size_bytes))).of(1) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 20, "1.0 MiB")],
)
def test_sizes_are_shown_short(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
