"""Loads of model weights: from the data files behind KVFS, and from any other, into tensors; and KV
blocks into and out of buffers.

What needs torch is imported when it is first asked for.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gds.blocks import Block, Outcome, read_blocks, write_blocks
    from gds.loading import iter_tensors, load_file, load_model
    from gds.opened import safe_open
    from gds.saving import save_file
    from gds.stages import Stages
    from gds.ways import Taken

__all__ = [
    "Block",
    "Outcome",
    "Stages",
    "Taken",
    "iter_tensors",
    "load_file",
    "load_model",
    "read_blocks",
    "safe_open",
    "save_file",
    "write_blocks",
]
_MODULES: Final = {
    "blocks": ("Block", "Outcome", "read_blocks", "write_blocks"),
    "loading": ("iter_tensors", "load_file", "load_model"),
    "opened": ("safe_open",),
    "saving": ("save_file",),
    "stages": ("Stages",),
    "ways": ("Taken",),
}


NO_TORCH: Final = (
    "loading needs torch: pip install 'kvfs[torch]' "
    "(in a checkout: ./dev python -m pip install torch)"
)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(_imported(f"gds.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(module: str) -> ModuleType:
    """Raises ImportError, with the remedy where torch is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(NO_TORCH, name="torch") from None
