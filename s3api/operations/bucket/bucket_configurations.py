"""The configurations of a bucket, each kept as one of its settings.

Most are read, replaced and removed alike: `_CONFIGURATIONS` says what each checks, keeps and
answers. `s3api.server.lifecycle_worker` carries the lifecycle rules out, `cors_headers` those for
requests that pages of other origins make.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from kvfs.base.errors import NotFound
from kvfs.http.api import Response
from s3api.auth import authorization
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.model.addressing import KEY_LIMIT_BYTES, is_bucket_name
from s3api.operations.answers import answer
from s3api.rules import cors, encryption, lifecycle, object_lock, tagging
from s3api.rules.access import ownership, policy
from s3api.rules.access.public_access import PublicAccessBlock
from s3api.server.log_delivery import key_of
from s3api.storage import bucket_settings as settings


class _Configuration(NamedTuple):
    """A configuration with the same life as others."""

    name: str
    """Its name in those of its operations."""
    setting: str
    absent: str
    """The error of reading it where there is none."""
    document: Callable[[Any], Mapping[str, Any]]
    """Returns the members of the answer, from what is kept."""
    parse: Callable[[Call], object]
    """Checks a request's document, and returns what is kept of it."""
    is_removable: bool = True
    is_put_silently: bool = False
    """Whether S3 answers its replacement with 204."""

    def handlers(self) -> dict[str, Handler]:
        """Returns its operations by name."""
        found: dict[str, Handler] = {
            f"Get{self.name}": partial(_get, configuration=self),
            f"Put{self.name}": partial(_put, configuration=self),
        }
        if self.is_removable:
            removal = f"Delete{self.name.removesuffix('Configuration')}"
            found[removal] = partial(_delete, configuration=self)
        return found


async def _get(call: Call, configuration: _Configuration) -> Response:
    kept = call.settings.get(configuration.setting)
    if not kept:
        raise S3Error(configuration.absent, extra={"BucketName": call.bucket})
    return answer(call, configuration.document(kept))


async def _put(call: Call, configuration: _Configuration) -> Response:
    await keep(call, configuration.setting, configuration.parse(call))
    return Response(204) if configuration.is_put_silently else answer(call)


async def _delete(call: Call, configuration: _Configuration) -> Response:
    await _forget(call, configuration.setting)
    return answer(call)


async def keep(call: Call, name: str, value: object) -> None:
    """Sets a setting; it is on disk when this returns."""
    packed = settings.pack(value)
    await call.blocking(lambda: call.store.buckets.put_setting(call.raw_bucket, name, packed))


async def _forget(call: Call, name: str) -> None:
    """Removes a setting, if it is set."""
    await call.blocking(lambda: call.store.buckets.delete_setting(call.raw_bucket, name))


def _under(member: str) -> Callable[[Any], Mapping[str, Any]]:
    return lambda kept: {member: kept}


def _document_of(call: Call, member: str) -> Any:
    """Returns the document of a request that must have one."""
    document = call.params.get(member)
    if document is None:
        raise S3Error("MissingRequestBodyError")
    return document


# ---- what each checks and keeps


def _cors_rules(call: Call) -> object:
    rules = call.params["CORSConfiguration"]["CORSRules"]
    cors.validate(rules)
    return rules


def _encryption(call: Call) -> object:
    """Default encryption is AES256 if the storage encrypts, else none."""
    configuration = call.params["ServerSideEncryptionConfiguration"]
    encryption.check_configuration(configuration, encrypted=call.service.encrypted)
    return configuration


def _lifecycle_rules(call: Call) -> object:
    document = _document_of(call, "LifecycleConfiguration")
    return lifecycle.validate(document["Rules"], _ids())


def _ids() -> Iterator[str]:
    while True:
        yield secrets.token_hex(16)


def _lock(call: Call) -> object:
    """Locks protect versions: the bucket must keep them. Once it has a lock it has it for good."""
    if call.settings.versioning != "Enabled":
        raise S3Error(
            "InvalidBucketState", "Versioning must be 'Enabled' on the bucket to apply Object Lock"
        )
    return object_lock.parse_configuration(_document_of(call, "ObjectLockConfiguration"))


def _ownership(call: Call) -> object:
    """ACLs can be switched off if the bucket's own grants nothing to others."""
    owned = ownership.parse_controls(call.params["OwnershipControls"])
    if not ownership.has_acls(owned):
        found = authorization.bucket_acl(call)
        if any(each.user != found.owner for each in found.grants):
            raise S3Error("InvalidBucketAclWithObjectOwnership")
    return owned


def _ownership_document(kept: str) -> Mapping[str, Any]:
    return {"OwnershipControls": ownership.controls(kept)}


def _policy(call: Call) -> object:
    """The policy is kept as it was sent."""
    document = call.params["Policy"]
    public_access_block(call).check_policy(policy.new_bucket_policy(document, call.bucket))
    return document


def _switches(call: Call) -> object:
    """The four switches against public access."""
    return PublicAccessBlock.parse(call.params["PublicAccessBlockConfiguration"]).document()


def _tags(call: Call) -> object:
    return tagging.parse_document(call.params["Tagging"], tagging.BUCKET_TAGS)


