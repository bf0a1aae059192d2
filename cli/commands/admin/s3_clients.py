"""The configuration of each client, as text to paste or to evaluate."""

import shlex
from typing import Final
from urllib.parse import urlsplit

from kvfs.base.errors import Invalid
from s3api.auth.credentials import Credentials

_SHELL: Final = """\
export AWS_ACCESS_KEY_ID={shell_key}
export AWS_SECRET_ACCESS_KEY={shell_secret}
export AWS_REGION={shell_region}
export AWS_DEFAULT_REGION={shell_region}
export AWS_ENDPOINT_URL={shell_endpoint}
export AWS_ENDPOINT_URL_S3={shell_endpoint}
"""
_TEXTS: Final = {
    "shell": _SHELL,
    "boto3": """\
import boto3

s3 = boto3.client(
    "s3",
    endpoint_url="{endpoint}",
    region_name="{region}",
    aws_access_key_id="{key}",
    aws_secret_access_key="{secret}",
)
""",
    "awscli": """\
# ~/.aws/config; then: aws --profile kvfs s3 ls
[profile kvfs]
aws_access_key_id = {key}
aws_secret_access_key = {secret}
region = {region}
endpoint_url = {endpoint}
""",
    "rclone": """\
[kvfs]
type = s3
provider = Other
endpoint = {endpoint}
region = {region}
access_key_id = {key}
secret_access_key = {secret}
force_path_style = true
""",
    "s3fs": """\
import s3fs

fs = s3fs.S3FileSystem(
    key="{key}",
    secret="{secret}",
    client_kwargs={{"endpoint_url": "{endpoint}", "region_name": "{region}"}},
)
""",
    "s3cmd": """\
[default]
access_key = {key}
secret_key = {secret}
host_base = {host}
host_bucket = {host}
bucket_location = {region}
use_https = {secure}
""",
    "minio": """\
from minio import Minio

client = Minio(
    endpoint="{host}",
    access_key="{key}",
    secret_key="{secret}",
    region="{region}",
    secure={secure},
)
""",
    "pyarrow": """\
from pyarrow import fs

s3 = fs.S3FileSystem(
    access_key="{key}",
    secret_key="{secret}",
    region="{region}",
    scheme="{scheme}",
    endpoint_override="{host}",
)
""",
    # Its client puts the bucket before the host. Not every machine looks names below localhost up.
    "lmcache": """\
# lmcache.yaml; the bucket "cache" is the directory /cache of the mount. Where the machine
# does not find cache.localhost, /etc/hosts needs the line: 127.0.0.1 cache.localhost
remote_url: "s3://cache.{local_host}"
remote_serde: "naive"
extra_config:
  s3_region: "{region}"
  disable_tls: {without_tls}
  aws_access_key_id: "{key}"
  aws_secret_access_key: "{secret}"
""",
    "vllm": _SHELL
    + """\
# weights: vllm serve s3://models/NAME --load-format runai_streamer
export RUNAI_STREAMER_S3_ENDPOINT={endpoint}
export RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING=0
export AWS_EC2_METADATA_DISABLED=true
""",
    # A file and no arguments: those are in the list of processes.
    "curl": """\
# kvfs s3 env --for curl | curl --config - {endpoint}/BUCKET/KEY
user = "{key}:{secret}"
aws-sigv4 = "aws:amz:{region}:s3"
header = "x-amz-content-sha256: UNSIGNED-PAYLOAD"
""",
}
CLIENTS: Final = tuple(_TEXTS)


def render(client: str, endpoint: str, region: str, pair: Credentials) -> str:
    """Returns the text for a client of CLIENTS. Raises Invalid for others."""
    if client not in _TEXTS:
        raise Invalid(f"--for takes one of {', '.join(CLIENTS)}, not '{client}'")
    values = {"endpoint": endpoint, "region": region, "key": pair.access_key, "secret": pair.secret}
    address = urlsplit(endpoint)
    is_secure = address.scheme == "https"
    return _TEXTS[client].format(
        **values,
        **{f"shell_{name}": shlex.quote(value) for name, value in values.items()},
        host=address.netloc,
        local_host=address.netloc.replace("127.0.0.1", "localhost"),
        scheme=address.scheme,
        secure=is_secure,
        without_tls=str(not is_secure).lower(),
    )
