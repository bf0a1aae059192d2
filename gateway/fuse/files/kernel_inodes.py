"""The inodes by which one kernel knows a file whose content other nodes replace.

To a kernel all opens of an inode share its size, its pages and, by passthrough, its data file. So
while a file's content is open, the content that other nodes publish next is another inode to the
kernel, with another number. Programs see the file's own number (st_ino) for both.

| the kernel's inode | look-ups | an open of it | its attributes |
|---|---|---|---|
| the present one | lead to it | gets the newest content | the newest |
| of a former content | no more | gets ESTALE: its name is looked up again | as it was opened |
| the same, by a descriptor | none | comes again at once: it is renewed in place | the newest |

Invariants
- The content open by the present inode is the file's open file (`handles`), or none is open by it.
- A former content keeps its inode until its last handle is released.
- A number tells which file it belongs to, so that an NFS client's handle leads there for good.
"""

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from gateway.fuse.files.open_file import OpenFile
from kvfs.base.errors import Stale

OTHER: Final = 1 << 47
"""Set in the numbers that are not the file's own."""
_SHIFT: Final = 40
_MOST: Final = 1 << 7
_FILE: Final = ~(OTHER | (_MOST - 1) << _SHIFT)
_HIGH: Final = ~_FILE
"""Bits in which the numbers of a file's inodes differ. A file beyond the first 2^40 of a namespace
has one number only."""
_NOTHING: Final[Mapping[int, OpenFile]] = {}
_REFUSED: Final = 256
"""Threads that were told to look a name up again."""


def ino_of(number: int) -> int:
    """Returns the file's own number."""
    return number & _FILE if number & OTHER else number


class Outdated(enum.Enum):
    """The treatment of an open of an inode whose content was replaced."""

    LOOK_UP = enum.auto()
    """Its name is to be looked up again: ESTALE, on which the kernel begins anew."""
    TAKE = enum.auto()
    """The name was looked up again and led to this inode, since its content was the newest."""
    RENEW = enum.auto()
    """There is no name: it is opened by a descriptor or a file handle."""


