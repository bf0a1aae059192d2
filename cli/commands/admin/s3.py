"""`kvfs s3`: users of the S3 API and their keys, the settings that clients need, presigned URLs.

All commands work with and without a running node.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import node_requests, open_store, settings_options
from cli.presentation import output
from kvfs.base.config import S3_USUAL, Address, Config
from kvfs.base.errors import Invalid, NotSupported, Unavailable

if TYPE_CHECKING:
    from s3api.auth.credentials import Credentials
    from s3api.server.users import Users

_METHODS = ("GET", "HEAD", "PUT", "DELETE", "POST")
_REPLACING_S = 3600.0
"""Each worker may take half a minute to start, and ten seconds for what it has begun."""
_WEEK_S = 7 * 24 * 3600


@click.group("s3")
def command() -> None:
    """The S3 API: users, keys, clients and presigned URLs."""


@command.command("restart")
@settings_options.configured("store")
def restart(config: Config) -> None:
    """Replace the S3 workers of the running node by new processes.

    They read certificates anew, and are of the installed version. Clients notice nothing: the port
    stays open, and the old ones answer what they have begun.
    """
    node_requests.ask(config, "replace_s3_workers", deadline_s=_REPLACING_S)


@contextlib.contextmanager
def _users(config: Config) -> Iterator["Users"]:
    from s3api.server.users import Users

    with open_store.engine_of(config) as engine:
        yield Users(config.store, engine)


# ---- users


@command.group("user")
def user() -> None:
    """Users: each has a key pair and may have a policy.

    A user without a policy may do everything with their own buckets; the policy of `admin`, whom
    the first start creates, allows everything everywhere.
    """


def _pair(name: str, pair: "Credentials") -> dict[str, str]:
    return {"user": name, "access_key": pair.access_key, "secret": pair.secret}


_pair_option = output.facts(
    lambda pair: (f"access key  {pair['access_key']}", f"secret      {pair['secret']}")
)


def _policy_of(path: Path | None) -> str:
    """Returns the checked document in a file, `-` for standard input. Raises Invalid."""
    from s3api.http.s3_errors import S3Error
    from s3api.rules.access.policy import parse_user_policy

    if path is None:
        return ""
    text = sys.stdin.read() if str(path) == "-" else path.read_text()
    try:
        parse_user_policy(text)
    except S3Error as error:
        raise Invalid(f"{path}: {error}") from error
    return text


@user.command("add")
@click.argument("name")
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Policy (JSON); - is standard input.",
)
@_pair_option
@settings_options.configured("store")
def add(name: str, config: Config, policy: Path | None) -> dict[str, str]:
    """Add a user and print its key pair."""
    document = _policy_of(policy)
    with _users(config) as users:
        return _pair(name, users.add(name, document))


def _listed(users: list[dict[str, Any]]) -> Iterator[str]:
    width = max((len(each["user"]) for each in users), default=0)
    for each in users:
        state = "enabled" if each["enabled"] else "disabled"
        policy = "own policy" if each["policy"] is not None else "no policy"
        keys = " ".join(each["access_keys"])
        yield f"{each['user']:<{width}}  {state:<8}  {policy:<10}  {keys}"


@user.command("list")
@output.facts(_listed)
@settings_options.configured("store")
def list_(config: Config) -> list[dict[str, Any]]:
    """List users and their access keys, never a secret."""
    with _users(config) as users:
        listed = users.list_all()
    return [
        {
            "user": name,
            "enabled": found.enabled,
            "access_keys": found.access_keys,
            "policy": json.loads(found.policy) if found.policy else None,
            "created_ns": found.created_ns,
        }
        for name, found in listed
    ]


@user.command("disable")
@click.argument("name")
@settings_options.configured("store")
def disable(name: str, config: Config) -> None:
    """Reject a user's signatures from now on."""
    with _users(config) as users:
        users.set_enabled(name, False)


@user.command("enable")
@click.argument("name")
@settings_options.configured("store")
def enable(name: str, config: Config) -> None:
    """Accept a user's signatures again."""
    with _users(config) as users:
        users.set_enabled(name, True)


