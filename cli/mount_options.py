"""The options of `mount -t kvfs`, as flags of `kvfs up`."""

import difflib
from collections.abc import Iterator
from typing import Final

import msgspec

from cli.settings_options import NAMES
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, NotSupported

_SWITCHES: Final = tuple(
    field.name for field in msgspec.structs.fields(Config) if field.type is bool
)
_PLACES: Final = ("store", "mount")
"""Settings that the call itself names."""
_HEEDED_BY_OTHERS: Final = frozenset(
    (
        *("defaults", "auto", "noauto", "nofail", "_netdev", "silent", "loud"),
        *("user", "nouser", "users", "owner", "group", "rw", "exec", "async", "nomand"),
        *("atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime"),
        *("strictatime", "nostrictatime", "lazytime", "nolazytime"),
    )
)
"""Options that mount(8) and systemd act on, that every mount of KVFS has anyway, and of access
times, which KVFS keeps in its own way."""
_BY_BIND: Final = ("ro", "noexec", "sync", "dirsync", "nosymfollow")
_FOREIGN: Final = ("x-", "X-", "comment=", "uhelper=", "helper=")


def flags(options: str, *, sloppy: bool = False) -> list[str]:
    """Returns the flags of `kvfs up` that options separated by commas stand for. `sloppy`: unknown
    ones are ignored. Raises Invalid, NotSupported."""
    return list(_flags(options, sloppy))


def _flags(options: str, sloppy: bool) -> Iterator[str]:
    for option in filter(None, options.split(",")):
        if option in _HEEDED_BY_OTHERS or option.startswith(_FOREIGN):
            continue
        if option in _BY_BIND:
            # mount(8) adds it to what users may mount.
            hint = "add exec after user or users, which mean it, or " if option == "noexec" else ""
            raise NotSupported(
                f"'{option}': a node's mount has no such option; {hint}mount it without, then"
                f" `mount --bind -o {option} DIRECTORY ELSEWHERE`"
            )
        if option.partition("=")[0] == "remount":
            raise NotSupported("'remount': unmount, and mount with the new options")
        flag = _flag(option)
        if flag:
            yield flag
        elif not sloppy:
            raise Invalid(_unknown(option))


def _flag(option: str) -> str:
    """Returns the flag for an option; empty: there is none."""
    name, equals, value = option.partition("=")
    key = name.replace("-", "_")
    if equals and (key == "config" or (key in NAMES and key not in (*_SWITCHES, *_PLACES))):
        return f"--{key.replace('_', '-')}={value}"
    if not equals and key in _SWITCHES:
        return f"--{key.replace('_', '-')}"
    if not equals and key.removeprefix("no") in _SWITCHES and key.startswith("no"):
        return f"--no-{key.removeprefix('no').replace('_', '-')}"
    return ""


def _unknown(option: str) -> str:
    name = option.partition("=")[0]
    if name.replace("-", "_") in _PLACES:
        return f"'{option}': the store and the directory stand before the options"
    if name.replace("-", "_") in NAMES:
        return f"'{option}': " + (
            "takes no value" if name.replace("-", "_") in _SWITCHES else f"write {name}=VALUE"
        )
    near = difflib.get_close_matches(name.replace("-", "_"), NAMES, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; `kvfs up --help` lists the settings"
    return f"'{option}': no such option of `mount -t kvfs`{hint}"
