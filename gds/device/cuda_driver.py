"""Requests to the CUDA driver itself.

One asks which GPUs this process may use, without torch and without a context on any of them. It is
only for a process that is about to use a GPU, or ends soon: a process that has asked cannot lend
CUDA to processes that it forks.

Another pins memory: if CUDA's runtime is refused that, the thread's next work on a GPU reports it
as its own failure; the driver tells only the caller.

The last copies to a GPU, in one call that keeps the interpreter's lock: it takes some microseconds,
and a thread that lets go of the lock gets it back when the other threads had theirs.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Final, NamedTuple

_LIBRARY: Final = "libcuda.so.1"
_NAME_BYTES: Final = 256
_ADDRESS_BYTES: Final = 32
_PORTABLE: Final = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for all GPUs."""


class Gpu(NamedTuple):
    """A GPU that CUDA shows to this process, in CUDA's order."""

    name: str
    address: str
    """The address on the PCI bus, as sysfs names it: 0000:1b:00.0."""
    total_bytes: int


class Driver(NamedTuple):
    """The answers of the CUDA driver."""

    gpus: tuple[Gpu, ...]
    cuda: str
    """The newest CUDA that it serves, '13.0'; empty: there is no driver."""
    reason: str
    """The reason why there are no GPUs; empty if there are."""


class _Refused(Exception):
    """A call of the driver failed; its text is the driver's."""


def ask_driver(library: str = _LIBRARY) -> Driver:
    """Asks the driver. Never raises: without a driver, the reason says so."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return Driver((), "", f"no CUDA driver: {library} cannot be loaded")
    version = ""
    try:
        _call(cuda, "cuInit", ctypes.c_uint(0))
        version = _version(_number(cuda, "cuDriverGetVersion"))
        gpus = tuple(_gpu(cuda, at) for at in range(_number(cuda, "cuDeviceGetCount")))
    except (_Refused, AttributeError) as error:
        return Driver((), version, f"the CUDA driver gives no GPU: {error}")
    return Driver(gpus, version, "" if gpus else "the CUDA driver shows no GPU")


def pin(address: int, size: int, library: str = _LIBRARY) -> str:
    """Lets GPUs copy from this memory of the host by themselves. The thread must have a context.
    Returns the reason if it is refused, else an empty text."""
    try:
        memory = ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE)
        _call(ctypes.CDLL(library), "cuMemHostRegister_v2", *memory)
    except (OSError, _Refused, AttributeError) as error:
        return f"{size} bytes of memory cannot be pinned: {error}"
    return ""


def unpin(address: int, library: str = _LIBRARY) -> None:
    """Unpins memory that was pinned. The thread must have a context."""
    with contextlib.suppress(_Refused):  # the GPU failed: nothing copies any more
        _call(ctypes.CDLL(library), "cuMemHostUnregister", ctypes.c_void_p(address))


def copy_async(to: int, source: int, size: int, stream: int) -> str:
    """Queues a copy of `size` bytes of pinned memory to a GPU in a stream of it. The thread must
    have a context there. Returns the reason if it is refused, else an empty text."""
    code = _copy_call()(to, source, size, stream)
    return _reason(ctypes.CDLL(_LIBRARY), code) if code else ""


@functools.cache
def _copy_call() -> Callable[[int, int, int, int], int]:
    call = ctypes.PyDLL(_LIBRARY).cuMemcpyHtoDAsync_v2
    call.argtypes = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return call


def _gpu(cuda: ctypes.CDLL, at: int) -> Gpu:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(at))
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    name = _text(cuda, "cuDeviceGetName", _NAME_BYTES, device)
    address = _text(cuda, "cuDeviceGetPCIBusId", _ADDRESS_BYTES, device)
    return Gpu(name, address.lower(), total.value)


def _number(cuda: ctypes.CDLL, call: str) -> int:
    found = ctypes.c_int()
    _call(cuda, call, ctypes.byref(found))
    return found.value


def _text(cuda: ctypes.CDLL, call: str, size: int, device: ctypes.c_int) -> str:
    found = ctypes.create_string_buffer(size)
    _call(cuda, call, found, ctypes.c_int(size), device)
    return found.value.decode(errors="replace")


def _call(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        raise _Refused(_reason(cuda, code))


def _reason(cuda: ctypes.CDLL, code: int) -> str:
    said = ctypes.c_char_p()
    cuda.cuGetErrorString(code, ctypes.byref(said))
    return (said.value or f"error {code}".encode()).decode(errors="replace")


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
