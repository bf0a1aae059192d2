"""The settings of a node, and their sources.

Rising order: defaults, one TOML file, environment variables `KVFS_<KEY>`, flags. The file is the
one named by --config, else by KVFS_CONFIG, else /etc/kvfs.toml if it exists. An unknown key is an
error that names the nearest known one, in every source. Variables that begin with KVFS_TEST_ belong
to the tests and are ignored.
"""

import difflib
import os
import re
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec

from kvfs.base.errors import ConfigError, Invalid
from kvfs.base.media import Place, parse_shared, parse_tier
from kvfs.base.units import Capacity, parse_capacity, parse_size

SYSTEM_FILE: Final = Path("/etc/kvfs.toml")
Mode = Literal["auto", "passthrough", "relay", "libfuse"]
MODES: Final = get_args(Mode)
Transport = Literal["tcp", "rdma"]
TRANSPORTS: Final = get_args(Transport)
PeerTlsMode = Literal["off", "accept", "require"]
PEER_TLS_MODES: Final = get_args(PeerTlsMode)
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")
_PREFIX: Final = "KVFS_"
_NOT_SETTINGS: Final = ("KVFS_CONFIG", "KVFS_GPU_READS")
_TEST_PREFIX: Final = "KVFS_TEST_"
_is_number: Final = re.compile(r"-?[0-9]{1,9}").fullmatch
_is_region: Final = re.compile(r"[a-z0-9-]{1,32}").fullmatch
_is_bucket: Final = re.compile(r"(s3://[^/]+(/.*)?)?").fullmatch
_is_web_address: Final = re.compile(r"https?://[^/]|\Z").match
_is_domain: Final = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*").fullmatch
_is_node_name: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}").fullmatch
_is_place: Final = re.compile(r"[A-Za-z0-9._-]{0,63}").fullmatch


def default_store() -> Path:
    """Returns the default store's directory: a system directory for root, one of their own for
    other users."""
    if os.geteuid() == 0:
        return Path("/var/lib/kvfs")
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "kvfs"


class Address(msgspec.Struct, frozen=True):
    """An address to listen at: a host (name or address) and a port, 0 for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


Listening = Address | Literal["auto", "off"]
"""`auto`: the usual port, or any free one if that is taken."""
S3_USUAL: Final = Address("127.0.0.1", 9000)
ADMIN_USUAL: Final = Address("127.0.0.1", 9001)
NFS_USUAL: Final = Address("127.0.0.1", 2049)
NFS_MOUNT_PORT: Final = 20048
PEER_PORT: Final = 9002
"""The port of the peer server, at the address by which this host reaches the engine."""
ENGINES: Final = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster")
"""Schemes of the URLs of engines that several nodes can share."""
MAX_S3_WORKERS: Final = 64
ENCRYPTED_STORAGE: Final = ("auto", "yes", "no")
OBJECT_OWNERSHIPS: Final = ("BucketOwnerEnforced", "BucketOwnerPreferred", "ObjectWriter")
"""S3's own names; under the first one ACLs do not count and cannot be set."""
DAY_S: Final = 86_400
MOST_BACKUP_S: Final = 366 * DAY_S


def default_s3_workers() -> int:
    """Returns one for each CPU that this process may use, at most four: each holds some 50 MB."""
    return min(len(os.sched_getaffinity(0)), 4)


