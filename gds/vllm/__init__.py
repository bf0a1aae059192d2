"""vLLM's load format `kvfs`: `vllm serve /mnt/kvfs/models/llama --load-format kvfs`.

vLLM finds `register` by its entry point, in each of its processes.
"""

import functools


@functools.cache
def register() -> None:
    """Makes vLLM know the format, once per process however often it is called."""
    from vllm.model_executor.model_loader import register_model_loader

    from gds.vllm.load_format import KvfsModelLoader

    register_model_loader("kvfs")(KvfsModelLoader)
