"""The page of settings, as the documents have it: `python -m cli.settings_page`.

Keys, defaults and meanings come from the declaration of `Config`."""

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Final

import msgspec

from kvfs.base import config
from kvfs.base.units import exact_size

SOURCES: Final = """\
Settings come, in rising order, from their defaults, a TOML file (`--config FILE`, `$KVFS_CONFIG`,
`/etc/kvfs.toml`), environment variables `KVFS_<KEY>` (`KVFS_S3_WORKERS`) and flags
(`--s3-workers`). A list is `["A", "B"]` in the file and `A,B` in a variable. `kvfs config` prints
what is in force and where it comes from. `kvfs namespace set` sets what belongs to one namespace.
"""
_HEAD: Final = f"""# Settings

This page is generated: `./dev python -m cli.settings_page > docs/settings.md`.

{SOURCES}
| key | default | meaning |
|---|---|---|
"""
_FOUND_AT_START: Final = {
    "store": "`/var/lib/kvfs` (root), `~/.local/share/kvfs`",
    "allow_other": "root: `true`",
    "s3_workers": "CPUs, at most 4",
    "node_name": "the host's name",
}
"""Defaults that depend on the machine or the user."""


def page() -> str:
    """Returns the whole page, in Markdown."""
    texts = dict(meanings())
    rows = (f"| `{key}` | {default(key)} | {texts[key]} |\n" for key in config.KEYS)
    return _HEAD + "".join(rows)


def default(key: str) -> str:
    """Returns the default of a setting, in Markdown."""
    if key in _FOUND_AT_START:
        return _FOUND_AT_START[key]
    value = next(
        field.default for field in msgspec.structs.fields(config.Config) if field.name == key
    )
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int):
        return f"`{exact_size(value) if key.endswith('_rate') and value else value}`"
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{text}`" if text else "-"


def meanings() -> Iterator[tuple[str, str]]:
    """Yields each field with the text below it, which Python itself does not keep."""
    (declaration,) = ast.parse(inspect.getsource(config.Config)).body
    assert isinstance(declaration, ast.ClassDef)
    field = ""
    for statement in declaration.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            field = statement.target.id
        elif field and isinstance(statement, ast.Expr):
            yield field, " ".join(str(ast.literal_eval(statement.value)).split())
            field = ""


if __name__ == "__main__":
    sys.stdout.write(page())
