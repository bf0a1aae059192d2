"""What may be put, and read into: any contiguous memory, untouched by Python."""

import array
import ctypes
import mmap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.base.errors import Invalid
from kvfs.client.buffers import readable, writable
from tests.contract import client_store


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvfs.Client]:
    root = client_store.make(tmp_path_factory.mktemp("store") / "store")
    with kvfs.Client(root) as client:
        yield client


class Tensor:
    """Memory with the attributes of a torch tensor by which its bytes are found."""

    def __init__(self, data: bytes, *, device: str = "cpu", contiguous: bool = True) -> None:
        self.memory = ctypes.create_string_buffer(bytes(data), len(data))
        self.device = SimpleNamespace(type=device.partition(":")[0])
        self.layout = "torch.strided"
        self._contiguous = contiguous

    def is_contiguous(self) -> bool:
        return self._contiguous

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def numel(self) -> int:
        return len(self.memory) // 2

    def element_size(self) -> int:
        return 2


def mapped(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


KINDS: dict[str, Any] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "two dimensions": lambda data: memoryview(data).cast("B", (2, len(data) // 2)),
    "doubles": lambda data: memoryview(data).cast("d"),
    "array": lambda data: array.array("i", data),
    "mmap": mapped,
    "ctypes structure": lambda data: (ctypes.c_uint32 * (len(data) // 4)).from_buffer_copy(data),
    "tensor": Tensor,
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_buffer_is_put(client: kvfs.Client, kind: str) -> None:
    data = bytes(range(256)) * 4
    client.put(f"/cache/{kind}", KINDS[kind](data))
    assert client.get(f"/cache/{kind}") == data


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bytes"])
def test_any_writable_buffer_is_read_into(client: kvfs.Client, kind: str) -> None:
    data = bytes(range(256)) * 4
    client.put("/cache/source", data)
    blank = bytearray(len(data))
    buffer = KINDS[kind](blank)
    assert client.get("/cache/source", into=buffer) == len(data)
    assert bytes(readable(buffer)) == data


def test_the_memory_itself_is_used() -> None:
    memory = bytearray(b"0123")
    for view in (readable(memory), writable(memoryview(memory).cast("H"))):
        assert view.nbytes == 4
        view[0:1] = b"x"
        assert memory == b"x123"
        memory[0:1] = b"0"
    tensor = Tensor(b"0123")
    writable(tensor)[:] = b"abcd"
    assert tensor.memory.raw == b"abcd"


def test_what_is_not_contiguous_is_refused(client: kvfs.Client) -> None:
    strided = memoryview(bytearray(10))[::2]
    with pytest.raises(Invalid, match="not contiguous"):
        client.put("/cache/strided", strided)
    with pytest.raises(Invalid, match="not contiguous"):
        client.get("/cache/strided", into=strided)
    with pytest.raises(Invalid, match="contiguous"):
        client.put("/cache/strided", Tensor(b"12", contiguous=False))
    assert client.exists(["/cache/strided"]) == [False]


def test_what_is_no_memory_of_this_machine_is_refused(client: kvfs.Client) -> None:
    with pytest.raises(Invalid, match=r"copy it to the CPU first"):
        client.put("/cache/a", Tensor(b"12", device="cuda:0"))
    for thing in ("text", 12, None, [1, 2], object()):
        with pytest.raises(Invalid, match="gives no buffer"):
            client.put("/cache/a", thing)


def test_what_cannot_be_written_is_refused(client: kvfs.Client) -> None:
    client.put("/cache/source", b"1")
    with pytest.raises(Invalid, match="read-only"):
        client.get("/cache/source", into=b"x")


@pytest.mark.parametrize(
    "empty", [b"", bytearray(), array.array("d"), Tensor(b""), memoryview(b"").cast("H")]
)
def test_nothing_at_all_is_a_buffer_too(client: kvfs.Client, empty: Any) -> None:
    client.put("/cache/nothing", empty)
    assert client.get("/cache/nothing") == b""


def test_numpy_arrays(client: kvfs.Client) -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    for kind in ("float16", "float32", ">i4", "complex128", "bool", "i4,f8"):
        put = numpy.arange(12).astype("i4").astype(kind).reshape(3, 4)
        got = numpy.empty_like(put)
        client.put("/cache/array", put)
        assert client.get("/cache/array", into=got) == put.nbytes
        assert (put == got).all()
    with pytest.raises(Invalid, match="not contiguous"):
        client.put("/cache/array", numpy.zeros((3, 4)).T)
    client.put("/cache/array", numpy.zeros((0, 4)))
    assert client.stat("/cache/array").size == 0
    with client.open("/cache/array", "wb") as file:
        numpy.save(file, put)
    with client.open("/cache/array") as file:
        assert (numpy.load(file) == put).all()


def test_torch_tensors(client: kvfs.Client) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for kind in (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        put = torch.arange(12).to(kind).reshape(3, 4)
        got = torch.zeros_like(put)
        client.put("/cache/tensor", put)
        assert client.get("/cache/tensor", into=got) == put.numel() * put.element_size()
        assert torch.equal(put.view(torch.uint8), got.view(torch.uint8))
    with pytest.raises(Invalid, match="contiguous"):
        client.put("/cache/tensor", torch.zeros(3, 4).T)
