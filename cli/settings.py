"""The options that name settings, shared by the commands, and the configuration they result in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvfs import config as configuration
from kvfs.config import ADMIN_USUAL, MODES, S3_USUAL, Config

F = TypeVar("F", bound=Callable[..., Any])


def _path(name: str, text: str) -> Callable[[F], F]:
    return click.option(f"--{name}", type=click.Path(path_type=Path), metavar="DIR", help=text)


_OPTIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "store": _path("store", "Directory of the store."),
    "mount": _path("mount", "Directory where the files appear."),
    "mode": click.option(
        "--mode", metavar="MODE", help=f"Fast path: {', '.join(MODES)}; auto: the best."
    ),
    "capacity": click.option(
        "--capacity", metavar="SIZE", help="Limit of the store: 400GiB, or 90% of the disk."
    ),
    "allow_other": click.option(
        "--allow-other/--no-allow-other", default=None, help="Let other users enter the mount."
    ),
    "suid": click.option("--suid/--no-suid", default=None, help="Honour set-user-id bits."),
    "dev": click.option("--dev/--no-dev", default=None, help="Honour device nodes."),
    "log_level": click.option("--log-level", metavar="LEVEL", help="debug, info, warning, error."),
    "s3": click.option(
        "--s3",
        metavar="HOST:PORT",
        help=f"Where the S3 API listens, or off (default: {S3_USUAL}, or a free port).",
    ),
    "s3_workers": click.option(
        "--s3-workers", type=int, metavar="N", help="Processes that serve S3 (CPUs, at most 4)."
    ),
    "s3_domains": click.option(
        "--s3-domains", metavar="NAME,...", help="Names of the S3 API: buckets are below them."
    ),
    "s3_region": click.option("--s3-region", metavar="NAME", help="Region of the S3 API."),
    "s3_certificate": click.option(
        "--s3-certificate", metavar="FILE", help="Certificate and chain (PEM): S3 over TLS."
    ),
    "s3_private_key": click.option(
        "--s3-private-key", metavar="FILE", help="The certificate's key (PEM)."
    ),
    "s3_signature_v2": click.option(
        "--s3-signature-v2/--no-s3-signature-v2",
        default=None,
        help="Take presigned URLs of signature version 2.",
    ),
    "s3_access_log": click.option(
        "--s3-access-log", metavar="FILE", help="Log each S3 request, in S3's format."
    ),
    "s3_lifecycle_day_s": click.option(
        "--s3-lifecycle-day-s",
        type=int,
        metavar="SECONDS",
        help="How long a day of lifecycle rules lasts, to see them work (86400).",
    ),
    "admin": click.option(
        "--admin",
        metavar="HOST:PORT",
        help=f"Where health and metrics are told, or off (default: {ADMIN_USUAL}, with S3).",
    ),
}
NAMES: Final = tuple(_OPTIONS)


def options(*names: str) -> Callable[[F], F]:
    """Adds --config and the options of the settings `names` to a command."""

    def add(function: F) -> F:
        for name in reversed(names):
            function = _OPTIONS[name](function)
        return click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Configuration file (default: $KVFS_CONFIG, else /etc/kvfs.toml).",
        )(function)

    return add


def resolve(config_file: Path | None, **flags: object) -> Config:
    """The settings in effect. A flag that is None was not given. Raises ConfigError."""
    return explain(config_file, **flags)[0]


def explain(config_file: Path | None, **flags: object) -> tuple[Config, dict[str, str]]:
    """The settings in effect and where each comes from. Raises ConfigError."""
    given = {name: value for name, value in flags.items() if value is not None}
    return configuration.load(given, file=config_file)
