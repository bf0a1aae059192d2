"""The caller of a request."""

from typing import NamedTuple


class Caller(NamedTuple):
    """The user and process that ask."""

    uid: int
    gid: int
    pid: int
