"""The manual pages, from the help texts and the declaration of settings.

`python -m cli.manual_pages DIRECTORY` writes them, in man(7)'s language, to `man1`, `man5` and
`man8` there.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import click

from cli import mount_helper, settings_page
from cli.presentation import exits
from cli.root import group
from kvfs.base.config import KEYS
from kvfs.base.version import VERSION

_SETTINGS: Final = "kvfs.toml"
_BREAK: Final = "\b"
"""Click's mark of a paragraph whose lines stay as they are."""


def pages() -> dict[str, str]:
    """Returns the text of each page by its path, `man1/kvfs-up.1`."""
    found = {f"man1/{name}.1": _join(lines) for name, lines in _commands(group, "kvfs")}
    found[f"man5/{_SETTINGS}.5"] = _join(_settings())
    found["man8/mount.kvfs.8"] = _join(_command(mount_helper.command, "mount.kvfs", 8))
    return found


def _join(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, Iterable[str]]]:
    """Yields the pages of a command and of those below it: `kvfs nfs export` has its own."""
    yield name.replace(" ", "-"), _command(command, name, 1)
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None, below
            yield from _commands(found, f"{name} {below}")


def _command(command: click.Command, name: str, section: int) -> Iterator[str]:
    context = click.Context(command, info_name=name, help_option_names=["-h", "--help"])
    page = name.replace(" ", "-")
    yield from _head(page, section, command.get_short_help_str(limit=200))
    yield ".SH SYNOPSIS"
    yield f".B {_escaped(name)}"
    yield _escaped(" ".join(command.collect_usage_pieces(context)))
    yield ".SH DESCRIPTION"
    yield from _paragraphs(command.help or "")
    options = [
        record
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
        and (record := parameter.get_help_record(context)) is not None
    ]
    if options:
        yield ".SH OPTIONS"
        yield from _terms(options)
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        yield from _terms(_below(command, context, page))
    if section == 1:
        yield ".SH EXIT STATUS"
        yield from _paragraphs(exits.HELP.replace("Exit codes:\n", ""))
    yield ".SH SEE ALSO"
    others = ["kvfs(1)", f"{_SETTINGS}(5)", "mount.kvfs(8)"]
    yield _escaped(", ".join(each for each in others if not each.startswith(f"{page}(")))


def _below(command: click.Group, context: click.Context, page: str) -> Iterator[tuple[str, str]]:
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None, name
        yield f"{page}-{name}(1)", found.get_short_help_str(limit=200)


def _settings() -> Iterator[str]:
    yield from _head(_SETTINGS, 5, "the settings of a node of KVFS")
    yield ".SH DESCRIPTION"
    yield from _paragraphs(settings_page.SOURCES)
    yield ".SH SETTINGS"
    meanings = dict(settings_page.meanings())
    yield from _terms(
        (key, f"{meanings[key]} Default: {settings_page.default(key)}") for key in KEYS
    )
    yield ".SH SEE ALSO"
    yield _escaped("kvfs(1), kvfs-config(1), kvfs-setup(1)")


def _head(page: str, section: int, summary: str) -> Iterator[str]:
    yield f'.TH "{page.upper()}" "{section}" "" "KVFS {VERSION}" "KVFS"'
    yield ".SH NAME"
    yield _escaped(f"{page} - {summary.rstrip('.')}")


def _terms(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for term, text in rows:
        yield ".TP"
        yield f".B {_escaped(term)}"
        yield _escaped(" ".join(text.split()))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = paragraph.splitlines()
        yield ".PP"
        if lines and lines[0].strip() == _BREAK:
            yield ".nf"
            yield from map(_escaped, lines[1:])
            yield ".fi"
        else:
            yield _escaped(" ".join(each.strip() for each in lines))


def _escaped(text: str) -> str:
    """Returns the text as man(7) prints it unchanged."""
    text = text.replace("`", "").replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def main(directory: str) -> None:
    """Writes all pages below a directory."""
    for name, text in pages().items():
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
