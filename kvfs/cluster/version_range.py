"""The versions of KVFS that work together. No I/O."""

from kvfs.base.errors import NotSupported
from kvfs.base.version import PROTOCOL, VERSION


def check(protocol: int, version: str, *, who: str) -> None:
    """Checks that a node that speaks `protocol` works with this one; `who` names it. Raises
    NotSupported, with both versions."""
    if abs(protocol - PROTOCOL) <= 1:
        return
    older = who if protocol < PROTOCOL else "this node"
    raise NotSupported(
        f"{who} runs KVFS {version} (protocol {protocol}), this node {VERSION} (protocol"
        f" {PROTOCOL}): they may be one protocol apart; upgrade {older}"
    )
