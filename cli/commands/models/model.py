"""`kvfs model`: looks into model weights, fetches them and loads them."""

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