def default_node_name() -> str:
    """Returns the host's name, without characters that a node's name cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:63].lstrip("._-") or "node"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a node. Field names are the keys of the TOML file; the text below each field
    stands in the documents too (`cli.settings_page`)."""

    store: Path = msgspec.field(default_factory=default_store)
    """The directory of data files and metadata."""
    mount: Path = Path("/mnt/kvfs")
    """The directory where the namespaces appear."""
    mode: Mode = "auto"
    """The data path: `auto` (the best one that the kernel and the privileges give), `passthrough`,
    `relay` or `libfuse`."""
    capacity: Capacity = Capacity(percent=90.0)
    """The limit of the store's data: a share of its disk, or bytes (`500GiB`)."""
    allow_other: bool = msgspec.field(default_factory=lambda: os.geteuid() == 0)
    """Whether other users may enter the mount (needs root, or `user_allow_other` in
    /etc/fuse.conf)."""
    suid: bool = False
    """Whether set-user-id bits take effect on the mount."""
    dev: bool = False
    """Whether device nodes work on the mount."""
    takeover_s: int = 0
    """Seconds for which the mount, and the programs that use it, wait for another daemon when its
    own has died or hands over (Linux 6.16). 0: the mount ends with its daemon."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = LOG_FORMATS[0]
    """The form of the log: `text`, or `json`: a line is an object with fields."""
    s3: Listening = "auto"
    """The address of the S3 API: `HOST:PORT`, `off`, or `auto`: 127.0.0.1:9000, or any free port if
    that is taken."""
    s3_workers: int = msgspec.field(default_factory=default_s3_workers)
    """Processes that serve S3."""
    s3_domains: tuple[str, ...] = ("localhost",)
    """Domains of the S3 API: a host below one of them names the bucket (virtual-hosted
    addressing)."""
    s3_region: str = "us-east-1"
    """The region that S3 reports, and signs presigned URLs for."""
    s3_certificate: str = ""
    """A PEM file with the certificate and its chain, to serve S3 over TLS."""
    s3_private_key: str = ""
    """The PEM file of the certificate's key."""
    s3_signature_v2: bool = True
    """Whether presigned URLs of signature version 2 are accepted."""
    s3_object_ownership: str = OBJECT_OWNERSHIPS[0]
    """Object ownership of buckets that S3 creates, if the request names none. ACLs count only under
    `ObjectWriter` and `BucketOwnerPreferred`."""
    encrypted_storage: str = ENCRYPTED_STORAGE[0]
    """Whether everything that the store lies on is encrypted, so that S3 accepts and reports SSE
    (AES256): `yes`, `no`, or `auto`: yes if fscrypt or dm-crypt is found."""
    s3_bucket_mode: str = "0700"
    """Permissions, in octal, of the directories of buckets that S3 creates, and so of their objects
    (0600); `0755` lets engines of other local users read them."""
    s3_access_log: str = ""
    """A file that gets a line for each request, in the format of S3's server access logs."""
    s3_log_delivery_s: int = 300
    """Seconds between deliveries of access logs into the buckets that PutBucketLogging names."""
    s3_lifecycle_day_s: int = DAY_S
    """Seconds that a day of lifecycle rules lasts; 10, say, to try rules out."""
    priority: int = -10
    """Nice value of the node and its S3 workers, if they may have it (root, or `LimitNICE`):
    programs wait for them, so they go first at a busy CPU. 0: that of the caller."""
    scrub_rate: int = 16 << 20
    """Bytes per second that the daily comparison of data with their checksums reads; 0: only when
    `kvfs scrub` asks, at full speed."""
    repair_rate: int = 128 << 20
    """Bytes per second that a node of a cluster moves to restore lost replicas, to drain and to
    rebalance; 0: no limit."""
    names_everywhere: int = 250_000_000
    """Names of peer namespaces of which every node of a cluster knows who holds them. Of more, each
    node knows a share and asks others for the rest; the same on all nodes."""
    admin: Listening = "auto"
    """The address of health and metrics: `HOST:PORT`, `off`, or `auto`: 127.0.0.1:9001, or any free
    port if that is taken, while S3 is served."""
    nfs: Listening = "off"
    """The address of NFS: `HOST:PORT`, `off`, or `auto`: 127.0.0.1:2049."""
    nfs_v3: bool = False
    """Whether NFS version 3 is served beside 4.0 and 4.1."""
    nfs_mount_port: int = NFS_MOUNT_PORT
    """The port of version 3's MOUNT protocol, on the host of `nfs`."""
    engine: str = ""
    """URL of the Redis or Valkey server that the nodes of a cluster share: `redis://`, `rediss://`,
    `unix://`, `redis+sentinel://`, `redis+cluster://`. Empty: a lone node."""
    node_name: str = msgspec.field(default_factory=default_node_name)
    """The node's name, unique in its cluster."""
    peer: Listening = "auto"
    """The address where other nodes fetch data: `HOST:PORT`, or `auto`: port 9002, or any free one
    if that is taken, at the address by which the engine is reached."""
    advertise: str = ""
    """`HOST[:PORT]` by which other nodes reach `peer`. Empty: the address by which the engine is
    reached, or the host of `peer`."""
    peer_tls: PeerTlsMode = "off"
    """TLS between nodes, by certificates that follow from the cluster's secret: `off`, `accept`
    (with all nodes that speak it) or `require` (nothing else)."""
    transport: Transport = "tcp"
    """The transport of data from other nodes: `tcp`, or `rdma` by Mooncake's transfer engine (`pip
    install 'kvfs[rdma]'`, libibverbs1)."""
    found: bool = False
    """Whether a cluster is made even if the engine was emptied, or another cluster's secret is
    here; the first node of a new engine makes one anyway."""
    zone: str = ""
    """The zone that fails as a whole with this node: replicas go to other zones."""
    rack: str = ""
    """The rack within the zone, which fails as a whole too."""
    secret_file: str = ""
    """The file of the cluster's secret. Empty: `cluster.key` in the store."""
    cold: str = ""
    """The cold tier, `s3://BUCKET/PREFIX`: namespaces with `--cold on` keep files there before they
    are evicted."""
    cold_endpoint: str = ""
    """URL of the cold tier's S3 service. Empty: from the AWS settings, like the credentials."""
    cold_rate: int = 0
    """Bytes per second that may be sent to the cold tier; 0: no limit."""
    backup: str = ""
    """The place of backups (`kvfs backup`): a directory, or `s3://BUCKET/PREFIX`."""
    backup_endpoint: str = ""
    """URL of the S3 service of `backup`. Empty: from the AWS settings, like the credentials."""
    backup_every_s: int = 0
    """Seconds from one backup that the node makes to the next; 0: it makes none."""
    backup_keep: int = 0
    """Backups that stay when one is made, the newest ones; 0: all."""
    tier: tuple[Place, ...] = ()
    """Memory and disks lent beside the store's directory: `ram=DIR:SIZE`, `ssd=DIR:SIZE`."""
    shared: tuple[Place, ...] = ()
    """Directories that several nodes have: `NAME=DIR`, or `NAME=DIR:owner=USER` if neither root nor
    the node's user owns it (a filesystem that squashes root)."""

    def as_dict(self) -> dict[str, str | bool | int | list[str]]:
        """Returns every key as it would be written in the file."""
        return {name: _written(getattr(self, name)) for name in KEYS}


