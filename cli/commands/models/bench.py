"""`kvfs bench`: the limits of this machine, and how close loads come to them."""

from typing import Final

import click

from cli.group import LazyGroup

_COMMANDS: Final = {"gds": "cli.commands.models.bench_gds"}


@click.group("bench", cls=LazyGroup, modules=_COMMANDS)
def command() -> None:
    """Measure this machine's limits and how close loads come."""
