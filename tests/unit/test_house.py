"""Names and folders of the product: one word for one thing, and few enough modules in a folder
that a stranger finds the right one."""

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PACKAGES: Final = ("cli", "gateway", "gds", "kvfs", "s3api")
MOST_MODULES: Final = 20
MOST_EXCEPTIONS: Final = 20

SHARED_CLASS_NAMES: Final[Mapping[str, str]] = {}
"""Class names that may stand twice, each with the reason."""
LARGE_FOLDERS: Final[Mapping[str, str]] = {}
"""Folders that may have more modules, each with the reason."""


def test_a_class_name_stands_once() -> None:
    modules = defaultdict(list)
    for path in _modules():
        for name in _public_classes(path):
            modules[name].append(path)
    assert _complaints(_repeated(modules), SHARED_CLASS_NAMES) == [], (
        "rename one so that it says what it is without its module, or give the reason in "
        "SHARED_CLASS_NAMES"
    )


def test_a_module_name_stands_once_in_a_package() -> None:
    modules = defaultdict(list)
    for path in _modules():
        if path.stem != "__init__":
            modules[f"{path.parts[0]}: {path.stem}"].append(path)
    assert _repeated(modules) == {}, "rename one so that it says what it holds without its folder"


def test_folders_have_few_modules() -> None:
    counts = Counter(path.parent for path in _modules() if path.stem != "__init__")
    large = {str(folder): count for folder, count in counts.items() if count > MOST_MODULES}
    assert _complaints(large, LARGE_FOLDERS) == [], (
        f"divide a folder of more than {MOST_MODULES} modules by subject, and remove from "
        "LARGE_FOLDERS what is divided"
    )


def test_no_module_lies_beside_the_packages_of_kvfs() -> None:
    flat = [path.name for path in (ROOT / "kvfs").glob("*.py") if path.stem != "__init__"]
    assert flat == [], "move it into the package whose subject it has"


def test_exceptions_are_few_and_have_reasons() -> None:
    exceptions = {**SHARED_CLASS_NAMES, **LARGE_FOLDERS}
    assert len(exceptions) <= MOST_EXCEPTIONS
    assert [name for name, reason in exceptions.items() if not reason] == []


@functools.cache
def _modules() -> list[Path]:
    """Of the product, from the root."""
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path.relative_to(ROOT) for path in found)


def _public_classes(path: Path) -> Iterable[str]:
    for node in ast.parse((ROOT / path).read_bytes()).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def _repeated(modules: Mapping[str, list[Path]]) -> dict[str, list[str]]:
    return {
        name: [str(path) for path in paths] for name, paths in modules.items() if len(paths) > 1
    }


def _complaints(found: Mapping[str, object], excepted: Mapping[str, str]) -> list[str]:
    """What is found and not excepted, and exceptions that nothing needs any more."""
    needless = [f"{name}: needs no exception any more" for name in excepted if name not in found]
    return [f"{name}: {what}" for name, what in found.items() if name not in excepted] + needless
