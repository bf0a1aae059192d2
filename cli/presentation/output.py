"""The output of commands: facts for people or for machines, and tables."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def facts(readable: Callable[[Any], Iterable[str]]) -> Callable[[F], Callable[..., None]]:
    """Adds --json to a command, and prints the facts that it returns: as JSON, or for people the
    lines that `readable` makes of them."""

    def add(function: F) -> Callable[..., None]:
        @functools.wraps(function)
        def printing(*given: Any, as_json: bool, **others: Any) -> None:
            found = function(*given, **others)
            for line in [json.dumps(found)] if as_json else readable(found):
                click.echo(line)

        return json_option(printing)

    return add


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, the head first, whose columns are as wide as necessary."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
