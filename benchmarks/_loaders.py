"""The ways to load a checkpoint that are compared, each in a process of its own: this module is its
program.

A line of JSON on the standard input names a flow and its files, a line on the standard output is
the answer. Memory for what comes next is backed before (`back_memory`), imports and warm-up lie
outside the timed part, and what was loaded is gone before the next.
"""

import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gds.probe.machine_limits import back_memory

_PAGE: Final = mmap.PAGESIZE
_THREADS: Final = 8
_clock = time.perf_counter

Files = Sequence[str]


class Ended(Exception):
    """A process gave no answer, or said what went wrong."""


# --- ways ----------------------------------------------------------------------------------------


def gds_copied(files: Files) -> object:
    import gds

    return gds.load_file(files[0]) if len(files) == 1 else gds.load_model(files)


def gds_mapped(files: Files) -> object:
    import gds

    return gds.load_model(files, copy=False)


def safetensors_touched(files: Files) -> object:
    """It maps the file: reading is what touching every page does."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    for tensor in found.values():
        tensor.view(-1).view(torch.uint8)[::_PAGE].sum()
    return found


def safetensors_first(files: Files) -> object:
    from safetensors import safe_open

    with safe_open(files[0], framework="pt") as file:
        name = next(iter(file.keys()))
        return file.get_tensor(name).view(-1)[0].item()


def fastsafetensors_nogds(files: Files) -> object:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: list(files)})
    found = loader.copy_files_to_device()
    tensors = {name: found.get_tensor(name) for name in found.key_to_rank_lidx}
    return tensors, found, loader


def runai(files: Files) -> object:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(files))
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


WAYS: Final[dict[str, Callable[[Files], object]]] = {
    "gds": gds_copied,
    "mapped": gds_mapped,
    "safetensors": safetensors_touched,
    "first": safetensors_first,
    "fastsafetensors": fastsafetensors_nogds,
    "runai": runai,
}


# --- limits --------------------------------------------------------------------------------------


def raw(file: str, direct: bool, threads: int, size: int) -> float:
    """Bytes per second of plain preads."""
    from gds.probe.machine_limits import read_rate

    with open(file, "rb", buffering=0) as opened:
        return read_rate(opened.fileno(), direct=direct, threads=threads, read_bytes=size)


def memcpy(total: int, threads: int) -> float:
    """Bytes per second."""
    from gds.probe.machine_limits import copy_rate

    return copy_rate(total, threads)


# --- flows ---------------------------------------------------------------------------------------


def load(way: str, files: Files) -> float:
    """Seconds."""
    return _timed(files, 1, lambda: WAYS[way](files))


def memory(way: str, files: Files) -> float:
    """Bytes of resident memory that a load took at its peak beyond the tensors."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = _status("VmRSS")
    found = WAYS[way](files)
    peak = _status("VmHWM")
    assert isinstance(found, dict)
    tensors = sum(tensor.nbytes for tensor in found.values())
    return float(peak - before - tensors)


def rank(files: Files, rank: int, ranks: int, strategy: str, after_s: float = 0.0) -> float:
    """Seconds of a rank's load, which begins so much later."""
    import gds

    time.sleep(after_s)
    return _timed(
        files,
        ranks,
        lambda: gds.load_model(files, rank=rank, world_size=ranks, strategy=strategy),
    )


def rank_of_whole(files: Files, rank: int, ranks: int, after_s: float) -> float:
    """Bytes that a rank takes which reads all, tensor by tensor, and begins so much later."""
    import gds

    time.sleep(after_s)
    return float(sum(each.nbytes for _, each in gds.iter_tensors(files, "cpu", rank, ranks, {})))


def _timed(files: Files, parts: int, load: Callable[[], object]) -> float:
    """Seconds of a load of one of so many parts of the files."""
    back_memory(2 * sum(os.path.getsize(file) for file in files) // parts)
    began = _clock()
    found = load()
    elapsed = _clock() - began
    del found
    return elapsed


def read_bytes() -> float:
    """That this process had the disk read so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return float(line.split()[1])
    raise KeyError("read_bytes")


def together(files: Files, small: str, ranks: int, apart_s: float, is_whole: bool) -> float:
    """Bytes that the ranks have the disk read, each in a process of its own, which begin so many
    seconds after each other; `is_whole`: each reads all."""
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(_another()) for _ in range(ranks)]
        ask(others, [{"flow": "load", "way": "gds", "files": [small]}] * ranks)  # imports
        before = ask(others, [{"flow": "read_bytes"}] * ranks)
        load: dict[str, Any] = {"flow": "rank", "files": files, "ranks": ranks}
        load |= {"flow": "rank_of_whole"} if is_whole else {"strategy": "auto"}
        ask(others, [load | {"rank": each, "after_s": each * apart_s} for each in range(ranks)])
        return sum(ask(others, [{"flow": "read_bytes"}] * ranks)) - sum(before)


@contextlib.contextmanager
def _another() -> Iterator[subprocess.Popen[str]]:
    """One more of this program."""
    command = [sys.executable, "-m", "benchmarks._loaders", sys.argv[1]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(
    processes: Sequence[subprocess.Popen[str]], questions: Sequence[dict[str, Any]]
) -> list[float]:
    """Each its own, all at once. Raises Ended with what went wrong there."""
    for process, question in zip(processes, questions, strict=True):
        assert process.stdin is not None
        print(json.dumps(question), file=process.stdin, flush=True)
    answers = []
    for process in processes:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline() or '{"error": "it ended"}')
        if "error" in answer:
            raise Ended(answer["error"])
        answers.append(float(answer["value"]))
    return answers


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


FLOWS: Final[dict[str, Callable[..., float]]] = {
    "load": load,
    "memory": memory,
    "memcpy": memcpy,
    "rank": rank,
    "rank_of_whole": rank_of_whole,
    "raw": raw,
    "read_bytes": read_bytes,
    "together": together,
}


def main() -> None:
    sys.path.append(sys.argv[1])
    # What the libraries print does not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        flow = FLOWS[asked.pop("flow")]
        try:
            answer: dict[str, Any] = {"value": flow(**asked)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
