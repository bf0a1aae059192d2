"""The part of a private file that is still this node's, now that the server has another record of
it. Pure.

| the server had | it has now | this node's content | this node's name |
|---|---|---|---|
| nothing | a record: it was told | told | told |
| an unpublished file | it, under a name that it has or had here | stays | stays |
| an unpublished file | it, under a name that others gave it | stays | is given up |
| any | it published, under this node's name | told | told |
| any | it published, under a name that it had here before | told | stays |
| any | it published, under a name that others gave it, or several | told | is given up |
| any | no name of it, or no record | is given up | is given up |

"Had nothing" holds only until the file gets another name here while the server is being told of it:
then the server may have it under the earlier name, as the lines below say.
"""

from collections.abc import Collection
from enum import Enum

from kvfs.meta import keys
from kvfs.meta.records import Flag, Inode


class Stays(Enum):
    """The part of a file that stays private."""

    ALL = "its content and its name"
    CONTENT = "its content; its name is the server's"
    NAME = "its name; its content is the server's"
    NOTHING = "nothing: both are the server's"
    TOLD = "nothing: the server has what this node has"


def stays(
    before: Inode | None, theirs: Inode | None, own: Inode, earlier: Collection[bytes]
) -> Stays:
    """Returns what stays private of a file of which the server had `before` and has `theirs`, and
    this node `own`. `earlier`: the keys of names that it had here before."""
    if before is None and not earlier:
        return Stays.TOLD
    if theirs is None:
        return Stays.NOTHING
    place, here = place_of(theirs), place_of(own)
    if not theirs.flags & Flag.PUBLISHED:
        return Stays.ALL if place == here or place in earlier else Stays.CONTENT
    if place == here:
        return Stays.TOLD
    return Stays.NAME if place in earlier and theirs.nlink == 1 else Stays.NOTHING


def place_of(inode: Inode) -> bytes:
    """Returns the key of a file's name; of a file without one a key that is none's."""
    return keys.file_entry(inode.parent, inode.name) if inode.nlink else b""


def with_name_of(record: Inode, named: Inode) -> Inode:
    """Returns a record with the name that another one of the file has. Changes `record`."""
    record.nlink, record.parent, record.name = named.nlink, named.parent, named.name
    record.ctime_ns = max(record.ctime_ns, named.ctime_ns)
    return record


def loses_name(before: Inode, theirs: Inode) -> bool:
    """Returns whether a file that another one replaced here, when its record was `before`, is to
    lose its name at the server too, where its record is `theirs` now: not if it has another one, or
    several, or none."""
    return theirs.nlink == 1 and place_of(theirs) == place_of(before)


def without_name(record: Inode) -> Inode:
    """Returns the record of a file that lost its last name. Changes `record`."""
    record.nlink, record.parent = 0, 0
    return record
