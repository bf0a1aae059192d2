"""Requests to the running node of a store."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvfs.base import control
from kvfs.base.config import Config
from kvfs.datastore.layout import is_locked

MOUNT_DEADLINE_S: Final = 30.0
COPYING_S: Final = 86_400.0
"""Deadline of requests that copy metadata between shards."""


def socket_of(config: Config) -> Path:
    """Returns the control socket of the node that runs on the store, if one does."""
    return config.store / "run" / "control.sock"


def ask(
    config: Config,
    method: str,
    params: Mapping[str, object] | None = None,
    deadline_s: float = control.DEADLINE_S,
) -> Any:
    """Returns the node's answer. Raises Unavailable when none runs, or what the node raised; NoNode
    also tells of a node that has begun to start that it waits for something."""
    try:
        return control.call(socket_of(config), method, params, deadline_s)
    except control.NoNode:
        if not _is_starting(config):
            raise
    raise control.NoNode(
        f"the node on {config.store} has not started yet: its log, {config.store}/run/kvfs.log,"
        " says what it waits for; `kvfs down` ends it"
    )


def _is_starting(config: Config) -> bool:
    try:
        return is_locked(config.store / "lock")
    except OSError:
        return False
