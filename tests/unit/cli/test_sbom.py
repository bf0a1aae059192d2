"""The bill of materials names every package that the product imports, in the version that is
pinned."""

import re
from configparser import ConfigParser
from pathlib import Path

from cli.sbom import bill

ROOT = Path(__file__).resolve().parents[3]
PINS = dict(
    line.split("==") for line in (ROOT / "requirements.lock").read_text().split() if "==" in line
)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_required_stands_in_it_as_pinned() -> None:
    found = {each["name"]: each["version"] for each in bill()["components"]}
    pinned = {normal(name): version for name, version in PINS.items()}
    assert {name: pinned.get(name) for name in found} == found
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    required = re.findall(r"^([\w-]+)", settings["options"]["install_requires"], re.MULTILINE)
    assert {normal(name) for name in required} <= set(found)


def test_no_package_lacks_what_it_requires() -> None:
    """Each that a component depends on is a component, and no test's package is among them."""
    found = bill()
    known = {each["bom-ref"] for each in found["components"]} | {"kvfs"}
    assert {each["ref"] for each in found["dependencies"]} == known
    assert {name for each in found["dependencies"] for name in each["dependsOn"]} <= known
    assert not {"pytest", "mypy"} & {each["name"] for each in found["components"]}
    lacking = [each["name"] for each in found["components"] if "not said" in str(each["licenses"])]
    assert lacking == []
