"""fsspec's view of a store: `fsspec.open("kvfs://models/llama/model.safetensors")`.

A `kvfs.Client` does the work, without the mount and with or without its node. Python touches no
bytes that it need not: files are copied by the kernel (reflink, if the disk can), reads are one
copy, from the data file's pages into the bytes that the caller gets.

Names begin with `/`, the namespace is their first part: `kvfs://models/x` and `kvfs:///models/x`
are one. Directories on the way to a new file are made; the namespace is not, except by `makedirs`.
Nothing is cached here, so that changes by others are seen at once. Errors are Python's OSErrors.
"""

import contextlib
import io
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from fsspec import AbstractFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.compression import compr
from fsspec.core import get_compression
from fsspec.transaction import Transaction
from fsspec.utils import isfilelike

from gateway.fsspec.files import (
    CompressedFile,
    ReadFile,
    TextFile,
    WriteFile,
    commit_together,
)
from gateway.fsspec.raising import os_errors
from kvfs.base.errors import (
    CrossNamespace,
    Exists,
    IsADirectory,
    NotADirectory,
    NotFound,
    NotSupported,
)
from kvfs.client import Client, Stat, Writer
from kvfs.session.byte_transfer import copy, go_on

_MOST_READ: Final = 1 << 30
_OF_TEXT: Final = ("encoding", "errors", "newline")
Info = dict[str, Any]
_opening: Final = threading.RLock()
"""Held while a filesystem opens its client. A fork waits for it: the child has no other threads,
and a lock that one of them held would be held for ever."""
os.register_at_fork(
    before=_opening.acquire,
    after_in_parent=_opening.release,
    after_in_child=_opening.release,
)


class KvfsTransaction(Transaction):  # type: ignore[misc]
    """All files written in it appear at once, or none does."""

    def complete(self, commit: bool = True) -> None:
        """Publishes or drops what was written, and ends. Raises OSError."""
        files = [self.files.popleft() for _ in range(len(self.files))]
        try:
            if commit:
                for file in files:
                    file.close()
                commit_together(files)
        finally:
            for file in files:
                file.discard()  # nothing, where it appeared
            super().complete(commit)


class KvfsFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """One store of this host. `store`: its directory; None: the one that `kvfs up` would use.

    Threads may share it, it may be pickled, and it goes on working in a child after a fork."""

    protocol = "kvfs"
    root_marker = "/"
    transaction_type = KvfsTransaction

    def __init__(self, store: str | os.PathLike[str] | None = None, **storage_options: Any) -> None:
        super().__init__(store=store, **storage_options)
        self._store = store
        self._opened: Client | None = None
        self._closing: weakref.finalize[[], KvfsFileSystem] | None = None

    @property
    def client(self) -> Client:
        """The client, opened when it is first asked for. Raises KvfsError."""
        if (opened := self._opened) is not None:
            return opened
        with _opening:
            if self._opened is None:
                opened = Client(self._store)
                self._closing = weakref.finalize(self, opened.close)
                self._opened = opened
            return self._opened

    def close(self) -> None:
        """Lets go of the store; the next request opens it again. Without this it is held until the
        process ends, since fsspec keeps filesystems. Idempotent."""
        with _opening:
            closing, self._opened, self._closing = self._closing, None, None
        if closing is not None:
            closing()

    @contextlib.contextmanager
    def _using(self, path: str, to: str | None = None) -> Iterator[Client]:
        """Raises OSErrors that name these paths."""
        with os_errors(path, to):
            yield self.client

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        if isinstance(stripped, list):
            return stripped
        return "/" + stripped.removeprefix("kvfs:").strip("/")

    # ---- what is there

    def info(self, path: str, **_: Any) -> Info:
        """Returns, beside what fsspec asks for: mode, uid, gid, nlink, ino, mtime and created (when
        its record changed last), both in seconds. A symbolic link is a `link`, and not followed."""
        name = self._strip_protocol(path)
        with self._using(name) as client:
            return _info(name, client.stat(name))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Info] | list[str]:
        name = self._strip_protocol(path)
        with self._using(name) as client:
            found = client.stat(name)
            if found.is_directory:
                above = name.rstrip("/")
                infos = [
                    _info(f"{above}/{os.fsdecode(each.name)}", each) for each in client.list(name)
                ]
            else:
                infos = [_info(name, found)]
        return infos if detail else [each["name"] for each in infos]

    def exists(self, path: str, **_: Any) -> bool:
        """Returns whether the path exists. Raises OSError if that cannot be told."""
        name = self._strip_protocol(path)
        with self._using(name) as client:
            try:
                client.stat(name)
            except (NotFound, NotADirectory):
                return False
            return True

    def created(self, path: str) -> datetime:
        """Returns when its record changed last: no other time of its beginning is kept."""
        return datetime.fromtimestamp(self.info(path)["created"], UTC)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    # ---- directories

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Makes a directory; at the top level, a durable namespace; `create_parents` makes that
        too."""
        name = self._strip_protocol(path)
        with self._using(name) as client:
            try:
                client.mkdir(name, parents=create_parents)
            except NotFound:
                if not create_parents:
                    raise
                with contextlib.suppress(Exists):
                    client.mkdir(_namespace(name))
                client.mkdir(name, parents=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        name = self._strip_protocol(path)
        if exist_ok and self.isdir(name):
            return
        try:
            self.mkdir(name)
        except FileExistsError:
            if not exist_ok or not self.isdir(name):
                raise

    def _make_directory(self, name: str) -> None:
        """Makes a directory and those above it, except the namespace; does nothing if it exists."""
        with self._using(name) as client:
            try:
                client.mkdir(name, parents=True)
            except Exists:
                if not self.isdir(name):
                    raise

    def rmdir(self, path: str) -> None:
        name = self._strip_protocol(path)
        with self._using(name) as client:
            client.rmdir(name)

    # ---- names

    def rm_file(self, path: str) -> None:
        """Removes a file, or an empty directory."""
        name = self._strip_protocol(path)
        with self._using(name) as client:
            try:
                client.remove(name)
            except IsADirectory:
                client.rmdir(name)

    def mv(
        self,
        path1: str | list[str],
        path2: str | list[str],
        recursive: bool = False,
        maxdepth: int | None = None,
        **_: Any,
    ) -> None:
        """Renames one file or directory, atomically, into `path2` if that is a directory. Lists,
        patterns and moves to another namespace are copied and removed."""
        if not isinstance(path1, str) or not isinstance(path2, str) or "*" in path1:
            self._copy_and_remove(path1, path2, recursive=recursive, maxdepth=maxdepth)
            return
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        if old == new:
            return
        if path2.endswith("/") or self.isdir(new):
            new = f"{new.rstrip('/')}/{os.path.basename(old)}"
        with self._using(old, new) as client:
            try:
                _rename(client, old, new)
            except CrossNamespace:
                self._copy_and_remove(old, new, recursive=self.isdir(old))

    def _copy_and_remove(
        self, path1: Any, path2: Any, *, recursive: bool, maxdepth: int | None = None
    ) -> None:
        self.copy(path1, path2, recursive=recursive, maxdepth=maxdepth)
        self.rm(path1, recursive=recursive)

    def copy(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        on_error: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Like fsspec's, except for `on_error`: a missing path, above all the namespace, is an
        error of trees too, unless "ignore" is asked for."""
        super().copy(path1, path2, recursive, maxdepth, on_error or "raise", **kwargs)

    # ---- whole files

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any
    ) -> Any:
        """Returns the contents of the paths; of a tree, those of its files."""
        if recursive:
            tree = self.expand_path(path, recursive=True)
            path = [each for each in tree if not self.isdir(each)]
            kwargs["assume_literal"] = True
            if not path:
                return {}
        return super().cat(path, on_error=on_error, **kwargs)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        name = self._strip_protocol(path)
        with self._raw(name) as file, os_errors(name):
            return _read(file.fileno(), *_limits(start, end, _size(file)))

    def cat_ranges(
        self,
        paths: list[str],
        starts: int | Iterable[int] | None,
        ends: int | Iterable[int] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[bytes | BaseException]:
        """Opens each file once, and tells it all its ranges before the first is read, so that the
        disk has many to do. `max_gap` makes no difference."""
        asked = list(zip(paths, _for_each(starts, paths), _for_each(ends, paths), strict=True))
        found: list[bytes | BaseException] = [b""] * len(asked)
        of_file: dict[str, list[int]] = {}
        for at, (path, _start, _end) in enumerate(asked):
            of_file.setdefault(self._strip_protocol(path), []).append(at)
        for name, places in of_file.items():
            try:
                ranges = self._read_ranges(name, [asked[at][1:] for at in places])
            except OSError as error:
                if on_error != "return":
                    raise
                ranges = [error] * len(places)
            for at, each in zip(places, ranges, strict=True):
                found[at] = each
        return found

    def _read_ranges(
        self, name: str, ranges: Sequence[tuple[int | None, int | None]]
    ) -> Sequence[bytes | BaseException]:
        with self._raw(name) as file, os_errors(name):
            fd, size = file.fileno(), _size(file)
            limits = [_limits(start, end, size) for start, end in ranges]
            for begin, length in limits:
                os.posix_fadvise(fd, begin, length, os.POSIX_FADV_WILLNEED)
            return [_read(fd, begin, length) for begin, length in limits]

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        if self._intrans:
            super().pipe_file(path, value, mode, **kwargs)
            return
        name = self._strip_protocol(path)
        with self._using(name) as client:
            client.put(name, value, exclusive=mode == "create", parents=True)

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        """Writes files; those of one dictionary appear at once, or none does."""
        if not isinstance(path, dict) or self._intrans:
            super().pipe(path, value, **kwargs)
            return
        items = [(self._strip_protocol(each), data) for each, data in path.items()]
        exclusive = kwargs.get("mode") == "create"
        with self._using(items[0][0] if items else "/") as client:
            client.put_many(items, exclusive=exclusive, parents=True)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        if self.isdir(old):
            self._make_directory(new)
            return
        with self._raw(old) as file, self._using(new) as client:
            client.put_file(file, new, parents=True)

    def get_file(
        self,
        rpath: str,
        lpath: Any,
        callback: Any = DEFAULT_CALLBACK,
        outfile: Any = None,
        **kwargs: Any,
    ) -> None:
        """Copies to a local file, which appears whole or not at all."""
        name = self._strip_protocol(rpath)
        if outfile is not None or isfilelike(lpath):
            super().get_file(name, lpath, callback=callback, outfile=outfile, **kwargs)
        elif self.isdir(name):
            os.makedirs(lpath, exist_ok=True)
        else:
            local = os.path.abspath(lpath)
            os.makedirs(os.path.dirname(local), exist_ok=True)
            with self._using(name, local) as client:
                callback.set_size(client.stat(name).size)
                client.get_file(name, local, progress=callback.absolute_update)

    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Any = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        if self._intrans:
            super().put_file(lpath, rpath, callback=callback, mode=mode, **kwargs)
            return
        name = self._strip_protocol(rpath)
        if os.path.isdir(lpath):
            self._make_directory(name)
            return
        callback.set_size(os.path.getsize(lpath))
        local = os.path.abspath(lpath)
        with self._using(local, name) as client:
            client.put_file(
                local,
                name,
                exclusive=mode == "create",
                parents=True,
                progress=callback.absolute_update,
            )

    # ---- file objects

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Any = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Like fsspec's. Writes are dropped whole if their `with` block ends by an exception: text
        and compressed data too."""
        if "r" in mode:
            return super().open(path, mode, block_size, cache_options, compression, **kwargs)
        name, kind = self._strip_protocol(path), mode.replace("b", "").replace("t", "")
        method = get_compression(name, compression)
        at_once = kwargs.pop("autocommit", not self._intrans)
        opened = self._open(name, kind + "b", block_size, at_once)
        assert isinstance(opened, WriteFile)
        file: WriteFile | CompressedFile = opened
        text = {each: kwargs[each] for each in _OF_TEXT if each in kwargs}
        try:
            if method:
                file = CompressedFile(compr[method](opened, mode=kind), opened)
            written = file if "b" in mode else TextFile(file, **text)
        except BaseException:
            opened.discard()
            raise
        if not at_once:
            self.transaction.files.append(written)
        return written

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **_: Any,
    ) -> ReadFile | WriteFile:
        """Opens in mode `rb`, `wb`, `xb`, or `ab`, which copies the file by the kernel and goes on
        behind it: of two that append at once the last one's file stays. `block_size`: of the
        buffer."""
        if mode == "rb":
            return ReadFile(self._raw(path), path, self, block_size)
        with self._using(path) as client:
            if mode not in ("wb", "xb", "ab"):
                raise NotSupported(
                    f"a file is opened with 'rb', 'wb', 'xb' or 'ab', not {mode!r}: change it in "
                    "place through the mount"
                )
            if mode == "ab":
                writer = _appending(client, path)
            else:
                writer = _as_writer(client.open(path, mode, parents=True))  # type: ignore[call-overload]
        return WriteFile(writer, path, block_size, autocommit)

    def _raw(self, name: str) -> io.FileIO:
        """Returns the opened data file."""
        with self._using(name) as client:
            raw = client.open(name).detach()
        assert isinstance(raw, io.FileIO)
        return raw


def _rename(client: Client, old: str, new: str) -> None:
    """Renames. Makes directories on the way, but no namespace, and none if there is nothing to
    move."""
    try:
        client.rename(old, new)
    except NotFound:
        client.stat(old)
        above = os.path.dirname(new)
        if above.count("/") == 1:
            raise  # the namespace itself
        with contextlib.suppress(Exists):
            client.mkdir(above, parents=True)
        client.rename(old, new)


def _appending(client: Client, path: str) -> Writer:
    """Returns a new file that begins with the content of the present one, if there is one."""
    try:
        before = client.open(path)
    except NotFound:
        return client.open(path, "wb", parents=True)
    with before:
        writer = client.open(path, "wb", parents=True)
        try:
            writer.reserve(_size(before))
            copy(before.fileno(), writer.fileno(), go_on)
            writer.seek(0, os.SEEK_END)
        except BaseException:
            writer.abort()
            raise
    return writer


def _as_writer(file: object) -> Writer:
    assert isinstance(file, Writer)
    return file


def _info(name: str, found: Stat) -> Info:
    kind = "directory" if found.is_directory else "link" if found.is_symlink else "file"
    info = {
        "name": name,
        "size": 0 if found.is_directory else found.size,
        "type": kind,
        "mode": found.mode,
        "uid": found.uid,
        "gid": found.gid,
        "nlink": found.nlink,
        "ino": found.ino,
        "mtime": found.mtime_ns / 1e9,
        "created": found.ctime_ns / 1e9,
        "islink": found.is_symlink,
    }
    return info | {"destination": os.fsdecode(found.target)} if found.is_symlink else info


def _namespace(name: str) -> str:
    return name.split("/", 2)[1]


def _size(file: io.IOBase) -> int:
    return os.fstat(file.fileno()).st_size


def _limits(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Returns the first byte and the number of bytes, as a slice counts."""
    begin, stop, _ = slice(start, end).indices(size)
    return begin, max(0, stop - begin)


def _read(fd: int, begin: int, length: int) -> bytes:
    if length <= _MOST_READ:
        return os.pread(fd, length, begin)
    parts = (min(_MOST_READ, length - done) for done in range(0, length, _MOST_READ))
    return b"".join(os.pread(fd, part, begin + at * _MOST_READ) for at, part in enumerate(parts))


def _for_each(given: int | Iterable[int] | None, paths: Iterable[str]) -> Iterable[int | None]:
    return given if isinstance(given, Iterable) else [given for _ in paths]
