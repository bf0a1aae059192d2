"""Asking the running node of a store."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvfs import control
from kvfs.config import Config

MOUNT_DEADLINE_S: Final = 30.0


def socket_of(config: Config) -> Path:
    """The control socket of the node that runs on the store, if one does."""
    return config.store / "run" / "control.sock"


def ask(
    config: Config,
    method: str,
    params: Mapping[str, object] | None = None,
    deadline_s: float = control.DEADLINE_S,
) -> Any:
    """The node's answer. Raises Unavailable when none runs, or what the node raised."""
    return control.call(socket_of(config), method, params, deadline_s)
