"""The settings of a node, and where they come from.

Rising order: defaults, one TOML file, environment variables `KVFS_<KEY>`, flags. The file is the
one named by --config, else by KVFS_CONFIG, else /etc/kvfs.toml where it exists. A key that is not
known is an error that names the nearest known one, wherever it stands. Variables that begin with
KVFS_TEST_ belong to the tests and are not looked at.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from kvfs.errors import ConfigError, Invalid
from kvfs.units import Capacity, parse_capacity

SYSTEM_FILE: Final = Path("/etc/kvfs.toml")
Mode = Literal["auto", "passthrough", "relay", "libfuse"]
MODES: Final = get_args(Mode)
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_PREFIX: Final = "KVFS_"
_NOT_SETTINGS: Final = ("KVFS_CONFIG",)
_TEST_PREFIX: Final = "KVFS_TEST_"
_is_region: Final = re.compile(r"[a-z0-9-]{1,32}").fullmatch
_is_domain: Final = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*").fullmatch


def default_store() -> Path:
    """For root a system directory, for others one of their own."""
    if os.geteuid() == 0:
        return Path("/var/lib/kvfs")
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "kvfs"


class Address(msgspec.Struct, frozen=True):
    """Where to listen: a host (name or address) and a port, 0 for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


Listening = Address | Literal["auto", "off"]
"""`auto`: at the usual port, and where that is taken at any free one."""
S3_USUAL: Final = Address("127.0.0.1", 9000)
ADMIN_USUAL: Final = Address("127.0.0.1", 9001)
MAX_S3_WORKERS: Final = 64
DAY_S: Final = 86_400


def default_s3_workers() -> int:
    """One for each CPU that we may use, at most four: each holds some 50 MB."""
    return min(len(os.sched_getaffinity(0)), 4)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is told. Field names are the keys of the TOML file."""

    store: Path = msgspec.field(default_factory=default_store)
    """Directory of the data files and of the embedded engine."""
    mount: Path = Path("/mnt/kvfs")
    """Where the namespace appears."""
    mode: Mode = "auto"
    """Fast path: one of MODES; 'auto' takes the best that the kernel and the privileges give."""
    capacity: Capacity = Capacity(percent=90.0)
    """Limit of what the store may hold: bytes, or a share of the disk."""
    allow_other: bool = msgspec.field(default_factory=lambda: os.geteuid() == 0)
    """Whether other users may enter the mount (needs root, or user_allow_other in /etc/fuse.conf).
    """
    suid: bool = False
    """Whether set-user-id bits take effect on the mount."""
    dev: bool = False
    """Whether device nodes work on the mount."""
    log_level: str = "info"
    """One of LOG_LEVELS."""
    s3: Listening = "auto"
    """Where the S3 API listens: HOST:PORT, `off`, or `auto` (S3_USUAL)."""
    s3_workers: int = msgspec.field(default_factory=default_s3_workers)
    """Processes that serve it."""
    s3_domains: tuple[str, ...] = ("localhost",)
    """Its names: a host below one of them names the bucket (virtual-hosted addressing)."""
    s3_region: str = "us-east-1"
    """What it says of its region, and signs presigned URLs for."""
    s3_certificate: str = ""
    """A PEM file with certificate and chain: the S3 API speaks TLS. Empty: it does not."""
    s3_private_key: str = ""
    """The PEM file of the certificate's key."""
    s3_signature_v2: bool = True
    """Whether presigned URLs of signature version 2 are taken."""
    s3_access_log: str = ""
    """A file for a line on each request, in the format of S3's server access logs. Empty: none."""
    s3_lifecycle_day_s: int = DAY_S
    """Seconds that a day of lifecycle rules lasts: less, to see them work."""
    admin: Listening = "auto"
    """Where health and metrics are told: HOST:PORT, `off`, or `auto` (ADMIN_USUAL, with S3)."""

    def as_dict(self) -> dict[str, str | bool | int | list[str]]:
        """Every key as it would be written in the file."""
        return {name: _written(getattr(self, name)) for name in KEYS}


def _written(value: object) -> str | bool | int | list[str]:
    if isinstance(value, bool | int):
        return value
    return list(value) if isinstance(value, tuple) else str(value)


KEYS: Final = Config.__struct_fields__


class Source(msgspec.Struct, frozen=True):
    """Values from one place; `label` says where a key of it stands, for messages."""

    values: Mapping[str, object]
    label: Callable[[str], str]


