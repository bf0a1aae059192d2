"""The bill of materials of an installation: `python -m cli.sbom` prints what KVFS requires there,
with all that these packages require in turn, as CycloneDX 1.5 (JSON).

It tells of what is installed, not of what was asked for: an auditor compares it with advisories
(`pip-audit`, `grype`, `trivy` read it). Packages of extras that are not installed do not stand in
it.
"""

import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Final

from kvfs.base.version import VERSION

_PRODUCT: Final = "kvfs"
_name_in: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*").match


def bill() -> dict[str, Any]:
    """Returns the bill. Raises PackageNotFoundError: KVFS is not installed here."""
    needed = requirements(_PRODUCT)
    packages = {name: metadata.distribution(name) for name in sorted(needed) if name != _PRODUCT}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": _PRODUCT,
                "name": _PRODUCT,
                "version": VERSION,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [_component(name, found) for name, found in packages.items()],
        "dependencies": [
            {
                "ref": _reference(name),
                "dependsOn": [_reference(each) for each in sorted(below)],
            }
            for name, below in sorted(needed.items())
        ],
    }


def requirements(product: str) -> dict[str, set[str]]:
    """Returns each installed package that `product` needs, itself included, with those that it
    requires directly. A requirement that is not installed is of an extra, or of another system."""
    found: dict[str, set[str]] = {}
    left = [product]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = set(_required(name))
            left += found[name]
    return found


def _required(name: str) -> Iterator[str]:
    for text in metadata.requires(name) or ():
        match = _name_in(text)
        assert match is not None, text
        required = _normal(match[0])
        if "extra ==" not in text.partition(";")[2] and _is_installed(required):
            yield required


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _component(name: str, found: metadata.Distribution) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": _reference(name),
        "name": name,
        "version": found.version,
        "purl": _reference(name),
        "licenses": [{"license": {"name": _license(found)}}],
    }


def _reference(name: str) -> str:
    return name if name == _PRODUCT else f"pkg:pypi/{name}@{metadata.version(name)}"


def _license(found: metadata.Distribution) -> str:
    """Returns what the package says of its licence, in one of the three places where it may."""
    about = found.metadata
    classified = [
        each.rpartition(" :: ")[2]
        for each in about.get_all("Classifier") or ()
        if each.startswith("License ::")
    ]
    places = (about.get_all("License-Expression"), classified, about.get_all("License"))
    said = ", ".join(next(filter(None, places), ()))
    return said.splitlines()[0] if said else "not said"


def _normal(name: str) -> str:
    """Returns the form in which two names of one package are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=1)
    sys.stdout.write("\n")
