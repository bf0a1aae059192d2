"""The id of the running boot: two records with the same one were written with no power cut between
them."""

import functools
from pathlib import Path
from typing import Final

_SOURCE: Final = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_id() -> int:
    """63 bits of the kernel's boot id, never 0 (which stands for 'on disk, whatever the boot')."""
    digits = _SOURCE.read_text(encoding="ascii").strip().replace("-", "")
    return int(digits[:16], 16) >> 1 or 1