class KernelInodes:
    """The inodes of one kernel."""

    def __init__(self, holds: Callable[[OpenFile], bool]) -> None:
        """`holds`: whether the kernel has a file open, or is about to."""
        self._holds = holds
        self._present: dict[int, int] = {}
        """The number of a file's present inode, for files that have others than their own."""
        self._bound: dict[int, dict[int, OpenFile]] = {}
        """By file and number, the content that is open by an inode that is not the present one."""
        self._lookups: dict[int, int] = {}
        """Look-up counts of numbers that are not the file's own."""
        self._outdated: set[int] = set()
        """Numbers under which the kernel may keep pages of a former content."""
        self._refused: dict[int, int] = {}
        """By thread, the number that it was told to look up again."""
        self._sure: set[int] | None = None
        """Numbers of which the kernel's pages are of the content that is open, or was since;
        None: of all."""

    def number(self, ino: int) -> int:
        """Returns the number of the inode to which look-ups lead."""
        return self._present.get(ino, ino) if self._present else ino

    def numbers(self, ino: int) -> list[int]:
        """Returns the numbers of all inodes by which the kernel may know the file, the present one
        first."""
        present = self.number(ino)
        bound = self._bound.get(ino, ())
        return [present, *(number for number in bound if number != present)]

    def is_one(self, ino: int) -> bool:
        """Returns whether the kernel knows the file by one inode."""
        return ino not in self._present and ino not in self._bound

    def looked_up(self, number: int) -> None:
        """Notes that the kernel was given a number that is not the file's own."""
        self._lookups[number] = self._lookups.get(number, 0) + 1

    def forgotten(self, number: int, count: int) -> None:
        """Notes that the kernel gives back look-ups of such a number."""
        left = self._lookups.get(number, 0) - count
        if left > 0:
            self._lookups[number] = left
            return
        self._lookups.pop(number, None)
        self._outdated.discard(number)
        if self._sure is not None:
            self._sure.discard(number)
        ino = ino_of(number)
        if self._present.get(ino) == number and self.content(ino) is None:
            del self._present[ino]

    def forget(self, ino: int) -> None:
        """Notes that the kernel has given back all look-ups of the file that this daemon counted:
        it knows nothing of it any more, except what it has open of an earlier daemon."""
        if self.content(ino) is None:
            self._present.pop(ino, None)
        self._outdated.discard(ino)
        if self._sure is not None:
            self._sure.discard(ino)

    def number_of(self, file: OpenFile) -> int:
        """Returns the number by which a file's content is opened."""
        if file.is_former:
            for number, bound in self._bound.get(file.ino, _NOTHING).items():
                if bound is file:
                    return number
        return self.number(file.ino)

    def go_on(self, contents: Mapping[int, OpenFile]) -> None:
        """Goes on with a kernel that has these contents open, by these numbers, of an earlier
        daemon. What it has of other numbers may be of contents that were replaced since."""
        self._sure = set(contents)
        present: dict[int, int] = {}
        for number in sorted(contents):  # a file's own number comes first
            file = contents[number]
            if file.is_former or present.setdefault(file.ino, number) != number:
                self._bind(number, file)
            elif number != file.ino:
                self._present[file.ino] = number
        for number, file in contents.items():
            if file.is_former and number == self.number(file.ino):  # another kernel has the newest
                self._present[file.ino] = next(self._free(file.ino), number)

    def content(self, number: int) -> OpenFile | None:
        """Returns the content that is open by this inode if that is not the present one."""
        ino = ino_of(number)
        file = self._bound.get(ino, _NOTHING).get(number)
        if file is not None and not self._holds(file):
            self._unbind(ino, number)
            return None
        return file

    def closed(self, file: OpenFile) -> None:
        """Notes that the data file of `file` is closed: no kernel has it open."""
        for number, bound in list(self._bound.get(file.ino, _NOTHING).items()):
            if bound is file:
                self._unbind(file.ino, number)

    def _bind(self, number: int, file: OpenFile) -> None:
        self._bound.setdefault(file.ino, {})[number] = file

    def _unbind(self, ino: int, number: int) -> None:
        bound = self._bound[ino]
        del bound[number]
        if not bound:
            del self._bound[ino]

    def has_open(self, number: int, file: OpenFile) -> bool:
        """Returns whether this inode shows the content of `file`, the file's open file."""
        return number == self.number(file.ino) and self._holds(file)

    def can_part(self, file: OpenFile) -> bool:
        """Returns whether there is a number for the content that follows this one."""
        return not self._holds(file) or next(self._free(file.ino), 0) > 0

    def part(self, file: OpenFile) -> None:
        """Makes a file's open file a former content: look-ups lead to another inode."""
        if self._holds(file):
            ino = file.ino
            number = self.number(ino)
            self._bind(number, file)
            self._outdated.add(number)
            self._present[ino] = next(self._free(ino))

    def rejoin(self, file: OpenFile) -> None:
        """Makes a former content the file's open file again."""
        bound = self._bound.get(file.ino, _NOTHING).items()
        number = next((number for number, each in bound if each is file), None)
        if number is None:
            return
        self._unbind(file.ino, number)
        if number == file.ino:
            self._present.pop(number, None)
        else:
            self._present[file.ino] = number

    def _free(self, ino: int) -> Iterator[int]:
        if ino & _HIGH:
            return
        present = self.number(ino)
        for one in range(_MOST):
            number = ino | OTHER | one << _SHIFT
            is_known = number in self._lookups or number == present
            if not is_known and self.content(number) is None:
                yield number

    def outdated(self, thread: int, number: int) -> Outdated:
        """Returns how to treat a thread's open of an inode whose content was replaced."""
        before = self._refused.get(thread, 0)
        if before == number:
            return Outdated.RENEW
        if before and ino_of(before) == ino_of(number):
            return Outdated.TAKE
        self._refused[thread] = number
        if len(self._refused) > _REFUSED:
            del self._refused[next(iter(self._refused))]
        return Outdated.LOOK_UP

    def opens(self, thread: int, number: int, file: OpenFile) -> bool:
        """Notes that this inode is opened. Returns whether pages that the kernel may keep of it are
        of another content. Raises Stale if another content is open by it."""
        if self._refused:
            self._refused.pop(thread, None)
        bound = self.content(number) if self._bound else None
        if bound is not None and bound is not file:
            raise Stale("other nodes have replaced the content: look it up again")
        is_sure = self._sure is None or number in self._sure
        if self._sure is not None:
            self._sure.add(number)
        if number != self.number(file.ino):
            self._bind(number, file)
            return True
        if self._outdated and number in self._outdated:
            self._outdated.remove(number)
            return True
        return not is_sure


class InodeOpener(NamedTuple):
    """The thread that opens an inode, and the inode's number in its kernel."""

    kernel: KernelInodes
    number: int
    thread: int

    def holds(self, file: OpenFile) -> bool:
        """Returns whether the inode shows the content of `file`, the file's open file."""
        return self.kernel.has_open(self.number, file)

    def content(self, file: OpenFile | None) -> OpenFile | None:
        """Returns the content that is open by the inode. `file`: the file's open file."""
        found = self.kernel.content(self.number)
        if found is None and file is not None and self.holds(file):
            return file
        return found

    def former(self) -> OpenFile | None:
        """Returns the former content that is open by the inode."""
        file = self.kernel.content(self.number)
        return file if file is not None and file.is_former else None

    def outdated(self) -> Outdated:
        """Like `KernelInodes.outdated`."""
        return self.kernel.outdated(self.thread, self.number)

    def opens(self, file: OpenFile) -> bool:
        """Like `KernelInodes.opens`."""
        return self.kernel.opens(self.thread, self.number, file)
