"""Access control lists: canned ones, grants in headers and documents, and their meaning.

An ACL means a policy: `policy_of_bucket` and `policy_of_object` write it as statements, so that one
evaluator answers for policies and ACLs. Permissions:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/acl-overview.html. Under BucketOwnerEnforced
ownership, the default of new buckets (`s3_object_ownership`), ACLs do not count and cannot be
set.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from s3api.http.s3_errors import S3Error
from s3api.rules.access import ownership
from s3api.rules.access.policy import Policy, Statement, bucket_arn

ALL_USERS: Final = "http://acs.amazonaws.com/groups/global/AllUsers"
AUTHENTICATED_USERS: Final = "http://acs.amazonaws.com/groups/global/AuthenticatedUsers"
LOG_DELIVERY: Final = "http://acs.amazonaws.com/groups/s3/LogDelivery"
_GROUPS: Final = frozenset({ALL_USERS, AUTHENTICATED_USERS, LOG_DELIVERY})
_GRANTS: Final = 100

PRIVATE: Final = "private"
_FULL: Final = "FULL_CONTROL"
_PERMISSIONS: Final = frozenset({_FULL, "READ", "WRITE", "READ_ACP", "WRITE_ACP"})
_HEADERS: Final = {
    "GrantRead": "READ",
    "GrantWrite": "WRITE",
    "GrantReadACP": "READ_ACP",
    "GrantWriteACP": "WRITE_ACP",
    "GrantFullControl": _FULL,
}
PARAMS: Final = frozenset(("ACL", *_HEADERS))
"""Parameters of requests that name an ACL or grants."""
# Canned ACL -> (group, permissions) besides the owner's full control.
_CANNED: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    PRIVATE: (),
    "public-read": ((ALL_USERS, "READ"),),
    "public-read-write": ((ALL_USERS, "READ"), (ALL_USERS, "WRITE")),
    "authenticated-read": ((AUTHENTICATED_USERS, "READ"),),
    "log-delivery-write": ((LOG_DELIVERY, "WRITE"), (LOG_DELIVERY, "READ_ACP")),
}
_BUCKET_OWNERS: Final = {"bucket-owner-read": "READ", "bucket-owner-full-control": _FULL}
_GRANTEE: Final = re.compile(
    r'\s*(id|uri|emailAddress)\s*=\s*(?:"([^"]*)"|([^\s",]*))\s*', re.IGNORECASE
)

_ON_BUCKET: Final[Mapping[str, tuple[str, ...]]] = {
    "READ": ("s3:ListBucket", "s3:ListBucketVersions", "s3:ListBucketMultipartUploads"),
    "WRITE": (),
    "READ_ACP": ("s3:GetBucketAcl",),
    "WRITE_ACP": ("s3:PutBucketAcl",),
}
_IN_BUCKET: Final = ("s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion")
_ON_OBJECT: Final[Mapping[str, tuple[str, ...]]] = {
    "READ": ("s3:GetObject", "s3:GetObjectVersion", "s3:GetObjectAttributes"),
    "WRITE": (),
    "READ_ACP": ("s3:GetObjectAcl", "s3:GetObjectVersionAcl"),
    "WRITE_ACP": ("s3:PutObjectAcl", "s3:PutObjectVersionAcl"),
}

NameOf = Callable[[str], str | None]
"""Returns the display name of a canonical id; None if there is no such user."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A user by canonical id and display name."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A permission to a user, or to a group (`group` is its URI)."""

    permission: str
    user: Owner | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Acl:
    """The owner of a bucket or object, and the grants on it. Groups come first in every ACL that
    this module makes, which public suites count on."""

    owner: Owner
    grants: tuple[Grant, ...]

    @property
    def is_public(self) -> bool:
        """Whether it grants something to everybody or to every authenticated user."""
        return any(each.group in (ALL_USERS, AUTHENTICATED_USERS) for each in self.grants)


def canned(name: str, owner: Owner, bucket_owner: Owner) -> Acl:
    """Returns a canned ACL of a bucket or object that `owner` owns; a bucket is its own owner's.
    Raises InvalidArgument."""
    grants = [Grant(_FULL, user=owner)]
    if name in _CANNED:
        grants[:0] = (Grant(permission, group=group) for group, permission in _CANNED[name])
    elif name in _BUCKET_OWNERS:
        if bucket_owner != owner:
            grants.append(Grant(_BUCKET_OWNERS[name], user=bucket_owner))
    else:
        raise S3Error("InvalidArgument", extra={"ArgumentName": "x-amz-acl", "ArgumentValue": name})
    return Acl(owner, tuple(grants))


def from_params(
    params: Mapping[str, Any], owner: Owner, bucket_owner: Owner, name_of: NameOf
) -> Acl | None:
    """Returns the ACL that a request's headers ask for (botocore's `ACL` and `Grant…`), None if
    they ask for none. Raises InvalidRequest, InvalidArgument, UnresolvableGrantByEmailAddress."""
    given = [member for member in _HEADERS if params.get(member)]
    name = params.get("ACL")
    if name and given:
        raise S3Error(
            "InvalidRequest", "Specifying both Canned ACLs and Header Grants is not allowed"
        )
    if name:
        return canned(name, owner, bucket_owner)
    if not given:
        return None
    grants = [
        _grant(_HEADERS[member], *grantee, name_of)
        for member in given
        for grantee in _grantees(params[member])
    ]
    return Acl(owner, _groups_first(grants))


def from_document(content: Mapping[str, Any], owner: Owner, name_of: NameOf) -> Acl:
    """Returns the ACL of an AccessControlPolicy document for a bucket or object that `owner` owns.
    Raises MalformedACLError, AccessDenied, InvalidArgument, UnresolvableGrantByEmailAddress."""
    named = content.get("Owner", {}).get("ID")
    grants = content.get("Grants")
    if named is None or grants is None or len(grants) > _GRANTS:
        raise S3Error("MalformedACLError")
    if named != owner.id:
        raise S3Error("AccessDenied")
    return Acl(owner, _groups_first(_parse_grant(each, name_of) for each in grants))


def load(content: Mapping[str, Any]) -> Acl:
    """Returns the ACL from which `document` made `content`."""
    owner = Owner(content["Owner"]["ID"], content["Owner"]["DisplayName"])
    return Acl(owner, tuple(_load_grant(each) for each in content["Grants"]))


def document(acl: Acl) -> dict[str, Any]:
    """Returns the answer to GetBucketAcl and GetObjectAcl, which is also the stored form."""
    return {
        "Owner": {"ID": acl.owner.id, "DisplayName": acl.owner.name},
        "Grants": [
            {"Grantee": _grantee_document(each), "Permission": each.permission}
            for each in acl.grants
        ],
    }


def check_object(params: Mapping[str, Any], owned: str) -> None:
    """Raises AccessControlListNotSupported if a write names an ACL that `owned`, the bucket's
    ownership, does not allow: any but full control of the bucket's owner."""
    if ownership.has_acls(owned):
        return
    if params.get("ACL") in (None, "bucket-owner-full-control") and not _has_grants(params):
        return
    raise not_supported()


