"""Loads of a checkpoint on the mount: the ways that are compared, and the rows."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import _cold, _wheels
from benchmarks._guard import Guard
from benchmarks._interleave import (
    FASTSAFETENSORS,
    NATIVE,
    RUNAI,
    SAFETENSORS,
    Group,
    Results,
    Row,
    Target,
)
from benchmarks._load import MIB, buffer
from benchmarks._loaders import Ended, ask
from benchmarks._systems import Kvfs, System, Unavailable

GDS: Final = "gds"
_ROOT: Final = Path(__file__).resolve().parent.parent
_SHARDS: Final = 4
_HIDDEN: Final = 4096
_WORDS: Final = 32_000
_THREADS: Final = 8
_FIRST_WAYS: Final = {GDS: "mapped", SAFETENSORS: "first"}
"""How a system gets at one tensor without all the others."""


class Scale(NamedTuple):
    shard_bytes: int
    """About; the last row of what a shard holds is cut so."""


QUICK: Final = Scale(256 * MIB)
FULL: Final = Scale(1000 * MIB)


class Checkpoint:
    """Shards as Llama has them, in bf16, and what lies beneath them."""

    def __init__(self, node: Kvfs, scale: Scale) -> None:
        self.node = node
        self._scale = scale
        self.shards: list[Path] = []
        self.small = node.root / "small.safetensors"

    def write(self) -> None:
        """Random bytes that are no NaNs to a reader that looks."""
        _write_shard(self.small, {"model.norm.weight": (1, _HIDDEN)})
        weights: dict[str, str] = {}
        for number in range(_SHARDS):
            path = self.node.root / f"model-{number + 1:05d}-of-{_SHARDS:05d}.safetensors"
            tensors = _layers(number, self._scale.shard_bytes)
            _write_shard(path, tensors)
            self.shards.append(path)
            weights |= dict.fromkeys(tensors, path.name)
        index = {"metadata": {}, "weight_map": weights}
        (self.node.root / "model.safetensors.index.json").write_text(json.dumps(index))

    def make_cold(self, shards: Sequence[Path]) -> None:
        _cold.make_cold(self.node.backing(shards))

    def make_warm(self, shards: Sequence[Path]) -> None:
        for path in self.node.backing(shards):
            with path.open("rb", buffering=0) as file:
                while file.read(8 * MIB):
                    pass

    def backing(self, shard: Path) -> Path:
        return self.node.backing([shard])[0]


def _layers(shard: int, size: int) -> dict[str, tuple[int, int]]:
    """Shapes by name."""
    up = _HIDDEN * 11 // 4
    layer = {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_HIDDEN // 4, _HIDDEN),
        "self_attn.v_proj": (_HIDDEN // 4, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (up, _HIDDEN),
        "mlp.up_proj": (up, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, up),
        "input_layernorm": (1, _HIDDEN),
    }
    words = _WORDS * size // FULL.shard_bytes
    ends = {0: "model.embed_tokens.weight", _SHARDS - 1: "lm_head.weight"}
    found = {ends[shard]: (words, _HIDDEN)} if shard in ends else {}
    for number in itertools.count():
        for name, shape in layer.items():
            if 2 * sum(map(_elements, found.values())) + 2 * _elements(shape) > size:
                return found
            found[f"model.layers.{shard}{number:02d}.{name}.weight"] = shape
    raise AssertionError


def _elements(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _write_shard(path: Path, tensors: Mapping[str, tuple[int, int]]) -> None:
    entries: dict[str, Any] = {}
    at = 0
    for name, shape in tensors.items():
        end = at + 2 * _elements(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    data = memoryview(buffer(8 * MIB))
    with path.open("wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for begin in range(0, at, len(data)):
            file.write(data[: min(len(data), at - begin)])


class Way(System):
    """One way to load, in a process of its own."""

    def __init__(self, name: str, checkpoint: Checkpoint, packages: Path) -> None:
        super().__init__(name, checkpoint.shards[0].parent)
        self.checkpoint = checkpoint
        self._packages = packages
        self._process: subprocess.Popen[str] | None = None

    def start(self, guard: Guard) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._loaders", str(self._packages)],
            cwd=_ROOT,
            env=os.environ | {"PYTHONPATH": str(_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        guard.process(self._process.pid)
        for way in (self.name, _FIRST_WAYS.get(self.name)):
            if way:
                self.load(way, [self.checkpoint.small])  # imports

    def stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()

    def ask(self, flow: str, **arguments: object) -> float:
        """Raises Unavailable with what went wrong there."""
        assert self._process is not None
        try:
            (answer,) = ask([self._process], [{"flow": flow} | arguments])
        except Ended as error:
            raise Unavailable(str(error)) from None
        return answer

    def load(self, way: str, shards: Sequence[Path]) -> float:
        """Seconds."""
        return self.ask("load", way=way, files=list(map(str, shards)))


class Raw(Way):
    """Plain reads of the data file, in all forms; what counts is the best of them."""

    _FORMS: Final = tuple(itertools.product((False, True), (1, 2, 4, 8), (2 * MIB, 16 * MIB)))

    def __init__(self, checkpoint: Checkpoint, packages: Path) -> None:
        super().__init__(NATIVE, checkpoint, packages)
        self._rates = Results()
        self.best: str = ""

    def load(self, _way: str, _shards: Sequence[Path]) -> float:
        """Nothing is loaded by plain reads."""
        return 0.0

    def cold(self, shard: Path) -> float:
        """Bytes per second of this round's fastest; see `settle`."""
        file = str(self.checkpoint.backing(shard))
        for direct, threads, size in self._FORMS:
            self.checkpoint.make_cold([shard])
            rate = self.ask("raw", file=file, direct=direct, threads=threads, size=size)
            kind = "O_DIRECT" if direct else "buffered"
            self._rates.add(_COLD.name, f"{kind}, {threads} x {size // MIB} MiB", rate / 1e9)
        return max(samples[-1] or 0 for samples in self._rates.samples[_COLD.name].values()) * 1e9

    def settle(self, results: Results) -> None:
        """Of all forms the one with the best median counts, in each round: the best of many in
        each round would be its luck."""
        rates = self._rates.samples.get(_COLD.name)
        if not rates:
            return
        self.best = max(rates, key=lambda form: self._rates.median(_COLD.name, form) or 0)
        results.samples[_COLD.name][NATIVE] = rates[self.best]

    def forms(self) -> dict[str, float | None]:
        """The median of each, in GB/s."""
        found = self._rates.samples.get(_COLD.name, {})
        return {form: self._rates.median(_COLD.name, form) for form in found}


