"""`mount.kvfs`: the helper that mount(8) and systemd call for `mount -t kvfs STORE DIRECTORY -o
OPTIONS` and for lines of /etc/fstab of this type.

The node of the store is started in the background if none runs, with the options as its settings;
one that runs without a mount mounts. The mount may be there already: `mount -a` does not see that
it is the same, as the kernel's table names no store. umount(8) needs no helper: the node goes on.
"""

import os
import sys
import traceback
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from cli import hidden_passwords, interrupts, mount_options, node_requests, settings_options
from cli.presentation import exits
from kvfs.base.config import Config
from kvfs.base.control import NoNode
from kvfs.base.errors import Busy, ConfigError, Invalid, KvfsError, NotSupported

_WRONG_CALL: Final = 1
_BUG: Final = 4
_FAILURE: Final = 32
"""Exit codes of mount(8)."""


def main() -> NoReturn:
    """Runs the helper, and ends with an exit code of mount(8)."""
    interrupts.handle_by(interrupts.end)
    hidden_passwords.hide()
    sys.exit(run())


def run(arguments: list[str] | None = None) -> int:
    """Mounts; returns the exit code. An error is one line."""
    try:
        command.main(arguments, prog_name="mount.kvfs", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return _WRONG_CALL
    except (ConfigError, Invalid, NotSupported) as error:
        return _refuse(error, _WRONG_CALL)
    except (KvfsError, OSError) as error:
        return _refuse(error, _FAILURE)
    except Exception:
        traceback.print_exc()
        return _BUG
    return 0


def _refuse(error: Exception, code: int) -> int:
    print(f"mount.kvfs: {exits.describe(error)}", file=sys.stderr)
    return code


@click.command("mount.kvfs", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("-o", "options", default="", metavar="OPTIONS", help="Settings, as KEY=VALUE,...")
@click.option("-s", "sloppy", is_flag=True, help="Ignore unknown options.")
@click.option("-f", "fake", is_flag=True, help="Check the options; mount nothing.")
@click.option("-n", is_flag=True, expose_value=False, help="Ignored.")
@click.option("-v", is_flag=True, expose_value=False, help="Ignored.")
@click.option("-t", "kind", metavar="TYPE", expose_value=False, help="Ignored.")
def command(store: str, directory: Path, options: str, sloppy: bool, fake: bool) -> None:
    """Mount the node of the directory STORE at DIRECTORY; start it if none runs.

    Options are the settings of `kvfs up` (capacity=400GiB, s3=off, nosuid; a list is given by
    repeating, or by config=FILE), and those that mount(8) and systemd heed themselves (_netdev,
    nofail, x-systemd.*).
    """
    if not os.path.isabs(store):
        raise Invalid(f"'{store}' is no store: name its directory, from /")
    words = mount_options.flags(options, sloppy=sloppy)
    place = ["--store", store, "--mount", str(directory.absolute())]
    # Imported here, as `kvfs` does it.
    from cli.commands.service import up

    found = up.command.make_context("up", [*place, *words]).params
    config = settings_options.resolve(
        found["config_file"], **{name: found[name] for name in settings_options.NAMES}
    )
    if fake:
        return
    try:
        status = node_requests.ask(config, "status")
    except NoNode:
        up.command.main([*place, "--daemon", *words], prog_name="kvfs up", standalone_mode=False)
        return
    _mount_running(config, status)


def _mount_running(config: Config, status: dict[str, Any]) -> None:
    """Has a running node mount, unless it does so there. Raises Busy, and what the node raises."""
    mount = status["mount"]
    if mount is None:
        wanted = {"mountpoint": str(config.mount)}
        node_requests.ask(config, "mount", wanted, deadline_s=node_requests.MOUNT_DEADLINE_S)
    elif Path(mount["mountpoint"]) != config.mount:
        raise Busy(
            f"the node on {config.store} is mounted at {mount['mountpoint']}: it has one mount"
        )


if __name__ == "__main__":
    main()
