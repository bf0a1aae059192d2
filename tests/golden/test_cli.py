"""The command line: its commands, what each is given, and how it ends. What commands answer with
`--json` is in `test_running.py`."""

import errno
from collections.abc import Iterator
from typing import Any, Final

import click

from cli.presentation import exits
from cli.root import group
from gateway.fuse.codec.errno_map import ERRNO
from kvfs.base import errors
from tests.golden.golden import hold

_UNSAID: Final = (None, False, ())


def test_commands() -> None:
    hold("cli.txt", _described(group, click.Context(group, info_name="kvfs")))


def test_errors() -> None:
    """How each error of the core ends a command, and a system call on the mount."""
    rows = [
        f"{kind.__name__:<17}{_above(kind):<11}{exits.exit_code(kind('x'))}     {_code(kind)}"
        for kind in ERRNO
    ]
    codes = exits.HELP.removeprefix("\b\n").splitlines()
    hold("errors.txt", ["error            is a       exit  errno", *rows, "", *codes])


def _code(kind: type[errors.KvfsError]) -> str:
    return errno.errorcode[ERRNO[kind]]


def _above(kind: type[errors.KvfsError]) -> str:
    above = kind.__bases__[0]
    return "" if above is errors.KvfsError else above.__name__


def _described(command: click.Command, context: click.Context) -> Iterator[str]:
    """A command, what it is given, and the commands below it."""
    yield f"{context.command_path}: {command.get_short_help_str(limit=1000)}"
    for parameter in command.params:
        yield f"    {_parameter(parameter)}"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None, name
            yield ""
            yield from _described(below, click.Context(below, context, info_name=name))


def _parameter(parameter: click.Parameter) -> str:
    found = parameter.to_info_dict()
    if isinstance(parameter, click.Argument):
        return _joined(parameter.make_metavar(click.Context(group)), _asked(found))
    assert isinstance(parameter, click.Option)
    names = ", ".join(found["opts"]) + "".join(f"/{name}" for name in found["secondary_opts"])
    value = "" if found["is_flag"] else _value(found, parameter.metavar)
    return _joined(f"{names} {value}".rstrip(), _asked(found), found["help"] or "")


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _value(found: dict[str, Any], metavar: str | None) -> str:
    return metavar or found["type"]["name"].upper()


def _asked(found: dict[str, Any]) -> str:
    """What is said of a value, but its name."""
    said = []
    if "choices" in found["type"]:
        said.append("one of " + ", ".join(map(str, found["type"]["choices"])))
    if "min" in found["type"]:
        low, high = found["type"]["min"], found["type"]["max"]
        said.append(f"{'' if low is None else low} to {'' if high is None else high}")
    if found["required"]:
        said.append("required")
    if found["nargs"] == -1 or found.get("multiple"):
        said.append("several")
    if found.get("hidden"):
        said.append("hidden")
    if not found.get("is_flag", True) and found.get("flag_value") not in _UNSAID:
        said.append(f"without a value {found['flag_value']}")
    if found["default"] not in _UNSAID:
        said.append(f"default {found['default']}")
    return f"[{'; '.join(said)}]" if said else ""
