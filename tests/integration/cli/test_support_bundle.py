"""`kvfs support-bundle` tells all of a node and no secret: planted ones are looked for."""

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.admin.redaction import REMOVED, Redactor
from tests.integration.harness import Node, best_mode, kvfs

PASSWORD = "pa55-of-the-engine"


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node.make(best_mode(), "--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0")
    yield made
    made.remove()


def unpack(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {each.name: archive.extractfile(each) for each in archive}
        return {
            name.partition("/")[2]: file.read().decode()
            for name, file in files.items()
            if file is not None
        }


def test_a_bundle_tells_all_and_no_secret(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.up()
    keys = (node.store / "s3-credentials").read_text()
    (secret,) = re.findall(r"secret\w* *= *(\S+)", keys)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-cold-tier-123")
    settings = tmp_path / "kvfs.toml"
    settings.write_text(f'engine = "redis+sentinel://user:{PASSWORD}@host,[::1]/n"\n')
    planted = [secret, PASSWORD, "of-the-cold-tier-123", "bearer-of-all", "mounts-pass"]
    with open(node.store / "run" / "kvfs.log", "a") as log:
        log.write(f"redis://user:{PASSWORD}@host/0 failed; {secret}; of-the-cold-tier-123\n")
        log.write("GET /b?X-Amz-Signature=bearer-of-all Authorization: bearer-of-all\n")
        log.write("//host/x /x cifs rw,password=mounts-pass 0 0\nthe last line\n")
    file = tmp_path / "bundle.tar.gz"
    place = ("--store", str(node.store), "--config", str(settings))
    done = kvfs("support-bundle", str(file), *place)
    assert done.returncode == 0, done.stderr
    assert file.stat().st_mode & 0o777 == 0o600

    found = unpack(file)
    assert [(name, each) for name, text in found.items() for each in planted if each in text] == []
    assert json.loads(found["status.json"])["pid"] == node.pid
    assert "kvfs_up_seconds" in found["metrics.txt"]
    assert json.loads(found["settings.json"])["settings"]["store"] == str(node.store)
    assert f"redis+sentinel://user:{REMOVED}@host,[::1]/n" in found["settings.json"]
    assert any(line["name"] == "passthrough" for line in json.loads(found["doctor.json"]))
    assert "the last line" in found["kvfs.log"]
    assert json.loads(found["versions.json"])["packages"]["trio"]
    assert "Name:" in found["process/status"]
    assert "kvfs.log.1: " in found["missing.txt"]
    assert kvfs("support-bundle", str(file), *place).returncode == 4  # it is there already


def test_a_stopped_node_has_a_bundle_too(node: Node, tmp_path: Path) -> None:
    node.up()
    node.down()
    file = tmp_path / "bundle.tar.gz"
    done = kvfs("support-bundle", str(file), "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    found = unpack(file)
    assert "kvfs " in found["kvfs.log"]
    assert "status.json: " in found["missing.txt"]


def test_no_part_of_an_archive_is_left(node: Node, tmp_path: Path) -> None:
    node.up()
    file = tmp_path / "bundle.tar.gz"
    command = ("support-bundle", str(file), "--store", str(node.store))
    done = kvfs(*command, inside=("prlimit", "--fsize=1000"))
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr
    assert not file.exists()
    assert kvfs(*command).returncode == 0


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("a known-secret b", f"a {REMOVED} b"),
        (
            '{"secret_file": "/etc/x", "token": "abc"}',
            f'{{"secret_file": "/etc/x", "token": "{REMOVED}"}}',
        ),
        ("redis://u:a:b@c@h", f"redis://u:{REMOVED}@h"),
        ("rediss://:p%20w@h:1/0", f"rediss://:{REMOVED}@h:1/0"),
        (f"REDIS://u:pw@h {'a' * 300_000}", f"REDIS://u:{REMOVED}@h {'a' * 300_000}"),
        (f"a://:{'b' * 300_000}", f"a://:{'b' * 300_000}"),
        ("http://127.0.0.1:9000/a@b", "http://127.0.0.1:9000/a@b"),
        ("tokens: 12 blocks", "tokens: 12 blocks"),
        ("aws_secret_access_key=xyz", f"aws_secret_access_key={REMOVED}"),
    ],
)
def test_secrets_are_known_by_their_place(text: str, clean: str) -> None:
    assert Redactor(["known-secret", "a"]).clean(text) == clean
