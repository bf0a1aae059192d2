"""Tensors become safetensors files: those that the format's own library makes of them, whole or not
at all."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvfs.base.errors import (
    Invalid,
    IsADirectory,
    NameTooLong,
    NoSpace,
    NotFound,
    NotPermitted,
    NotSupported,
)
from tests.integration.posix import as_user

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


def every_dtype() -> "dict[str, torch.Tensor]":
    """In an order that is not the file's."""
    import torch

    from gds.io.tensors import DTYPES

    raw = torch.arange(96, dtype=torch.uint8)
    found = {f"b {name}": raw.view(dtype) for name, dtype in DTYPES.items() if name != "BOOL"}
    found |= {f"a {name}": each[: len(each) // 2].clone() for name, each in found.items()}
    found = {name: each.clone() for name, each in found.items()}
    found["bool"] = raw.view(3, 32) % 2 == 1
    found["scalar"] = torch.tensor(1.5)
    found["empty"] = torch.empty(0, 7)
    found['a "name"\n\x01é'] = torch.ones(3, 1, 2, dtype=torch.float16)
    return found


def assert_as_safetensors(tensors: "dict[str, torch.Tensor]", path: Path, beside: Path) -> None:
    """The file is, byte for byte, the one that the format's own library makes."""
    from safetensors.torch import save_file

    save_file(tensors, beside / "wanted", metadata={"format": "pt"})
    assert path.read_bytes() == (beside / "wanted").read_bytes()


def test_the_file_is_that_of_the_formats_own_library(where: Path, tmp_path: Path) -> None:
    import torch

    import gds

    tensors = every_dtype()
    gds.save_file(tensors, where / "a.safetensors", metadata={"format": "pt"})
    assert_as_safetensors(tensors, where / "a.safetensors", tmp_path)
    found = gds.load_file(where / "a.safetensors")
    assert set(found) == set(tensors)
    for name, each in tensors.items():
        assert found[name].dtype == each.dtype
        assert found[name].shape == each.shape
        assert (
            found[name].reshape(-1).view(torch.uint8).tolist()
            == each.reshape(-1).view(torch.uint8).tolist()
            or not each.numel()
        )


def test_nothing_at_all_is_a_file_too(where: Path) -> None:
    import gds

    gds.save_file({}, where / "a.safetensors")
    assert gds.load_file(where / "a.safetensors") == {}


def test_many_small_tensors_and_one_that_takes_several_writes(where: Path, tmp_path: Path) -> None:
    import torch

    import gds

    tensors = {f"{n}": torch.full((3,), n, dtype=torch.int16) for n in range(3000)}
    tensors["large"] = torch.arange(20 * MIB, dtype=torch.int32)
    gds.save_file(tensors, where / "a.safetensors", metadata={"format": "pt"})
    assert_as_safetensors(tensors, where / "a.safetensors", tmp_path)


def test_a_disk_that_takes_less_than_it_was_given(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gds

    write = os.pwritev

    def write_some(fd: int, views: Sequence[Any], offset: int) -> int:
        return write(
            fd, [views[0][:13], *views[1:3]] if len(views[0]) < 14 else [views[0][:13]], offset
        )

    monkeypatch.setattr(os, "pwritev", write_some)
    tensors = every_dtype()
    gds.save_file(tensors, where / "a.safetensors", metadata={"format": "pt"})
    assert_as_safetensors(tensors, where / "a.safetensors", tmp_path)


def test_what_lies_on_a_device_goes_through_a_small_buffer(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import gds
    from gds import save

    monkeypatch.setattr(save, "_is_on_host", lambda _: False)
    monkeypatch.setattr(save, "_PART_BYTES", 1000)
    tensors = every_dtype() | {"large": torch.arange(5000)}
    gds.save_file(tensors, where / "a.safetensors", metadata={"format": "pt"})
    assert_as_safetensors(tensors, where / "a.safetensors", tmp_path)


def test_what_the_format_cannot_hold_is_named(where: Path) -> None:
    import torch

    import gds

    table = torch.zeros(4, 4)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"t": table.t()[:, :2]}, Invalid, "'t' is not contiguous"),
        ({"one": table, "two": table}, Invalid, "'one' and 'two' share memory"),
        ({"all": table, "row": table[1]}, Invalid, "'all' and 'row' share memory"),
        ({"s": table.to_sparse()}, NotSupported, "'s' is torch.sparse_coo"),
        ({"c": torch.zeros(2, dtype=torch.complex128)}, NotSupported, "'c'.*complex128"),
        ({"m": torch.zeros(2, device="meta")}, Invalid, "'m' has no data"),
        ({"n": [1, 2]}, Invalid, "'n' is no tensor but list"),
        ({"__metadata__": table}, Invalid, "__metadata__"),
        ({"\udc80": table}, Invalid, "no text"),
    ]
    for tensors, error, text in refused:
        with pytest.raises(error, match=text):
            gds.save_file(tensors, where / "a.safetensors")
    with pytest.raises(Invalid, match="texts by name"):
        gds.save_file({}, where / "a.safetensors", metadata={"step": 3})  # type: ignore[dict-item]
    assert os.listdir(where) == []
    gds.save_file({"upper": table[:2], "lower": table[2:]}, where / "a.safetensors")


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_after_an_error_what_was_there_stays_and_nothing_else(
    where: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    import torch

    import gds

    path = where / "a.safetensors"
    gds.save_file({"old": torch.ones(5)}, path)
    before = path.read_bytes()

    def fail(*_: object) -> int:
        raise failure

    monkeypatch.setattr(os, "pwritev", fail)
    wanted = NoSpace if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(wanted):
        gds.save_file({"new": torch.zeros(5)}, path)
    with pytest.raises(wanted):
        gds.save_file({"new": torch.zeros(5)}, where / "b.safetensors")
    assert os.listdir(where) == ["a.safetensors"]
    assert path.read_bytes() == before


def test_a_new_file_takes_the_place_of_the_old_one(where: Path) -> None:
    import torch

    import gds

    path = where / "a.safetensors"
    gds.save_file({"old": torch.ones(5)}, path)
    (where / "link").symlink_to("a.safetensors")
    with open(path, "rb") as reader:
        gds.save_file({"new": torch.zeros(5)}, where / "link")
        assert b"old" in reader.read()
    assert list(gds.load_file(path)) == ["new"]
    assert (where / "link").is_symlink()
    assert sorted(os.listdir(where)) == ["a.safetensors", "link"]


def test_a_place_that_is_not_there(where: Path) -> None:
    import gds

    with pytest.raises(NotFound, match="none: no such directory"):
        gds.save_file({}, where / "none" / "a.safetensors")
    with pytest.raises(IsADirectory):
        gds.save_file({}, where)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_what_cannot_be_made_is_named_as_the_caller_names_it(mount: Path, tmp_path: Path) -> None:
    import torch

    import gds

    (tmp_path / "link").symlink_to(mount)
    with pytest.raises(NameTooLong, match=f"^{tmp_path}/link/nnn"):
        gds.save_file({"a": torch.ones(5)}, tmp_path / "link" / ("n" * 256))
    for path in (mount.parent / "a.safetensors", tmp_path / "link" / ".." / "a.safetensors"):
        with pytest.raises(NotPermitted, match=f"^{path}: a file stands in a namespace"):
            gds.save_file({"a": torch.ones(5)}, path)
    mount.chmod(0o755)
    with as_user(1234), pytest.raises(PermissionError) as refused:
        gds.save_file({"a": torch.ones(5)}, mount / "a.safetensors")
    assert refused.value.filename == str(mount / "a.safetensors")


def test_names_are_texts() -> None:
    import torch

    import gds

    with pytest.raises(Invalid, match="1 is no name"):
        gds.save_file({1: torch.ones(5)}, "a.safetensors")  # type: ignore[dict-item]
    with pytest.raises(Invalid, match="not in a list"):
        gds.save_file([torch.ones(5)], "a.safetensors")  # type: ignore[arg-type]


def test_who_may_not_write_to_the_store_saves_through_the_mount(mount: Path) -> None:
    import torch

    import gds

    where = mount / "for everybody"
    where.mkdir()
    where.chmod(0o777)
    with as_user(1234):
        gds.save_file({"mine": torch.ones(5)}, where / "a.safetensors")
    assert (where / "a.safetensors").stat().st_uid == 1234
    assert list(gds.load_file(where / "a.safetensors")) == ["mine"]
    assert os.listdir(where) == ["a.safetensors"]
