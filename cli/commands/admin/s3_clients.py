"""The configuration of each client, as text to paste or to evaluate."""

import shlex
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvfs.base.errors import Invalid
from s3api.auth.credentials import Credentials


class _Access(NamedTuple):
    endpoint: str
    region: str
    key: str
    secret: str

    @property
    def host(self) -> str:
        """The host with its port."""
        return urlsplit(self.endpoint).netloc

    @property
    def scheme(self) -> str:
        return urlsplit(self.endpoint).scheme

    @property
    def secure(self) -> bool:
        return self.scheme == "https"


def _shell(a: _Access) -> str:
    values = {
        "AWS_ACCESS_KEY_ID": a.key,
        "AWS_SECRET_ACCESS_KEY": a.secret,
        "AWS_REGION": a.region,
        "AWS_DEFAULT_REGION": a.region,
        "AWS_ENDPOINT_URL": a.endpoint,
        "AWS_ENDPOINT_URL_S3": a.endpoint,
    }
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


def _boto3(a: _Access) -> str:
    return f"""\
import boto3

s3 = boto3.client(
    "s3",
    endpoint_url="{a.endpoint}",
    region_name="{a.region}",
    aws_access_key_id="{a.key}",
    aws_secret_access_key="{a.secret}",
)
"""


def _awscli(a: _Access) -> str:
    return f"""\
# ~/.aws/config; then: aws --profile kvfs s3 ls
[profile kvfs]
aws_access_key_id = {a.key}
aws_secret_access_key = {a.secret}
region = {a.region}
endpoint_url = {a.endpoint}
"""


def _rclone(a: _Access) -> str:
    return f"""\
[kvfs]
type = s3
provider = Other
endpoint = {a.endpoint}
region = {a.region}
access_key_id = {a.key}
secret_access_key = {a.secret}
force_path_style = true
"""


def _s3fs(a: _Access) -> str:
    return f"""\
import s3fs

fs = s3fs.S3FileSystem(
    key="{a.key}",
    secret="{a.secret}",
    client_kwargs={{"endpoint_url": "{a.endpoint}", "region_name": "{a.region}"}},
)
"""


def _s3cmd(a: _Access) -> str:
    return f"""\
[default]
access_key = {a.key}
secret_key = {a.secret}
host_base = {a.host}
host_bucket = {a.host}
bucket_location = {a.region}
use_https = {a.secure}
"""


def _minio(a: _Access) -> str:
    return f"""\
from minio import Minio

client = Minio(
    endpoint="{a.host}",
    access_key="{a.key}",
    secret_key="{a.secret}",
    region="{a.region}",
    secure={a.secure},
)
"""


def _pyarrow(a: _Access) -> str:
    return f"""\
from pyarrow import fs

s3 = fs.S3FileSystem(
    access_key="{a.key}",
    secret_key="{a.secret}",
    region="{a.region}",
    scheme="{a.scheme}",
    endpoint_override="{a.host}",
)
"""


def _lmcache(a: _Access) -> str:
    # Its client puts the bucket before the host. Not every machine looks names below localhost up.
    host = a.host.replace("127.0.0.1", "localhost")
    return f"""\
# lmcache.yaml; the bucket "cache" is the directory /cache of the mount. Where the machine
# does not find cache.localhost, /etc/hosts needs the line: 127.0.0.1 cache.localhost
remote_url: "s3://cache.{host}"
remote_serde: "naive"
extra_config:
  s3_region: "{a.region}"
  disable_tls: {str(not a.secure).lower()}
  aws_access_key_id: "{a.key}"
  aws_secret_access_key: "{a.secret}"
"""


def _vllm(a: _Access) -> str:
    return (
        _shell(a)
        + f"""\
# weights: vllm serve s3://models/NAME --load-format runai_streamer
export RUNAI_STREAMER_S3_ENDPOINT={a.endpoint}
export RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING=0
export AWS_EC2_METADATA_DISABLED=true
"""
    )


def _curl(a: _Access) -> str:
    # A file and no arguments: those are in the list of processes.
    return f"""\
# kvfs s3 env --for curl | curl --config - {a.endpoint}/BUCKET/KEY
user = "{a.key}:{a.secret}"
aws-sigv4 = "aws:amz:{a.region}:s3"
header = "x-amz-content-sha256: UNSIGNED-PAYLOAD"
"""


_CLIENTS: Final[dict[str, Callable[[_Access], str]]] = {
    "shell": _shell,
    "boto3": _boto3,
    "awscli": _awscli,
    "rclone": _rclone,
    "s3fs": _s3fs,
    "s3cmd": _s3cmd,
    "minio": _minio,
    "pyarrow": _pyarrow,
    "lmcache": _lmcache,
    "vllm": _vllm,
    "curl": _curl,
}
CLIENTS: Final = tuple(_CLIENTS)


def render(client: str, endpoint: str, region: str, pair: Credentials) -> str:
    """Returns the text for a client of CLIENTS. Raises Invalid for others."""
    if client not in _CLIENTS:
        raise Invalid(f"--for takes one of {', '.join(CLIENTS)}, not '{client}'")
    return _CLIENTS[client](_Access(endpoint, region, pair.access_key, pair.secret))
