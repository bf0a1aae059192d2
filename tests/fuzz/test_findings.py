"""Inputs that once ended in another way than their parser declares."""

import os
from pathlib import Path

import pytest

from kvfs.datastore.files import description
from kvfs.meta.redis.location import shown
from tests.fuzz.__main__ import ALL

FOUND = {
    "peer words": [b"error \x92\xa8Not\x93\xa4oun\xa4gone", b"addresses \x91\x93\x01\xa1\xff\x01"],
    "peer messages": [b"\x91" * 4_000],
    "engine answers": [b":$267\r\n", b"*1\r\n:1x\r\n"],
    "log answer": [
        b"\x95\xc4\x02ok\x91\x95\xc4\x035-1\xc4\x05token\xc4\x06before" + b"\x91" * 4_000
    ],
    "engine url": [
        b"redis://user:pw@redis://user:pw@host:6379/1",
        b"redis:/r:pw@h://[::1]:7,h",
        b"redis://user:pw@host:6\x80\0ser:pw@host:6379/1://ser:pw@ht:6379/1",
    ],
}
TARGETS = {each.name: each for each in ALL}


@pytest.mark.parametrize(
    ("name", "data"), [(name, data) for name, inputs in FOUND.items() for data in inputs]
)
def test_it_is_refused_or_read(name: str, data: bytes) -> None:
    target = TARGETS[name]
    try:
        target.run(data)
    except target.refusals:
        return


def test_a_url_shows_no_password_wherever_it_stands() -> None:
    for url in FOUND["engine url"]:
        assert "pw" not in shown(url.decode(errors="surrogateescape"))


def test_a_description_with_a_text_that_is_none_is_none(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.touch()
    os.setxattr(
        path,
        "user.kvfs",
        b"\x9d\x01\x01\x00\x00\xc4\x00\xc4\x00\x00\x00\x00\x00\x00\xc4\x00\xa1\xff",
    )
    with path.open("rb") as file:
        assert description(file.fileno()) is None
