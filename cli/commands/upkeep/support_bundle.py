"""`kvfs support-bundle`: one archive with what somebody who helps needs to know of a node, and no
secret.

A part that cannot be had is no obstacle: the archive says what is missing, and why. Each text goes
through `kvfs.admin.redaction` before it is written.
"""

import contextlib
import http.client
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import click
import msgspec

from cli import node_requests, settings_options
from kvfs.admin.redaction import Redactor
from kvfs.base.config import Config, default_node_name
from kvfs.base.errors import Exists, Invalid, KvfsError
from kvfs.base.version import VERSION
from kvfs.datastore.kernel.ownership import require_directory, trusted
from kvfs.meta.redis.location import parse

_LOG_TAIL_BYTES: Final = 8 << 20
_JOURNAL_LINES: Final = 20_000
_DEADLINE_S: Final = 20.0
_SMALL_BYTES: Final = 64 << 10
_SYSTEM_FILES: Final = (
    *("/proc/meminfo", "/proc/cpuinfo", "/proc/mounts", "/proc/loadavg", "/proc/version"),
    *("/proc/pressure/cpu", "/proc/pressure/io", "/proc/pressure/memory", "/etc/os-release"),
)
_PROCESS_FILES: Final = ("status", "limits", "smaps_rollup", "cgroup", "io", "oom_score_adj")


@click.command("support-bundle")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@settings_options.options("store")
def command(file: Path | None, config_file: Path | None, store: Path | None) -> None:
    """Write an archive of state and logs for somebody who helps.

    It holds names of files, namespaces, users and hosts, but no content and no secret. FILE is
    kvfs-support-NODE-TIME.tar.gz if none is given.
    """
    config, origins = settings_options.explain(config_file, store=store)
    name = f"kvfs-support-{default_node_name()}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    target = file or Path(f"{name}.tar.gz")
    require_directory(config.store, "the store", trusted())
    redactor = Redactor(_secrets(config))
    try:
        output = os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except FileExistsError:
        raise Exists(f"{target} is there already: name another file") from None
    try:
        with output, tarfile.open(fileobj=output, mode="w:gz") as archive:
            lacking = _write(archive, name, _parts(config, origins), redactor)
    except BaseException:  # half an archive would be taken for a whole one
        target.unlink(missing_ok=True)
        raise
    click.echo(f"wrote {target} ({target.stat().st_size:,} bytes, without {lacking} parts)")


Part = tuple[str, Callable[[], str]]


def _write(archive: tarfile.TarFile, name: str, parts: Iterable[Part], redactor: Redactor) -> int:
    """Returns how many parts are missing. Raises OSError: the archive cannot be written."""
    lacking = []
    for part, read in parts:
        try:
            text = read()
        except (KvfsError, OSError, ValueError, subprocess.SubprocessError) as error:
            lacking.append(f"{part}: {error}")
            continue
        _add(archive, f"{name}/{part}", redactor.clean(text))
    _add(archive, f"{name}/missing.txt", redactor.clean("".join(f"{e}\n" for e in lacking)))
    return len(lacking)


def _parts(config: Config, origins: dict[str, str]) -> Iterator[Part]:
    """Yields the parts by their names; each is read on its own."""
    status: dict[str, Any] = {}

    def read_status() -> str:
        status.update(node_requests.ask(config, "status", deadline_s=_DEADLINE_S))
        return _json(status)

    yield "versions.json", _versions
    yield "settings.json", lambda: _json({"settings": config.as_dict(), "origins": origins})
    yield "status.json", read_status
    yield "doctor.json", lambda: _doctor(config, status or None)
    yield "metrics.txt", lambda: _metrics(status)
    yield "store.txt", lambda: _listing(config.store)
    for name in ("kvfs.log", "kvfs.log.1"):
        yield name, lambda name=name: _tail(config.store / "run" / name)  # type: ignore[misc]
    yield "journal.txt", _journal
    for path in _SYSTEM_FILES:
        yield f"system{path}", Path(path).read_text
    if "pid" in status:
        for name in _PROCESS_FILES:
            yield f"process/{name}", Path(f"/proc/{status['pid']}/{name}").read_text


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode(errors="backslashreplace")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
    archive.addfile(entry, io.BytesIO(content))


def _json(value: object) -> str:
    return json.dumps(msgspec.to_builtins(value), indent=1) + "\n"


def _versions() -> str:
    packages = {each.name: each.version for each in metadata.distributions()}
    system = {"system": platform.platform(), "python": sys.version, "packages": packages}
    return _json({"kvfs": VERSION, **system})


def _doctor(config: Config, status: dict[str, Any] | None) -> str:
    from cli.commands.service import doctor

    return _json(list(doctor.examine(config.store, status)))


def _metrics(status: dict[str, Any]) -> str:
    """Asks the node for them. Raises ValueError: it serves none."""
    if not status.get("admin"):
        raise ValueError("the node serves no metrics, or none runs")
    where = urlsplit(status["admin"]["endpoint"]).netloc
    connection = http.client.HTTPConnection(where, timeout=_DEADLINE_S)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    except http.client.HTTPException as error:
        raise ValueError(str(error)) from error
    finally:
        connection.close()


def _listing(store: Path) -> str:
    """Lists the store's own files, not its data files, and the space of its disk."""
    disk = shutil.disk_usage(store)
    lines = [f"{store}: {disk.total} bytes, {disk.used} used, {disk.free} free"]
    for directory in (store, store / "meta", store / "run"):
        for path in sorted(directory.iterdir()):
            found = path.lstat()
            owner = f"{found.st_uid}:{found.st_gid}"
            lines.append(f"{found.st_mode:06o} {owner} {found.st_size:>12} {path}")
    return "\n".join(lines) + "\n"


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, 0))
        return file.read().decode(errors="backslashreplace")


def _journal() -> str:
    """Returns what systemd has of the service. Raises ValueError where there is no systemd."""
    if shutil.which("journalctl") is None:
        raise ValueError("systemd's journal is not there")
    command = ["journalctl", "--unit=kvfs", "--no-pager", f"--lines={_JOURNAL_LINES}"]
    done = subprocess.run(
        command, capture_output=True, timeout=_DEADLINE_S, check=True, text=True, errors="replace"
    )
    return done.stdout


def _secrets(config: Config) -> Iterator[str]:
    """Yields what may be in no text: keys and passwords of this node."""
    files = [config.store / "s3-credentials", config.store / "cluster.key"]
    files += [Path(config.secret_file)] if config.secret_file else []
    with contextlib.suppress(Invalid):  # a bundle may tell of a URL that is none
        engine = parse(config.engine)
        if engine.password:
            yield from (engine.password, quote(engine.password, safe=""))
        files += [Path(engine.password_file)] if engine.password_file else []
    for path in files:
        yield from _words(path)
    for name, value in os.environ.items():
        if name.startswith("AWS_") and ("SECRET" in name or "TOKEN" in name or "KEY" in name):
            yield value


def _words(path: Path) -> Iterator[str]:
    """Yields the lines of a file of secrets, and their last parts: `name = VALUE`,
    `kvfs-cluster:ID:KEY`."""
    try:
        text = path.read_bytes()[:_SMALL_BYTES].decode(errors="replace")
    except OSError:
        return  # of a file that cannot be read nothing is in a text that this process reads
    for line in text.splitlines():
        if not line.startswith(("[", "#")):
            yield line.strip()
            yield re.split(r"[=:]", line)[-1].strip()
