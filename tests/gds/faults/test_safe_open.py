"""`gds.safe_open` beside the one of safetensors: the same files, the same answers."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.base.errors import Conflict, Corrupt, Invalid, NotFound, NotSupported
from tests.gds.checkpoints import Meant, llama, meant, write
from tests.integration.posix import let_clock_pass

if TYPE_CHECKING:
    import gds.open_file

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch

SHAPES = {"matrix": (7, 6), "cube": (3, 4, 8), "row": (12,), "wide": (2, 3000), "none": (0, 4)}
DTYPES = {
    "BOOL": "U8 I8 BOOL",
    "F16": "I16 U16 F16 BF16",
    "F32": "I32 U32 F32 I64 U64 F64",
    "F8_E4M3": "F8_E5M2 F8_E4M3 F8_E8M0",
}
TENSORS: dict[str, Meant] = {
    f"{dtype} {name}": meant(dtype, shape, seed)
    for seed, dtype in enumerate(" ".join(DTYPES.values()).split())
    for name, shape in SHAPES.items()
} | {
    "scalar": meant("F32", (), 99),
    "packed": meant("F4", (6, 8), 98),
    "complex": meant("C64", (3, 4), 97),
}


@pytest.fixture(scope="module")
def path(mount: Path) -> Path:
    mount.mkdir(exist_ok=True)
    write(mount / "every.safetensors", TENSORS, padding=3)
    return mount / "every.safetensors"


def opened(path: Path, framework: str = "pt") -> "gds.open_file.SafeOpen":
    import gds

    return gds.safe_open(path, framework=framework, device="cpu")


def real(path: Path, framework: str = "pt") -> Any:
    import safetensors

    return safetensors.safe_open(path, framework=framework, device="cpu")


def raw(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    import torch

    bits = b""
    if tensor.numel():
        flat = tensor.contiguous().reshape(-1)
        # One element alone is contiguous whatever its stride.
        bits = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), bits


def test_it_says_the_same_of_a_file(path: Path) -> None:
    with opened(path) as ours, real(path) as theirs:
        assert ours.keys() == theirs.keys()
        assert [n for n in ours.offset_keys() if TENSORS[n].data] == [
            n for n in theirs.offset_keys() if TENSORS[n].data
        ]
        assert sorted(ours.offset_keys()) == ours.keys()
        assert ours.metadata() == theirs.metadata() is None
        for name in ours.keys():  # noqa: SIM118 - this is no dictionary
            mine, other = ours.get_slice(name), theirs.get_slice(name)
            assert mine.get_shape() == other.get_shape()
            assert mine.get_dtype() == other.get_dtype()


def test_every_tensor_is_the_same(path: Path) -> None:
    with opened(path) as ours, real(path) as theirs:
        every = ours.get_tensors()
        for name in ours.keys():  # noqa: SIM118 - this is no dictionary
            wanted = raw(theirs.get_tensor(name))
            assert raw(ours.get_tensor(name)) == wanted, name
            assert raw(every[name]) == wanted, name


def test_metadata(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, tmp_path / "a", metadata={"format": "pt", "of": "me"})
    with opened(tmp_path / "a") as ours:
        assert ours.metadata() == {"format": "pt", "of": "me"}


def test_arrays_of_numpy(path: Path) -> None:
    import numpy

    with opened(path, "np") as ours, real(path, "np") as theirs:
        for name in ("F32 matrix", "I64 cube", "BOOL row", "scalar", "F16 none"):
            mine, other = ours.get_tensor(name), theirs.get_tensor(name)
            assert mine.dtype == other.dtype
            numpy.testing.assert_array_equal(mine, other)
        assert ours.get_slice("F32 matrix")[2:4].shape == (2, 6)
        with pytest.raises(NotSupported, match="BFloat16"):
            ours.get_tensor("BF16 matrix")


numbers = st.integers(-9, 9)
slices = st.builds(slice, st.none() | numbers, st.none() | numbers, st.none() | st.integers(-1, 4))
lists = st.lists(st.integers(-3, 3), max_size=3)
items = st.one_of(slices, slices, numbers, lists, st.just(Ellipsis), st.none(), st.booleans())
indexes = st.one_of(items, st.lists(items, max_size=4).map(tuple))


@settings(max_examples=400)
@given(name=st.sampled_from(sorted(set(TENSORS) - {"packed"})), index=indexes)
def test_every_index_gives_the_same(path: Path, name: str, index: Any) -> None:
    """Or fails in the same way."""
    with opened(path) as ours, real(path) as theirs:
        wanted, why = outcome(lambda: theirs.get_slice(name)[index])
        found, our_why = outcome(lambda: ours.get_slice(name)[index])
    assert our_why == why
    if wanted is not None:
        assert raw(found) == raw(wanted)


@pytest.mark.parametrize("index", [1, (slice(1, 5), slice(1, 3)), (..., -1), slice(2, 2), [0, 3]])
def test_elements_that_torch_packs_are_indexed_in_pairs(path: Path, index: Any) -> None:
    """safetensors itself does not slice them."""
    import torch

    with opened(path) as ours:
        whole = ours.get_tensor("packed").view(torch.uint8)
        assert ours.get_slice("packed").get_shape() == [6, 8]
        if isinstance(index, list):
            with pytest.raises(NotImplementedError):
                ours.get_slice("packed")[index]
            return
        found = ours.get_slice("packed")[index]
        assert found.dtype == torch.float4_e2m1fn_x2
        assert torch.equal(found.view(torch.uint8), whole[index])


def outcome(read: Callable[[], Any]) -> tuple[Any, type[Exception] | None]:
    try:
        return read(), None
    except Exception as error:
        return None, type(error)


@pytest.mark.parametrize(
    ("shape", "index", "read"),
    [
        ((4096, 1024), (slice(1024, 2048),), 2 << 20),
        ((4096, 1024), (5,), 2 << 10),
        ((4096, 1024), (slice(None, None, 2048),), (2 << 20) * 2 + (2 << 10)),
        ((4096, 1024), (slice(0, 0),), 0),
        ((4, 1 << 20), (Ellipsis, slice(0, 1 << 18)), 2 << 20),
        ((4, 1 << 20), ([0, 2],), 8 << 20),
    ],
)
def test_what_an_index_leaves_out_is_not_read(
    where: Path,
    shape: tuple[int, ...],
    index: tuple[Any, ...],
    read: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted where a plan is made; the whole tensor has 8 MiB."""
    from gds import load as module
    from gds.plan import load_plan

    asked = []
    plan = load_plan.make_plan

    def counting(*arguments: Any) -> Any:
        made = plan(*arguments)
        asked.append(made.read_bytes)
        return made

    write(where / "a", {"t": meant("BF16", shape, 1)})
    monkeypatch.setattr(module, "make_plan", counting)
    with opened(where / "a") as ours, real(where / "a") as theirs:
        assert raw(ours.get_slice("t")[index]) == raw(theirs.get_slice("t")[index])
    assert sum(asked) == read