@user.command("rotate")
@click.argument("name")
@_pair_option
@settings_options.configured("store")
def rotate(name: str, config: Config) -> dict[str, str]:
    """Give a user a new key pair and print it; the old one ends, as do sessions started with it."""
    with _users(config) as users:
        return _pair(name, users.rotate(name))


@user.command("remove")
@click.argument("name")
@settings_options.configured("store")
def remove(name: str, config: Config) -> None:
    """Remove a user. The user's buckets stay; `admin` may take care of them."""
    with _users(config) as users:
        users.remove(name)


@user.command("policy")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--delete", is_flag=True, help="Remove the policy.")
@settings_options.configured("store")
def policy(name: str, config: Config, file: Path | None, delete: bool) -> None:
    """Show a user's policy, or set it from FILE (JSON; - is standard input)."""
    if file is not None and delete:
        raise click.UsageError("give FILE or --delete, not both")
    document = _policy_of(file)
    with _users(config) as users:
        if file is not None or delete:
            users.set_policy(name, document)
        elif found := users.policy(name):
            click.echo(found)


# ---- clients


@command.command("env")
@click.option(
    "--user", "name", default="admin", show_default=True, help="User whose keys are printed."
)
@click.option(
    "--for", "target", default="shell", metavar="CLIENT", help="Client to print it for; see below."
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="URL by which clients reach the node (default: the running node's).",
)
@settings_options.configured("store", "s3", "s3_region")
def env(name: str, config: Config, target: str, endpoint: str | None) -> None:
    """Print settings for a client: endpoint, region and keys.

    CLIENT is shell (`eval "$(kvfs s3 env)"`), boto3, awscli, rclone, s3fs, s3cmd, minio, pyarrow,
    lmcache, vllm or curl.
    """
    from cli.commands.admin import s3_clients

    with _users(config) as users:
        pair = users.find(name)
    click.echo(
        s3_clients.render(target, _endpoint(config, endpoint), config.s3_region, pair), nl=False
    )


@command.command("presign")
@click.argument("method")
@click.argument("path", metavar="BUCKET/KEY")
@click.option(
    "--expires", "expires_s", default=3600, show_default=True, help="Validity in seconds."
)
@click.option("--user", "name", default="admin", show_default=True, help="User who signs it.")
@click.option(
    "--endpoint",
    metavar="URL",
    help="URL by which clients reach the node (default: the running node's).",
)
@settings_options.configured("store", "s3", "s3_region")
def presign(
    method: str,
    config: Config,
    path: str,
    expires_s: int,
    name: str,
    endpoint: str | None,
) -> None:
    """Print a URL that admits one kind of request for a time."""
    from s3api.auth.presign import presign as sign

    if method.upper() not in _METHODS:
        raise click.UsageError(f"METHOD is one of {', '.join(_METHODS)}")
    if not 1 <= expires_s <= _WEEK_S:
        raise click.UsageError(f"--expires is 1 to {_WEEK_S} seconds")
    with _users(config) as users:
        pair = users.find(name)
    url = sign(
        method.upper(),
        _endpoint(config, endpoint),
        f"/{path.removeprefix('s3://')}".encode(),
        pair.access_key,
        pair.secret,
        region=config.s3_region,
        now=time.time(),
        expires_s=expires_s,
    )
    click.echo(url)


def _endpoint(config: Config, given: str | None) -> str:
    """Returns the given endpoint, else that of the running node, else that of the settings.

    Raises NotSupported if S3 is off.
    """
    if given is not None:
        if not given.startswith(("http://", "https://")):
            raise Invalid(f"an endpoint begins with http:// or https://, not '{given}'")
        return given.rstrip("/")
    with contextlib.suppress(Unavailable):
        running = node_requests.ask(config, "status").get("s3")
        if running is None:
            raise NotSupported("the running node serves no S3: start it without --no-s3")
        return str(running["endpoint"])
    if config.s3 == "off":
        raise NotSupported("the settings turn S3 off (s3 = off): name where it is, --endpoint URL")
    where = config.s3 if isinstance(config.s3, Address) else S3_USUAL
    return f"{'https' if config.s3_certificate else 'http'}://{where}"