_COLD: Final = Row(
    "one shard, cold",
    "GB/s",
    True,
    {
        GDS: (
            Target("of_native", 0.9),
            Target("of_best_peer", 1.0),
            Target("of_safetensors", 1.5),
        )
    },
)
_MODEL: Final = Row("all shards, cold", "GB/s", True, {GDS: (Target("of_best_peer", 1.0),)})
_WARM: Final = Row("one shard, warm", "GB/s", True, {GDS: (Target("of_native", 0.8),)})
_FIRST: Final = Row(
    "first tensor of all shards, mapped", "ms", False, {GDS: (Target("at_most", 50),)}
)
_MEMORY: Final = Row(
    "memory beyond the tensors, all shards", "MB", False, {GDS: (Target("at_most", 512),)}
)


def ways(checkpoint: Checkpoint, *, peers: bool) -> list[Way]:
    """Raises OSError where their packages cannot be had."""
    packages = _wheels.loaders()
    names = [GDS, SAFETENSORS, FASTSAFETENSORS, RUNAI] if peers else [GDS]
    return [Raw(checkpoint, packages), *(Way(name, checkpoint, packages) for name in names)]


def groups() -> list[Group]:
    return [
        Group((_COLD,), _one_cold, applies=lambda system: isinstance(system, Way)),
        Group((_MODEL,), _model_cold, applies=_loads),
        Group((_WARM,), _one_warm, applies=lambda system: isinstance(system, Way)),
        Group((_FIRST,), _first, applies=lambda system: system.name in _FIRST_WAYS),
        Group((_MEMORY,), _memory, applies=lambda system: system.name == GDS, rounds=1),
    ]


def _loads(system: System) -> bool:
    return isinstance(system, Way) and not isinstance(system, Raw)


def _one_cold(system: System) -> Mapping[str, float]:
    assert isinstance(system, Way)
    shard = system.checkpoint.shards[0]
    if isinstance(system, Raw):
        return {_COLD.name: system.cold(shard) / 1e9}
    system.checkpoint.make_cold([shard])
    return {_COLD.name: shard.stat().st_size / system.load(system.name, [shard]) / 1e9}


def _model_cold(system: System) -> Mapping[str, float]:
    assert isinstance(system, Way)
    shards = system.checkpoint.shards
    system.checkpoint.make_cold(shards)
    size = sum(shard.stat().st_size for shard in shards)
    return {_MODEL.name: size / system.load(system.name, shards) / 1e9}


def _one_warm(system: System) -> Mapping[str, float]:
    """The first is memory copied into memory."""
    assert isinstance(system, Way)
    shard = system.checkpoint.shards[0]
    size = shard.stat().st_size
    if isinstance(system, Raw):
        return {_WARM.name: system.ask("memcpy", total=size, threads=_THREADS) / 1e9}
    system.checkpoint.make_warm([shard])
    return {_WARM.name: size / system.load(system.name, [shard]) / 1e9}


def _first(system: System) -> Mapping[str, float]:
    """Cold, but for the headers' pages, which whoever made the list of tensors has read."""
    assert isinstance(system, Way)
    shards = system.checkpoint.shards
    system.checkpoint.make_cold(shards)
    return {_FIRST.name: system.load(_FIRST_WAYS[system.name], shards) * 1e3}


def _memory(system: System) -> Mapping[str, float]:
    assert isinstance(system, Way)
    files = list(map(str, system.checkpoint.shards))
    return {_MEMORY.name: system.ask("memory", way=GDS, files=files) / 1e6}