def test_a_file_stays_what_it_was_while_it_is_open(where: Path) -> None:
    before, after = llama(1, 64), llama(1, 64, first=1)
    write(where / "a", before)
    with opened(where / "a") as ours:
        write(where / "b", after)
        (where / "b").rename(where / "a")
        for name in before:
            assert raw(ours.get_tensor(name))[2] == before[name].data


def test_a_file_that_is_written_to_meanwhile_is_refused(where: Path) -> None:
    write(where / "a", llama(1, 64))
    with opened(where / "a") as ours:
        let_clock_pass(where / "a")
        with open(where / "a", "r+b") as file:
            file.write(b"\0")
        with pytest.raises(Conflict, match="written to"):
            ours.get_tensor("model.layers.0.self_attn.q_proj.weight")


def test_threads_share_one_file(where: Path) -> None:
    tensors = llama(2, 128)
    write(where / "a", tensors)
    wrong: list[str] = []

    def read(names: list[str]) -> None:
        wrong.extend(n for n in names if raw(ours.get_tensor(n))[2] != tensors[n].data)

    with opened(where / "a") as ours:
        names = ours.keys()
        threads = [threading.Thread(target=read, args=(names[at:],)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_errors_name_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a", llama(1, 64))
    with pytest.raises(NotFound, match="nothing"):
        opened(tmp_path / "nothing")
    (tmp_path / "bad").write_bytes(b"1234")
    with pytest.raises(Corrupt, match="bad"):
        opened(tmp_path / "bad")
    with pytest.raises(NotSupported, match="jax"):
        opened(tmp_path / "a", "jax")
    with opened(tmp_path / "a") as ours:
        with pytest.raises(NotFound, match=r"a: it has no tensor 'x'"):
            ours.get_tensor("x")
        with pytest.raises(NotFound, match="'x'"):
            ours.get_slice("x")
    for ask in (ours.keys, ours.offset_keys, ours.metadata):
        with pytest.raises(Invalid, match="closed"):
            ask()
    with pytest.raises(Invalid, match="closed"):
        ours.get_tensor("model.layers.0.self_attn.q_proj.weight")
    ours.close()
