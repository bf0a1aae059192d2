"""`kvfs bench`: what this machine gives, and what of it arrives."""

from typing import Final

import click

from cli.group import LazyGroup

_COMMANDS: Final = {"gds": "cli.commands.models.bench_gds"}


@click.group("bench", cls=LazyGroup, modules=_COMMANDS)
def command() -> None:
    """Measure what this machine gives, and what of it arrives."""