def _written(value: object) -> str | bool | int | list[str]:
    if isinstance(value, bool | int):
        return value
    return [str(each) for each in value] if isinstance(value, tuple) else str(value)


KEYS: Final = Config.__struct_fields__


class SettingsSource(msgspec.Struct, frozen=True):
    """Values from one source; `label` names the place of a key in it, for messages."""

    values: Mapping[str, object]
    label: Callable[[str], str]


def load(
    flags: Mapping[str, object] | None = None,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Config, dict[str, str]]:
    """Returns the settings in effect, and the source of each key.

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
    """Checks that the settings fit together. Raises ConfigError."""
    pair = ("s3_certificate", "s3_private_key")
    for given, missing in (pair, pair[::-1]):
        if getattr(config, given) and not getattr(config, missing):
            raise ConfigError(f"{origins[given]}: needs {missing}, the other half of it")
    if isinstance(config.s3, Address) and config.s3 == config.admin and config.s3.port:
        raise ConfigError(f"{origins['admin']}: {config.admin} is where the S3 API listens")
    _check_nfs(config, origins)
    _check_cluster(config, origins)


def _check_nfs(config: Config, origins: Mapping[str, str]) -> None:
    """Checks that NFS has ports of its own."""
    address = NFS_USUAL if config.nfs == "auto" else config.nfs
    if not isinstance(address, Address):
        return
    for taken in ("s3", "admin"):
        if getattr(config, taken) == address:
            raise ConfigError(f"{origins['nfs']}: {address} is where {taken} listens")
    if config.nfs_v3 and address.port == config.nfs_mount_port:
        raise ConfigError(f"{origins['nfs_mount_port']}: NFS itself listens at that port")


def _check_cluster(config: Config, origins: Mapping[str, str]) -> None:
    """Checks the settings of a cluster's nodes: they are complete there, and not given to a lone
    node."""
    if not config.engine:
        for key in _OF_CLUSTERS:
            if origins[key].startswith("flag") and getattr(config, key) not in _NONE:
                raise ConfigError(
                    f"{origins[key]}: only nodes of a cluster have one: they share an --engine"
                )
        return
    if config.peer == "off":
        raise ConfigError(f"{origins['peer']}: a node of a cluster serves its data to the others")
    if config.peer_tls == "require" and config.transport == "rdma":
        raise ConfigError(
            f"{origins['transport']}: it sends data without TLS, which peer_tls requires"
        )
    for taken in ("s3", "admin", "nfs"):
        address = getattr(config, taken)
        if isinstance(address, Address) and address == config.peer and address.port:
            raise ConfigError(f"{origins['peer']}: {address} is where {taken} listens")


def _sources(
    flags: Mapping[str, object], file: Path | None, environ: Mapping[str, str]
) -> Iterable[SettingsSource]:
    path = _file_in_use(file, environ)
    if path is not None:
        yield SettingsSource(_read_toml(path), lambda key: f"{path}: {key}")
    variables = {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(_PREFIX)
        and name not in _NOT_SETTINGS
        and not name.startswith(_TEST_PREFIX)
    }
    yield SettingsSource(variables, lambda key: f"environment: {_PREFIX}{key.upper()}")
    yield SettingsSource(flags, lambda key: f"flag: --{key.replace('_', '-')}")


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


def _whole(what: str, least: int, most: int) -> Callable[[object], int]:
    def convert(value: object) -> int:
        number = int(value) if isinstance(value, str) and _is_number(value) else value
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise Invalid(f"must be {what} from {least} to {most}, not {number!r}")
        return number

    return convert


def _text(what: str, matches: Callable[[str], object]) -> Callable[[object], str]:
    def convert(value: object) -> str:
        if not isinstance(value, str) or not matches(value):
            raise Invalid(f"must be {what}, not {value!r}")
        return value

    return convert


def _rate(value: object) -> int:
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Invalid(f"must be bytes in a second like '16MiB', or 0, not {value!r}")
    return value


def _domains(value: object) -> tuple[str, ...]:
    """Converts a list, or one text with commas."""
    if isinstance(value, str):
        value = [each.strip() for each in value.split(",") if each.strip()]
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, str) and _is_domain(each) for each in value
    ):
        raise Invalid(f"must be names of hosts like ['s3.example.com'], not {value!r}")
    return tuple(each.lower() for each in value)


def _places(parse: Callable[[str], Place]) -> Callable[[object], tuple[Place, ...]]:
    """Converts a list, or one text with commas."""

    def convert(value: object) -> tuple[Place, ...]:
        if isinstance(value, str):
            value = [each.strip() for each in value.split(",") if each.strip()]
        if not isinstance(value, list | tuple):
            raise Invalid(f"must be a list of places, not {value!r}")
        return tuple(each if isinstance(each, Place) else parse(str(each)) for each in value)

    return convert


def _file_or_none(value: object) -> str:
    return "" if value == "" else str(_path(value))


def _place_of_backups(value: object) -> str:
    return value if isinstance(value, str) and _is_bucket(value) else str(_path(value))


def _permissions(value: object) -> str:
    if not isinstance(value, str) or re.fullmatch("0?[0-7]{3}", value) is None:
        raise Invalid(f"must be permissions in octal like '0700', not {value!r}")
    if int(value, 8) & 0o700 != 0o700:
        raise Invalid(f"must leave the owner everything, as '0700' does, not {value!r}")
    return f"0{value[-3:]}"


def _engine(value: object) -> str:
    if value == "":
        return ""
    scheme = str(value).partition("://")[0]
    if not isinstance(value, str) or "://" not in value or scheme not in ENGINES:
        raise Invalid(f"must be a URL that begins with {'://, '.join(ENGINES)}://")
    return value


def _advertised(value: object) -> str:
    host, colon, port = str(value).rpartition(":")
    if not isinstance(value, str) or (colon and not host) or any(c.isspace() for c in value):
        raise Invalid(f"must be HOST or HOST:PORT, not {value!r}")
    if colon and not host.endswith(":") and "]" not in port:
        _listening(value)
    return value


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
    "takeover_s": _whole("a number of seconds", 0, 3600),
    "log_level": _one_of(LOG_LEVELS),
    "log_format": _one_of(LOG_FORMATS),
    "s3": _listening,
    "s3_workers": _whole("a number", 1, MAX_S3_WORKERS),
    "s3_domains": _domains,
    "s3_region": _text("a name like 'us-east-1'", _is_region),
    "s3_certificate": _file_or_none,
    "s3_private_key": _file_or_none,
    "s3_signature_v2": _boolean,
    "s3_object_ownership": _one_of(OBJECT_OWNERSHIPS),
    "encrypted_storage": _one_of(ENCRYPTED_STORAGE),
    "s3_bucket_mode": _permissions,
    "s3_access_log": _file_or_none,
    "s3_log_delivery_s": _whole("a number of seconds", 1, DAY_S),
    "s3_lifecycle_day_s": _whole("a number of seconds", 1, DAY_S),
    "priority": _whole("a nice value", -20, 19),
    "scrub_rate": _rate,
    "repair_rate": _rate,
    "names_everywhere": _whole("a number of names", 0, 1 << 40),
    "admin": _listening,
    "nfs": _listening,
    "nfs_v3": _boolean,
    "nfs_mount_port": _whole("a port", 1, 65535),
    "engine": _engine,
    "node_name": _text("a name like 'gpu-07' of at most 63 letters", _is_node_name),
    "peer": _listening,
    "advertise": _advertised,
    "peer_tls": _one_of(PEER_TLS_MODES),
    "transport": _one_of(TRANSPORTS),
    "found": _boolean,
    "zone": _text("a name like 'zone-1' of at most 63 letters", _is_place),
    "rack": _text("a name like 'zone-1' of at most 63 letters", _is_place),
    "secret_file": _file_or_none,
    "cold": _text("s3://BUCKET/PREFIX", _is_bucket),
    "cold_endpoint": _text("a URL like 'https://s3.example.com'", _is_web_address),
    "cold_rate": _rate,
    "backup": _place_of_backups,
    "backup_endpoint": _text("a URL like 'https://s3.example.com'", _is_web_address),
    "backup_every_s": _whole("a number of seconds", 0, MOST_BACKUP_S),
    "backup_keep": _whole("a number of backups", 0, 1_000_000),
    "tier": _places(parse_tier),
    "shared": _places(parse_shared),
}
assert tuple(_CONVERTERS) == KEYS
_OF_CLUSTERS: Final = ("peer", "advertise", "peer_tls", "transport", "zone", "rack", "secret_file")
"""Settings that mean nothing to a lone node."""
_NONE: Final = ("", "auto", "off", "tcp")
"""Values of them that ask for nothing."""
