"""`kvfs setup`: makes a node a service of this machine.

For the same settings it writes the same again: a second call changes nothing. What others wrote it
leaves as it is.
"""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click
import msgspec

from cli import node_requests, settings_file, settings_options
from cli.commands.service import setup_checks, systemd_unit
from cli.commands.service.doctor_line import show
from kvfs.base import config as configuration
from kvfs.base import private_file
from kvfs.base.config import KEYS, SYSTEM_FILE, Config
from kvfs.base.errors import Exists, Invalid, KvfsError, NotFound, Unavailable
from kvfs.base.printable import without_passwords
from kvfs.meta.redis.location import parse

_SETTINGS: Final = tuple(name for name in settings_options.NAMES if name != "found")
"""Settings that may stand in a file for long: a cluster is founded once."""
_UNITS: Final = Path("/etc/systemd/system")
_PACKAGED_UNITS: Final = Path("/lib/systemd/system")
_MOUNT_HELPER: Final = Path("/sbin/mount.kvfs")
_SYSTEMD: Final = Path("/run/systemd/system")


class _Planned(msgspec.Struct, frozen=True):
    """A file to write, or a symbolic link to make."""

    path: Path
    content: str
    mode: int = 0o644
    is_link: bool = False

    def is_there(self) -> bool:
        """Returns whether it is as planned."""
        if self.is_link:
            return self.path.is_symlink() and os.readlink(self.path) == self.content
        return self.path.is_file() and self.path.read_text(errors="replace") == self.content

    def write(self) -> None:
        """Writes it in place of what is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.is_link:
            self._link()
        else:
            private_file.replace(self.path, self.content.encode(), mode=self.mode)

    def _link(self) -> None:
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(self.content)
        draft.replace(self.path)


@click.command("setup")
@settings_options.options(*_SETTINGS)
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Write below DIR, the root of another system, and check nothing here.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be written; change nothing.")
def command(config_file: Path | None, root: Path | None, dry_run: bool, **flags: object) -> None:
    """Make a node a service of this machine.

    Checks the machine, writes the settings given here into /etc/kvfs.toml (or --config) if there is
    no such file, a systemd unit, and the helper of `mount -t kvfs`. Starts nothing.
    """
    file = (config_file or SYSTEM_FILE).absolute()
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    config, written = _settings(_below(root, file), given)
    if root is None:
        _check(config, is_fatal=not dry_run)
    plan = [*written, *_service(config, file, root)]
    changed = [each for each in plan if _carry_out(each, dry_run)]
    if root is None and not dry_run:
        _tell_systemd(changed)


def _below(root: Path | None, path: Path) -> Path:
    """Returns where a file of the system lies. Raises Invalid: a link there leads out of it."""
    if root is None:
        return path
    below = root / path.relative_to("/")
    if not below.parent.resolve().is_relative_to(root.resolve()):
        raise Invalid(f"{below.parent} is {below.parent.resolve()}, out of {root}: chroot into it")
    return below


def _settings(file: Path, given: dict[str, object]) -> tuple[Config, list[_Planned]]:
    """Returns the settings of the service, and the file that is to be written for them: none if
    there is one, which says the same. The mount is to outlive upgrades unless what is given says
    otherwise. The environment is not the service's. Raises ConfigError, Exists, Invalid."""
    if not file.exists():
        config, _ = configuration.load(given, file=Path(os.devnull), environ={})
        if "takeover_s" not in given and config.mode != "libfuse":
            given = {**given, "takeover_s": systemd_unit.TAKEOVER_S}
            config, _ = configuration.load(given, file=Path(os.devnull), environ={})
        mode = 0o600 if _has_password(config) else 0o644
        return config, [_Planned(file, _file_text(config, given), mode)]
    config, _ = configuration.load(given, file=file, environ={})
    kept, _ = configuration.load({}, file=file, environ={})
    others = [f"--{name.replace('_', '-')}" for name in given if _differ(config, kept, name)]
    if others:
        raise Exists(f"{file} is there and says otherwise than {', '.join(others)}: edit it")
    click.echo(f"kept     {file}")
    return kept, []


