"""`kvfs config`: the settings in effect and where each comes from."""

import json
from pathlib import Path

import click

from cli import settings_options


@click.command("config")
@settings_options.options(*settings_options.NAMES)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(config_file: Path | None, as_json: bool, **flags: object) -> None:
    """Show the settings in effect and where each comes from.

    The output without --json is a valid configuration file.
    """
    config, origins = settings_options.explain(config_file, **flags)
    values = config.as_dict()
    if as_json:
        click.echo(json.dumps({"settings": values, "origins": origins}))
        return
    lines = [(f"{key} = {json.dumps(value)}", origins[key]) for key, value in values.items()]
    width = max(len(line) for line, _ in lines)
    for line, origin in lines:
        click.echo(f"{line:<{width}}  # {origin}")
