"""`kvfs up`: starts a node, mounts it and serves it over S3, in the foreground or detached."""

import errno
import gc
import json
import logging
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from cli import node_requests, settings_options
from cli.commands.service.fresh_start import Fresh
from cli.presentation import exits
from gateway import service_manager
from gateway.node_start import HANDED_OVER, Start, Successor
from kvfs.base import log_lines
from kvfs.base.config import Config
from kvfs.base.errors import Corrupt, Unavailable
from kvfs.base.units import format_size
from kvfs.base.version import VERSION

if TYPE_CHECKING:
    import socket

    from s3api.auth.credentials import Credentials

log = logging.getLogger(__name__)
_SILENT_S: Final = 30.0
"""A start that takes longer is waiting for something, and says so."""
_REPLACED_S: Final = 60.0
"""Longest wait for the end of the node before."""
_LOG_LIMIT_BYTES: Final = 10 << 20
_FASTEST: Final = "the kernel reads and writes the data files itself"


@click.command("up")
@settings_options.options(*settings_options.NAMES)
@click.option(
    "--no-passthrough",
    is_flag=True,
    help="Do not use kernel passthrough (the same as --mode relay).",
)
@click.option("--no-mount", is_flag=True, help="Run the node without a mount; see `kvfs mount`.")
@click.option(
    "--daemon", is_flag=True, help="Run in the background; return when mount and S3 answer."
)
@click.option("--no-s3", is_flag=True, help="Do not serve S3 (the same as --s3 off).")
@click.option(
    "--replace",
    is_flag=True,
    help="Take the place of the node that runs on the store: its S3 port stays open meanwhile.",
)
@click.option(
    "--take-over",
    is_flag=True,
    hidden=True,
    help="Go on with the mount that waits for another daemon, or do nothing.",
)
@click.option(
    "--hand-over", is_flag=True, hidden=True, help="Ask the running daemon for its mount before."
)
def command(
    config_file: Path | None,
    take_over: bool,
    hand_over: bool,
    no_passthrough: bool,
    no_mount: bool,
    no_s3: bool,
    replace: bool,
    daemon: bool,
    **flags: object,
) -> None:
    """Start a node on a store, mount it and serve it over S3.

    SIGTERM and ^C unmount and stop it.
    """
    if no_s3:
        if flags["s3"] not in (None, "off"):
            raise click.UsageError(f"--no-s3 does not go with --s3 {flags['s3']}")
        flags["s3"] = "off"
    if no_passthrough:
        if flags["mode"] not in (None, "relay"):
            raise click.UsageError(f"--no-passthrough does not go with --mode {flags['mode']}")
        flags["mode"] = "relay"
    config = settings_options.resolve(config_file, **flags)
    if no_mount and config.nfs != "off":
        raise click.UsageError("NFS is served over the mount: --nfs does not go with --no-mount")
    _refuse_place(config, mounted=not no_mount)
    fresh = Fresh(config, mounted=not no_mount)
    start = Start(mounted=not no_mount, replaces=replace, takes_over=take_over, asks=hand_over)
    if daemon:
        _start_detached(config, fresh, start)
    else:
        start = start._replace(is_service=service_manager.is_there(os.environ))
        shown = _log_ready if config.log_format == "json" else _present
        if _run(config, fresh, start, on_ready=shown) and start.is_service:
            sys.exit(HANDED_OVER)


def _refuse_place(config: Config, *, mounted: bool) -> None:
    """Finds obstacles to a new store before one is made. With an old store the mountpoint comes
    after the lock: a second `up` is told which process holds the store."""
    from gateway import mountpoint

    mountpoint.refuse_nested(config.store)
    mountpoint.end_dead(config.mount, config.store / "lock")
    if mounted and not os.path.exists(config.store / "format"):
        mountpoint.check(config.mount, config.store)


OnReady = Callable[[dict[str, Any], str], None]
"""Gets the status, and a text that must be shown once and logged nowhere (empty: none)."""


