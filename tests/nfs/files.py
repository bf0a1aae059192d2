"""Whole files by their paths in an export, by libnfs (C, version 3) or by the raw client (4.1), for
tests that replay what programs do with files.

libnfs 4.0.0 encodes no WRITE of version 4 that has 4 KiB or more, so version 4 is the raw client's.
"""

import contextlib
import ctypes
import ctypes.util
import errno
import os
from collections.abc import Iterator
from typing import Any, Final, Protocol

from tests.nfs.door import Door
from tests.nfs.rpc import AuthSys
from tests.nfs.status import NfsError
from tests.nfs.v3_types import Stability
from tests.nfs.v4 import Client41, Owner
from tests.nfs.v4_attributes import MODE, SIZE
from tests.nfs.v4_operations import Guarded, Share, Unchecked

USER: Final = AuthSys(uid=4001, gid=4001)
_PART: Final = 1 << 20


class Files(Protocol):
    """One client; directories end without a slash, the root is an empty path. Raises
    FileNotFoundError, FileExistsError, OSError."""

    def write(self, path: str, data: bytes, new: bool = False) -> None:
        """Create or replace the content, and commit it. `new`: it must not be there."""

    def read(self, path: str) -> bytes: ...

    def size(self, path: str) -> int: ...

    def replace(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None: ...

    def names(self, directory: str) -> set[str]: ...


def exists(files: Files, path: str) -> bool:
    try:
        files.size(path)
    except FileNotFoundError:
        return False
    return True


# ---- libnfs


class _Entry(ctypes.Structure):
    """The beginning of libnfs' nfsdirent (include/nfsc/libnfs.h)."""

    _fields_ = (("next", ctypes.c_void_p), ("name", ctypes.c_char_p), ("inode", ctypes.c_uint64))


def library() -> ctypes.CDLL | None:
    """None where it is not installed (Debian's package libnfs-utils)."""
    try:
        found = ctypes.CDLL(ctypes.util.find_library("nfs") or "libnfs.so.13")
    except OSError:
        return None
    for name in ("nfs_init_context", "nfs_parse_url_dir", "nfs_readdir"):
        getattr(found, name).restype = ctypes.c_void_p
    found.nfs_get_error.restype = ctypes.c_char_p
    return found


class LibNfs:
    """Ended by `close`."""

    def __init__(self, door: Door, export: str) -> None:
        found = library()
        assert found is not None
        self._library = found
        self._context = ctypes.c_void_p(found.nfs_init_context())
        self._call("nfs_set_version", 3)
        found.nfs_set_uid(self._context, USER.uid)
        found.nfs_set_gid(self._context, USER.gid)
        url = f"nfs://127.0.0.1/{export}/?nfsport={door.port}&mountport={door.mount_port}"
        assert found.nfs_parse_url_dir(self._context, url.encode()), found.nfs_get_error(
            self._context
        )
        self._call("nfs_mount", b"127.0.0.1", f"/{export}".encode())

    def close(self) -> None:
        self._library.nfs_destroy_context(self._context)

    def write(self, path: str, data: bytes, new: bool = False) -> None:
        flags = os.O_CREAT | os.O_WRONLY | (os.O_EXCL if new else os.O_TRUNC)
        with self._opened("nfs_create", path, flags, 0o644) as handle:
            for at in range(0, len(data), _PART):
                part = data[at : at + _PART]
                where, count = ctypes.c_uint64(at), ctypes.c_uint64(len(part))
                assert self._call("nfs_pwrite", handle, where, count, part) == len(part)
            self._call("nfs_fsync", handle)

    def read(self, path: str) -> bytes:
        buffer, found = ctypes.create_string_buffer(_PART), bytearray()
        with self._opened("nfs_open", path, os.O_RDONLY) as handle:
            while True:
                where, count = ctypes.c_uint64(len(found)), ctypes.c_uint64(_PART)
                got = self._call("nfs_pread", handle, where, count, buffer)
                if not got:
                    return bytes(found)
                found += buffer.raw[:got]

    def size(self, path: str) -> int:
        told = (ctypes.c_uint64 * 32)()
        self._call("nfs_stat64", self._path(path), told)
        return int(told[7])

    def replace(self, old: str, new: str) -> None:
        self._call("nfs_rename", self._path(old), self._path(new))

    def remove(self, path: str) -> None:
        self._call("nfs_unlink", self._path(path))

    def mkdir(self, path: str) -> None:
        self._call("nfs_mkdir", self._path(path))

    def names(self, directory: str) -> set[str]:
        stream = ctypes.c_void_p()
        self._call("nfs_opendir", self._path(directory), ctypes.byref(stream))
        found = set()
        while entry := self._library.nfs_readdir(self._context, stream):
            name = ctypes.cast(entry, ctypes.POINTER(_Entry)).contents.name
            found.add(os.fsdecode(name))
        self._library.nfs_closedir(self._context, stream)
        return found - {".", ".."}

    @contextlib.contextmanager
    def _opened(self, call: str, path: str, *how: int) -> Iterator[ctypes.c_void_p]:
        handle = ctypes.c_void_p()
        self._call(call, self._path(path), *how, ctypes.byref(handle))
        try:
            yield handle
        finally:
            self._call("nfs_close", handle)

    def _path(self, path: str) -> bytes:
        return b"/" + os.fsencode(path)

    def _call(self, name: str, *arguments: Any) -> int:
        result: int = getattr(self._library, name)(self._context, *arguments)
        if result < 0:
            told = self._library.nfs_get_error(self._context).decode(errors="replace")
            raise OSError(-result, f"{name}: {told}")
        return result


# ---- the raw client


class Raw41:
    """What it keeps are handles of directories."""

    def __init__(self, door: Door, export: str) -> None:
        self._client: Client41 = door.v41(USER)
        self._directories = {"": self._client.walk(export)}

    def close(self) -> None:
        """Its connection ends with the door."""

    def write(self, path: str, data: bytes, new: bool = False) -> None:
        with _as_os_errors():
            directory, name = self._place(path)
            how = Guarded((MODE.to(0o644),)) if new else Unchecked((MODE.to(0o644), SIZE.to(0)))
            opened = self._client.open(directory, name, Owner(), Share.BOTH, creation=how)
            for at in range(0, len(data), _PART):
                part = data[at : at + _PART]
                told = self._client.write(
                    opened.handle, at, part, Stability.UNSTABLE, opened.stateid
                )
                assert told.count == len(part)
            self._client.commit(opened.handle)
            self._client.close(opened)

    def read(self, path: str) -> bytes:
        with _as_os_errors():
            opened = self._client.open(*self._place(path), Owner(), Share.READ)
            found = bytearray()
            while True:
                part = self._client.read(opened.handle, len(found), _PART // 2, opened.stateid)
                found += part.data
                if part.eof:
                    self._client.close(opened)
                    return bytes(found)

    def size(self, path: str) -> int:
        with _as_os_errors():
            return self._client.getattr(self._client.lookup(*self._place(path)), (SIZE,))[SIZE]

    def replace(self, old: str, new: str) -> None:
        with _as_os_errors():
            self._client.rename(*self._place(old), *self._place(new))

    def remove(self, path: str) -> None:
        with _as_os_errors():
            self._client.remove(*self._place(path))

    def mkdir(self, path: str) -> None:
        with _as_os_errors():
            self._client.mkdir(*self._place(path), MODE.to(0o755))

    def names(self, directory: str) -> set[str]:
        with _as_os_errors():
            return set(self._client.names(self._directory(directory)))

    def _place(self, path: str) -> tuple[bytes, str]:
        directory, _, name = path.rpartition("/")
        return self._directory(directory), name

    def _directory(self, path: str) -> bytes:
        if path not in self._directories:
            self._directories[path] = self._client.lookup(*self._place(path))
        return self._directories[path]


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except NfsError as error:
        name = error.name.removeprefix("NFS4ERR_")
        codes = {"NOENT": errno.ENOENT, "EXIST": errno.EEXIST, "STALE": errno.ESTALE}
        if name not in codes:
            raise
        raise OSError(codes[name], str(error)) from error
