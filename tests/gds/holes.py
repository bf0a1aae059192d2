"""Large checkpoints that take no disk: each tensor begins with its number, behind which the file
has a hole."""

import json
from collections.abc import Sequence
from pathlib import Path

MIB = 1 << 20


def write(
    path: Path, count: int, shape: Sequence[int], dtype: str = "U8", *, aligned: bool = True
) -> None:
    """`count` tensors t00, t01, ... of one shape, of elements of one byte (U8) or two. `aligned`:
    elements begin at multiples of their size, as other writers have it."""
    size = (1 if dtype == "U8" else 2) * shape[0] * (shape[1] if len(shape) > 1 else 1)
    entries = {
        f"t{n:02d}": {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [n * size, (n + 1) * size],
        }
        for n in range(count)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8 + (not aligned))
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for n in range(count):
            file.seek(8 + len(header) + n * size)
            file.write(bytes([n]))
        file.truncate(8 + len(header) + count * size)