def _run(config: Config, fresh: Fresh, start: Start, *, on_ready: OnReady) -> bool:
    """Runs the node; returns whether it leaves its mount to the next daemon."""
    # Imported here: `--help` and a daemon's parent need neither trio nor the engine.
    import trio

    from gateway import service
    from s3api.server.companion import S3Serving, is_wanted

    os.environ[log_lines.VARIABLE] = config.log_format  # of the children too
    log_lines.begin(config.log_level)
    companions: list[service.Companion] = []
    if config.nfs != "off":
        from gateway.nfs.serving import NfsServing as NfsServing

        companions.append(NfsServing(config))
    if config.backup and config.backup_every_s:
        from cli.backup_schedule import BackupSchedule

        companions.append(BackupSchedule(config))
    serving = S3Serving(config, _take_place(config, start))
    if is_wanted(config):
        companions.insert(0, serving)

    def ready(status: dict[str, Any]) -> None:
        gc.freeze()  # what is there by now stays: no collection looks at it again
        fresh.started()
        on_ready(status, welcome(config, serving.first))

    with fresh.kept_if_started():
        try:
            return trio.run(
                lambda: service.run(config, start, on_ready=ready, companions=companions)
            )
        except BaseExceptionGroup as group:
            raise _first(group) from group


def _take_place(config: Config, start: Start) -> "list[socket.socket] | None":
    """Has the node that runs on the store end, or hand its mount over, if this one begins in its
    place; returns its S3 listeners. To be called when all that takes time is done. Raises what the
    node raises, Unavailable when it does not go in time."""
    if not (start.replaces or start.asks):
        return None
    from cli.commands.service import down
    from s3api.server import listener_passing

    listeners = listener_passing.take(config)
    if start.asks:
        node_requests.ask(config, "hand-over")
        down.wait_for_end(config, _REPLACED_S)
    else:
        down.stop(config, _REPLACED_S, ends_waiting=False)  # this node goes on with it
    return listeners


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the error that ended the service: of several, the first is shown and all are in the
    log."""
    if len(group.exceptions) > 1:
        log.error("several parts failed", exc_info=group)
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _present(status: dict[str, Any], once: str) -> None:
    """Shows it to the caller. The output of a service is a log, where no secret may be."""
    if once and not sys.stdout.isatty():
        where = f"{status['store']['path']}/s3-credentials"
        once = f"The S3 API has a first user, admin, whose keys are in {where}\n"
    _report(status, once)


def _log_ready(status: dict[str, Any], once: str) -> None:
    """Logs it: who reads lines with fields gets no other lines."""
    for line in summary(status).splitlines():
        log.info("%s", line)
    if once:
        where = f"{status['store']['path']}/s3-credentials"
        log.info("the S3 API has a first user, admin, whose keys are in %s", where)


def _report(status: dict[str, Any], once: str) -> None:
    sys.stdout.write(summary(status) + once)
    sys.stdout.flush()


def welcome(config: Config, first: "Credentials | None") -> str:
    """Returns the key pair that the first start made, for people."""
    if first is None:
        return ""
    return (
        f"\nThe S3 API has a first user, admin, who may do everything. This is shown once:\n"
        f"  access key  {first.access_key}\n"
        f"  secret      {first.secret}\n"
        f"It is also in {config.store}/s3-credentials; "
        f"`kvfs s3 env --store {config.store}` sets a shell up.\n"
    )


def summary(status: dict[str, Any]) -> str:
    """Returns the start-up summary: the addresses of all services, and which fast path is active
    and why."""
    from gateway.mountpoint import hidden

    store, engine, mount = status["store"], status["engine"], status["mount"]
    rows = [
        ("mount", mount["mountpoint"] if mount else "none; `kvfs mount DIR` makes one"),
        *([("hidden", hidden(mount["mountpoint"], mount["hides"]))] if _hides(mount) else []),
        ("path", f"{mount['mode']}: {mount['reason'] or _FASTEST}" if mount else "none"),
        ("store", f"{store['path']} ({store['filesystem']})"),
        (
            "space",
            f"{format_size(store['free_bytes'])} free of a limit of "
            f"{format_size(store['capacity_bytes'])}",
        ),
        ("engine", f"{engine['name']}: {engine['durability']}"),
        *_served(status),
        ("start", f"{status['start_s']:.2f} s, process {status['pid']}"),
    ]
    lines = [f"kvfs {VERSION} is up"] + [f"  {name:<8}{text}" for name, text in rows]
    return "\n".join(lines) + "\n"


def _hides(mount: dict[str, Any] | None) -> bool:
    return bool(mount and mount.get("hides"))  # a node of an older version does not say


def _served(status: dict[str, Any]) -> list[tuple[str, str]]:
    s3, admin = status.get("s3"), status.get("admin")
    rows = []
    if s3 is not None:
        rows.append(("s3", f"{s3['endpoint']} ({len(s3['workers'])} workers)"))
    if (nfs := status.get("nfs")) is not None:
        exported = ", ".join(f"/{each['namespace']}" for each in nfs["exports"])
        where = f"{nfs['endpoint']} (version {', '.join(nfs['versions'])})"
        rows.append(("nfs", f"{where}: {exported or 'nothing is exported, see kvfs nfs export'}"))
    if admin is not None:
        rows.append(("admin", f"{admin['endpoint']}/metrics, /health/live, /health/ready"))
    return rows


# ---- detached


def _start_detached(config: Config, fresh: Fresh, start: Start) -> None:
    """Forks, lets the child report, and ends with its report.

    It forks rather than starting a new interpreter, so that imported modules need not be imported
    again.
    """
    with fresh.kept_if_started():
        log_path, output = _open_log(config)
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_daemon(config, fresh, start, writer, output)
    os.close(writer)
    os.close(output)
    with open(reader, "rb") as pipe:
        if not select.select([pipe], [], [], _SILENT_S)[0]:
            print(f"kvfs: still starting, its log is {log_path}", file=sys.stderr)
        report = pipe.read()
    if not report:
        raise Unavailable(f"the node died while it started; its log is {log_path}")
    answer = json.loads(report)
    if "error" in answer:
        os.waitpid(child, 0)
        print(f"kvfs: {answer['error']}", file=sys.stderr)
        sys.exit(answer["code"])
    _report(answer["status"], answer["once"])


def _be_daemon(config: Config, fresh: Fresh, start: Start, writer: int, output: int) -> NoReturn:
    """Runs the child's life. Never returns into the parent's code."""
    reported = False

    def ready(status: dict[str, Any], once: str) -> None:
        _log_ready(status, once)
        report({"status": status, "once": once})

    def report(answer: dict[str, Any]) -> None:
        nonlocal reported
        os.write(writer, json.dumps(answer).encode())
        os.close(writer)
        reported = True

    code = 0
    try:
        started_in = _here(config)
        os.setsid()
        os.chdir("/")
        _redirect(output)
        _close_others(writer)
        start = start._replace(successor=Successor(sys.argv[1:], started_in))
        _run(config, fresh, start, on_ready=ready)
    except BaseException as error:
        code = exits.exit_code(error)
        log.error("the node stopped: %s", exits.describe(error), exc_info=code == exits.BUG)
        if not reported:
            report({"error": exits.describe(error), "code": code})
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)


def _here(config: Config) -> str:
    """Returns the directory from which relative paths of the command line count; not one that the
    mount hides: whoever starts the next daemon there would wait for it."""
    mount = Path(os.path.realpath(config.mount.parent)) / config.mount.name
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed
        return "/"
    return "/" if Path(here).is_relative_to(mount) else here


def _open_log(config: Config) -> tuple[Path, int]:
    """Opens the log of the store, made if missing: returns its path and a descriptor.

    Runs before the fork: the caller is told of a store that cannot be written. Raises ReadOnly,
    NoSpace, Invalid, Corrupt (the disk fails).
    """
    from kvfs.datastore import layout

    try:
        path = layout.create_store(config.store).run / "kvfs.log"
        if path.exists() and path.stat().st_size > _LOG_LIMIT_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.EIO:
            raise Corrupt(
                f"the disk of the store {config.store} fails ({error.strerror}): look into the "
                "kernel's log (dmesg), then unmount it, check it and mount it again"
            ) from error
        raise layout.translate(error, config.store) from error


def _redirect(output: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)


def _close_others(kept: int) -> None:
    """Closes the descriptors that the caller had open beside the standard streams: it may be
    waiting for their end."""
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