_CONFIGURATIONS: Final = (
    _Configuration(
        "BucketCors",
        settings.CORS,
        "NoSuchCORSConfiguration",
        _under("CORSRules"),
        _cors_rules,
    ),
    _Configuration(
        "BucketEncryption",
        settings.ENCRYPTION,
        "ServerSideEncryptionConfigurationNotFoundError",
        _under("ServerSideEncryptionConfiguration"),
        _encryption,
    ),
    _Configuration(
        "BucketLifecycleConfiguration",
        settings.LIFECYCLE,
        "NoSuchLifecycleConfiguration",
        _under("Rules"),
        _lifecycle_rules,
    ),
    _Configuration(
        "ObjectLockConfiguration",
        settings.OBJECT_LOCK,
        "ObjectLockConfigurationNotFoundError",
        _under("ObjectLockConfiguration"),
        _lock,
        is_removable=False,
    ),
    _Configuration(
        "BucketOwnershipControls",
        settings.OWNERSHIP,
        "OwnershipControlsNotFoundError",
        _ownership_document,
        _ownership,
    ),
    _Configuration(
        "BucketPolicy",
        settings.POLICY,
        "NoSuchBucketPolicy",
        _under("Policy"),
        _policy,
        is_put_silently=True,
    ),
    _Configuration(
        "PublicAccessBlock",
        settings.PUBLIC_ACCESS,
        "NoSuchPublicAccessBlockConfiguration",
        _under("PublicAccessBlockConfiguration"),
        _switches,
    ),
    _Configuration(
        "BucketTagging",
        settings.TAGGING,
        "NoSuchTagSet",
        tagging.document,
        _tags,
        is_put_silently=True,
    ),
)


# ---- those with a life of their own


def public_access_block(call: Call) -> PublicAccessBlock:
    """Returns the bucket's switches against public access."""
    return PublicAccessBlock.parse(call.settings.get(settings.PUBLIC_ACCESS) or {})


async def _get_policy_status(call: Call) -> Response:
    """Returns whether the policy or the ACL allows everybody something."""
    document = call.settings.get(settings.POLICY)
    is_public = document is not None and policy.is_public(
        authorization.parsed_bucket_policy(document)
    )
    if not is_public and ownership.has_acls(call.settings.ownership):
        acl = authorization.bucket_acl(call)
        is_public = public_access_block(call).effective_acl(acl).is_public
    return answer(call, {"PolicyStatus": {"IsPublic": is_public}})


async def _get_encryption(call: Call) -> Response:
    """Returns the configuration that was put, as long as objects are encrypted so."""
    kept = call.settings.get(settings.ENCRYPTION)
    if kept is None or not call.service.encrypted:
        raise encryption.no_configuration()
    return answer(call, {"ServerSideEncryptionConfiguration": kept})


async def _get_versioning(call: Call) -> Response:
    """Returns the status; empty if versions were never kept."""
    return answer(call, call.settings.get(settings.VERSIONING))


async def _put_versioning(call: Call) -> Response:
    """Sets the status. Once on, it can be suspended, except in a bucket with object lock."""
    configuration = call.params["VersioningConfiguration"]
    status = configuration.get("Status")
    if status is None:
        raise S3Error("IllegalVersioningConfigurationException")
    if configuration.get("MFADelete") == "Enabled" or b"x-amz-mfa" in call.fields:
        raise S3Error("NotImplemented", "MFA delete is not implemented: there are no MFA devices")
    object_lock.check_versioning(status, enabled=call.settings.has_lock)
    await keep(call, settings.VERSIONING, {"Status": status})
    return answer(call)


async def _get_logging(call: Call) -> Response:
    kept = call.settings.get(settings.LOGGING)
    return answer(call, {} if kept is None else {"LoggingEnabled": kept})


async def _put_logging(call: Call) -> Response:
    """Sets the target of access logs, a bucket of the same owner; without one, logging is switched
    off. Only the owner may, whatever a policy allows others."""
    if not call.is_owner and call.caller.name != call.service.identities.administrator:
        raise S3Error("AccessDenied")
    wanted = call.params["BucketLoggingStatus"].get("LoggingEnabled")
    if wanted is None:
        await _forget(call, settings.LOGGING)
    else:
        _check_log_target(call, wanted)
        await keep(call, settings.LOGGING, wanted)
    return answer(call)


def _check_log_target(call: Call, wanted: Mapping[str, Any]) -> None:
    if wanted.get("TargetGrants"):
        raise S3Error("NotImplemented", "Grants on log objects are not implemented: use a policy")
    if len(wanted.get("TargetObjectKeyFormat") or {}) > 1:
        raise S3Error("MalformedXML")
    target: str = wanted["TargetBucket"]
    if not is_bucket_name(target):
        raise S3Error("InvalidTargetBucketForLogging")
    try:
        found = call.service.settings.of(target.encode())
    except NotFound:
        raise S3Error("InvalidTargetBucketForLogging") from None
    owner = found.get(settings.OWNER) or call.service.identities.administrator
    if owner != call.owner or found.has_lock:
        raise S3Error("InvalidTargetBucketForLogging")
    key = key_of(wanted, owner, call.service.region, call.bucket, 0.0)
    if len(key.encode()) > KEY_LIMIT_BYTES:  # no object could have it: nothing would be delivered
        raise S3Error("KeyTooLongError")


HANDLERS: Final[dict[str, Handler]] = {
    **{name: handler for each in _CONFIGURATIONS for name, handler in each.handlers().items()},
    "GetBucketEncryption": _get_encryption,
    "GetBucketLogging": _get_logging,
    "GetBucketPolicyStatus": _get_policy_status,
    "GetBucketVersioning": _get_versioning,
    "PutBucketLogging": _put_logging,
    "PutBucketVersioning": _put_versioning,
}
