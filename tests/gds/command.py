"""The command line with torch: from another environment, behind all that this one has."""

import os
import sysconfig

from tests.integration.clients.environments import lmcache
from tests.integration.harness import ROOT


def with_torch(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """A command of `kvfs`, and its environment variables."""
    ours = sysconfig.get_path("purelib")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ours}",
        "KVFS_CONFIG": os.devnull,
        "PYTHONWARNINGS": "ignore",
    }
    return [str(lmcache()), "-c", "from cli.main import main; main()", *arguments], environment
