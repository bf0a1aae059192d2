"""The first eight bytes of a file, which tell its kind and version: the last of them is a digit."""

from pathlib import Path

from kvfs.base.errors import NotSupported


def refuse_later(path: Path, known: bytes, found: bytes) -> None:
    """Raises NotSupported if a file begins as a later version than `known`: it is not damaged, and
    must not be repaired."""
    if found[:-1] == known[:-1] and found[-1:].isdigit() and found > known:
        raise NotSupported(
            f"{path} is of a later version of KVFS: use the version that made the store"
        )
