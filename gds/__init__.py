"""Loads of model weights: from the data files behind KVFS, and from any other, into tensors.

What needs torch is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gds.loading import iter_tensors, load_file, load_model

__all__ = ["iter_tensors", "load_file", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gds import loading

    return getattr(loading, name)
