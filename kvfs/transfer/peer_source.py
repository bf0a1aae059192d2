"""The data of files come from other nodes: `Bringing.fetch` of a node of a cluster."""

from collections.abc import Callable, Sequence

from kvfs.base.errors import Unavailable
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.meta.records import Flag, Inode
from kvfs.transfer.arriving_file import WantedFile
from kvfs.transfer.fetcher import Fetch
from kvfs.transfer.file_fetches import Fetcher
from kvfs.transfer.incoming_file import FileFiller


def by_peers(
    fetcher: Fetcher, address: Callable[[int], PeerAddress | None], is_sure: Callable[[], bool]
) -> Fetch:
    """A fetch from the nodes that have an address now. `is_sure`: whether this node may say who
    lives; while it may not, nothing is given up as lost."""

    def fetch(ino: int, inode: Inode, nodes: Sequence[int], fd: int) -> FileFiller | None:
        alive = [there for node in nodes if (there := address(node)) is not None]
        if not alive:
            if not is_sure():
                raise Unavailable("this node has lost touch with its cluster")
            return None
        checksum = inode.checksum if inode.flags & Flag.SEALED else b""
        return fetcher.start(WantedFile(ino, inode.version, inode.size, checksum), alive, fd)

    return fetch
