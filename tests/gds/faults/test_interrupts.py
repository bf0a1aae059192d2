"""Ctrl-C at each step of a load: it ends, and leaves neither descriptors nor threads.

An interrupt comes where Python looks for signals: behind each call of a C function, and at the
beginning of each of Python's. A profiler is called at these places: it raises at the first of them,
in the next load at the second, and so on, until a load is over before.
"""

from pathlib import Path
from typing import Final

import pytest

from tests.gds import children
from tests.gds.checkpoints import llama, write_shards

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch

_EACH_STEP: Final = """
import contextlib, faulthandler, gc, gds, itertools, os, sys, threading

faulthandler.dump_traceback_later(100, exit=True)
path, copies, every = sys.argv[1], sys.argv[2] == "copy", int(sys.argv[3])


def load():
    return gds.load_model(path, copy=copies)


def files():
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def interrupt_at(step):
    left = itertools.count(step, -1)
    has_come = []

    def profile(frame, event, argument):
        if event in ("call", "c_return") and frame.f_code is not sys._getframe().f_code:
            if next(left) == 0:
                sys.setprofile(None)
                has_come.append(True)
                raise KeyboardInterrupt

    try:
        sys.setprofile(profile)
        load()
        sys.setprofile(None)
    except KeyboardInterrupt:
        pass
    return has_come


sys.unraisablehook = lambda told: None  # of an interrupt in a finalizer
load(), load(), gc.collect(), gc.freeze()  # what is there is not looked through each time
before = files()
steps = 0
for step in itertools.count(0, every):
    if not interrupt_at(step):
        break
    steps += 1
    gc.collect()
    assert files() == before, (step, files(), before)
    names = [each.name for each in threading.enumerate() if each.name.startswith("kvfs")]
    assert not names, (step, names)
assert len(load()) == 16
print(steps)
"""


@pytest.mark.parametrize("copies", ["copy", "map"])
def test_an_interrupt_at_any_step_leaves_nothing_behind(where: Path, copies: str) -> None:
    write_shards(where, [llama(1, 64, first=n) for n in range(2)])
    assert int(children.run(_EACH_STEP, where, copies, 3)) > 100
