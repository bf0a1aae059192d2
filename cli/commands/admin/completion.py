"""`kvfs completion`: the script that teaches a shell our commands and options."""

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  kvfs completion bash > ~/.local/share/bash-completion/completions/kvfs
    zsh:   kvfs completion zsh > a file `_kvfs` in a directory of $fpath
    fish:  kvfs completion fish > ~/.config/fish/completions/kvfs.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "kvfs", "_KVFS_COMPLETE").source())
