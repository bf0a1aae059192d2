"""`kvfs config`: the settings in effect and where each comes from."""

from pathlib import Path
from typing import Any

import click

from cli import settings_file, settings_options
from cli.presentation import output
from kvfs.base.printable import without_passwords


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = {key: settings_file.line(key, value) for key, value in facts["settings"].items()}
    width = max(map(len, lines.values()))
    return [f"{line:<{width}}  # {facts['origins'][key]}" for key, line in lines.items()]


@click.command("config")
@settings_options.options(*settings_options.NAMES)
@output.facts(_lines)
def command(config_file: Path | None, **flags: object) -> dict[str, Any]:
    """Show the settings in effect and where each comes from.

    The output without --json is a valid configuration file. A password in the engine's URL is not
    shown: xxxxx stands in its place.
    """
    config, origins = settings_options.explain(config_file, **flags)
    shown = {
        key: without_passwords(value) if isinstance(value, str) else value
        for key, value in config.as_dict().items()
    }
    return {"settings": shown, "origins": origins}
