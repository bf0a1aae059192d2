"""The location in an engine's URL. No I/O."""

import re
from enum import Enum
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote

from kvfs.base.errors import Invalid
from kvfs.base.printable import without_user

_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
PREFIX: Final = "kvfs"
HELP: Final = (
    "redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… (TLS; ?ca=FILE), unix:///PATH[?db=N],"
    " redis+sentinel://HOST[:PORT],…/NAME[/DB], redis+cluster://HOST[:PORT],…;"
    " with ?prefix=NAME and ?password-file=FILE for all"
)


class Kind(Enum):
    """The kind of server behind a URL."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


class ServerAddress(NamedTuple):
    """The address of a server: a host with a port, or the path of a socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class EngineLocation(NamedTuple):
    """The location of an engine."""

    kind: Kind
    addresses: tuple[ServerAddress, ...]
    shown: str
    """The URL without user and password."""
    prefix: str
    db: int = 0
    name: str = ""
    """The name of the master for which sentinels are asked."""
    username: str | None = None
    password: str | None = None
    password_file: str = ""
    """The file with the password, instead of the URL: a command line is in everybody's list of
    processes."""
    tls: bool = False
    ca: str = ""
    """A file of certificates; empty: the system's."""

    def __repr__(self) -> str:
        return f"Location({self.shown})"


_URL: Final = re.compile(r"([^:/?#]+)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)
_is_scheme: Final = re.compile(r"[A-Za-z0-9+.-]+").fullmatch
_KINDS: Final = {
    "redis": Kind.SERVER,
    "rediss": Kind.SERVER,
    "unix": Kind.SERVER,
    "redis+sentinel": Kind.SENTINEL,
    "redis+cluster": Kind.CLUSTER,
}


def is_url(text: str) -> bool:
    """Returns whether it is a URL, not a directory."""
    return "://" in text


def parse(url: str) -> EngineLocation:
    """Parses a URL. Raises Invalid, whose text shows no password."""
    parts = _split(url)
    kind = _KINDS.get(parts.scheme)
    if kind is None:
        raise Invalid(f"{shown(url)}: an engine's URL is {HELP}")
    try:
        return _parsed(parts, kind, shown(url))
    except ValueError as error:
        raise Invalid(f"{shown(url)}: {error}; an engine's URL is {HELP}") from None


def _split(url: str) -> SplitResult:
    """Splits a URL: urlsplit of some releases of Python takes one host, and refuses addresses of
    IPv6 after others."""
    found = _URL.fullmatch(url)
    if found is None:
        raise Invalid(f"that is no URL of an engine; one is {HELP}")
    scheme, netloc, path, query, fragment = found.groups(default="")
    return SplitResult(scheme.lower(), netloc, path, query, fragment)


def shown(url: str) -> str:
    """Returns the URL without its secrets."""
    scheme, separator, _ = url.partition("://")
    if not separator or not _is_scheme(scheme):
        return "that"
    _, _, rest = without_user(url).partition("://")
    if scheme != "unix":
        rest = rest.rpartition("@")[2]  # of a URL within a URL, as it may be pasted
    authority, slash, path = rest.partition("/")
    path, _, _ = path.partition("?")
    return f"{scheme}://{authority.partition('?')[0]}{slash}{path}"


def _parsed(parts: SplitResult, kind: Kind, shown_url: str) -> EngineLocation:
    query = _query(parts)
    user, _, hosts = parts.netloc.rpartition("@")
    username, colon, password = user.partition(":")
    names = [part for part in unquote(parts.path).split("/") if part]
    if parts.scheme == "unix":
        if hosts or not names:
            raise ValueError("the path of a socket comes after unix://")
        addresses: tuple[ServerAddress, ...] = (ServerAddress("", 0, unquote(parts.path)),)
        names = [query["db"]] if "db" in query else []
    else:
        port = _SENTINEL_PORT if kind is Kind.SENTINEL else _PORT
        addresses = tuple(_address(text, port) for text in hosts.split(","))
    if kind is Kind.SERVER and len(addresses) > 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    if colon and "password-file" in query:
        raise ValueError("there are two passwords, one in it and one in the file")
    name = names.pop(0) if kind is Kind.SENTINEL and names else ""
    if kind is Kind.SENTINEL and not name:
        raise ValueError("the name of the master is missing")
    if len(names) > (0 if kind is Kind.CLUSTER else 1):
        raise ValueError(f"what is /{names[-1]}?")
    return EngineLocation(
        kind=kind,
        addresses=addresses,
        shown=shown_url,
        prefix=query.get("prefix", PREFIX),
        db=_number(names[0], "a database") if names else 0,
        name=name,
        username=unquote(username) or None,
        password=unquote(password) if colon else None,
        password_file=query.get("password-file", ""),
        tls=parts.scheme == "rediss",
        ca=query.get("ca", ""),
    )


def _query(parts: SplitResult) -> dict[str, str]:
    known = {"prefix", "password-file", *(("ca",) if parts.scheme == "rediss" else ())}
    known |= {"db"} if parts.scheme == "unix" else set()
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := query.keys() - known:
        raise ValueError(f"it knows no '{min(unknown)}', only {', '.join(sorted(known))}")
    prefix = query.get("prefix", PREFIX)
    if not prefix or set(prefix) & set("{}") or not prefix.isascii() or not prefix.isprintable():
        raise ValueError("a prefix is of ASCII characters, without braces")
    return query


def _address(text: str, port: int) -> ServerAddress:
    host, number = text, ""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("an address of IPv6 is [ADDRESS] or [ADDRESS]:PORT")
        number = rest.removeprefix(":")
    elif ":" in text:
        host, _, number = text.rpartition(":")
    if not host:
        raise ValueError("a host is missing")
    found = _number(number, "a port") if number else port
    if not 0 < found < 1 << 16:
        raise ValueError(f"{found} is no port")
    return ServerAddress(unquote(host), found)


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"'{text}' is no number of {what}")
    return int(text)
