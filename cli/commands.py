"""`kvfs`: the group of commands, and what becomes of their errors."""

import sys
import traceback
from typing import Final

import click

from cli import exits
from cli.group import LazyGroup
from kvfs.base.errors import KvfsError
from kvfs.base.version import VERSION

COMMANDS: Final = {
    "up": "cli.up",
    "down": "cli.down",
    "status": "cli.status",
    "doctor": "cli.doctor",
    "mount": "cli.mount",
    "umount": "cli.umount",
    "ls": "cli.ls",
    "stat": "cli.stat",
    "put": "cli.put",
    "get": "cli.get",
    "rm": "cli.rm",
    "import": "cli.import_",
    "export": "cli.export",
    "where": "cli.where",
    "prefetch": "cli.prefetch",
    "replicate": "cli.replicate",
    "backing": "cli.backing",
    "model": "cli.model",
    "bench": "cli.bench",
    "namespace": "cli.namespace",
    "s3": "cli.s3",
    "nfs": "cli.nfs",
    "node": "cli.nodes",
    "config": "cli.config",
    "fsck": "cli.fsck",
    "scrub": "cli.scrub",
    "quarantine": "cli.quarantine",
    "rebuild": "cli.rebuild",
    "engine": "cli.engine",
    "completion": "cli.completion",
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
    """The exit code of a command. Errors of the core become one line and an exit code. Raises
    KeyboardInterrupt, and SystemExit with an exit code."""
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
