"""`kvfs scrub`: has a running node compare its data with their checksums now."""

from pathlib import Path

import click

from cli import node_requests, settings_options


@click.command("scrub")
@settings_options.options("store")
def command(config_file: Path | None, store: Path | None) -> None:
    """Compare all data with their checksums now.

    Runs at the running node's `scrub_rate`; it does so once a day anyway. `kvfs status` shows its
    progress and findings.
    """
    config = settings_options.resolve(config_file, store=store)
    node_requests.ask(config, "scrub")
    click.echo("scrubbing; kvfs status shows what is found")
