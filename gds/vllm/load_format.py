"""The loader of vLLM's load format `kvfs`.

vLLM's models cut a rank's part from whole tensors themselves, so each rank reads all of them. With
several ranks, these reads go through the page cache: from the disk once per host, however long
after each other the ranks start.
"""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import torch
from vllm.model_executor.model_loader import BaseModelLoader

from gds.load import iter_tensors

_SETTINGS: Final = frozenset({"device"})


class KvfsModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads safetensors checkpoints from a directory, which need not be on a mount of KVFS.

    `--model-loader-extra-config '{"device": "cuda"}'`: vLLM gets tensors in that memory; else in
    the CPU's, from where vLLM copies them."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        settings = load_config.model_loader_extra_config or {}
        if unknown := set(settings) - _SETTINGS:
            raise ValueError(f"load format kvfs knows no settings {sorted(unknown)}")
        self._device = str(settings.get("device", "cpu"))

    def download_model(self, model_config: Any) -> None:
        """Downloads nothing. Raises ValueError if the model is no directory."""
        _directory(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Gives the model all tensors, as they arrive. Raises ValueError, and what
        `gds.iter_tensors` raises."""
        if getattr(model, "secondary_weights", ()):
            raise ValueError(
                f"{type(model).__name__} has weights from a second place, which load format kvfs "
                "does not read: use --load-format auto"
            )
        weights = self._weights(_files(_directory(model_config), model))
        with contextlib.closing(weights):
            model.load_weights(weights)

    def _weights(self, paths: list[Path]) -> Generator[tuple[str, torch.Tensor], None, None]:
        rank, ranks = _rank()
        return iter_tensors(paths, self._device, rank, ranks, plan={})


def _directory(model_config: Any) -> Path:
    # Another place for the weights alone, where vLLM was given one.
    name = getattr(model_config, "model_weights", "") or model_config.model
    if not os.path.isdir(name):
        raise ValueError(
            f"{name} is no directory: load format kvfs reads checkpoints that are there, as on a "
            "mount of KVFS"
        )
    return Path(name)


def _files(directory: Path, model: Any) -> list[Path]:
    """Returns the files that the model says it wants; else those that `gds` finds in a
    directory."""
    for pattern in getattr(model, "allow_patterns_overrides", None) or ():
        if found := sorted(directory.glob(pattern)):
            return found
    return [directory]


def _rank() -> tuple[int, int]:
    """Returns this rank's number, and how many there are."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
