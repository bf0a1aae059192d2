"""Exports of namespaces over NFS: which ones, to whom and how.

An export is an attribute of its namespace's directory (`trusted.kvfs.nfs`, JSON), so it is alike on
all nodes of a cluster, goes with its namespace, and changes in one transaction with it. Its number
is the namespace's, which no other one ever gets: a handle leads to the same file on every node. The
same attribute of the root lists the numbers: the exports are examined each second, at a cost that
grows with their number, however many namespaces there are.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from kvfs.base.errors import Invalid, NoAttribute, NotFound, NotSupported
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, namespace_root
from kvfs.tree import inodes, namespaces

ATTRIBUTE: Final = b"trusted.kvfs.nfs"
LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
"""Networks that may enter if none was named."""
Squash = Literal["none", "root", "all"]
Groups = Literal["client", "server"]
GROUPS: Final = get_args(Groups)
MOST_NETWORKS: Final = 256
_LONGEST_PREFIX: Final = 99
_is_plain: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}").fullmatch


class Export(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way in which one namespace is exported."""

    allow: tuple[str, ...] = LOOPBACK
    """Networks of the clients that may enter, as `network` writes them."""
    squash: Squash = "root"
    """The users whose calls are made as nobody's: root, everybody, or no one."""
    read_only: bool = False
    groups: Groups = "client"
    """The source of a user's groups: the client, which can name 16, or this host."""
    namespace: int = 0
    """The namespace that it belongs to: a copy of the attribute exports no other directory."""


class Exported(NamedTuple):
    """A namespace that is exported."""

    number: int
    """The namespace's id, and the export's."""
    name: str
    export: Export


def network(text: str) -> str:
    """Returns a network or an address in its usual form. Raises Invalid, also for what
    NFS-Ganesha's configuration cannot hold: there it would end all exports."""
    if "%" in text:
        raise Invalid("a network has no scope ('%')")
    try:
        found = ipaddress.ip_network(text)
    except ValueError as error:
        raise Invalid(f"no network: {error}; write 10.1.0.0/16, or one address") from None
    if _LONGEST_PREFIX < found.prefixlen < found.max_prefixlen:
        raise Invalid(
            f"{found}: NFS-Ganesha reads no prefix longer than /{_LONGEST_PREFIX}; write a shorter"
            " one, or each address"
        )
    return str(found)


def make(allow: Iterable[str], *, squash: Squash, read_only: bool, groups: Groups) -> Export:
    """Returns an export; without a network it is for this host alone. Raises Invalid."""
    networks = tuple(dict.fromkeys(network(each) for each in allow)) or LOOPBACK
    if len(networks) > MOST_NETWORKS:
        raise Invalid(f"an export is for at most {MOST_NETWORKS} networks, not {len(networks)}")
    return Export(allow=networks, squash=squash, read_only=read_only, groups=groups)


def put(t: Transaction, name: bytes, export: Export, now: int) -> int:
    """Exports a namespace so from now on, and returns its number. Raises NotFound, NotSupported for
    a name that Ganesha's configuration could not hold."""
    number, _ = namespaces.by_name(t, name)
    if not _is_plain(name.decode(errors="replace")):
        raise NotSupported(
            "a namespace that is exported has a name of letters, digits, '.', '_' and '-'"
        )
    value = msgspec.json.encode(msgspec.structs.replace(export, namespace=number))
    inodes.set_xattr(t, namespace_root(number), ATTRIBUTE, value, 0, now)
    _list(t, {*_listed(t), number}, now)
    return number


def take_away(t: Transaction, name: bytes, now: int) -> None:
    """Stops exporting it. Raises NotFound, also if it was not exported."""
    number, _ = namespaces.by_name(t, name)
    try:
        inodes.remove_xattr(t, namespace_root(number), ATTRIBUTE, now)
    except NoAttribute:
        raise NotFound(f"{name.decode(errors='backslashreplace')} is not exported") from None
    _list(t, _listed(t) - {number}, now)


def list_all(t: Transaction) -> list[Exported]:
    """Returns all exports, by number. An attribute that `put` did not write exports nothing."""
    found = []
    for number in sorted(_listed(t)):
        try:
            value = inodes.get_xattr(t, namespace_root(number), ATTRIBUTE)
            export = _parse(value, number)
            name = namespaces.get(t, number).name.decode(errors="replace")
        except (NoAttribute, NotFound, Invalid):
            continue
        if _is_plain(name):
            found.append(Exported(number, name, export))
    return found


def _listed(t: Transaction) -> set[int]:
    """Returns the numbers of namespaces, some of which may be exported no more, or have gone."""
    try:
        value = inodes.get_xattr(t, ROOT_INODE, ATTRIBUTE)
        return msgspec.json.decode(value, type=set[int])
    except (NoAttribute, msgspec.DecodeError):
        return set()


def _list(t: Transaction, numbers: set[int], now: int) -> None:
    present = sorted(each for each in numbers if _is_exported(t, each))
    inodes.set_xattr(t, ROOT_INODE, ATTRIBUTE, msgspec.json.encode(present), 0, now)


def _is_exported(t: Transaction, number: int) -> bool:
    try:
        inodes.get_xattr(t, namespace_root(number), ATTRIBUTE)
    except NoAttribute:
        return False
    return True


def _parse(value: bytes, number: int) -> Export:
    """Parses an export; root may set the attribute to anything. Raises Invalid."""
    try:
        export = msgspec.json.decode(value, type=Export)
    except msgspec.DecodeError as error:
        raise Invalid(str(error)) from None
    if not export.allow or len(export.allow) > MOST_NETWORKS:
        raise Invalid("no networks")
    if export.namespace != number:
        raise Invalid("another namespace's")
    for each in export.allow:
        if network(each) != each:
            raise Invalid("not as it is written here")
    return export
