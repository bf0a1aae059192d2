"""The node of a store as its doors reach it: one interface, in process for the daemon
(`kvfs.node.local_port`), over the control socket for every other process (`control_port`).

The requests and answers below are what goes over the socket, so that both ends of it read one
declaration. Whoever serves and whoever asks may be of neighbouring versions: fields are added with
a default, and none changes its meaning.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from kvfs.tree.changes import Change
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldPage

State = Literal["here", "coming", "nowhere"]
"""The state of a file's data. `here`: the wanted part can be read; `coming`: ask again; `nowhere`:
nobody else has them, or there is nobody to ask."""


Name = tuple[int, bytes]
"""A directory, and a name in it."""


class SpaceGrant(msgspec.Struct):
    """The answer to a request for space."""

    capacity_bytes: int
    """Bytes that the store may hold in all, as the node is set."""
    others_bytes: int = 0
    """Bytes that usage counts although other nodes have them."""


class NodePort(Protocol):
    """The node, which answers as soon as it can. All methods raise Unavailable."""

    async def changed(
        self,
        changes: Sequence[Change],
        published: Sequence[int] = (),
        dropped: Sequence[int] = (),
    ) -> None:
        """Returns when every mount's kernel has forgotten these names, and the node knows these new
        files and the inodes that lost their last link under names that no kernel knew."""

    async def room(self, namespace_id: int, size: int) -> SpaceGrant:
        """Returns when `size` bytes are free in the namespace. Raises NoSpace, which names what is
        full."""

    async def touched(self, inos: Sequence[int], misses: Mapping[str, int]) -> None:
        """Takes note of files that were read, in this order, and of names that were missed."""

    async def find(self, names: Sequence[Name]) -> bool:
        """Looks on other nodes for names that are absent here, or whose data are, in namespaces
        whose names are each node's own; others are passed over. Returns whether the records here
        may say something else of one of them by now: look again."""

    async def listed(self, asked: Sequence[AskedPage], detail: Detail) -> list[ToldPage]:
        """Returns what other nodes have of these parts of directories, in namespaces whose names
        are each node's own: of each some names, or that there are none up to a key. Nodes that do
        not answer are left out."""

    async def may_remove(self, directory: int) -> bool:
        """Returns whether a directory that is empty here may be removed: no other node that answers
        has a file below it. Then theirs go too, where its namespace's names are each node's own."""

    async def bring(self, ino: int) -> State:
        """Reconciles a file's record and data, and waits for a while for data that others have.

        Raises NotFound, Stale, Conflict, Corrupt, NoSpace; Busy while they are written in place on
        another host, OtherVersion and Unreached for a cache."""

    async def bring_span(self, ino: int, version: int, offset: int, length: int) -> State:
        """Like `bring`, for some bytes of one content."""

    async def borrow(self, ino: int, size: int, into: int) -> State:
        """Waits likewise for the first `size` bytes of a data file of another node, which come into
        the data file of a body that the caller has begun. Raises what `bring` raises."""

    async def is_written(self, ino: int) -> bool:
        """Returns whether somebody has the file open for writing on a mount of the node."""

    async def seal(self, inos: Sequence[int]) -> bool:
        """Returns whether each of these files is sealed by now, or in use; if not, ask again."""


class ChangedNames(msgspec.Struct):
    """The request `changed`."""

    changes: list[Any] = []
    """The changes in the form of `tree.changes.to_wire`."""
    published: list[int] = []
    dropped: list[int] = []


class WantedRoom(msgspec.Struct):
    """The request `room`."""

    namespace: int
    bytes: int


class ReadFiles(msgspec.Struct):
    """The request `touched`."""

    inodes: list[int]
    misses: dict[str, int] = {}
    """Number of misses by reason (`policy.miss_reasons`)."""


class WantedNames(msgspec.Struct):
    """The request `find`."""

    names: list[tuple[int, str]]
    """A directory, and the bytes of a name in it in base64."""


class WantedPages(msgspec.Struct):
    """The request `list`."""

    asked: str
    """`AskedPage`s in msgpack, in base64."""
    detail: Detail


class RemovedDirectory(msgspec.Struct):
    """The request `may-remove`."""

    inode: int


class WantedData(msgspec.Struct):
    """The request `bring`."""

    inode: int
    version: int = 0
    offset: int = 0
    length: int = -1
    """Bytes wanted; -1: the whole file, whatever its version is by then."""


class BorrowedData(msgspec.Struct):
    """The request `borrow`."""

    inode: int
    bytes: int
    into: int


class AskedFile(msgspec.Struct):
    """The request `writers`."""

    inode: int


class AskedFiles(msgspec.Struct):
    """The request `seal`."""

    inodes: list[int]


class FoundNames(msgspec.Struct):
    """The answer to `find`."""

    is_news: bool


class ListedPages(msgspec.Struct):
    """The answer to `list`."""

    pages: str
    """A `ToldPage` for each that was asked for, in msgpack, in base64."""


class Removable(msgspec.Struct):
    """The answer to `may-remove`."""

    is_empty: bool


class DataState(msgspec.Struct):
    """The answer to `bring` and `borrow`."""

    state: State


class Writing(msgspec.Struct):
    """The answer to `writers`."""

    open: bool


class Sealing(msgspec.Struct):
    """The answer to `seal`."""

    tried: bool


METHODS: Final[Mapping[type[msgspec.Struct], str]] = {
    ChangedNames: "changed",
    WantedRoom: "room",
    ReadFiles: "touched",
    WantedNames: "find",
    WantedPages: "list",
    RemovedDirectory: "may-remove",
    WantedData: "bring",
    BorrowedData: "borrow",
    AskedFile: "writers",
    AskedFiles: "seal",
}
"""The method of the control socket for each request."""