def load(
    flags: Mapping[str, object] | None = None,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Config, dict[str, str]]:
    """The settings in effect, and for each key where it came from.

    `flags` holds only what was given on the command line, by key. Raises ConfigError.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    for source in _sources(flags or {}, file, environ):
        for key, value in source.values.items():
            where = source.label(key)
            if key not in KEYS:
                raise ConfigError(_unknown(where, key))
            values[key] = _convert(key, value, where)
            origins[key] = where
    config = Config(**values)
    _check(config, origins)
    return config, origins


def _check(config: Config, origins: Mapping[str, str]) -> None:
    """What settings ask of each other. Raises ConfigError."""
    pair = ("s3_certificate", "s3_private_key")
    for given, missing in (pair, pair[::-1]):
        if getattr(config, given) and not getattr(config, missing):
            raise ConfigError(f"{origins[given]}: needs {missing}, the other half of it")
    if isinstance(config.s3, Address) and config.s3 == config.admin and config.s3.port:
        raise ConfigError(f"{origins['admin']}: {config.admin} is where the S3 API listens")


def _sources(
    flags: Mapping[str, object], file: Path | None, environ: Mapping[str, str]
) -> Iterable[Source]:
    path = _file_in_use(file, environ)
    if path is not None:
        yield Source(_read_toml(path), lambda key: f"{path}: {key}")
    variables = {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(_PREFIX)
        and name not in _NOT_SETTINGS
        and not name.startswith(_TEST_PREFIX)
    }
    yield Source(variables, lambda key: f"environment: {_PREFIX}{key.upper()}")
    yield Source(flags, lambda key: f"flag: --{key.replace('_', '-')}")


def _file_in_use(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is None and environ.get("KVFS_CONFIG"):
        file = Path(environ["KVFS_CONFIG"])
    if file is None and SYSTEM_FILE.exists():
        file = SYSTEM_FILE
    return file


def _read_toml(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error


def _unknown(where: str, key: str) -> str:
    nearest = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
    if nearest:
        hint = nearest[0]
        if where.startswith("environment"):
            hint = _PREFIX + hint.upper()
        return f"{where}: no such setting; did you mean {hint}?"
    return f"{where}: no such setting; there are: {', '.join(KEYS)}"


def _convert(key: str, value: object, where: str) -> object:
    try:
        return _CONVERTERS[key](value)
    except Invalid as error:
        raise ConfigError(f"{where}: {error}") from error


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise Invalid("must be a path")
    return Path(os.path.abspath(Path(value).expanduser()))


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise Invalid(f"must be true or false, not {value!r}")


def _capacity(value: object) -> Capacity:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise Invalid(f"must be a size like '4GiB' or a share like '90%', not {value!r}")
    return parse_capacity(value)


def _listening(value: object) -> Listening:
    if value in ("auto", "off") or isinstance(value, Address):
        return value
    host, separator, port = str(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not isinstance(value, str) or not separator or not host or not port.isdecimal():
        raise Invalid(f"must be HOST:PORT like '{S3_USUAL}', 'auto' or 'off', not {value!r}")
    if int(port) > 65535:
        raise Invalid(f"{port} is no port: there are 0 to 65535")
    return Address(host, int(port))


def _workers(value: object) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if not isinstance(value, int) or not 1 <= value <= MAX_S3_WORKERS or isinstance(value, bool):
        raise Invalid(f"must be a number from 1 to {MAX_S3_WORKERS}, not {value!r}")
    return value


def _day(value: object) -> int:
    seconds = int(value) if isinstance(value, str) and value.isdigit() else value
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 1 <= seconds <= DAY_S:
        raise Invalid(f"must be a number of seconds from 1 to {DAY_S}, not {value!r}")
    return seconds


def _domains(value: object) -> tuple[str, ...]:
    """A list, or one text with commas."""
    if isinstance(value, str):
        value = [each.strip() for each in value.split(",") if each.strip()]
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, str) and _is_domain(each) for each in value
    ):
        raise Invalid(f"must be names of hosts like ['s3.example.com'], not {value!r}")
    return tuple(each.lower() for each in value)


def _region(value: object) -> str:
    if not isinstance(value, str) or not _is_region(value):
        raise Invalid(f"must be a name like 'us-east-1', not {value!r}")
    return value


def _file_or_none(value: object) -> str:
    return "" if value == "" else str(_path(value))


def _one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    def convert(value: object) -> str:
        if value in choices:
            return str(value)
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise Invalid(f"must be one of {', '.join(choices)}, not {value!r}{hint}")

    return convert


_CONVERTERS: Final[dict[str, Callable[[object], object]]] = {
    "store": _path,
    "mount": _path,
    "mode": _one_of(MODES),
    "capacity": _capacity,
    "allow_other": _boolean,
    "suid": _boolean,
    "dev": _boolean,
    "log_level": _one_of(LOG_LEVELS),
    "s3": _listening,
    "s3_workers": _workers,
    "s3_domains": _domains,
    "s3_region": _region,
    "s3_certificate": _file_or_none,
    "s3_private_key": _file_or_none,
    "s3_signature_v2": _boolean,
    "s3_access_log": _file_or_none,
    "s3_lifecycle_day_s": _day,
    "admin": _listening,
}
assert tuple(_CONVERTERS) == KEYS
