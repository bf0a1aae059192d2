"""What was asked of a cluster, by whom and when, and what came of it.

Times are of one clock, CLOCK_MONOTONIC: all hosts are of one machine. An operation was done at one
moment between its two times, or perhaps never where its outcome is not known.
"""

import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

Action = Literal[
    "put",
    "write",
    "put_new",
    "reserve",
    "publish",
    "read",
    "remove",
    "drop",
    "rename",
    "append",
    "mkdir",
    "rmdir",
]
"""
put      the name has this value afterwards, at once, whatever it had
write    the same, in place: while it is going on, readers of its own host may see parts; refused
         where the directory is not there
put_new  as put where the name was absent; else it is refused
reserve  an exclusive create: the name is taken, its value comes with `publish`
read     the value, or that the name is absent
remove   absent afterwards; refused where it was
drop     absent afterwards, and nobody says whether it was
append   a line of this value stands at the end
mkdir    the directory is there, which its name with an empty last part stands for; refused where
         it was
rmdir    it is not; refused where it was not there, or not empty
rename   `other` has what the name had, which is absent afterwards; refused where it was
"""
ABSENT: Final = 0
"""The value of a name that is not there; others are numbers that no two writes have in common."""
TORN: Final = -1
"""What was read is nothing that was written as a whole."""
EMPTY: Final = -2
"""A file without content: nobody writes one."""


@dataclass(frozen=True)
class Event:
    host: int
    action: Action
    name: str
    value: int
    """That was written, or read."""
    began: float
    ended: float
    """Infinite where the outcome is not known: it was done at any time since, or not at all."""
    is_refused: bool = False
    other: str = ""
    front: str = ""
    """By which way it went; for people."""

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.ended)

    def overlaps(self, other: "Event") -> bool:
        return self.began <= other.ended and other.began <= self.ended

    def __str__(self) -> str:
        names = f"{self.name} -> {self.other}" if self.other else self.name
        said = "refused" if self.is_refused else "" if self.is_known else "outcome not known"
        times = f"{self.began:.4f} to {self.ended:.4f}"
        return f"{times} host {self.host} {self.front} {self.action} {names} {self.value} {said}"


@dataclass(frozen=True)
class Disturbance:
    """Something that kept hosts from the others, or made them give up what they held."""

    began: float
    ended: float
    hosts: frozenset[int]
    empties: bool = False
    name: str = ""

    @property
    def kind(self) -> str:
        """Its name without the number of its host."""
        return re.sub(r" ?\d+", "", self.name)


class Unknown(Exception):
    """Nobody knows whether a change was made."""


class Failed(Exception):
    """Nothing was learnt and nothing changed."""


class Refused(Exception):
    """It was not done: there was something where nothing may be, or nothing."""


class Hangs(Exception):
    """Operations that never end; the text says which, and where the processes stand."""


@dataclass
class _Answer:
    value: int


@dataclass
class History:
    """Written by many threads."""

    events: list[Event] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    """What failed and changed nothing, by what it said."""
    _under_way: dict[int, tuple[str, float]] = field(default_factory=dict)
    """What a thread has asked, and since when."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _last: threading.local = field(default_factory=threading.local)

    @property
    def went_wrong(self) -> bool:
        """Whether the calling thread's last operation failed, or nobody knows."""
        return getattr(self._last, "went_wrong", False)

    @contextmanager
    def asking(
        self, host: int, front: str, action: Action, name: str, value: int = 0, other: str = ""
    ) -> Iterator[_Answer]:
        """The operation is done inside, by a front which says how it ended by what it raises."""
        answer, began = _Answer(value), time.monotonic()
        thread = threading.get_ident()
        self._last.went_wrong = False
        self._under_way[thread] = (f"host {host} {front} {action} {name} {other}".strip(), began)

        def record(ended: float, *, is_refused: bool = False) -> None:
            event = Event(host, action, name, answer.value, began, ended, is_refused, other, front)
            with self._lock:
                self.events.append(event)

        try:
            yield answer
        except Refused:
            record(time.monotonic(), is_refused=True)
        except Unknown as error:
            self._last.went_wrong = True
            record(math.inf)
            print(f"{time.monotonic():.4f} host {host} {front} {action} {name} {other}: {error}")
        except Failed as error:
            self._last.went_wrong = True
            print(f"{time.monotonic():.4f} host {host} {front} {action} {name} {other}: {error}")
            with self._lock:
                self.failures[str(error)] = self.failures.get(str(error), 0) + 1
        else:
            record(time.monotonic())
        finally:
            del self._under_way[thread]

    def hanging(self) -> list[str]:
        """Operations that have not ended: which, and for how long they have been going on."""
        now = time.monotonic()
        under_way = list(self._under_way.values())
        return [f"{asked} for {now - began:.0f} s" for asked, began in under_way]
