"""`kvfs scrub`: has a running node compare its data with their checksums now."""

import click

from cli import node_requests, settings_options
from kvfs.base.config import Config


@click.command("scrub")
@settings_options.configured("store")
def command(config: Config) -> None:
    """Compare all data with their checksums now.

    Runs at the running node's `scrub_rate`; it does so once a day anyway. `kvfs status` shows its
    progress and findings.
    """
    node_requests.ask(config, "scrub")
    click.echo("scrubbing; kvfs status shows what is found")
