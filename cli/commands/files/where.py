"""`kvfs where`: the nodes and media on which the data of files lie."""

import json
import os
from typing import Any

import click

from cli import node_requests, open_store, settings_options
from kvfs.base.config import Config
from kvfs.base.errors import IsADirectory, NotFound
from kvfs.base.units import format_size


@click.command("where")
@click.argument("paths", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PATH...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
@settings_options.configured("store")
def command(paths: tuple[str, ...], config: Config, as_json: bool) -> None:
    """Show on which nodes and media the data of files lie.

    Includes the cold tier and transfers in progress.
    """
    with open_store.client_of(config) as client:
        for path in paths:
            found = client.stat(os.fsencode(path))
            if not found.is_file:
                raise IsADirectory(f"{path} is no regular file: name files")
            (facts,) = node_requests.ask(config, "where", {"inodes": [found.ino]})
            if facts is None:
                raise NotFound(f"{path}: it was removed")
            click.echo(json.dumps({"path": path, **facts}) if as_json else _shown(path, facts))


def _shown(path: str, facts: dict[str, Any]) -> str:
    blocks = f"{facts['blocks']} block{'' if facts['blocks'] == 1 else 's'}"
    state = "" if facts["sealed"] else ", not sealed yet"
    lines = [f"{path}: {format_size(facts['size_bytes'])}, {blocks}{state}"]
    lines += [f"  {_holder(each)}" for each in facts["copies"]]
    if facts["cold"] is not None:
        lines.append(f"  cold tier: {facts['cold']}")
    if len(lines) == 1:
        lines.append("  nowhere")
    return "\n".join(lines)


def _holder(copy: dict[str, Any]) -> str:
    name = f"node {copy['node']} ({copy['name']})" if copy["node"] else "this node"
    if not copy["alive"]:
        return f"{name}: all blocks, but it does not run"
    if copy["arriving"] is not None:
        return f"{name}: arriving, {copy['arriving']:.0%} are there"
    return f"{name}: all blocks{', on ' + copy['medium'] if copy['medium'] else ''}"
