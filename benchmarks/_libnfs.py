"""libnfs as a client that costs little: C, one call a request, buffers of the caller's
(include/nfsc/libnfs.h of its version 4)."""

import ctypes
import ctypes.util
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

MIB: Final = 1 << 20
USER: Final = 1_000
"""Who the clients say they are: to be root is not allowed by version 3 of KVFS's door."""


def load() -> ctypes.CDLL | None:
    """None where it is not installed."""
    name = ctypes.util.find_library("nfs") or "libnfs.so.13"
    try:
        found = ctypes.CDLL(name)
    except OSError:
        return None
    found.nfs_init_context.restype = ctypes.c_void_p
    found.nfs_parse_url_dir.restype = ctypes.c_void_p
    found.nfs_get_error.restype = ctypes.c_char_p
    return found


class Failed(OSError):
    """A call of libnfs failed; the message is its own."""


class Client:
    """One connection, one call at a time."""

    def __init__(self, library: ctypes.CDLL, version: int, port: int, mount_port: int) -> None:
        self._library = library
        self._context = ctypes.c_void_p(library.nfs_init_context())
        self._call("nfs_set_version", version)
        library.nfs4_set_client_name(self._context, secrets.token_hex(8).encode())
        library.nfs_set_uid(self._context, USER)
        library.nfs_set_gid(self._context, USER)
        self._port, self._mount_port = port, mount_port
        memory = mmap.mmap(-1, MIB)
        self._buffer = (ctypes.c_char * MIB).from_buffer(memory)

    def mount(self, export: str) -> None:
        url = f"nfs://127.0.0.1{export}/?nfsport={self._port}&mountport={self._mount_port}"
        parsed = self._library.nfs_parse_url_dir(self._context, url.encode())
        if not parsed:
            raise Failed(self._library.nfs_get_error(self._context).decode())
        self._call("nfs_mount", b"127.0.0.1", export.encode())

    @contextmanager
    def opened(self, path: str, flags: int) -> Iterator[ctypes.c_void_p]:
        """An open file; made where the flags say so."""
        handle = ctypes.c_void_p()
        if flags & os.O_CREAT:
            self._call("nfs_create", path.encode(), flags, 0o644, ctypes.byref(handle))
        else:
            self._call("nfs_open", path.encode(), flags, ctypes.byref(handle))
        try:
            yield handle
        finally:
            self._call("nfs_close", handle)

    def read(self, path: str, offset: int, size: int) -> None:
        """As many bytes, by MiB."""
        with self.opened(path, os.O_RDONLY) as handle:
            for at in range(offset, offset + size, MIB):
                count = min(MIB, offset + size - at)
                arguments = ctypes.c_uint64(at), ctypes.c_uint64(count), self._buffer
                if self._call("nfs_pread", handle, *arguments) != count:
                    raise Failed("a short READ")

    def write(self, path: str, size: int) -> None:
        """A new file of as many bytes, committed; by version 3 alone: see `_raw_v4`."""
        with self.opened(path, os.O_CREAT | os.O_WRONLY) as handle:
            for at in range(0, size, MIB):
                arguments = ctypes.c_uint64(at), ctypes.c_uint64(MIB), self._buffer
                if self._call("nfs_pwrite", handle, *arguments) != MIB:
                    raise Failed("a short WRITE")
            self._call("nfs_fsync", handle)

    def create(self, path: str) -> None:
        """An empty file."""
        with self.opened(path, os.O_CREAT | os.O_WRONLY):
            pass

    def stat(self, path: str) -> None:
        """Its attributes, asked for anew."""
        self._call("nfs_stat64", path.encode(), self._buffer)

    def unlink(self, path: str) -> None:
        self._call("nfs_unlink", path.encode())

    def close(self) -> None:
        self._library.nfs_destroy_context(self._context)

    def _call(self, name: str, *arguments: Any) -> int:
        result: int = getattr(self._library, name)(self._context, *arguments)
        if result < 0:
            raise Failed(self._library.nfs_get_error(self._context).decode())
        return result
