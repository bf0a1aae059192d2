"""Tests that need a GPU: an NVIDIA one, its driver, and a torch with CUDA. Each is skipped without,
saying what is missing.

In a checkout: `./dev python -m pip install torch kvikio-cu13`, then `./dev test tests/gpu`. On a
machine whose image brings torch, put what else is needed into a directory SITE

    pip install --no-deps --target SITE msgspec lmdb trio outcome sniffio sortedcontainers attrs
    pip install --no-deps --target SITE xxhash httptools kvikio-cu13 libkvikio-cu13 rapids-logger
    export PYTHONPATH=SITE

and run, in this order, so that what may hang has an end and comes late

    export KVIKIO_COMPAT_MODE=OFF
    timeout 20 python3 -c 'import kvikio; kvikio.CuFile("/etc/passwd").close()'; echo $?
    unset KVIKIO_COMPAT_MODE
    python3 -m pytest tests/gpu -k "not kvikio and not cufile"
    timeout 300 python3 -m pytest tests/gpu -k "kvikio or cufile"
    python3 -m benchmarks.gpu --quick

(124 of the first: cuFile does not come back there, which `kvfs doctor` should say too. Where the
image lacks cuda-pathfinder it is needed as well: without it libkvikio.so is not found.)"""

import warnings
from collections.abc import Iterator

import pytest

from gds.probe.capability import probe


def missing() -> str:
    """Why nothing here can run; empty where it can."""
    machine = probe()
    if not machine.cuda.gpus:
        return f"no GPU: {machine.cuda.reason}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch

            can = torch.cuda.is_available()
    except ImportError as error:
        return f"no torch: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return "" if can else "torch finds no GPU that it can use"


@pytest.fixture(scope="session")
def why_not() -> str:
    return missing()


@pytest.fixture(autouse=True)
def _gpu(why_not: str) -> Iterator[None]:
    """Skips; else memory that a test left behind is given back after it."""
    if why_not:
        pytest.skip(why_not)
    import torch

    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
