"""The meaning of a server's refusals: which ones pass by themselves, and the errors for the others.
No I/O."""

from typing import Final

from kvfs.base.errors import Invalid, KvfsError, NoSpace, NotSupported, Unavailable

PASSING: Final = (
    *("OOM", "MISCONF", "MASTERDOWN", "NOREPLICAS", "UNKILLABLE", "BUSY", "UNBLOCKED"),
    *("LOADING", "READONLY", "CLUSTERDOWN", "TRYAGAIN"),
)
"""The beginnings of refusals that pass when the server is asked again, later."""
ELSEWHERE: Final = ("READONLY", "CLUSTERDOWN", "MASTERDOWN")
"""Refusals after which another server may be the right one."""
_DENIED: Final = ("NOAUTH", "WRONGPASS", "NOPERM")
_STRANGER: Final = ("invalid password", "unauthenticated")
"""Refusals of strangers; the second is for a request of more than ten words, which a server refuses
unread."""


def said(text: str) -> str:
    """Returns the server's own words, which servers before 7.0 wrap into the error of a script."""
    _, _, within = text.rpartition(": -") if text.startswith("Error running script") else ("",) * 3
    return within or text


def is_passing(text: str) -> bool:
    return said(text).startswith(PASSING)


def is_full(text: str) -> bool:
    """Returns whether the server has no memory left for the request, of which it did nothing."""
    return said(text).startswith("OOM")


def full(shown: str) -> NoSpace:
    return NoSpace(
        f"the memory of the engine {shown} is full: remove files, or raise its maxmemory"
    )


def raised(text: str, shown: str) -> KvfsError:
    """Returns the error for a refusal by the engine `shown` that does not pass."""
    inner = said(text)
    if inner.startswith(_DENIED) or "AUTH" in inner[:24] or any(w in inner for w in _STRANGER):
        return denied(inner, shown)
    if "cluster support disabled" in inner:
        return Invalid(f"{shown} is not a server of a cluster: its URL starts with redis://")
    if "unknown command" in inner or "wrong number of arguments" in inner:
        return lacking(inner, shown)
    return Unavailable(f"the engine {shown} refused a request: {inner}")


def denied(text: str, shown: str) -> Invalid:
    """Returns the error for a wrong user or password."""
    return Invalid(
        f"the engine {shown} refuses us ({text}): name a user and password in the URL that may run"
        " scripts on these keys"
    )


def lacking(text: str, shown: str) -> NotSupported:
    """Returns the error for a server that is too old."""
    return NotSupported(
        f"the engine {shown} lacks a command ({text}): Redis 6.2 or newer, or Valkey, is needed"
    )


def untrusted(text: str, shown: str) -> Invalid:
    """Returns the error for a server whose certificate is not trusted."""
    return Invalid(
        f"the engine {shown} shows a certificate that we do not trust ({text}): name the file of"
        " its authority in the URL, ?ca=FILE"
    )


def unanswered(text: str, shown: str, deadline_s: float) -> Unavailable:
    """Returns the error for a server that did not answer, or whose refusal did not pass."""
    return Unavailable(
        f"the engine {shown} did not answer within {deadline_s:g} s ({text}): see that it runs,"
        " and its log"
    )


def is_of(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Returns whether an error, or one that it came from, is of a kind."""
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__
    return False
