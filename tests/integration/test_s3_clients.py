"""Real clients of the S3 API, unmodified, against one running node with its mount beside.

They live in a virtual environment of their own, `.venv-s3-clients`, see environments.py. Those for
Python are driven by the scripts in s3_clients/, programs from here.
"""

import os
import random
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.environments import environment
from tests.integration.s3 import REGION, S3

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
SIZES = {"empty": 0, "small": 11, "above-a-part": 5 * MIB + 1, "large": 20 * MIB}
ODD = ("with space", "plus+sign", "per%cent", "100%25", "ünïcode/☃", "a&b=c#e", "~-_.!*'()")

pytestmark = pytest.mark.timeout(600)  # the first test may have to install the clients


@pytest.fixture(scope="session")
def programs() -> Path:
    """Where the clients' programs are."""
    return environment(".venv-s3-clients", HERE / "requirements-s3-clients.txt").parent


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

    def script(self, name: str) -> None:
        self.run(self.programs / "python", HERE / "s3_clients" / f"{name}.py")


@pytest.fixture
def shop(s3: S3, bucket: str, programs: Path, tmp_path: Path) -> Shop:
    return Shop(s3, bucket, programs, tmp_path)


def content(size: int) -> bytes:
    """Always the same for a size."""
    return random.Random(size).randbytes(size)


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
    shop.script(f"with_{name}")


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
