"""Groups of commands that know what was meant by a name that is none."""

import difflib
from typing import Any

import click


class Group(click.Group):
    """Answers an unknown command with the nearest one, or with all there are."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click does. Raises UsageError."""
        name, known = args[0], self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are: {', '.join(known)}"
            ctx.fail(f"no such command as '{name}'; {hint}")
        return super().resolve_command(ctx, args)
