"""`kvfs`: the group of commands, and the translation of their errors."""

import sys
import traceback
from typing import Final

import click

from cli.group import LazyGroup
from cli.presentation import exits
from kvfs.base.errors import KvfsError
from kvfs.base.version import VERSION

COMMANDS: Final = {
    "up": "cli.commands.service.up",
    "down": "cli.commands.service.down",
    "setup": "cli.commands.service.setup",
    "restart": "cli.commands.service.restart",
    "status": "cli.commands.service.status",
    "doctor": "cli.commands.service.doctor",
    "mount": "cli.commands.service.mount",
    "umount": "cli.commands.service.mount:umount",
    "ls": "cli.commands.files.stat:ls",
    "stat": "cli.commands.files.stat",
    "put": "cli.commands.files.put",
    "get": "cli.commands.files.put:get",
    "rm": "cli.commands.files.rm",
    "import": "cli.commands.files.import_export:import_",
    "export": "cli.commands.files.import_export:export",
    "where": "cli.commands.files.where",
    "prefetch": "cli.commands.files.jobs:prefetch",
    "replicate": "cli.commands.files.jobs:replicate",
    "backing": "cli.commands.files.backing",
    "model": "cli.commands.models.model",
    "bench": "cli.commands.models.model:bench",
    "namespace": "cli.commands.admin.namespace",
    "s3": "cli.commands.admin.s3",
    "nfs": "cli.commands.admin.nfs",
    "node": "cli.commands.admin.nodes",
    "config": "cli.commands.admin.config",
    "fsck": "cli.commands.upkeep.fsck",
    "scrub": "cli.commands.upkeep.scrub",
    "quarantine": "cli.commands.upkeep.quarantine",
    "rebuild": "cli.commands.upkeep.rebuild",
    "engine": "cli.commands.upkeep.engine",
    "backup": "cli.commands.upkeep.backup",
    "upgrade": "cli.commands.upkeep.upgrade",
    "support-bundle": "cli.commands.upkeep.support_bundle",
    "completion": "cli.commands.admin.completion",
}


@click.group(
    cls=LazyGroup,
    modules=COMMANDS,
    epilog=exits.HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, prog_name="kvfs", message="%(prog)s %(version)s")
def group() -> None:
    """KVFS: a filesystem for LLM inference. Every prefix block is a file, at the speed of the disk.

    Settings come from one TOML file, environment variables KVFS_<KEY> and flags, in rising order;
    `kvfs config` shows them. Paths within KVFS are written /NAMESPACE/NAME...
    """


def run(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code. Errors of the core become one line and an exit
    code. Raises KeyboardInterrupt, and SystemExit with an exit code."""
    try:
        code = group.main(arguments, prog_name="kvfs", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BrokenPipeError:
        # The reader of our output has gone (`kvfs ls | head`): nothing is wrong.
        sys.stderr.close()
        code = 0
    except (KvfsError, OSError) as error:
        exits.fail(error)
    except Exception:
        traceback.print_exc()
        print("kvfs: this is a bug in KVFS; please report what is above", file=sys.stderr)
        code = exits.BUG
    return code if isinstance(code, int) else 0
