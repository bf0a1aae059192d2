"""The options that name settings, shared by the commands, and the configuration they result in."""

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
    """A path that is asked nothing, as `click.Path` does: a mount whose server hangs may not
    answer."""
    return click.option(f"--{name}", type=Path, metavar="DIR", help=text)


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
    "s3_object_ownership": click.option(
        "--s3-object-ownership",
        metavar="NAME",
        help="Whether ACLs count in new buckets: BucketOwnerEnforced (no), ObjectWriter ...",
    ),
    "encrypted_storage": click.option(
        "--encrypted-storage",
        metavar="auto|yes|no",
        help="Whether the store's disks are encrypted, so that S3 may say so (auto: ask them).",
    ),
    "s3_bucket_mode": click.option(
        "--s3-bucket-mode",
        metavar="MODE",
        help="Permissions of new buckets on the mount, and so of their objects (0700).",
    ),
    "s3_access_log": click.option(
        "--s3-access-log", metavar="FILE", help="Log each S3 request, in S3's format."
    ),
    "s3_log_delivery_s": click.option(
        "--s3-log-delivery-s",
        type=int,
        metavar="SECONDS",
        help="How often access logs go into the buckets that PutBucketLogging names (300).",
    ),
    "s3_lifecycle_day_s": click.option(
        "--s3-lifecycle-day-s",
        type=int,
        metavar="SECONDS",
        help="How long a day of lifecycle rules lasts, to see them work (86400).",
    ),
    "priority": click.option(
        "--priority",
        type=int,
        metavar="NICE",
        help="The node's nice value, where it may have it (-10; 0: as it was started).",
    ),
    "scrub_rate": click.option(
        "--scrub-rate",
        metavar="SIZE",
        help="Bytes read in a second to compare data with their checksums (16MiB; 0: none).",
    ),
    "repair_rate": click.option(
        "--repair-rate",
        metavar="SIZE",
        help="Bytes moved in a second to restore replicas, drain and even out (128MiB).",
    ),
    "admin": click.option(
        "--admin",
        metavar="HOST:PORT",
        help=f"Where health and metrics are told, or off (default: {ADMIN_USUAL}, with S3).",
    ),
    "nfs": click.option(
        "--nfs",
        is_flag=False,
        flag_value="auto",
        metavar="[HOST:PORT]",
        help=f"Serve NFS 4.0 and 4.1 ({NFS_USUAL} where nothing is named); see kvfs nfs.",
    ),
    "nfs_v3": click.option(
        "--nfs-v3/--no-nfs-v3", default=None, help="Serve version 3 of NFS as well."
    ),
    "nfs_mount_port": click.option(
        "--nfs-mount-port",
        metavar="PORT",
        help=f"Where version 3's MOUNT protocol is served ({NFS_MOUNT_PORT}).",
    ),
    "engine": click.option(
        "--engine",
        metavar="URL",
        help="Share metadata with other nodes: redis://HOST[:PORT][/DB], rediss://, unix://, "
        "redis+sentinel://, redis+cluster://; with ?prefix=NAME and ?password-file=FILE.",
    ),
    "node_name": click.option(
        "--node-name", metavar="NAME", help="What the node is called in its cluster (host name)."
    ),
    "peer": click.option(
        "--peer",
        metavar="HOST:PORT",
        help=f"Where other nodes fetch data (default: port {PEER_PORT}, or a free one, of the "
        "address by which the engine is reached).",
    ),
    "advertise": click.option(
        "--advertise", metavar="HOST[:PORT]", help="How other nodes reach --peer."
    ),
    "transport": click.option(
        "--transport",
        metavar="NAME",
        help="How data come from other nodes: tcp, or rdma (pip install 'kvfs[rdma]').",
    ),
    "found": click.option(
        "--found/--no-found",
        default=None,
        help="Make a cluster also where the engine seems to have lost one.",
    ),
    "zone": click.option("--zone", metavar="NAME", help="What fails together with this node."),
    "rack": click.option("--rack", metavar="NAME", help="Likewise, within the zone."),
    "secret_file": click.option(
        "--secret-file", metavar="FILE", help="The cluster's secret (cluster.key in the store)."
    ),
    "cold": click.option(
        "--cold", metavar="s3://BUCKET/PREFIX", help="Where cold files go before they are evicted."
    ),
    "cold_endpoint": click.option(
        "--cold-endpoint", metavar="URL", help="Of the S3 service of --cold (AWS_ENDPOINT_URL)."
    ),
    "cold_rate": click.option(
        "--cold-rate", metavar="SIZE", help="At most so many bytes a second to --cold."
    ),
    "tier": click.option(
        "--tier",
        multiple=True,
        metavar="MEDIUM=DIR:SIZE",
        help="Lend memory (ram, a tmpfs) or a further disk (ssd); may be repeated.",
    ),
    "shared": click.option(
        "--shared",
        multiple=True,
        metavar="NAME=DIR[:owner=USER]",
        help="A directory that other nodes have too; may be repeated.",
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
    """The settings in effect. A flag that is None, or empty, was not given. Raises ConfigError."""
    return explain(config_file, **flags)[0]


def explain(config_file: Path | None, **flags: object) -> tuple[Config, dict[str, str]]:
    """The settings in effect and where each comes from. Raises ConfigError."""
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    return configuration.load(given, file=config_file)
