"""Tensors without a copy: views of the file."""

from pathlib import Path

import pytest

from kvfs.base.errors import Invalid
from tests.gds.checkpoints import assert_same, llama, meant, write
from tests.gds.loads.test_loading import EVERY_DTYPE

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


@pytest.mark.parametrize("padding", [0, 1])
def test_every_dtype_comes_back_byte_for_byte(where: Path, padding: int) -> None:
    import gds

    write(where / "a.safetensors", EVERY_DTYPE, padding)
    assert_same(gds.load_file(where / "a.safetensors", copy=False), EVERY_DTYPE)


def test_ranks_have_what_they_have_of_a_copy(where: Path) -> None:
    import torch

    import gds

    write(where / "a.safetensors", llama(1, 64) | {"packed": meant("F4", (4, 8), 1)})
    plan = {"packed": 1, r"down_proj": 1, r"q_proj": 0}
    for rank in range(2):
        copied = gds.load_model(where / "a.safetensors", rank=rank, world_size=2, plan=plan)
        mapped = gds.load_model(
            where / "a.safetensors", rank=rank, world_size=2, plan=plan, copy=False
        )
        assert copied.keys() == mapped.keys()
        for name, tensor in copied.items():
            assert tensor.dtype == mapped[name].dtype
            ours, theirs = (each.contiguous().view(torch.uint8) for each in (tensor, mapped[name]))
            assert torch.equal(ours, theirs), name


def test_what_is_written_to_a_tensor_stays_out_of_the_file(where: Path) -> None:
    import gds

    file = where / "a.safetensors"
    write(file, EVERY_DTYPE)
    gds.load_file(file, copy=False)["large"].zero_()
    assert_same(gds.load_file(file), EVERY_DTYPE)
    assert_same(gds.load_file(file, copy=False), EVERY_DTYPE)


def test_a_file_that_was_removed_is_there_for_its_tensors(where: Path) -> None:
    import gds

    file = where / "a.safetensors"
    write(file, EVERY_DTYPE)
    found = gds.load_file(file, copy=False)
    file.unlink()
    assert_same(found, EVERY_DTYPE)


def test_a_conversion_is_a_copy(where: Path) -> None:
    import torch

    import gds

    write(where / "a.safetensors", EVERY_DTYPE)
    with pytest.raises(Invalid, match="copy"):
        gds.load_model(where / "a.safetensors", dtype=torch.float32, copy=False)
