"""Loads of model weights, from the data files behind KVFS and from any other, into tensors; and KV
blocks into and out of buffers.

Names that need torch are imported when they are first asked for.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gds.blocks import Block, Outcome, read_blocks, write_blocks
    from gds.io.timings import Stages
    from gds.load import iter_tensors, load_file, load_model
    from gds.open_file import safe_open
    from gds.probe.io_path import Taken
    from gds.save import save_file

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
    "load": ("iter_tensors", "load_file", "load_model"),
    "open_file": ("safe_open",),
    "save": ("save_file",),
    "io.timings": ("Stages",),
    "probe.io_path": ("Taken",),
}


NO_TORCH: Final = (
    "loading needs torch: pip install 'kvfs[torch]' "
    "(in a checkout: ./dev python -m pip install torch)"
)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            found = globals()[name] = getattr(_imported(f"gds.{module}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(module: str) -> ModuleType:
    """Raises ImportError, with the remedy where torch is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(NO_TORCH, name="torch") from None
