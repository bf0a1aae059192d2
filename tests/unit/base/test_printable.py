"""Passwords in URLs: where they are, in values and in texts, and what is shown in their place."""

import pytest

from kvfs.base import printable
from kvfs.meta.redis.location import shown

VALUES = [
    ("redis://u:pw@h:1/2", "redis://u:xxxxx@h:1/2"),
    ("--engine=rediss://:pw@h", "--engine=rediss://:xxxxx@h"),
    ("REDIS://u:a:b@c@h", "REDIS://u:xxxxx@h"),
    ("redis://u:a?b#c@h/0", "redis://u:xxxxx@h/0"),
    ("redis://u:a b\"c'd@h", "redis://u:xxxxx@h"),
    ("redis+sentinel://u:pw@h:1,[::1]:2/n", "redis+sentinel://u:xxxxx@h:1,[::1]:2/n"),
    ("redis://u@h:1", "redis://u@h:1"),
    ("redis+sentinel://h:1,h:2/n", "redis+sentinel://h:1,h:2/n"),
    ("http://127.0.0.1:9000/a@b", "http://127.0.0.1:9000/a@b"),
    ("a:b@c", "a:b@c"),
]


@pytest.mark.parametrize(("value", "hidden"), VALUES)
def test_a_password_in_a_value_is_hidden(value: str, hidden: str) -> None:
    assert printable.without_passwords(value) == hidden


@pytest.mark.parametrize(("value", "_hidden"), VALUES)
def test_all_readings_agree(value: str, _hidden: str) -> None:
    found = [value[begin:end] for begin, end in printable.passwords(value)]
    assert bool(found) == (printable.without_passwords(value) != value)
    for password in found:
        assert password not in printable.without_passwords(value)
        assert password not in shown(value)


def test_values_in_a_row_are_taken_one_by_one() -> None:
    row = "kvfs\0redis://u:one@h\0x\0redis://h:1\0a@b\0redis://:two@h\0"
    assert [row[begin:end] for begin, end in printable.passwords(row)] == ["one", "two"]


def test_in_a_text_a_url_ends_at_blanks_and_quotation_marks() -> None:
    text = """{"a": "redis://u:pw@h:1", "b": "http://h:9000", "c": "d@e"} of redis://:x@h, x@y"""
    hidden = """{"a": "redis://u:-@h:1", "b": "http://h:9000", "c": "d@e"} of redis://:-@h, x@y"""
    assert printable.without_passwords(text, "-", is_text=True) == hidden
