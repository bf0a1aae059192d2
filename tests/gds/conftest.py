"""torch for these tests: from the environment that the real clients have anyway, behind all that
the project's own has, so that nothing else is taken from there."""

import sys
import warnings

import pytest

from tests.integration.environments import lmcache


@pytest.fixture(scope="session", autouse=True)
def _torch() -> None:
    """torch and safetensors can be imported from here on."""
    interpreter = lmcache()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sys.path.append(str(interpreter.parent.parent / "lib" / version / "site-packages"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch  # noqa: F401
