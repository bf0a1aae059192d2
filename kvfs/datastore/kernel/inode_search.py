"""Whether a filesystem looks long for the inode of a new file where files come and go: then data
files are made ahead of their use (`kvfs.datastore.spare_files`)."""

import os
from pathlib import Path
from typing import Final

from kvfs.datastore.kernel import filesystem_magic

_SYSFS: Final = Path("/sys")
_NO_JOURNAL: Final = "<none>"


def is_long_after_removals(directory: int, sysfs: Path = _SYSFS) -> bool:
    """Returns whether a create in this directory (a descriptor) may look past many inodes that were
    removed a while ago: on ext4 without a journal, and where nothing else is known. ext4 with a
    journal and XFS take as long for a file made ahead as for any other."""
    kind = filesystem_magic.magic_of(directory)
    if kind == filesystem_magic.XFS:
        return False
    if kind != filesystem_magic.EXT4:
        return True
    device = os.fstat(directory).st_dev
    try:
        block = os.readlink(sysfs / "dev/block" / f"{os.major(device)}:{os.minor(device)}")
        journal = sysfs / "fs/ext4" / os.path.basename(block) / "journal_task"
        return journal.read_text(encoding="ascii").strip() == _NO_JOURNAL
    except OSError:
        return True
