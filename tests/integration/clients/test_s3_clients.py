"""Real clients of the S3 API, unmodified, against one running node with its mount beside.

They live in a virtual environment of their own, `.venv-s3-clients`, see environments.py. Those for
Python are driven by the scripts in s3_clients/, programs from here.
"""

import hashlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.commands.admin.s3_clients import CLIENTS
from tests.integration.clients.environments import lmcache, s3_clients
from tests.integration.clients.s3_clients.objects import MIB, ODD, SIZES, content
from tests.integration.harness import kvfs
from tests.integration.s3 import REGION, S3

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(1200)  # the first tests may have to install the clients


@pytest.fixture(scope="session")
def programs() -> Path:
    """Where the clients' programs are."""
    return s3_clients().parent


@dataclass(frozen=True)
class Shop:
    """A bucket, and how clients are run that know where it is."""

    s3: S3
    bucket: str
    programs: Path
    home: Path

    @property
    def mount(self) -> Path:
        """The bucket's directory."""
        return self.s3.mount / self.bucket

    @property
    def store(self) -> str:
        return str(self.s3.node.store)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        pair = self.s3.users["main"]
        return {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "AWS_ACCESS_KEY_ID": pair.access_key,
            "AWS_SECRET_ACCESS_KEY": pair.secret,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_S3": self.s3.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "S3_BUCKET": self.bucket,
            "S3_MOUNT": str(self.mount),
        }

    def run(
        self,
        *command: object,
        stdin: bytes = b"",
        code: int = 0,
        more: Mapping[str, str] | None = None,
    ) -> bytes:
        """What a program says to its standard output; it must end with `code`."""
        done = subprocess.run(
            list(map(str, command)),
            cwd=self.home,
            env=self.environment | dict(more or {}),
            input=stdin,
            capture_output=True,
            timeout=120,
            check=False,
        )
        said = done.stdout[-3000:] + done.stderr[-3000:]
        assert done.returncode == code, said.decode(errors="replace")
        return done.stdout

    def settings_for(self, client: str) -> str:
        """What KVFS tells its users to configure a client with."""
        store = ("--store", str(self.s3.node.store))
        done = kvfs("s3", "env", *store, "--user", "main", "--for", client)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def shop(s3: S3, bucket: str, programs: Path, tmp_path: Path) -> Shop:
    return Shop(s3, bucket, programs, tmp_path)


def plant(root: Path) -> dict[str, bytes]:
    """Files of all sizes and names below a directory; returns their paths with their content."""
    files = {name: content(size) for name, size in SIZES.items()}
    files |= {name: name.encode() for name in ODD}
    files |= {f"sub/{name}": name.encode() for name in ("one", "two/deep")}
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return files