def check_bucket(params: Mapping[str, Any], owned: str) -> None:
    """Raises InvalidBucketAclWithObjectOwnership if a bucket is created with an ACL beside
    BucketOwnerEnforced."""
    if ownership.has_acls(owned) or (
        params.get("ACL") in (None, PRIVATE) and not _has_grants(params)
    ):
        return
    raise S3Error(
        "InvalidBucketAclWithObjectOwnership",
        "Bucket cannot have ACLs set with ObjectOwnership's BucketOwnerEnforced setting",
    )


def not_supported() -> S3Error:
    """Returns the refusal of PutBucketAcl and PutObjectAcl under BucketOwnerEnforced."""
    return S3Error("AccessControlListNotSupported", "The bucket does not allow ACLs")


def policy_of_bucket(acl: Acl, bucket: str) -> Policy:
    """Returns the policy that grants what a bucket's ACL allows."""
    statements = list(_statements(acl, _ON_BUCKET, bucket_arn(bucket)))
    inside = bucket_arn(bucket, "*")
    writers = (each for each in acl.grants if each.permission in ("WRITE", _FULL))
    statements += (_statement(each, _IN_BUCKET, inside) for each in writers)
    return Policy(tuple(statements))


def policy_of_object(acl: Acl) -> Policy:
    """Returns the policy that grants what an object's ACL allows; the caller must ask it about that
    object alone."""
    return Policy(tuple(_statements(acl, _ON_OBJECT, "*")))


