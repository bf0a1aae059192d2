"""The Python API: the files of a store, read and written without the mount."""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, Literal, overload

from kvfs.base.errors import KvfsError
from kvfs.client.buffers import Buffer
from kvfs.client.client_core import Core, target_of
from kvfs.client.file_status import Stat
from kvfs.client.local_files import Destination, Source
from kvfs.client.match import Match
from kvfs.client.writer import Writer
from kvfs.session import paths
from kvfs.session.parallel import nothing
from kvfs.session.paths import Path
from kvfs.vfs.stage_records import Options

NEW_FILE: Final = 0o644
NEW_DIRECTORY: Final = 0o755


class Client:
    """The files of one store of this host, with or without its node running.

    It opens the store itself: metadata from the embedded engine, data straight from and to the
    store's data files; no payload byte passes through Python. Several clients, threads and
    processes may use one store at once, beside its node and mount. A running node is told of every
    change, so that its mount shows it when the call returns; it also makes room in full caches.

        with kvfs.Client() as client:
            client.put("/cache/model/block-1", tensor, parents=True)
            present = client.exists(["/cache/model/block-1", "/cache/model/block-2"])
            size = client.get("/cache/model/block-1", into=buffer)
            for entry in client.list("/cache/model"):
                print(entry.name, entry.size)

    `store`: its directory; None: the one that `kvfs up` would use (KVFS_STORE, the configuration
    file, or the default). Nothing is opened for writing before the first write, so reading works
    on a store that is read-only too.

    Paths are text or bytes like `/cache/a/b`, the leading slash optional, bytes kept as they are.
    Files that a mount has not closed yet are not seen. Symbolic links are not followed.

    Every method may raise, besides what it says: NotFound (no store there), Busy (a node runs in
    this very process), Corrupt, Unavailable (see the message), AccessDenied (the node belongs to
    another user), OSError (of the disk, or of local files). Methods that write also raise ReadOnly,
    and Unavailable when all is done, but a running node did not say in time that its mount has
    forgotten what was there before.

    Interrupted (KeyboardInterrupt): a change is made whole or not at all.
    """

    def __init__(self, store: str | bytes | os.PathLike[str] | None = None) -> None:
        self._core = Core(store)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the store; idempotent. File objects for reading go on working; those for
        writing must be closed before."""
        self._core.close()

    # ---- whole files

    def put(
        self,
        path: Path,
        data: Buffer,
        *,
        mode: int = NEW_FILE,
        exclusive: bool = False,
        parents: bool = False,
    ) -> None:
        """Stores the bytes of a buffer under a name, atomically over what is there.

        `data`: anything with the buffer protocol, or a torch tensor on the CPU; contiguous. It is
        not changed and not copied. `mode`: permission bits. `exclusive`: the name must be free,
        else Exists. `parents`: directories on the way are made, but for the namespace.

        When it returns, the file survives SIGKILL of every process, and in a durable namespace
        power loss. Readers see the old file or the new one, whole. Raises NotFound, NotADirectory,
        IsADirectory, Exists, NotPermitted (beside the namespaces), NameTooLong, Invalid,
        NoSpace.
        """
        self._core.put(path, data, Options(mode, exclusive, parents), nothing)

    def put_many(
        self,
        items: Iterable[tuple[Path, Buffer]],
        *,
        mode: int = NEW_FILE,
        exclusive: bool = False,
        parents: bool = False,
    ) -> None:
        """Like `put` for each (path, data), in one transaction: all files appear at once, or none.

        Data are written by several threads. The last of several items with the same path counts.
        Raises what `put` raises.
        """
        self._core.put_many(items, Options(mode, exclusive, parents), nothing)

    @overload
    def get(self, path: Path, *, offset: int = 0, size: int | None = None) -> bytearray: ...

    @overload
    def get(self, path: Path, into: Buffer, *, offset: int = 0, size: int | None = None) -> int: ...

    def get(
        self,
        path: Path,
        into: Buffer | None = None,
        *,
        offset: int = 0,
        size: int | None = None,
    ) -> bytearray | int:
        """Reads a file, or `size` bytes of it from `offset` on; less where it ends before.

        Returns a new bytearray. With `into` (a writable buffer as in `put`) the kernel reads into
        that, and the number of bytes is returned; TooLarge where it is too small.

        What replaces or evicts the file meanwhile does not matter. Raises NotFound (evicted ones
        too), NotADirectory, IsADirectory, NotSupported (a symbolic link), TooLarge, Invalid,
        Corrupt (the data file is missing, shorter than recorded, or cannot be read).
        """
        return self._core.get(path, into, offset, size, nothing)

    @overload
    def get_many(
        self, keys: Sequence[Path] | Match, buffers: None = None, *, verify: bool = False
    ) -> list[bytearray | KvfsError | None]: ...

    @overload
    def get_many(
        self, keys: Sequence[Path] | Match, buffers: Sequence[Buffer], *, verify: bool = False
    ) -> list[int | KvfsError | None]: ...

    def get_many(
        self,
        keys: Sequence[Path] | Match,
        buffers: Sequence[Buffer] | None = None,
        *,
        verify: bool = False,
    ) -> Sequence[bytearray | int | KvfsError | None]:
        """Reads many files, by several threads; the results in the order of `keys`.

        For each: its bytes as a new bytearray or, with `buffers`, the number of bytes that were
        read into the buffer of its place; None for a miss; an error object, not raised, for one
        that cannot be read (IsADirectory, NotSupported, TooLarge, Corrupt, Unavailable).

        `verify`: what was read is compared with the checksums that the node made when the file was
        quiet for some seconds, and is Corrupt where it is not what was stored. What has none yet is
        not checked.

        With a `Match` in place of keys, the contents that it found are read, in its order, without
        another look-up: what was promised is there, under whatever name by now.
        """
        return self._core.get_many(keys, buffers, nothing, verify=verify)

    def put_file(
        self,
        source: Source,
        path: Path,
        *,
        mode: int = NEW_FILE,
        exclusive: bool = False,
        parents: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Like `put`, from a local file: its path, or a descriptor or file object (a pipe too).
        Returns the bytes stored.

        The kernel moves the bytes: it shares them (reflink) if the filesystem can, else
        copy_file_range, else sendfile; holes stay holes. `progress` is called with the bytes moved
        so far, at least every 64 MiB; an exception of it ends the transfer, and nothing was put.
        """
        return self._core.put_file(
            source, path, Options(mode, exclusive, parents), progress or nothing
        )

    def get_file(
        self,
        path: Path,
        destination: Destination,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Copies a file to a local one: a path, where it appears whole or not at all, or a
        descriptor or file object. Returns the bytes copied; `progress` as in `put_file`. Raises
        what `get` raises."""
        return self._core.get_file(path, destination, progress or nothing)

    @overload
    def open(self, path: Path, mode: Literal["rb"] = "rb") -> io.BufferedReader: ...

    @overload
    def open(self, path: Path, mode: Literal["wb", "xb"], *, parents: bool = False) -> Writer: ...

    def open(
        self, path: Path, mode: str = "rb", *, parents: bool = False
    ) -> io.BufferedReader | Writer:
        """Returns a file object: for reading, the data file itself, which may also be mapped or
        sent; for writing (`wb`, or `xb` for a name that is free), a `Writer`, whose file appears
        when it is closed. Raises as `get` and `put`; NotSupported for other modes."""
        return self._core.open(path, mode, parents=parents)

    # ---- names

    def exists(self, keys: Sequence[Path]) -> list[bool]:
        """Returns whether each path exists, in the order of `keys`; one transaction for all.

        Made for many keys of few directories: some hundred thousand a second or more. It checks
        only names: `get` tells whether a file can be read.
        """
        return self._core.names.exist(keys)

    def match(self, keys: Sequence[Path], lease_s: float = 30.0) -> Match:
        """Returns how many leading keys of a chain (files of one namespace) are here, with a lease
        on them: for `lease_s` seconds, at most an hour, nothing of them is evicted, moved to the
        cold tier or to another medium, or dropped.

        `len` of the result is the number of leading keys that are here, and `promised` of them are
        leased: all or none, and `refusal` tells why none. It is a context manager, whose end
        releases the lease, and `get_many` takes it in place of keys. The first one of a process
        opens its table of leases, which takes some milliseconds. With `lease_s` 0 it only looks.
        Names that only other nodes know are not asked for.

        A process has up to 1,024 leases on up to 65,536 files at once, all processes together on up
        to half of the store. They end with the process, and with the client. Raises Invalid (keys
        of several namespaces, another length of time).
        """
        return self._core.match(keys, lease_s)

    def stat(self, path: Path) -> Stat:
        """Returns attributes of a file, directory or symbolic link. Raises NotFound, NotADirectory,
        NameTooLong."""
        return self._core.names.stat(paths.parse(path))

    def remove(self, path: Path) -> None:
        """Removes the name of anything but a directory. Programs that have the file open go on
        reading it.

        Raises NotFound, NotADirectory, IsADirectory.
        """
        self._core.names.remove(*paths.parse_name(path))

    def rename(self, old: Path, new: Path, *, exclusive: bool = False) -> None:
        """Moves a file or directory to another name in its namespace, atomically over an existing
        file (or empty directory); a namespace, to another name.

        `exclusive`: the new name must be free, else Exists. Raises NotFound, NotADirectory,
        IsADirectory, NotEmpty, CrossNamespace, NotPermitted, NameTooLong, Invalid; Conflict if
        others replace the file all the time while it is put on disk, to replace a durable one.
        """
        self._core.names.rename(paths.parse_name(old), paths.parse_name(new), exclusive=exclusive)

    def mkdir(self, path: Path, *, mode: int = NEW_DIRECTORY, parents: bool = False) -> None:
        """Makes a directory; at the top level, a durable namespace. `parents` as in `put`.

        Raises Exists, NotFound, NotADirectory, NameTooLong, Invalid.
        """
        self._core.names.make_directory(target_of(path), Options(mode=mode, parents=parents))

    def rmdir(self, path: Path) -> None:
        """Removes an empty directory; at the top level, a namespace. Raises NotFound,
        NotADirectory, NotEmpty."""
        self._core.names.remove_directory(*paths.parse_name(path))

    def sync(self) -> None:
        """Makes all changes of names so far, by any process, survive power loss. Raises Unavailable
        if the disk refuses."""
        self._core.session.sync()

    def list(self, path: Path = "/", *, after: bytes = b"") -> Iterator[Stat]:
        """Yields the entries of a directory, sorted by name (a directory as its name and `/`).

        They are read in pages of 1,000 as the iteration goes on, each as of one moment: names that
        stay all the while are given once. `after`: goes on after the entry that has this
        `Stat.key`. Raises NotFound, NotADirectory, with the first entry.
        """
        return self._core.names.entries(paths.parse(path), after)