def files_below(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("name", ["minio", "obstore", "pyarrow", "s3fs"])
def test_clients_for_python(shop: Shop, name: str) -> None:
    if name in CLIENTS:
        (shop.home / "configured.py").write_text(shop.settings_for(name))
    script = HERE / "s3_clients" / f"with_{name}.py"
    shop.run(shop.programs / "python", script, more={"PYTHONPATH": str(shop.home)})


@pytest.fixture
def named_host(shop: Shop) -> Shop:
    """A shop whose programs find `BUCKET.localhost`: not every machine looks names below localhost
    up, so they run where /etc/hosts has it."""
    hosts = shop.home / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {shop.bucket}.localhost\n")
    enter = shop.home / "enter"
    enter.write_text(
        '#!/bin/sh\nexec unshare --map-root-user --mount sh -c \'mount --bind "$0" /etc/hosts && '
        f'exec "$@"\' {hosts} "$@"\n'
    )
    enter.chmod(0o755)
    if subprocess.run([enter, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace for an /etc/hosts of its own")
    return shop


def test_awscrt(named_host: Shop) -> None:
    shop = named_host
    script = HERE / "s3_clients" / "with_awscrt.py"
    shop.run(shop.home / "enter", shop.programs / "python", script)


def test_runai_streamer(shop: Shop) -> None:
    """With the settings that `kvfs s3 env --for vllm` prints, in the environment that has torch."""
    settings = (line.removeprefix("export ") for line in shop.settings_for("vllm").splitlines())
    more = dict(line.split("=", 1) for line in settings if not line.startswith("#"))
    (shop.mount / "llama").mkdir()
    script = HERE / "s3_clients" / "with_runai.py"
    shop.run(lmcache(), script, shop.mount / "llama", f"{shop.url}/llama", more=more)


def test_lmcache(named_host: Shop) -> None:
    """Its connector and its L2 adapter; the bucket is the one in the settings' place."""
    shop = named_host
    config = shop.settings_for("lmcache").replace("s3://cache.", f"{shop.url}.")
    (shop.home / "lmcache.yaml").write_text(config)
    script = HERE / "programs" / "lmcache_s3_example.py"
    more = {"LMCACHE_TRACK_USAGE": "false"}
    said = shop.run(shop.home / "enter", lmcache(), script, "lmcache.yaml", more=more)
    assert b"connector and L2 adapter got every byte back" in said
    blocks = files_below(shop.mount)
    assert len(blocks) == 8 + 7  # the adapter deleted one
    assert {len(data) for data in blocks.values()} == {4 * MIB}


def test_virtual_hosts(named_host: Shop) -> None:
    """Both versions of the signature sign the bucket that the host names."""
    shop = named_host
    enter, host = shop.home / "enter", f"%(bucket)s.localhost:{shop.s3.port}"
    endpoint = f"http://localhost:{shop.s3.port}"
    (shop.home / "data").write_bytes(content(6 * MIB))
    config = shop.home / "aws"
    config.write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    aws = {"AWS_CONFIG_FILE": str(config), "AWS_ENDPOINT_URL_S3": endpoint}
    shop.run(enter, "aws", "s3", "cp", "data", f"{shop.url}/by aws", more=aws)
    assert shop.run(enter, "aws", "s3", "cp", f"{shop.url}/by aws", "-", more=aws) == content(
        6 * MIB
    )
    for version in (2, 4):
        (shop.home / ".s3cfg").write_text(
            f"{shop.settings_for('s3cmd')}host_bucket = {host}\nsignature_v2 = {version == 2}\n"
        )
        shop.run(enter, "s3cmd", "put", "data", f"{shop.url}/by s3cmd {version}")
        assert b"by aws" in shop.run(enter, "s3cmd", "ls", shop.url)
        assert (shop.mount / f"by s3cmd {version}").read_bytes() == content(6 * MIB)
        shop.run(enter, "s3cmd", "get", "--force", f"{shop.url}/by s3cmd {version}", "back")
        assert (shop.home / "back").read_bytes() == content(6 * MIB)


# ---- boto3


def test_boto3(shop: Shop) -> None:
    """Its transfers, with the checksums that it takes by default."""
    client = shop.s3.client("main")
    for name, data in plant(shop.home / "tree").items():
        client.upload_file(str(shop.home / "tree" / name), shop.bucket, name)
        assert (shop.mount / name).read_bytes() == data
        client.download_file(shop.bucket, name, str(shop.home / "back"))
        assert (shop.home / "back").read_bytes() == data
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=shop.bucket, MaxKeys=3)
    keys = [entry["Key"] for page in pages for entry in page["Contents"]]
    assert keys == sorted(files_below(shop.mount), key=str.encode)
    client.copy({"Bucket": shop.bucket, "Key": "large"}, shop.bucket, "copy of large")
    assert (shop.mount / "copy of large").read_bytes() == content(20 * MIB)
    (shop.mount / "large").write_bytes(b"now small")
    assert client.get_object(Bucket=shop.bucket, Key="large")["Body"].read() == b"now small"


# ---- awscli


def test_awscli_syncs(shop: Shop) -> None:
    """Large files go in parts; a body of no bytes waits for 100 Continue all the same."""
    tree, back = shop.home / "tree", shop.home / "back"
    files = plant(tree)
    shop.run("aws", "s3", "sync", "--no-progress", tree, shop.url)
    assert files_below(shop.mount) == files
    (shop.mount / "of the mount").write_bytes(b"m")
    shop.run("aws", "s3", "sync", "--no-progress", shop.url, back)
    assert files_below(back) == files | {"of the mount": b"m"}
    (shop.mount / "sub" / "one").unlink()
    assert shop.run("aws", "s3", "sync", "--no-progress", shop.url, back) == b""
    said = shop.run("aws", "s3", "sync", "--no-progress", "--delete", shop.url, back)
    assert said == b"delete: back/sub/one\n"
    listed = shop.run("aws", "s3", "ls", "--recursive", "--summarize", shop.url).decode()
    assert f"Total Objects: {len(files)}\n" in listed
    assert listed.splitlines()[-4].endswith("ünïcode/☃")
    shop.run("aws", "s3", "rm", "--recursive", f"{shop.url}/sub")
    assert not (shop.mount / "sub").exists()


def test_awscli_copies(shop: Shop) -> None:
    large, url = content(20 * MIB), f"{shop.url}/a dir/large+1"
    shop.run("aws", "s3", "cp", "-", url, "--metadata", "colour=green", stdin=large)
    assert (shop.mount / "a dir" / "large+1").read_bytes() == large
    assert os.getxattr(shop.mount / "a dir" / "large+1", "user.s3.meta.colour") == b"green"
    assert shop.run("aws", "s3", "cp", url, "-") == large
    shop.run("aws", "s3", "mv", url, f"{shop.url}/moved")
    assert (shop.mount / "moved").read_bytes() == large
    assert not (shop.mount / "a dir").exists()
    url = shop.run("aws", "s3", "presign", f"{shop.url}/moved").decode().strip()
    with urllib.request.urlopen(url) as response:
        assert response.read() == large
    shop.run("aws", "s3", "mb", shop.url + "-more")
    shop.run("aws", "s3", "cp", f"{shop.url}/moved", f"{shop.url}-more")
    shop.run("aws", "s3", "rb", "--force", shop.url + "-more")
    assert (shop.url + "-more").removeprefix("s3://") not in shop.run("aws", "s3", "ls").decode()


def test_awscli_names_any_key(shop: Shop) -> None:
    (shop.home / "file").write_bytes(b"0123456789")
    for key in ("a//b", "dir/", "/leading", "../up", "./here"):
        at = ("--bucket", shop.bucket, "--key", key)
        shop.run("aws", "s3api", "put-object", *at, "--body", "file", "--if-none-match", "*")
        shop.run("aws", "s3api", "get-object", *at, "--range", "bytes=3-5", "part")
        assert (shop.home / "part").read_bytes() == b"345"
    keys = json.loads(
        shop.run(
            *("aws", "s3api", "list-objects-v2", "--bucket", shop.bucket),
            *("--query", "Contents[].Key"),
        )
    )
    assert keys == ["../up", "./here", "/leading", "a//b", "dir/"]
    assert (shop.mount / "a" / "%" / "b").read_bytes() == b"0123456789"


# ---- rclone


def test_rclone(shop: Shop) -> None:
    (shop.home / "rclone.conf").write_text(shop.settings_for("rclone"))
    settings = {
        "RCLONE_CONFIG": str(shop.home / "rclone.conf"),
        "RCLONE_S3_UPLOAD_CUTOFF": "6Mi",
        "RCLONE_S3_COPY_CUTOFF": "6Mi",
        "RCLONE_RETRIES": "1",
    }

    def rclone(*arguments: object, stdin: bytes = b"", code: int = 0) -> str:
        said = shop.run("rclone", *arguments, stdin=stdin, more=settings, code=code)
        return said.decode("utf-8", "surrogateescape")

    remote = f"kvfs:{shop.bucket}"
    tree, back = shop.home / "tree", shop.home / "back"
    files = plant(tree)
    rclone("copy", tree, remote)
    assert files_below(shop.mount) == files
    rclone("check", tree, remote)
    rclone("check", "--download", tree, remote)
    rclone("check", shop.mount, remote)
    listed = dict(line.split(maxsplit=1)[::-1] for line in rclone("ls", remote).splitlines())
    assert listed == {name: str(len(data)) for name, data in files.items()}
    sums = dict(line.split("  ")[::-1] for line in rclone("md5sum", remote).splitlines())
    assert sums == {name: hashlib.md5(data).hexdigest() for name, data in files.items()}
    (shop.mount / "small").write_bytes(b"changed on the mount")
    (shop.mount / "empty").unlink()
    rclone("sync", remote, back)
    assert files_below(back) == files_below(shop.mount)
    rclone("sync", tree, remote)
    assert files_below(shop.mount) == files
    part = rclone("cat", f"{remote}/small", "--offset", 3, "--count", 4)
    assert os.fsencode(part) == content(11)[3:7]
    rclone("rcat", f"{remote}/streamed", stdin=content(7 * MIB))
    assert (shop.mount / "streamed").read_bytes() == content(7 * MIB)
    rclone("moveto", f"{remote}/large", f"{remote}/moved here")
    assert (shop.mount / "moved here").read_bytes() == content(20 * MIB)
    assert not (shop.mount / "large").exists()
    rclone("deletefile", f"{remote}/streamed")
    # What another client put, in one piece and without a digest, is compared by its content, too.
    other, (size, when) = tree / "other", (MIB, 1_700_000_000)
    plain = shop.s3.client("main", request_checksum_calculation="when_required")
    plain.put_object(Bucket=shop.bucket, Key="other", Body=b"a" * size)
    other.write_bytes(b"b" * size)
    os.utime(other, (when, when))
    rclone("sync", "--checksum", tree, remote)
    assert (shop.mount / "other").read_bytes() == b"b" * size
    # So is what the mount wrote, in a bucket with MD5s of files, too.
    kvfs("namespace", "set", f"/{shop.bucket}", "--etag", "md5-all", "--store", shop.store)
    (shop.mount / "other").write_bytes(b"c" * size)
    (shop.mount / "sub" / "one").write_bytes(files["sub/one"])
    os.utime(shop.mount / "other", (when, when))
    said = rclone("check", "--one-way", "--differ", "-", tree, remote, code=1)
    assert said.split() == ["other"]
    rclone("sync", "--checksum", tree, remote)
    assert (shop.mount / "other").read_bytes() == b"b" * size
    (shop.mount / "other").write_bytes(b"c" * size)
    rclone("sync", "--checksum", remote, tree)
    assert other.read_bytes() == b"c" * size
    rclone("purge", f"{remote}/sub")
    assert not (shop.mount / "sub").exists()
    rclone("delete", remote)
    assert rclone("lsf", "-R", "--files-only", remote) == ""


# ---- s3cmd


@pytest.mark.parametrize("version", [2, 4])
def test_s3cmd(shop: Shop, version: int) -> None:
    """With signatures of both versions; parts of 5 MiB."""
    (shop.home / ".s3cfg").write_text(
        f"{shop.settings_for('s3cmd')}signature_v2 = {version == 2}\n"
        "multipart_chunk_size_mb = 5\nprogress_meter = False\nmax_retries = 1\n"
    )

    def s3cmd(*arguments: object) -> str:
        return shop.run("s3cmd", *arguments).decode()

    tree, back = shop.home / "tree", shop.home / "back"
    back.mkdir()
    files = plant(tree)
    s3cmd("put", tree / "large", f"{shop.url}/put one")
    assert (shop.mount / "put one").read_bytes() == content(20 * MIB)
    s3cmd("del", f"{shop.url}/put one")
    s3cmd("sync", f"{tree}/", f"{shop.url}/")
    assert files_below(shop.mount) == files
    s3cmd("sync", f"{shop.url}/", f"{back}/")
    assert files_below(back) == files
    listed = s3cmd("ls", "-r", shop.url)
    assert [line.split(f"{shop.url}/")[1] for line in listed.splitlines()] == sorted(files)
    about = s3cmd("info", f"{shop.url}/small")
    assert f"MD5 sum:   {hashlib.md5(content(11)).hexdigest()}" in about
    assert "File size: 11\n" in about
    s3cmd("cp", f"{shop.url}/large", f"{shop.url}/copied/large")
    assert (shop.mount / "copied" / "large").read_bytes() == content(20 * MIB)
    s3cmd("mv", f"{shop.url}/copied/large", f"{shop.url}/moved")
    s3cmd("modify", "--add-header=x-amz-meta-colour:green", f"{shop.url}/moved")
    assert os.getxattr(shop.mount / "moved", "user.s3.meta.colour") == b"green"
    assert s3cmd("du", shop.url).split()[0] == str(
        sum(len(data) for data in files.values()) + 20 * MIB
    )
    (shop.mount / "of the mount").write_bytes(b"m")
    s3cmd("get", f"{shop.url}/of the mount", back / "m")
    assert (back / "m").read_bytes() == b"m"
    # In a bucket with MD5s of files, too, what the mount wrote is compared by its content.
    kvfs("namespace", "set", f"/{shop.bucket}", "--etag", "md5-all", "--store", shop.store)
    (shop.mount / "small").write_bytes(content(12)[1:])
    s3cmd("sync", f"{shop.url}/", f"{back}/")
    assert (back / "small").read_bytes() == content(12)[1:]
    (shop.mount / "small").write_bytes(files["small"])
    assert "upload:" not in s3cmd("sync", f"{tree}/small", f"{shop.url}/")
    url = s3cmd("signurl", f"{shop.url}/moved", "+60").strip()
    with urllib.request.urlopen(url) as response:
        assert response.read() == content(20 * MIB)
    s3cmd("del", "-r", "-f", shop.url)
    assert not files_below(shop.mount)


# ---- curl


def test_curl(shop: Shop) -> None:
    """Signing for itself, and with URLs that were signed for it."""
    (shop.home / "curlrc").write_text(shop.settings_for("curl"))
    (shop.home / "data").write_bytes(content(5 * MIB))
    url = f"{shop.s3.endpoint}/{shop.bucket}"
    curl = ("curl", "--silent", "--show-error", "--fail")
    signing = (*curl, "--config", "curlrc")
    shop.run(*signing, "--upload-file", "data", f"{url}/signed")  # waits for 100 Continue
    assert (shop.mount / "signed").read_bytes() == content(5 * MIB)
    assert shop.run(*signing, f"{url}/signed") == content(5 * MIB)
    assert shop.run(*signing, "--range", "10-19", f"{url}/signed") == content(5 * MIB)[10:20]
    shop.run(*signing, "--request", "DELETE", f"{url}/signed")
    assert not (shop.mount / "signed").exists()
    for number, sign in enumerate((by_kvfs, by_boto3, by_boto3_version_4)):
        key = f"pre signed+{number}"
        shop.run(*curl, "--upload-file", "data", sign(shop, "PUT", key))
        assert (shop.mount / key).read_bytes() == content(5 * MIB)
        assert shop.run(*curl, sign(shop, "GET", key)) == content(5 * MIB)
        shop.run(*curl, "--request", "DELETE", sign(shop, "GET", key), code=22)
        assert (shop.mount / key).exists()


def by_kvfs(shop: Shop, method: str, key: str) -> str:
    where = ("--store", str(shop.s3.node.store), "--user", "main")
    done = kvfs("s3", "presign", *where, method, f"{shop.bucket}/{key}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def by_boto3(shop: Shop, method: str, key: str, **options: Any) -> str:
    """Signed with version 2, as boto3 does for an endpoint of one's own."""
    url: str = shop.s3.client("main", **options).generate_presigned_url(
        f"{method.lower()}_object", {"Bucket": shop.bucket, "Key": key}
    )
    assert ("X-Amz-Signature=" in url) == bool(options)
    return url


def by_boto3_version_4(shop: Shop, method: str, key: str) -> str:
    return by_boto3(shop, method, key, signature_version="s3v4")