def _statements(
    acl: Acl, meaning: Mapping[str, tuple[str, ...]], resource: str
) -> Iterable[Statement]:
    for grant in acl.grants:
        if grant.permission == _FULL:
            allowed = tuple(action for each in meaning.values() for action in each)
        else:
            allowed = meaning[grant.permission]
        if allowed:
            yield _statement(grant, allowed, resource)


def _statement(grant: Grant, allowed: tuple[str, ...], resource: str) -> Statement:
    principal = ("CanonicalUser", grant.user.id) if grant.user else ("*", "*")
    conditions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    if grant.group == AUTHENTICATED_USERS:
        conditions = (("null", "aws:username", ("false",)),)
    elif grant.group == LOG_DELIVERY:
        principal = ("Service", "logging.s3.amazonaws.com")
    actions = tuple(each.lower() for each in allowed)
    return Statement(True, (principal,), actions, (resource,), conditions)


def _groups_first(grants: Iterable[Grant]) -> tuple[Grant, ...]:
    """Returns the groups first, otherwise the order in which the grants came."""
    return tuple(sorted(grants, key=lambda each: each.group is None))


def are_named(params: Mapping[str, Any]) -> bool:
    """Returns whether the parameters of a request name an ACL or grants."""
    return not PARAMS.isdisjoint(params)


def _has_grants(params: Mapping[str, Any]) -> bool:
    named = _HEADERS.keys() & params.keys()
    return bool(named) and any(params[member] for member in named)


def _grantees(header: str) -> Iterable[tuple[str, str]]:
    """Yields (kind, value) of `id="…", uri="…"`."""
    at = 0
    while True:
        match = _GRANTEE.match(header, at)
        if match is None:
            raise S3Error("InvalidArgument", "Argument format not recognized")
        yield match[1].lower(), match[2] if match[2] is not None else match[3]
        at = match.end()
        if at == len(header):
            return
        if header[at] != ",":
            raise S3Error("InvalidArgument", "Argument format not recognized")
        at += 1


def _grant(permission: str, kind: str, value: str, name_of: NameOf) -> Grant:
    if permission not in _PERMISSIONS:
        raise S3Error("MalformedACLError")
    if kind == "uri":
        if value not in _GROUPS:
            raise S3Error("InvalidArgument", "Invalid group uri")
        return Grant(permission, group=value)
    name = name_of(value)
    if name is None and kind == "emailaddress":  # it may be a user's name here
        raise S3Error("UnresolvableGrantByEmailAddress")
    if name is None:
        raise S3Error("InvalidArgument", "Invalid id")
    return Grant(permission, user=Owner(value, name))


def _parse_grant(content: Mapping[str, Any], name_of: NameOf) -> Grant:
    grantee = content.get("Grantee", {})
    member, kind = {
        "CanonicalUser": ("ID", "id"),
        "Group": ("URI", "uri"),
        "AmazonCustomerByEmail": ("EmailAddress", "emailaddress"),
    }.get(grantee.get("Type", ""), ("", ""))
    if grantee.get(member) is None:
        raise S3Error("MalformedACLError")
    return _grant(content.get("Permission", ""), kind, grantee[member], name_of)


def _load_grant(content: Mapping[str, Any]) -> Grant:
    grantee, permission = content["Grantee"], content["Permission"]
    if grantee["Type"] == "Group":
        return Grant(permission, group=grantee["URI"])
    return Grant(permission, user=Owner(grantee["ID"], grantee["DisplayName"]))


def _grantee_document(grant: Grant) -> dict[str, str]:
    if grant.user is None:
        assert grant.group is not None
        return {"Type": "Group", "URI": grant.group}
    return {"Type": "CanonicalUser", "ID": grant.user.id, "DisplayName": grant.user.name}
