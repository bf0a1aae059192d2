"""The options that name settings, shared by the commands, and the resulting configuration."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvfs.base import config as configuration
from kvfs.base.config import (
    ADMIN_USUAL,
    MODES,
    NFS_MOUNT_PORT,
    NFS_USUAL,
    PEER_PORT,
    S3_USUAL,
    Config,
)

F = TypeVar("F", bound=Callable[..., Any])


def _path(name: str, text: str) -> Callable[[F], F]:
    """Adds a path that is not looked at, as `click.Path` would: a mount whose server hangs may not
    answer."""
    return click.option(f"--{name}", type=Path, metavar="DIR", help=text)


_OPTIONS: Final[dict[str, Callable[[Any], Any]]] = {
    "store": _path(
        "store",
        "Directory of the store (default: /var/lib/kvfs for root, else ~/.local/share/kvfs).",
    ),
    "mount": _path("mount", "Directory where the namespaces appear (default: /mnt/kvfs)."),
    "mode": click.option(
        "--mode",
        metavar="MODE",
        help=f"Data path: {', '.join(MODES)} (default: auto, the best one).",
    ),
    "capacity": click.option(
        "--capacity",
        metavar="SIZE",
        help="Limit of the store: bytes, like 400GiB, or a share of its disk (default: 90%).",
    ),
    "allow_other": click.option(
        "--allow-other/--no-allow-other", default=None, help="Let other users enter the mount."
    ),
    "suid": click.option(
        "--suid/--no-suid", default=None, help="Honour set-user-id bits on the mount."
    ),
    "dev": click.option("--dev/--no-dev", default=None, help="Honour device nodes on the mount."),
    "takeover_s": click.option(
        "--takeover-s",
        type=int,
        metavar="SECONDS",
        help="Time for which the mount waits for another daemon when its own has died; 0: it ends "
        "(the default).",
    ),
    "log_level": click.option(
        "--log-level",
        metavar="LEVEL",
        help="Least severe messages logged: debug, info, warning or error (default: info).",
    ),
    "log_format": click.option(
        "--log-format",
        metavar="FORM",
        help="Form of the log: text, or json, a line with fields (default: text).",
    ),
    "s3": click.option(
        "--s3",
        metavar="HOST:PORT",
        help=f"Address of the S3 API, or off (default: {S3_USUAL}, or a free port).",
    ),
    "s3_workers": click.option(
        "--s3-workers",
        type=int,
        metavar="N",
        help="Processes that serve S3 (default: one per CPU, at most 4).",
    ),
    "s3_domains": click.option(
        "--s3-domains",
        metavar="NAME,...",
        help="Domains of the S3 API; a host below one names a bucket (default: localhost).",
    ),
    "s3_region": click.option(
        "--s3-region", metavar="NAME", help="Region of the S3 API (default: us-east-1)."
    ),
    "s3_certificate": click.option(
        "--s3-certificate",
        metavar="FILE",
        help="Certificate with its chain (PEM); serves S3 over TLS.",
    ),
    "s3_private_key": click.option(
        "--s3-private-key", metavar="FILE", help="Private key of the certificate (PEM)."
    ),
    "s3_signature_v2": click.option(
        "--s3-signature-v2/--no-s3-signature-v2",
        default=None,
        help="Accept presigned URLs of signature version 2 (default: yes).",
    ),
    "s3_object_ownership": click.option(
        "--s3-object-ownership",
        metavar="NAME",
        help="Object ownership of new buckets: BucketOwnerEnforced (the default: ACLs do not "
        "count), BucketOwnerPreferred or ObjectWriter.",
    ),
    "encrypted_storage": click.option(
        "--encrypted-storage",
        metavar="auto|yes|no",
        help="Whether the store's disks are encrypted, so that S3 may report it (default: auto, by "
        "looking at them).",
    ),
    "s3_bucket_mode": click.option(
        "--s3-bucket-mode",
        metavar="MODE",
        help="Permissions of new buckets' directories, and so of their objects, in octal (default: "
        "0700).",
    ),
    "s3_access_log": click.option(
        "--s3-access-log",
        metavar="FILE",
        help="Log of S3 requests, in S3's format (default: none).",
    ),
    "s3_log_delivery_s": click.option(
        "--s3-log-delivery-s",
        type=int,
        metavar="SECONDS",
        help="Time between deliveries of access logs to the buckets that PutBucketLogging names "
        "(default: 300).",
    ),
    "s3_lifecycle_day_s": click.option(
        "--s3-lifecycle-day-s",
        type=int,
        metavar="SECONDS",
        help="Length of a day of lifecycle rules; shorten it to try rules out (default: 86400).",
    ),
    "priority": click.option(
        "--priority",
        type=int,
        metavar="NICE",
        help="Nice value of the node, if permitted; 0: that of its caller (default: -10).",
    ),
    "scrub_rate": click.option(
        "--scrub-rate",
        metavar="SIZE",
        help="Bytes per second that the daily checksum comparison reads; 0: none (default: 16MiB).",
    ),
    "repair_rate": click.option(
        "--repair-rate",
        metavar="SIZE",
        help="Bytes per second moved to restore replicas, drain and rebalance; 0: no limit "
        "(default: 128MiB).",
    ),
    "names_everywhere": click.option(
        "--names-everywhere",
        type=int,
        metavar="NAMES",
        help="Names of peer namespaces that every node knows the holders of; of more, each a share "
        "(default: 250000000).",
    ),
    "admin": click.option(
        "--admin",
        metavar="HOST:PORT",
        help=f"Address of health and metrics, or off (default: {ADMIN_USUAL} while S3 is served, "
        "or a free port).",
    ),
    "nfs": click.option(
        "--nfs",
        is_flag=False,
        flag_value="auto",
        metavar="[HOST:PORT]",
        help=f"Serve NFS 4.0 and 4.1, at {NFS_USUAL} if no address is given; see kvfs nfs.",
    ),
    "nfs_v3": click.option(
        "--nfs-v3/--no-nfs-v3", default=None, help="Serve NFS version 3 as well."
    ),
    "nfs_mount_port": click.option(
        "--nfs-mount-port",
        metavar="PORT",
        help=f"Port of version 3's MOUNT protocol (default: {NFS_MOUNT_PORT}).",
    ),
    "engine": click.option(
        "--engine",
        metavar="URL",
        help="Server of the metadata that the nodes of a cluster share: redis://HOST[:PORT][/DB], "
        "rediss://, unix://, redis+sentinel:// or redis+cluster://, with ?prefix=NAME and "
        "?password-file=FILE.",
    ),
    "node_name": click.option(
        "--node-name",
        metavar="NAME",
        help="Name of the node in its cluster (default: the host's name).",
    ),
    "peer": click.option(
        "--peer",
        metavar="HOST:PORT",
        help=f"Address where other nodes fetch data (default: port {PEER_PORT}, or a free one, of "
        "the address by which the engine is reached).",
    ),
    "advertise": click.option(
        "--advertise", metavar="HOST[:PORT]", help="Address by which other nodes reach --peer."
    ),
    "peer_tls": click.option(
        "--peer-tls",
        metavar="MODE",
        help="TLS between nodes: off (the default), accept (with all that speak it) or require.",
    ),
    "transport": click.option(
        "--transport",
        metavar="NAME",
        help="Transport of data from other nodes: tcp (the default) or rdma (pip install "
        "'kvfs[rdma]').",
    ),
    "found": click.option(
        "--found/--no-found",
        default=None,
        help="Make a cluster even if the engine seems to have lost one.",
    ),
    "zone": click.option(
        "--zone",
        metavar="NAME",
        help="Zone that fails as a whole with this node; replicas go to other zones.",
    ),
    "rack": click.option(
        "--rack", metavar="NAME", help="Rack within the zone, which fails as a whole too."
    ),
    "secret_file": click.option(
        "--secret-file",
        metavar="FILE",
        help="File of the cluster's secret (default: cluster.key in the store).",
    ),
    "cold": click.option(
        "--cold",
        metavar="s3://BUCKET/PREFIX",
        help="Cold tier: keeps files of namespaces with --cold on before they are evicted.",
    ),
    "cold_endpoint": click.option(
        "--cold-endpoint",
        metavar="URL",
        help="URL of the S3 service of --cold (default: $AWS_ENDPOINT_URL).",
    ),
    "cold_rate": click.option(
        "--cold-rate",
        metavar="SIZE",
        help="Most bytes per second sent to --cold (default: 0, no limit).",
    ),
    "backup": click.option(
        "--backup",
        metavar="DIR|s3://BUCKET/PREFIX",
        help="Place of backups.",
    ),
    "backup_endpoint": click.option(
        "--backup-endpoint",
        metavar="URL",
        help="URL of the S3 service of --backup (default: $AWS_ENDPOINT_URL).",
    ),
    "backup_every_s": click.option(
        "--backup-every-s",
        metavar="SECONDS",
        help="Time between backups that the node makes (default: 0, it makes none).",
    ),
    "backup_keep": click.option(
        "--backup-keep",
        metavar="NUMBER",
        help="Backups that stay when one is made, the newest (default: 0, all).",
    ),
    "tier": click.option(
        "--tier",
        multiple=True,
        metavar="MEDIUM=DIR:SIZE",
        help="Lend memory (ram, a tmpfs) or another disk (ssd); repeatable.",
    ),
    "shared": click.option(
        "--shared",
        multiple=True,
        metavar="NAME=DIR[:owner=USER]",
        help="Directory that other nodes have too; repeatable.",
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


def configured(*names: str) -> Callable[[F], Callable[..., Any]]:
    """Adds --config and the options of the settings `names` to a command, which gets the settings
    in effect as `config`. Raises ConfigError when the command is called."""

    def add(function: F) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_config(*given: Any, config_file: Path | None, **others: Any) -> Any:
            flags = {name: others.pop(name) for name in names}
            return function(*given, config=resolve(config_file, **flags), **others)

        return options(*names)(with_config)

    return add


def resolve(config_file: Path | None, **flags: object) -> Config:
    """Returns the settings in effect. A flag that is None, or empty, was not given. Raises
    ConfigError."""
    return explain(config_file, **flags)[0]


def explain(config_file: Path | None, **flags: object) -> tuple[Config, dict[str, str]]:
    """Returns the settings in effect and the origin of each. Raises ConfigError."""
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    return configuration.load(given, file=config_file)
