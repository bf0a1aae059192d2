"""Names, folders and docstrings of the product: one word for one thing, few enough modules in a
folder that a stranger finds the right one, and docstrings that begin with their subject."""

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import LONGEST, TESTS

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PACKAGES: Final = ("cli", "gateway", "gds", "kvfs", "s3api")
MOST_MODULES: Final = 20
MOST_EXCEPTIONS: Final = 20
FRAGMENT_WORDS: Final = frozenset(("What", "Of", "Who", "Those", "Whose", "Where", "Which"))
"""First words that leave out what a docstring is about."""

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


@pytest.mark.parametrize("suite", ["unit", "contract", "integration", "fault", "gds", "nfs"])
def test_folders_of_tests_have_few_modules(suite: str) -> None:
    counts = Counter(path.parent for path in (ROOT / "tests" / suite).rglob("*.py"))
    large = {str(folder): count for folder, count in counts.items() if count > MOST_MODULES}
    assert large == {}, f"divide a folder of more than {MOST_MODULES} modules by subject"


def test_files_of_tests_that_begin_first_are_there() -> None:
    assert [each for each in LONGEST if not (TESTS / each).exists()] == []


def test_no_module_lies_beside_the_packages_of_kvfs() -> None:
    flat = [path.name for path in (ROOT / "kvfs").glob("*.py") if path.stem != "__init__"]
    assert flat == [], "move it into the package whose subject it has"


def test_docstrings_begin_with_their_subject() -> None:
    fragments = [
        f"{path}:{line}: {text[:60]!r}"
        for path in _modules()
        for line, text, is_function in _docstrings(ast.parse((ROOT / path).read_bytes()))
        if _first_word(text) in FRAGMENT_WORDS or (is_function and _first_word(text) == "Whether")
    ]
    assert fragments == [], (
        "name the subject first: a verb for a function (Returns whether ...), a noun phrase for a "
        "thing (docs/design/changing.md)"
    )


def test_fragments_are_seen() -> None:
    source = """
'Where it is.'

class Thing:
    'A thing.'
    limit: int
    'What it may have.'

    def is_full(self) -> bool:
        'Whether it is full.'

    @property
    def is_open(self) -> bool:
        'Whether it is open.'
"""
    found = sorted((line, is_it) for line, _, is_it in _docstrings(ast.parse(source)))
    assert found == [(2, False), (5, False), (7, False), (10, True), (14, False)]


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


def _docstrings(module: ast.Module) -> Iterable[tuple[int, str, bool]]:
    """Each docstring: its line, its text, and whether a function has it that is no property."""
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
            ast.unparse(decorator).endswith("property") for decorator in node.decorator_list
        )
        for place, statement in enumerate(body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text, is_function and place == 0


def _first_word(text: str) -> str:
    return text.split(maxsplit=1)[0].rstrip(",:;.") if text.strip() else ""


def _repeated(modules: Mapping[str, list[Path]]) -> dict[str, list[str]]:
    return {
        name: [str(path) for path in paths] for name, paths in modules.items() if len(paths) > 1
    }


def _complaints(found: Mapping[str, object], excepted: Mapping[str, str]) -> list[str]:
    """What is found and not excepted, and exceptions that nothing needs any more."""
    needless = [f"{name}: needs no exception any more" for name in excepted if name not in found]
    return [f"{name}: {what}" for name, what in found.items() if name not in excepted] + needless
