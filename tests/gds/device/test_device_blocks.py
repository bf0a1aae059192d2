"""Blocks into and out of a device's memory, in batches through two buffers."""

from typing import TYPE_CHECKING

import pytest

from kvfs.base.errors import NoSpace, Unavailable

if TYPE_CHECKING:
    import torch

    from tests.gds.late_device import LateDevice

MIB = 1 << 20
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


@pytest.fixture
def device() -> "LateDevice":
    from tests.gds.late_device import LateDevice

    return LateDevice()


def parts_on(device: "LateDevice", sizes: list[int]) -> "list[torch.Tensor]":
    import torch

    return [device.empty((size,), torch.uint8) for size in sizes]


def block(number: int, size: int) -> bytes:
    return bytes([1 + number % 250]) * size


SIZES = [9 * MIB + n for n in range(20)] + [0, 1, 70 * MIB, 3]


def test_batches_are_bounded_and_miss_nothing() -> None:
    from gds.device.device_blocks import batches

    assert list(batches([], 10)) == []
    assert list(batches([4, 4, 4], 8)) == [slice(0, 2), slice(2, 3)]
    assert list(batches([20, 1, 20], 8)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(batches([0, 0, 9, 0], 8)) == [slice(0, 3), slice(3, 4)]


def test_blocks_are_read_to_where_they_belong(device: "LateDevice") -> None:
    from gds.device.device_blocks import read_into

    parts = parts_on(device, SIZES)
    asked: list[int] = []

    def fetch(batch: slice, views: list[memoryview]) -> list[int]:
        sizes = []
        for at, view in zip(range(*batch.indices(len(SIZES))), views, strict=True):
            asked.append(at)
            size = 0 if at % 5 == 3 else len(view) // 2 if at % 5 == 4 else len(view)
            view[:size] = block(at, size)
            sizes.append(size)
        return sizes

    read_into(parts, device, fetch)
    assert device.pending == device.lent == 0
    device.do_all()
    assert asked == list(range(len(SIZES)))
    for at, part in enumerate(parts):
        size = 0 if at % 5 == 3 else len(part) // 2 if at % 5 == 4 else len(part)
        assert part.numpy()[:size].tobytes() == block(at, size)
        assert part.numpy()[size:].tobytes() == b"\x5a" * (len(part) - size)


def test_blocks_are_written_as_they_are_when_the_callers_stream_is_done(
    device: "LateDevice",
) -> None:
    from gds.device.device_blocks import write_from

    parts = parts_on(device, SIZES)
    for at, part in enumerate(parts):
        device.caller.submit(lambda at=at, part=part: part.fill_(1 + at % 250))
    stored: dict[int, bytes] = {}

    def store(batch: slice, views: list[memoryview]) -> None:
        stored.update(zip(range(*batch.indices(len(SIZES))), map(bytes, views), strict=True))

    write_from(parts, device, store)
    assert device.pending == device.lent == 0
    assert stored == {at: block(at, size) for at, size in enumerate(SIZES)}
    assert device.most_lent == 2


def test_what_fails_leaves_nothing_lent(device: "LateDevice") -> None:
    from gds.device.device_blocks import read_into, write_from

    parts = parts_on(device, [40 * MIB] * 3)

    def no_node(batch: slice, views: list[memoryview]) -> list[int]:
        if batch.start:
            raise Unavailable("the node is gone")
        return [len(view) for view in views]

    with pytest.raises(Unavailable, match="gone"):
        read_into(parts, device, no_node)
    assert device.pending == device.lent == 0

    def full(_batch: slice, _views: list[memoryview]) -> None:
        raise NoSpace("full")

    with pytest.raises(NoSpace):
        write_from(parts, device, full)
    assert device.pending == device.lent == 0
