"""One rank of `kvfs model load`: a process of its own, as an engine's workers are.

It gets its task as a JSON argument, says `ready` when torch is imported, begins when a line comes
at standard input, and reports its progress, then the result or the error: a JSON object a line. Its
tensors go with it.
"""

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any, Final

from cli.presentation import exits
from gds.io.timings import Spent, Stages
from kvfs.base.errors import KvfsError

_PERIOD_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1
"""From linux/prctl.h."""


def main() -> None:
    """Runs the rank. Raises nothing: it reports its error."""
    _keep_to_ourselves()
    wanted = json.loads(sys.argv[1])
    if not _end_with(wanted["parent"]):
        return
    try:
        from gds import load
    except ImportError as error:
        _tell(failed=f"torch cannot be imported: {error}", code=exits.USAGE)
        return
    _tell(ready=True)
    if not sys.stdin.readline():
        return  # nobody waits any more
    try:
        _tell(result=_load(load, wanted))
    except KeyboardInterrupt:
        return
    except (KvfsError, OSError) as error:
        _tell(failed=exits.describe(error), code=exits.exit_code(error))


def _load(load: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    opened = began
    told = began
    of = 0

    def progress(done: int, all_bytes: int) -> None:
        nonlocal opened, told, of
        now = time.monotonic()
        if not done:
            opened, of = now, all_bytes
        if not done or done == all_bytes or now - told >= _PERIOD_S:
            told = now
            _tell(read=done, of=all_bytes)

    told_of: list[Any] = []  # ways, the last of which is the one that was gone, then the stages
    tensors = load.load_model(
        wanted["path"],
        wanted["device"],
        wanted["rank"],
        wanted["ranks"],
        strategy=wanted["strategy"],
        progress=progress,
        report=told_of.append,
        verify=wanted["verify"],
    )
    *ways, stages = told_of
    return {
        "way": ways[-1].way.value,
        "why": ways[-1].reason,
        "open_s": opened - began,
        "load_s": time.monotonic() - opened,
        "read_bytes": of,
        "tensors": len(tensors),
        "tensor_bytes": sum(each.numel() * each.element_size() for each in tensors.values()),
        "stages": _described(stages),
    }


def _described(stages: Stages) -> dict[str, Any]:
    def one(spent: Spent) -> dict[str, float]:
        return {
            "bytes": spent.size_bytes,
            "seconds": stages.seconds(spent),
            "gb_per_s": stages.gb_per_s(spent),
        }

    return {
        "threads": stages.threads,
        "read": one(stages.read),
        "check": one(stages.check),
        "copy": one(stages.copy),
        "wait": one(stages.wait),
    }


def _end_with(parent: int) -> bool:
    """Has the kernel end this process when its parent ends, even by a signal that no process can
    catch; False: it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def _keep_to_ourselves() -> None:
    """Sends what libraries print to standard error."""
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(ours, "w", encoding="utf-8")  # noqa: SIM115  to the end of the process


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
