"""`kvfs backing`: the data files behind paths, leased to programs that do not read through the
mount.

A lease is an open descriptor, so it ends with the process that has it, however that ends. A command
takes the place of this process and inherits the descriptors: no other process has to stay.
"""

import contextlib
import json
import math
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click

from cli import settings_options
from cli.commands.files import mounted_path
from kvfs.base.config import Config
from kvfs.base.errors import Invalid
from kvfs.client.mount.backing_file import Leased, lease

_HERE: Final = "{}"
_CHUNK_BYTES: Final = 65536
_MOST_S: Final = 365 * 86_400.0


class _BeforeCommand(click.Command):
    """Keeps the arguments after the first `--` apart: a command with its own options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["command"] = args[at + 1 :]
        if at + 1 == len(args):
            ctx.fail("no command stands behind --")
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND [{}]...]"]


@click.command("backing", cls=_BeforeCommand)
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per path.")
@click.option("-0", "--null", "nulls", is_flag=True, help="End each name with NUL (xargs -0).")
@click.option(
    "--for",
    "duration_s",
    type=click.FloatRange(0, _MOST_S),
    metavar="SECONDS",
    help="Time to hold them; 0: only print, hold nothing.",
)
@settings_options.configured("store")
@click.pass_context
def command(
    context: click.Context,
    /,
    paths: tuple[str, ...],
    as_json: bool,
    nulls: bool,
    duration_s: float | None,
    config: Config,
) -> None:
    """Print the data files behind paths, and keep them there.

    For programs that open files by name and have no use for a mount: cuFile, GPUDirect Storage,
    O_DIRECT readers. PATH is a path on the mount, or within KVFS. Data on other nodes are fetched
    first. While a file is leased it is not evicted, and its data file keeps its name and content,
    even if the file is replaced or removed. A file that is open for writing is not leased. Only
    read data files, never write to them; nor write to a leased file on the mount, which would
    change its data file: replace it by a rename.

    \b
    kvfs backing PATH -- COMMAND --file {}    runs COMMAND; the lease ends with it
    kvfs backing PATH...                      prints, and holds until Ctrl-C, or SIGTERM
    kvfs backing PATH... --for 600            prints, and holds for ten minutes
    program | kvfs backing PATH...            holds until the pipe is closed

    Only the end of a pipe ends it: with </dev/null, as services have it, it holds until a signal
    ends it.

    {} stands for the data files; a command without it gets them as its last arguments.
    """
    wanted: list[str] = context.meta["command"]
    if wanted and (as_json or nulls or duration_s is not None):
        raise Invalid("--json, --null and --for go without a command: its lease ends with it")
    if duration_s is not None and math.isnan(duration_s):
        raise Invalid("--for nan: give seconds")
    if as_json and nulls:
        raise Invalid("--json and --null exclude each other")
    with lease([mounted_path.find(config, path) for path in paths]) as leased:
        if wanted:
            _become(wanted, leased)
        for path, each in zip(paths, leased, strict=True):
            click.echo(_shown(path, each, as_json), nl=not nulls)
            if nulls:
                click.echo("\0", nl=False)
        sys.stdout.flush()
        _hold(duration_s)


def _shown(path: str, leased: Leased, as_json: bool) -> str:
    if not as_json:
        return leased.name
    return json.dumps(
        {
            "path": path,
            "data_file": leased.name,
            "size_bytes": leased.size_bytes,
            "store": str(leased.store),
        }
    )


def _become(wanted: Sequence[str], leased: Sequence[Leased]) -> None:
    """Runs the command in this process's place. Raises Invalid, OSError."""
    arguments = _arguments(wanted, [each.name for each in leased])
    for each in leased:
        for fd in each.descriptors:
            os.set_inheritable(fd, True)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; commands do not
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606  a command of the user's own, no shell
    except OSError as error:
        raise OSError(error.errno, error.strerror, arguments[0]) from None


def _arguments(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the command with the data files in their places. Raises Invalid."""
    if not any(_HERE in each for each in wanted):
        return [*wanted, *names]
    found: list[str] = []
    for each in wanted:
        if each == _HERE:
            found += names
        elif _HERE in each and len(names) > 1:
            raise Invalid(f"'{each}' has room for one data file: there are {len(names)}")
        else:
            found.append(each.replace(_HERE, names[0]))
    return found


def _hold(duration_s: float | None) -> None:
    """Returns when the lease is over: by time, Ctrl-C, or the end of a pipe at standard input."""
    if duration_s == 0:
        return
    pipe = _is_pipe(sys.stdin)
    until = "until Ctrl-C" if duration_s is None else f"for {duration_s:g} s"
    with contextlib.suppress(KeyboardInterrupt):
        click.echo(f"held {until}{', or the end of standard input' if pipe else ''}", err=True)
        _wait(None if duration_s is None else time.monotonic() + duration_s, pipe)


def _wait(end: float | None, watches_input: bool) -> None:
    watched = [sys.stdin.fileno()] if watches_input else []
    while True:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            return
        ready, _, _ = select.select(watched, [], [], left)
        if ready and not os.read(ready[0], _CHUNK_BYTES):
            return


def _is_pipe(stream: Any) -> bool:
    """Returns whether another program has the other end, and may close it."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
