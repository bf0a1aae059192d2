"""`kvfs model`: looks into model weights, fetches them and loads them. `kvfs bench`: the limits of
this machine, and how close loads come to them."""

from typing import Final

import click

from cli.group import LazyGroup

_COMMANDS: Final = {
    "inspect": "cli.commands.models.model_inspect",
    "prefetch": "cli.commands.models.model_prefetch",
    "load": "cli.commands.models.model_load",
}


@click.group("model", cls=LazyGroup, modules=_COMMANDS)
def command() -> None:
    """Model weights: look into them, fetch them here, load them.

    PATH is a safetensors file, an index of shards (*.safetensors.index.json), or a directory that
    has them: on the mount, within KVFS, or anywhere else.
    """


_BENCHES: Final = {"gds": "cli.commands.models.bench_gds"}


@click.group("bench", cls=LazyGroup, modules=_BENCHES)
def bench() -> None:
    """Measure this machine's limits and how close loads come."""
