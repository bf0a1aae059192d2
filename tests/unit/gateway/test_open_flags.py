"""With which flags the mount's kernel is told to open a file."""

import os

import pytest

from gateway.fuse.channel.backing_registry import BackingRegistry
from gateway.fuse.codec.protocol import Fopen
from gateway.fuse.files.open_file import Handle, OpenFile
from kvfs.transfer.transfer import Transfer, WantedFile
from tests.unit.space import new_inode

NO_DEVICE = -1


def opened(*, coming: bool, whole: bool = False) -> Handle:
    """A handle of a file that came, or comes, from another node, or was here."""
    file = OpenFile(7, 1, NO_DEVICE, False, new_inode())
    if coming:
        file.incoming = Transfer(WantedFile(7, 1, 1 << 30, b""))
        if whole:
            file.incoming.end()
    return Handle(1, file, os.O_RDONLY, False)


@pytest.fixture
def backing() -> BackingRegistry:
    made = BackingRegistry(NO_DEVICE, passthrough=False, stack_depth=0, direct_writes=True)
    made.direct_reads = True
    return made


@pytest.mark.parametrize(
    ("coming", "whole", "is_direct"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_what_is_still_coming_is_read_past_the_page_cache(
    backing: BackingRegistry, coming: bool, whole: bool, is_direct: bool
) -> None:
    flags, _ = backing.flags(opened(coming=coming, whole=whole))
    assert bool(flags & Fopen.DIRECT_IO) is is_direct
    assert flags & Fopen.KEEP_CACHE  # what others mapped of it stays


def test_a_kernel_that_could_not_map_it_reads_through_the_page_cache(
    backing: BackingRegistry,
) -> None:
    backing.direct_reads = False
    flags, _ = backing.flags(opened(coming=True))
    assert not flags & Fopen.DIRECT_IO


def test_pages_of_content_that_was_replaced_do_not_stay(backing: BackingRegistry) -> None:
    handle = opened(coming=True)
    handle.replaced = True
    flags, _ = backing.flags(handle)
    assert not flags & Fopen.KEEP_CACHE
