"""NIXL on a mount: blocks written by its POSIX plugin, and read again, also from the data file.

    python nixl_example.py DIRECTORY

Its GDS plugin takes the same lines with `GDS` for `POSIX` and tensors on the GPU; that needs an
NVIDIA GPU, its driver with nvidia-fs, and the data file's descriptor (`backing` here), since cuFile
does not know FUSE. That has not been run. Ends with 0 when every byte came back.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from nixl._api import nixl_agent, nixl_agent_config

from kvfs.client.mount.backing_file import open_backing

BLOCKS, BLOCK_BYTES = 8, 1 << 20
DEADLINE_S = 60


class Engine:
    """One agent, which moves tensors to and from files."""

    def __init__(self) -> None:
        self.agent = nixl_agent("example", nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX")

    def move(self, how: str, tensors: list[torch.Tensor], fds: list[int]) -> None:
        """`how`: WRITE or READ; each tensor with the file beside it."""
        memory = self.agent.register_memory(tensors)
        files = self.agent.register_memory([(0, BLOCK_BYTES, fd, "") for fd in fds], "FILE")
        try:
            self._finish(
                self.agent.initialize_xfer(
                    how, self.agent.get_xfer_descs(tensors), files.trim(), "example"
                )
            )
        finally:
            self.agent.deregister_memory(files)
            self.agent.deregister_memory(memory)

    def _finish(self, transfer: Any) -> None:
        until = time.monotonic() + DEADLINE_S
        state = self.agent.transfer(transfer)
        while state == "PROC":
            assert time.monotonic() < until, "NIXL did not finish"
            state = self.agent.check_xfer_state(transfer)
        self.agent.release_xfer_handle(transfer)
        assert state == "DONE", state


def main() -> None:
    parser = argparse.ArgumentParser(description="NIXL on a mount.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    paths = [directory / f"block-{number}" for number in range(BLOCKS)]
    torch.manual_seed(1)
    blocks = [torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8) for _ in paths]
    engine = Engine()

    fds = [os.open(path, os.O_RDWR | os.O_CREAT, 0o644) for path in paths]
    engine.move("WRITE", blocks, fds)
    for fd in fds:
        os.close(fd)
    compare(engine, blocks, [os.open(path, os.O_RDONLY) for path in paths])
    backing = [open_backing(path) for path in paths]
    compare(engine, blocks, [each.fd for each in backing])
    print(f"{BLOCKS} blocks came back, by the mount and from {backing[0].store}")


def compare(engine: Engine, blocks: list[torch.Tensor], fds: list[int]) -> None:
    found = [torch.zeros_like(block) for block in blocks]
    engine.move("READ", found, fds)
    for fd in fds:
        os.close(fd)
    assert all(map(torch.equal, blocks, found)), "a block came back changed"


if __name__ == "__main__":
    main()
