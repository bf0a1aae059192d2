"""What the kernel's table of mounts says of a filesystem."""

import os
from pathlib import Path

import pytest

from kvfs.datastore.kernel.filesystem_probe import Mount, mount_of

TABLE = r"""22 1 254:0 / / rw,relatime - ext4 /dev/root rw
31 22 8:1 / /mnt/my\040models\134a rw shared:1 - xfs /dev/sda1 rw
40 22 0:44 / /mnt/kvfs rw - fuse.kvfs kvfs rw,user_id=1000,group_id=0,allow_other
41 22 0:45 / /mnt/odd rw - overlay user_id=0 rw,lowerdir=/user_id=0
32 22 8:1 /sub /mnt/other rw - xfs /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("device", "mount"),
    [
        ((254, 0), Mount("ext4", "/")),
        ((8, 1), Mount("xfs", "/mnt/my models\\a")),
        ((0, 44), Mount("fuse.kvfs", "/mnt/kvfs", 1000)),
        ((0, 45), Mount("overlay", "/mnt/odd")),
        ((9, 9), Mount("", "")),
    ],
)
def test_a_filesystem_is_named_as_it_was_mounted_first(
    tmp_path: Path, device: tuple[int, int], mount: Mount
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert mount_of(os.makedev(*device), table) == mount
