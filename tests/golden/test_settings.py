"""The settings: name, variable of the environment, type, default, and what a value may be.

Values on both sides of its bounds say what is taken, and how it is written back."""

import os
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest

from kvfs.base import config as configuration
from kvfs.base.config import KEYS, Config, load
from kvfs.base.errors import ConfigError
from tests.golden.golden import hold

_OF_THIS_HOST: Final = {
    "store": "/var/lib/kvfs for root, else ~/.local/share/kvfs",
    "allow_other": "true for root, else false",
    "s3_workers": "the CPUs that may be used, at most 4",
    "node_name": "the host's name",
}
"""Defaults that are another on another host."""
_TRIED: Final[dict[str, tuple[str, ...]]] = {
    "capacity": ("0", "1", "4GiB", "0%", "0.5%", "100%", "101%"),
    "s3": ("auto", "off", "h:0", "h:65535", "h:65536", "[::1]:1", "h"),
    "s3_workers": ("0", "1", "64", "65"),
    "s3_domains": ("", "a.example,b.example", "a/b"),
    "s3_region": ("a", "a" * 32, "a" * 33, "A"),
    "s3_bucket_mode": ("0700", "777", "0600", "01777"),
    "s3_log_delivery_s": ("0", "1", "86400", "86401"),
    "s3_lifecycle_day_s": ("0", "1", "86400", "86401"),
    "priority": ("-21", "-20", "19", "20"),
    "scrub_rate": ("-1", "0", "16MiB"),
    "repair_rate": ("-1", "0", "128MiB"),
    "names_everywhere": ("-1", "0", "250000000"),
    "cold_rate": ("-1", "0", "1GiB"),
    "nfs_mount_port": ("0", "1", "65535", "65536"),
    "engine": (
        *("", "redis://h", "rediss://h", "unix:///s", "redis+sentinel://h", "redis+cluster://h"),
        "http://h",
    ),
    "node_name": ("a", "a" * 63, "a" * 64, "-a", "a b"),
    "zone": ("", "a" * 63, "a" * 64, "a/b"),
    "cold": ("", "s3://b", "s3://b/p", "b/p"),
    "cold_endpoint": ("", "http://h", "https://h", "h"),
    "backup": ("", "/d", "s3://b", "s3://b/p"),
    "backup_endpoint": ("", "http://h", "https://h", "h"),
    "backup_every_s": ("-1", "0", "31622400", "31622401"),
    "backup_keep": ("-1", "0", "1000000", "1000001"),
    "suid": ("1", "true", "yes", "on", "0", "false", "no", "off", "2"),
    "tier": ("", "ram=/d:1GiB", "ssd=/d:1GiB,ssd=/e:2GiB", "disk=/d:1GiB", "ram=/d"),
    "shared": ("", "n=/d", "n=/d:owner=root", "/d"),
    "mode": (*configuration.MODES, "other"),
    "log_level": (*configuration.LOG_LEVELS, "other"),
    "log_format": (*configuration.LOG_FORMATS, "other"),
    "transport": (*configuration.TRANSPORTS, "other"),
    "encrypted_storage": (*configuration.ENCRYPTED_STORAGE, "other"),
    "s3_object_ownership": (*configuration.OBJECT_OWNERSHIPS, "other"),
}
"""Settings without a line here take what another of the same kind takes, or any path or text."""


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home")
    hold("settings.txt", _described())


def _described() -> Iterator[str]:
    kinds = {each.name: each for each in msgspec.structs.fields(Config)}
    values = Config().as_dict()
    for key in KEYS:
        default = _OF_THIS_HOST.get(key) or _shown(values[key])
        yield f"{key}  KVFS_{key.upper()}  {_type(kinds[key].type)}  default {default}"
        for tried in _TRIED.get(key, ()):
            yield f"    {_short(tried)}: {_outcome(key, tried)}"


def _type(kind: object) -> str:
    """As the program writes it in a file of settings."""
    if kind is bool:
        return "true or false"
    if kind is int:
        return "number"
    return "list" if str(kind).startswith("tuple") else "text"


def _outcome(key: str, value: str) -> str:
    try:
        config, _ = load(environ={"KVFS_CONFIG": os.devnull, f"KVFS_{key.upper()}": value})
    except ConfigError:
        return "refused"
    written = config.as_dict()[key]
    return "taken" if written == value else _shown(written)


def _short(value: str) -> str:
    long = len(value) > 1 and value == value[0] * len(value)
    return f"{value[0]!r} * {len(value)}" if long else repr(value)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
