"""A line of `kvfs doctor` on one accelerated path."""

import msgspec


class DoctorLine(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerated path."""

    name: str
    available: bool
    active: bool | None
    """None: not known, because no node runs."""
    reason: str
    """The basis of the path, or the reason for its absence and what is done instead."""
    remedy: str = ""
    """How to get it."""


def show(line: DoctorLine) -> str:
    """Returns the line for people."""
    state = "available" if line.available else "missing"
    if line.active is not None:
        state = "active" if line.active else f"{state}, not active"
    remedy = f" -> {line.remedy}" if line.remedy else ""
    return f"{line.name:<18}{state:<23}{line.reason}{remedy}"
