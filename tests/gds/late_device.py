"""A device in memory of the host that does everything as late as a real one might: queued work when
somebody waits for it, and what the caller's stream still had to do with new memory as well."""

import functools
import threading
from collections.abc import Callable, Sequence

import torch

from gds.device.devices import Mark, Queue, Staging, Work
from gds.device.pinned import PinnedPool

SCRIBBLE = 0x5A


class LateMark:
    def __init__(self, queue: "LateQueue", number: int) -> None:
        self._queue = queue
        self._number = number

    def wait(self) -> None:
        self._queue.run_to(self._number)


class LateQueue:
    def __init__(self, failure: Callable[[], None] = lambda: None) -> None:
        self._failure = failure
        self._lock = threading.RLock()
        self._work: list[tuple[Work, Sequence[Mark]]] = []
        self._done = 0

    def submit(self, work: Work, after: Sequence[Mark] = ()) -> Mark:
        with self._lock:
            self._work.append((work, after))
            return self.mark()

    def copy(self, to: torch.Tensor, staged: torch.Tensor, after: Sequence[Mark] = ()) -> Mark:
        return self.submit(functools.partial(to.copy_, staged), after)

    def mark(self) -> Mark:
        with self._lock:
            return LateMark(self, len(self._work))

    def run_to(self, number: int) -> None:
        self._failure()
        with self._lock:
            for at in range(self._done, number):
                work, after = self._work[at]
                for mark in after:
                    mark.wait()
                work()
                self._work[at] = (int, ())
            self._done = max(self._done, number)

    @property
    def pending(self) -> int:
        return len(self._work) - self._done


class LateDevice:
    """See `gds.device.devices.Device`. `room`: bytes it has; `fails`: called before anything is
    done."""

    def __init__(self, room: int = 1 << 40, fails: Callable[[], None] = lambda: None) -> None:
        self._room = room
        self._fails = fails
        self.caller = LateQueue()
        self.entered: list[str] = []
        """Names of the threads that came."""
        self.pinned: dict[int, int] = {}
        """Sizes of buffers, by address."""
        self._pool = PinnedPool(self._pin, self.pinned.__delitem__)
        self.queues: list[LateQueue] = []
        self.lent = 0
        self.most_lent = 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        with self._lock:
            self._room -= made.nbytes
            if self._room < 0:
                raise RuntimeError("out of memory, of which there was little")
        if made.numel():
            raw = made.reshape(-1).view(torch.uint8)
            self.caller.submit(functools.partial(raw.fill_, SCRIBBLE))
        return made

    def ready(self) -> Mark:
        return self.caller.mark()

    def queue(self) -> Queue:
        self.queues.append(LateQueue(self._fails))
        return self.queues[-1]

    def lend(self, size: int) -> Staging:
        with self._lock:
            self.lent += 1
            self.most_lent = max(self.lent, self.most_lent)
        return self._pool.lend(size)

    def _pin(self, address: int, size: int) -> str:
        self.pinned[address] = size
        return ""

    def give_back(self, staging: Staging) -> None:
        staging.memory[:] = bytes(len(staging.memory))  # whoever has it next writes to it
        with self._lock:
            self.lent -= 1
        self._pool.give_back(staging)

    def do_all(self) -> None:
        """All that is still to be done, in whichever order."""
        for queue in (*self.queues, self.caller):
            queue.run_to(len(queue._work))

    @property
    def pending(self) -> int:
        return sum(queue.pending for queue in self.queues)
