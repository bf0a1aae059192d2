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
from kvfs.base.config import S3_USUAL, Address, Config
from kvfs.base.errors import Invalid, NotSupported, Unavailable

if TYPE_CHECKING:
    from s3api.auth.credentials import Credentials
    from s3api.server.users import Users

_METHODS = ("GET", "HEAD", "PUT", "DELETE", "POST")
_WEEK_S = 7 * 24 * 3600


@click.group("s3")
def command() -> None:
    """The S3 API: users, keys, clients and presigned URLs."""


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


def _show_pair(name: str, pair: "Credentials", as_json: bool) -> None:
    if as_json:
        told = {"user": name, "access_key": pair.access_key, "secret": pair.secret}
        click.echo(json.dumps(told))
    else:
        click.echo(f"access key  {pair.access_key}\nsecret      {pair.secret}")


def _json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


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
@_json_option
@settings_options.options("store")
def add(
    name: str, config_file: Path | None, policy: Path | None, as_json: bool, **flags: object
) -> None:
    """Add a user and print its key pair."""
    document = _policy_of(policy)
    with _users(settings_options.resolve(config_file, **flags)) as users:
        _show_pair(name, users.add(name, document), as_json)


@user.command("list")
@_json_option
@settings_options.options("store")
def list_(config_file: Path | None, as_json: bool, **flags: object) -> None:
    """List users and their access keys, never a secret."""
    with _users(settings_options.resolve(config_file, **flags)) as users:
        listed = users.list_all()
    if as_json:
        rows = [
            {
                "user": name,
                "enabled": found.enabled,
                "access_keys": found.access_keys,
                "policy": json.loads(found.policy) if found.policy else None,
                "created_ns": found.created_ns,
            }
            for name, found in listed
        ]
        click.echo(json.dumps(rows))
        return
    width = max((len(name) for name, _ in listed), default=0)
    for name, found in listed:
        state = "enabled" if found.enabled else "disabled"
        policy = "own policy" if found.policy else "no policy"
        click.echo(f"{name:<{width}}  {state:<8}  {policy:<10}  {' '.join(found.access_keys)}")


@user.command("disable")
@click.argument("name")
@settings_options.options("store")
def disable(name: str, config_file: Path | None, **flags: object) -> None:
    """Reject a user's signatures from now on."""
    with _users(settings_options.resolve(config_file, **flags)) as users:
        users.set_enabled(name, False)


@user.command("enable")
@click.argument("name")
@settings_options.options("store")
def enable(name: str, config_file: Path | None, **flags: object) -> None:
    """Accept a user's signatures again."""
    with _users(settings_options.resolve(config_file, **flags)) as users:
        users.set_enabled(name, True)


@user.command("rotate")
@click.argument("name")
@_json_option
@settings_options.options("store")
def rotate(name: str, config_file: Path | None, as_json: bool, **flags: object) -> None:
    """Give a user a new key pair and print it; the old one ends, as do sessions started with it."""
    with _users(settings_options.resolve(config_file, **flags)) as users:
        _show_pair(name, users.rotate(name), as_json)


@user.command("remove")
@click.argument("name")
@settings_options.options("store")
def remove(name: str, config_file: Path | None, **flags: object) -> None:
    """Remove a user. The user's buckets stay; `admin` may take care of them."""
    with _users(settings_options.resolve(config_file, **flags)) as users:
        users.remove(name)


@user.command("policy")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--delete", is_flag=True, help="Remove the policy.")
@settings_options.options("store")
def policy(
    name: str, config_file: Path | None, file: Path | None, delete: bool, **flags: object
) -> None:
    """Show a user's policy, or set it from FILE (JSON; - is standard input)."""
    if file is not None and delete:
        raise click.UsageError("give FILE or --delete, not both")
    document = _policy_of(file)
    with _users(settings_options.resolve(config_file, **flags)) as users:
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
@settings_options.options("store", "s3", "s3_region")
def env(
    name: str, config_file: Path | None, target: str, endpoint: str | None, **flags: object
) -> None:
    """Print settings for a client: endpoint, region and keys.

    CLIENT is shell (`eval "$(kvfs s3 env)"`), boto3, awscli, rclone, s3fs, s3cmd, minio, pyarrow,
    lmcache, vllm or curl.
    """
    from cli.commands.admin import s3_clients

    config = settings_options.resolve(config_file, **flags)
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
@settings_options.options("store", "s3", "s3_region")
def presign(
    method: str,
    config_file: Path | None,
    path: str,
    expires_s: int,
    name: str,
    endpoint: str | None,
    **flags: object,
) -> None:
    """Print a URL that admits one kind of request for a time."""
    from s3api.auth.presign import presign as sign

    if method.upper() not in _METHODS:
        raise click.UsageError(f"METHOD is one of {', '.join(_METHODS)}")
    if not 1 <= expires_s <= _WEEK_S:
        raise click.UsageError(f"--expires is 1 to {_WEEK_S} seconds")
    config = settings_options.resolve(config_file, **flags)
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
