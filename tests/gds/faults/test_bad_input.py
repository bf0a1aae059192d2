"""Files that lie: each way to load refuses them by file and tensor, and leaves nothing open."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from kvfs.base.errors import Corrupt

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> Any:
    return {"dtype": dtype, "shape": shape or [end - begin], "data_offsets": [begin, end]}


def file_of(header: object, size: int, length: int | None = None) -> bytes:
    """A file with this header and so many bytes of data; `length`: what it says of the header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(size)


TWICE: Final = (
    b'{"a": %b, "a": %b}' % (json.dumps(entry(0, 8)).encode(), json.dumps(entry(8, 16)).encode()),
)

LYING: Final[Mapping[str, tuple[bytes, tuple[str, ...]]]] = {
    "empty": (b"", ("no safetensors file",)),
    "shorter than a length": (b"1234567", ("no safetensors file",)),
    "cut in its header": (file_of({"a": entry(0, 8)}, 8)[:30], ("truncated",)),
    "cut in its data": (file_of({"a": entry(0, 8)}, 7), ("truncated",)),
    "longer than its tensors": (file_of({"a": entry(0, 8)}, 9), ("no tensor",)),
    "a huge header": (file_of({}, 8, 1 << 40), ("its header would have",)),
    "a length of all bits": (b"\xff" * 16, ("its header would have",)),
    "an overlap": (file_of({"a": entry(0, 8), "b": entry(4, 12)}, 12), ("'b'", "overlaps")),
    "a hole": (file_of({"a": entry(0, 8), "b": entry(12, 16)}, 16), ("'b'", "hole")),
    "a size that overflows": (
        file_of({"a": entry(0, 8, "U8", [1 << 62, 1 << 62])}, 8),
        ("'a'", "shape"),
    ),
    "an end before its begin": (
        file_of({"a": {"dtype": "U8", "shape": [4], "data_offsets": [8, 4]}}, 8),
        ("'a'", "data_offsets"),
    ),
    "a negative size": (file_of({"a": entry(0, 8, "U8", [-8])}, 8), ("'a'", "shape")),
    "a name twice": (file_of(*TWICE, 16), ("'a' twice",)),
    "another dtype's size": (file_of({"a": entry(0, 8, "F32")}, 8), ("'a'", "F32")),
    "a dtype that is none": (file_of({"a": entry(0, 8, "F7")}, 8), ("'a'", "'F7'")),
    "no JSON": (file_of(b"{nonsense", 8), ("no JSON",)),
    "a list": (file_of(b"[]", 8), ("no JSON object",)),
    "nested beyond all measure": (file_of(b'{"a":' + b"[" * 100_000, 8), ("no JSON",)),
    "not UTF-8": (file_of(b'{"\xff": 1}', 8), ("no JSON",)),
}


def load_file(path: Path) -> object:
    import gds

    return gds.load_file(path)


def load_rank(path: Path) -> object:
    import gds

    return gds.load_model(path.parent, rank=1, world_size=2)


def iter_tensors(path: Path) -> object:
    import gds

    return list(gds.iter_tensors([path]))


def map_file(path: Path) -> object:
    import gds

    return gds.load_file(path, copy=False)


@pytest.mark.parametrize("load", [load_file, load_rank, iter_tensors, map_file])
def test_a_file_that_lies_is_refused_by_name(where: Path, load: Callable[[Path], object]) -> None:
    path = where / "lying.safetensors"
    for kind, (content, said) in LYING.items():
        path.write_bytes(content)
        opened = len(os.listdir("/proc/self/fd"))
        with pytest.raises(Corrupt) as caught:
            load(path)
        message = str(caught.value)
        assert all(each in message for each in (str(path), *said)), (kind, message)
        assert len(os.listdir("/proc/self/fd")) == opened, kind


def test_of_several_files_the_one_that_lies_is_named_and_none_is_loaded(where: Path) -> None:
    good = file_of({"good": entry(0, 8)}, 8)
    (where / "a.safetensors").write_bytes(good)
    (where / "b.safetensors").write_bytes(LYING["a hole"][0])
    opened = len(os.listdir("/proc/self/fd"))
    for load in (load_rank, iter_tensors):
        with pytest.raises(Corrupt, match=r"b\.safetensors.*'b'"):
            load(where / "b.safetensors")
    assert len(os.listdir("/proc/self/fd")) == opened
