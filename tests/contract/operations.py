"""The operations of a node's mount without a kernel, as tests drive them."""

from typing import Final

from gateway.fuse.channel.backing_registry import BackingRegistry
from gateway.fuse.files.kernel_inodes import KernelInodes
from gateway.fuse.files.open_files import OpenFiles
from gateway.fuse.operations import Operations
from kvfs.node import Node


class _Forgotten:
    """There is no kernel that could remember anything."""

    def attributes(self, _ino: int) -> None:
        pass

    def content_soon(self, _ino: int) -> None:
        pass

    async def content(self, _ino: int) -> None:
        pass


class MountedNode:
    """A node's mount."""

    def __init__(self, node: Node) -> None:
        self.backing: Final = BackingRegistry(-1, False, 0, True)
        inodes = KernelInodes(self.backing.holds)
        open_files = OpenFiles(node, self.backing, _Forgotten(), [inodes])
        node.holders.mounted(open_files)
        self.operations: Final = Operations(node, open_files)
