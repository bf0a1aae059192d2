"""What the Helm chart says of this project is so; Helm itself is not asked."""

import re
import subprocess
from pathlib import Path

from cli.commands.service import up
from kvfs.base.config import KEYS, load
from kvfs.base.version import VERSION

CHART = Path(__file__).resolve().parents[2] / "docs/packaging/helm/kvfs"
NODES = (CHART / "templates/nodes.yaml").read_text()
VALUES = (CHART / "values.yaml").read_text()
TEMPLATES = "".join(path.read_text() for path in (CHART / "templates").iterdir())


def block(text: str, name: str) -> str:
    """The lines below a key at the top."""
    found = re.search(rf"^{name}:\n((?:  .*\n)+)", text, re.MULTILINE)
    assert found is not None, name
    return found[1]


def test_it_is_of_this_version() -> None:
    about = (CHART / "Chart.yaml").read_text()
    assert re.findall(r"^(?:appVersion|version): (.*)$", about, re.MULTILINE) == [VERSION] * 2
    assert re.findall(r"^  tag: (.*)$", VALUES, re.MULTILINE) == [VERSION]


def test_its_settings_are_there() -> None:
    variables = re.findall(r"name: (KVFS_\w+)", TEMPLATES)
    assert {name.removeprefix("KVFS_").lower() for name in variables} <= set(KEYS)
    settings = dict(re.findall(r"^  (\w+): (.*)$", block(VALUES, "settings"), re.MULTILINE))
    own = {name.removeprefix("KVFS_").lower() for name in variables}
    assert not own & set(settings)
    load(settings, environ={})
    (arguments,) = re.findall(r'args: \["up", (.*?)\{\{', NODES)
    up.command.make_context("up", re.findall(r'"([^"]+)"', arguments))


def test_services_are_no_settings() -> None:
    """Kubernetes tells pods of services by variables, KVFS_S3_SERVICE_HOST for one, and an unknown
    setting is an error: each pod of ours goes without."""
    ours = [each for each in TEMPLATES.split("\nkind: ") if "image.repository" in each]
    assert len(ours) == 2
    for each in ours:
        assert "      enableServiceLinks: false\n" in each


def test_ports_are_those_that_are_served() -> None:
    served = dict(re.findall(r'KVFS_(S3|ADMIN|PEER), value: .*?:(\d+)"', NODES))
    named = dict(re.findall(r"name: (s3|admin|peer), containerPort: (\d+)", NODES))
    assert {name.lower(): port for name, port in served.items()} == named


def test_each_value_is_used() -> None:
    names = re.findall(r"^(\w+):", VALUES, re.MULTILINE)
    assert [name for name in names if f".Values.{name}" not in TEMPLATES] == []
    for name in ("image", "cluster", "engine", "s3", "podMonitor"):
        for key in re.findall(r"^  (\w+):", block(VALUES, name), re.MULTILINE):
            assert f".Values.{name}.{key}" in TEMPLATES, f"{name}.{key}"


def test_the_secret_is_kept_whole_and_stays(tmp_path: Path) -> None:
    """A pod that was killed, or a power cut, may leave an empty file."""
    found = re.search(r"command:\n +- sh\n +- -ec\n +- \|\n((?: {14}.*\n)+)", NODES)
    assert found is not None
    given, kept = tmp_path / "given", tmp_path / "secret"
    for path in (given, kept):
        path.mkdir()
    script = found[1].replace("/secret/", f"{kept}/").replace("/given/", f"{given}/")
    (kept / "cluster.key").touch()
    for secret in ("the first", "another"):
        (given / "cluster.key").write_text(secret)
        subprocess.run(["sh", "-ec", script], check=True)
        assert [each.name for each in kept.iterdir()] == ["cluster.key"]
        assert (kept / "cluster.key").read_text() == "the first"
        assert (kept / "cluster.key").stat().st_mode & 0o777 == 0o600
