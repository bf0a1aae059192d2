"""KVFS: a filesystem for LLM inference. `Client` and `AsyncClient` are its Python API."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfs.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: the command line and the daemon start without it.
    if name in __all__:
        from kvfs import client

        return getattr(client, name)
    raise AttributeError(f"module 'kvfs' has no attribute {name!r}")
