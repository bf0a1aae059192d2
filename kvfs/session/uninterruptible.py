"""Work aside, in a thread that no signal interrupts.

An interrupt (Ctrl-C) is an exception between any two steps of the main thread: an object that a
step opened is lost before the next one would have kept it, a lock of `threading` stays taken, and
`Thread.join` takes a thread that runs for one that ended. So opening, and waiting for threads, is
done aside; the caller waits here, by C functions alone, which an interrupt leaves as they were.
"""

import _thread
import os
import queue
import weakref
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from kvfs.base.errors import NoSpace

T = TypeVar("T")
_NOTICE_S: Final = 0.5
"""An interrupt that comes between the interpreter's last check for one and the wait itself does not
end the wait: it is noticed when that is over."""


def uninterrupted(work: Callable[[], T], discard: Callable[[T], object]) -> T:
    """Calls `work` aside and returns its result. Interrupted, it waits until `work` ended, and
    `discard`s its result; a second interrupt ends that wait, and the rest is done aside. Raises
    what `work` raises, and NoSpace (of memory for a thread)."""
    job = Aside(work, discard)
    try:
        job.start()
        return job.result()
    except BaseException:
        job.is_left = True  # before any call, at whose entry the next interrupt may come
        try:
            job.leave()
        except BaseException:
            job.leave()
            raise
        raise


def next_within(waiting: "queue.SimpleQueue[T]") -> T | None:
    """Returns the next object, None if none came for a moment: so an interrupt is noticed soon,
    even one that came as the wait began."""
    try:
        return waiting.get(timeout=_NOTICE_S)
    except queue.Empty:
        return None


class Aside(Generic[T]):
    """One piece of work. One thread calls everything except the work."""

    def __init__(
        self,
        work: Callable[[], T],
        discard: Callable[[T], object],
        over: "queue.SimpleQueue[object] | None" = None,
    ) -> None:
        """`over` gets an object when the work ended, or never came to run."""
        self._work = work
        self._discard = discard
        self._found: list[T] = []
        self._error: BaseException | None = None
        self.is_left = False
        """Whether nobody waits for its result any more: it is discarded aside."""
        self._over = queue.SimpleQueue() if over is None else over
        self._process = os.getpid()
        # The thread's arguments are let go when it ends, also where it never came to run.
        self._tokens = [_Token()]
        self._token = weakref.ref(self._tokens[0], self._over.put)

    def start(self) -> None:
        """Starts it, once. Raises NoSpace."""
        try:
            _thread.start_new_thread(self._run, (self._tokens.pop(),))
        except RuntimeError as error:
            raise NoSpace(f"no thread to work with: {error}") from None

    def result(self) -> T:
        """Returns the result when it ended. Raises what it raised; interrupted, at once."""
        self._wait()
        # Else the traceback would hold this object, and all that it has, until it is collected.
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            if not self._found:
                raise NoSpace("no memory for a thread to work with")
            return self._found[0]
        finally:
            del error

    @property
    def is_over(self) -> bool:
        """Whether it is over; true also in a process that was forked meanwhile, which has no such
        thread."""
        return self._token() is None or os.getpid() != self._process

    def leave(self) -> None:
        """Waits until it ended, and discards its result; interrupted, it is discarded aside. To be
        called once more then, to wait still: even an interrupt as it begins comes to that."""
        try:
            self._tokens.clear()
            self._wait()
        finally:
            self.is_left = True
            self._discard_found()

    def _wait(self) -> None:
        while not self.is_over:
            next_within(self._over)

    def _run(self, token: "_Token") -> None:
        del token  # an error's traceback would keep it
        try:
            self._found.append(self._work())
            if self.is_left:
                self._discard_found()
        except BaseException as error:
            self._error = error

    def _discard_found(self) -> None:
        """Discards the result, by the one of the two threads that comes first."""
        try:
            found = self._found.pop()
        except IndexError:
            return
        self._discard(found)


class _Token:
    """An object that lives until the thread ended."""

    __slots__ = ("__weakref__",)
