"""Groups of commands: they suggest the command that an unknown name meant, and import a command's
module when it is called, to start fast."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click


class CommandGroup(click.Group):
    """Answers an unknown command with the nearest one, or with all that exist."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Resolves like click. Raises UsageError."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are: {', '.join(known)}"
            ctx.fail(f"no such command as '{name}'; {hint}")
        return super().resolve_command(ctx, args)


class LazyGroup(CommandGroup):
    """Finds its commands in the modules that hold them: `module:name`, or `module` if it is named
    `command` there."""

    def __init__(self, *arguments: Any, modules: Mapping[str, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._modules = modules

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(self._modules)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._modules:
            return None
        module, _, name = self._modules[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name or "command")
        return command