def _differ(one: Config, other: Config, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def _file_text(config: Config, given: Iterable[str]) -> str:
    """Returns the settings as TOML. Raises Invalid: one cannot be written there."""
    values = config.as_dict()
    shown = [key for key in KEYS if key in ("store", "mount") or key in given]
    head = "# Settings of this machine's node; `kvfs config` prints all and where each comes from."
    text = "\n".join([head, *(settings_file.line(key, values[key]) for key in shown)]) + "\n"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"a setting is no text that a file can have: {error}") from error
    return text


def _has_password(config: Config) -> bool:
    return bool(config.engine) and parse(config.engine).password is not None


def _check(config: Config, *, is_fatal: bool) -> None:
    """Shows what the machine has. Raises Unavailable: a node could not start."""
    store = config.store
    while not store.is_dir():
        store = store.parent
    try:
        status = node_requests.ask(config, "status")
    except KvfsError:
        status = None
    lines = list(setup_checks.examine(config, store, status))
    for line in lines:
        click.echo(show(line))
    missing = setup_checks.obstacles(lines)
    if missing and is_fatal:
        raise Unavailable("no node can start here: " + "; ".join(each.reason for each in missing))


def _service(config: Config, file: Path, root: Path | None) -> list[_Planned]:
    """Returns the unit and the helper of mount(8). Raises NotFound, Exists."""
    scripts = Path(sys.prefix) / "bin"
    program, helper = scripts / "kvfs", scripts / "mount.kvfs"
    for each in (program, helper):
        if not each.exists():
            raise NotFound(f"{each} does not exist: install KVFS with pip, or its Debian package")
    text = systemd_unit.text(config, program, file)
    unit = _Planned(_below(root, _UNITS / systemd_unit.NAME), text)
    packaged = msgspec.structs.replace(unit, path=_below(root, _PACKAGED_UNITS / unit.path.name))
    if not unit.path.exists() and packaged.is_there():
        unit = packaged
    if unit.path.exists() and not unit.path.read_text("utf-8").startswith(systemd_unit.HEADER):
        raise Exists(f"{unit.path} is not from `kvfs setup`: move it away, or keep it")
    link = _Planned(_below(root, _MOUNT_HELPER), str(helper), is_link=True)
    if os.path.lexists(link.path) and not _is_helper(link.path):
        raise Exists(f"{link.path} is another program's: move it away")
    return [unit, link]


def _is_helper(path: Path) -> bool:
    """Returns whether it is a link to the helper of an installation, this or another."""
    return path.is_symlink() and Path(os.readlink(path)).name == _MOUNT_HELPER.name


def _carry_out(planned: _Planned, dry_run: bool) -> bool:
    """Returns whether it was changed."""
    if planned.is_there():
        click.echo(f"kept     {planned.path}")
        return False
    shown = f"{planned.path} -> {planned.content}" if planned.is_link else str(planned.path)
    if dry_run:
        click.echo(f"would write {shown}")
        if not planned.is_link:
            content = without_passwords(planned.content)
            click.echo("".join(f"    {line}\n" for line in content.splitlines()), nl=False)
        return False
    planned.write()
    click.echo(f"wrote    {shown}")
    return True


def _tell_systemd(changed: Iterable[_Planned]) -> None:
    if not _SYSTEMD.is_dir():
        click.echo("systemd does not run here: `kvfs up --daemon` starts the node")
        return
    if any(each.path.name == systemd_unit.NAME for each in changed):
        subprocess.run(["systemctl", "daemon-reload"], check=False)
        click.echo("ran      systemctl daemon-reload")
    click.echo(f"`systemctl enable --now {systemd_unit.NAME}` starts the node, at each boot too")
