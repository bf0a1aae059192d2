"""What programs import: public names, their signatures and fields as the source has them, and the
entry points by which others find them. Nothing is imported: torch and vLLM may be missing."""

import ast
import configparser
import functools
from collections.abc import Iterator
from typing import Final

from tests.golden.golden import HERE, hold

ROOT: Final = HERE.parent.parent
PUBLIC: Final = {
    "kvfs": (),
    "kvfs.client": (),
    "kvfs.errors": (),
    "gds": (),
    "gds.open_file": ("SafeOpen",),
    "gateway.fsspec.filesystem": ("KvfsFileSystem",),
    "gds.vllm": ("register",),
}
"""Modules, and which of their names: those that they list (`__all__`), else all their classes."""
_DUNDERS: Final = frozenset(
    ("__aenter__", "__aexit__", "__call__", "__enter__", "__exit__", "__init__", "__iter__")
)
_DECORATORS: Final = frozenset(
    ("classmethod", "contextlib.asynccontextmanager", "overload", "property", "staticmethod")
)
"""Those that say how something is called."""
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_python() -> None:
    hold("python.txt", _described())


def test_entry_points() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = []
    for group, entries in setup["options.entry_points"].items():
        for entry in entries.strip().splitlines():
            lines.append(f"{group}: {entry}")
            module, _, name = entry.partition("=")[2].strip().partition(":")
            assert _found(module, name), entry
    extras = [f"extra: {name}" for name in setup["options.extras_require"]]
    hold("entry_points.txt", [*lines, *extras])


def _described() -> Iterator[str]:
    seen: dict[int, str] = {}
    for module, names in PUBLIC.items():
        yield f"## {module}"
        yield ""
        for name in names or _names_of(module):
            found = _found(module, name)
            if id(found) in seen:
                yield f"{name}: {seen[id(found)]}"
            else:
                seen[id(found)] = f"{module}.{name}"
                yield from _definition(found)
            yield ""


@functools.cache
def _parsed(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(source.read_text())


def _names_of(module: str) -> list[str]:
    body = _parsed(module).body
    for node in body:
        if isinstance(node, ast.Assign) and _target(node) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return [node.name for node in body if isinstance(node, ast.ClassDef)]


def _found(module: str, name: str) -> ast.stmt:
    """The definition of a name, wherever the module has it from."""
    for node in ast.walk(_parsed(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            assert node.module is not None
            return _found(node.module, name)
    raise LookupError(f"{module} has no {name}")


def _definition(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, _FUNCTIONS):
        yield from _function(node)
        return
    assert isinstance(node, ast.ClassDef)
    bases = ", ".join(map(ast.unparse, node.bases))
    yield f"class {node.name}({bases})" if bases else f"class {node.name}"
    for each in node.body:
        if isinstance(each, _FUNCTIONS) and _is_public(each.name):
            yield from (f"    {line}" for line in _function(each))
        elif isinstance(each, ast.AnnAssign | ast.Assign) and _is_public(_target(each)):
            yield f"    {ast.unparse(each)}"


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    decorators = map(ast.unparse, node.decorator_list)
    yield from (f"@{each}" for each in decorators if each in _DECORATORS)
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield f"{word} {node.name}({ast.unparse(node.args)}){returned}"


def _target(node: ast.AnnAssign | ast.Assign) -> str:
    return ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])


def _is_public(name: str) -> bool:
    return name in _DUNDERS or not name.startswith("_")
