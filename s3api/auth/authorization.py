"""Decides whether a caller may do what a request asks for: policies, ACLs and ownership, put
together.

1. A Deny of any policy wins. 2. A session's restriction must allow it. 3. A caller whom a user's or
the bucket's policy allows may do it. 4. So may the bucket's owner, a caller whom an ACL allows,
and, to end or examine an upload, the caller that began it. ACLs, where they count, limit the owner
in their own matters (lists and writes of a bucket, reads of an object): the writer of an object
into a bucket of another user owns it. 5. Nobody else may.

The bucket's owner can always read, replace and delete the bucket's policy, or could lock itself
out.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from kvfs.base.errors import NotFound
from kvfs.objects.object_info import Facts
from s3api.auth.credentials import KeyOwner
from s3api.http.s3_errors import S3Error
from s3api.rules.access import acl, ownership, policy
from s3api.rules.access.acl import Acl, Owner
from s3api.rules.access.actions import PUT_TAGS
from s3api.rules.access.policy import AccessRequest, Decision, Policy, Requester
from s3api.rules.access.public_access import PublicAccessBlock
from s3api.rules.access.request_values import (
    REQUEST_TAGS,
    SignatureKind,
    request_values,
    with_existing_tags,
    with_request_tags,
)
from s3api.storage.bucket_settings import ACL, POLICY, PUBLIC_ACCESS

if TYPE_CHECKING:
    from s3api.http.request_context import Call

_REMEMBERED: Final = 256
_LIST_OWN: Final = "s3:ListAllMyBuckets"
_FOR_ALL_USERS: Final = frozenset({_LIST_OWN, "s3:CreateBucket"})
"""Actions that concern no bucket of another user: each user may do them, unless a policy denies
it."""
_OF_POLICY: Final = frozenset({"s3:GetBucketPolicy", "s3:PutBucketPolicy", "s3:DeleteBucketPolicy"})
_BY_BUCKET_ACL: Final = frozenset(
    {
        "s3:ListBucket",
        "s3:ListBucketVersions",
        "s3:ListBucketMultipartUploads",
        "s3:PutObject",
    }
)
"""Actions that the owner of a bucket may do by its ACL, once it has one: it may take them from
itself."""
_BY_OBJECT_ACL: Final = frozenset(
    {
        "s3:GetObject",
        "s3:GetObjectVersion",
        "s3:GetObjectAttributes",
        "s3:GetObjectVersionAttributes",
        "s3:GetObjectAcl",
        "s3:GetObjectVersionAcl",
        "s3:PutObjectAcl",
        "s3:PutObjectVersionAcl",
    }
)
"""Actions that the owner of a bucket may not do with objects of others there, unless their ACLs
allow them."""
_ACL_OF_OBJECT: Final = frozenset(each for each in _BY_OBJECT_ACL if each.endswith("Acl"))
_WITH_A_WRITE: Final = frozenset({"s3:PutObjectAcl", PUT_TAGS})
"""Actions on the new object that the right to write by the bucket's ACL brings along."""
_WRITES: Final = frozenset({"PutObject", "CopyObject", "CreateMultipartUpload"})
_BY_NAME: Final = frozenset({"AbortMultipartUpload", "CreateBucket", "ListParts"})
"""Operations that a caller may do who has no more than a name."""
_CREATE_OBJECTS: Final = {
    "PutObject": "true",
    "CopyObject": "true",
    "CompleteMultipartUpload": "true",
    "CreateMultipartUpload": "false",
    "UploadPart": "false",
    "UploadPartCopy": "false",
}
"""Operations that need s3:PutObject, and whether an object is there after them."""
_SHOW_OWNERS: Final = frozenset({"GetObjectAcl", "PutObjectAcl", "GetObjectAttributes"})
"""Operations for which the object's owner must be known, even if the bucket's owner asks. GetObject
and HeadObject find it with the object: `Access.require_of_foreign`."""
_BY_INITIATOR: Final = frozenset({"s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"})
"""Actions on an upload for the caller that began it, unless a policy denies them."""
INITIATOR: Final = "upload.initiator"
"""A key of an upload's attributes: the name of the user who began it; empty: nobody."""


class _UserPolicy(NamedTuple):
    policy: Policy
    allows_all: bool


@functools.lru_cache(_REMEMBERED)
def caller_of(user: str | None) -> Requester:
    """Returns a user as policies and ACLs know it; None: nobody."""
    return Requester() if user is None else Requester(user, "", user)


def owner_of(user: str) -> Owner:
    """Returns a user as ACLs and lists name it."""
    return Owner(user, user)


class Access:
    """Decides for one worker. Pure, except for what it reads of the bucket and the object."""

    def is_decided(self, call: "Call", actions: Sequence[str]) -> bool:
        """Returns whether a request may do everything that it needs to, whatever the object. Raises
        NoSuchBucket."""
        return call.operation not in _SHOW_OWNERS and _all_at_once(call, actions)

    def authorise(self, call: "Call", actions: Sequence[str], *, of_object: bool) -> bool:
        """Returns whether a request of which that is not decided may do everything that it needs
        to; `of_object`: to an object that should exist. False: it does not exist, and the caller,
        who may list the bucket, may be told so, and learns nothing of an object that appears
        meanwhile. Raises AccessDenied, NoSuchBucket."""
        facts = facts_or_none(call) if of_object else None
        for action in actions:
            if self.allows(call, action, call.key, facts):
                continue
            if of_object and facts is None and self.allows(call, "s3:ListBucket"):
                return False
            raise S3Error("AccessDenied")
        return True

    def is_unconditional(self, call: "Call", actions: Iterable[str], facts: Facts) -> bool:
        """Returns whether only the caller decides whether all of it may be done to this object, and
        nothing else of the request. Raises NoSuchBucket."""
        return "owner" not in facts.metadata and _all_at_once(call, actions)

    def require(self, call: "Call", actions: Iterable[str], facts: Facts | None = None) -> None:
        """Raises AccessDenied unless the caller may do all of it; NoSuchBucket."""
        for action in actions:
            if not self.allows(call, action, call.key, facts):
                raise S3Error("AccessDenied")

    def could_allow(self, call: "Call", actions: Iterable[str]) -> bool:
        """Returns whether there may be an object of the bucket to which the caller may do one of
        these; False: none. Raises NoSuchBucket."""
        return any(self.allows(call, action, any_object=True) for action in actions)

    def refuse_excluded(self, call: "Call") -> None:
        """Raises AccessDenied for a caller who may do nothing, by the bucket's settings, whatever
        is in the bucket; NoSuchBucket."""
        settings, known = call.settings, call.known
        is_shared = settings.has_policy or ownership.has_acls(settings.ownership)
        if is_shared or call.is_owner or (known is not None and known.policy):
            return
        if known is None or call.operation not in _BY_NAME:
            raise S3Error("AccessDenied")

    def require_of_foreign(self, call: "Call", action: str, facts: Facts) -> None:
        """Checks before an object is shown that may not be the bucket owner's. Raises
        AccessDenied."""
        if "owner" in facts.metadata and not self.allows(call, action, call.key, facts):
            raise S3Error("AccessDenied")

    def allows(
        self,
        call: "Call",
        action: str,
        key: str = "",
        facts: Facts | None = None,
        *,
        any_object: bool = False,
    ) -> bool:
        """Returns whether the caller may do `action` to the bucket, or with a key to that object of
        it; `facts` if the object exists. `any_object`: whether it may do it to any object of it."""
        if action in _FOR_ALL_USERS:
            return _allows_service(call, action)
        foreign = facts is not None and "owner" in facts.metadata
        if not foreign and _all_at_once(call, (action,)):
            return True
        block = PublicAccessBlock.parse(call.settings.get(PUBLIC_ACCESS) or {})
        request = _request(call, action, key, facts, any_object=any_object)
        decision = policy.evaluate(_policies(call, block, action), request)
        if decision is Decision.DENY:
            return False
        if _comes_with_write(call, action):
            return self.allows(call, "s3:PutObject", key, facts)
        if not _within(_session(call.known), request):
            return False
        if decision is Decision.ALLOW:
            return True
        if call.is_owner and not _is_by_acl(call, action, facts):
            return True
        if action in _BY_INITIATOR:
            return _began(call)
        if not _allows_by_acl(call, block, request, facts):
            return False
        call.by_acl = True
        return True


def object_acl(call: "Call", facts: Facts) -> Acl:
    """Returns the ACL of an object: the one that was put, else private to its owner."""
    kept = facts.metadata.get("acl")
    if kept is not None:
        return acl.load(_loaded(kept))
    owner = owner_of(facts.metadata.get("owner") or call.owner)
    return acl.canned("private", owner, owner_of(call.owner))


def bucket_acl(call: "Call") -> Acl:
    """Returns the ACL of the bucket, like `object_acl`."""
    kept = call.settings.get(ACL)
    owner = owner_of(call.owner)
    return acl.load(kept) if kept is not None else acl.canned("private", owner, owner)


def parsed_bucket_policy(document: str) -> Policy:
    """Returns a bucket's policy, parsed. Raises MalformedPolicy."""
    return _bucket_policy(document)


def facts_or_none(call: "Call") -> Facts | None:
    """Returns the object that a request names, if it exists; for conditions on it."""
    try:
        found = call.store.find(call.raw_bucket, call.raw_key, call.version)
    except NotFound:
        return None
    return None if found.delete_marker else found


def _all_at_once(call: "Call", actions: Iterable[str]) -> bool:
    """Returns whether only the caller decides, as for nearly all requests: an owner or an
    administrator, and neither a bucket's policy nor a session."""
    known = call.known
    if known is None or known.session_policy or not _FOR_ALL_USERS.isdisjoint(actions):
        return False
    settings = call.settings
    if settings.has_policy:
        return False
    if known.policy:
        return _user_policy(known.policy).allows_all
    return call.is_owner and not (settings.has_acl and not _BY_BUCKET_ACL.isdisjoint(actions))


def _allows_service(call: "Call", action: str) -> bool:
    if call.caller.name is None:
        return action == _LIST_OWN  # of nobody's buckets, there are none
    own = _own(call.known)
    request = _request(call, action, "", None)
    if own is not None and policy.evaluate([own], request) is Decision.DENY:
        return False
    return _within(_session(call.known), request)


def _policies(call: "Call", block: PublicAccessBlock, action: str) -> list[Policy]:
    own, document = _own(call.known), call.settings.get(POLICY)
    found = [] if own is None else [own]
    if document is not None and not (call.is_owner and action in _OF_POLICY):
        parsed = _bucket_policy(document)
        account = "" if call.is_owner else "another"
        found.append(block.effective_policy(parsed, call.caller, account))
    return found


def _is_by_acl(call: "Call", action: str, facts: Facts | None) -> bool:
    """Returns whether the bucket's owner may do it by an ACL alone."""
    if not ownership.has_acls(call.settings.ownership):
        return False
    if action in _BY_BUCKET_ACL:
        return call.settings.get(ACL) is not None
    owner = facts.metadata.get("owner") if facts is not None else None
    return action in _BY_OBJECT_ACL and owner not in (None, call.caller.name)


def _began(call: "Call") -> bool:
    """Returns whether the upload that a request names is the caller's."""
    try:
        upload = call.store.uploads.find(call.raw_bucket, call.raw_key, call.params["UploadId"])
    except NotFound:
        return False
    return call.caller.name is not None and upload.metadata.get(INITIATOR) == call.caller.name


def _allows_by_acl(
    call: "Call", block: PublicAccessBlock, request: AccessRequest, facts: Facts | None
) -> bool:
    if not ownership.has_acls(call.settings.ownership):
        return False
    action, name = request.action, call.caller.name
    if facts is not None:
        of_object = block.effective_acl(object_acl(call, facts))
        if action in _ACL_OF_OBJECT and name is not None and of_object.owner.id == name:
            return True
        if policy.evaluate([acl.policy_of_object(of_object)], request) is Decision.ALLOW:
            return True
    if call.operation in _WRITES and action in _WITH_A_WRITE:
        request = AccessRequest(request.caller, "s3:PutObject", request.resource, request.values)
    of_bucket = acl.policy_of_bucket(block.effective_acl(bucket_acl(call)), call.bucket)
    return policy.evaluate([of_bucket], request) is Decision.ALLOW


def _comes_with_write(call: "Call", action: str) -> bool:
    """Returns whether a caller that may put an object may also set this of it, unless it is denied:
    its tags, and an ACL that shows it only to the writer and the bucket's owner. (S3 asks for
    permissions of their own; policies that other servers' users write count on these.)"""
    if call.operation not in _WRITES:
        return False
    if action != "s3:PutObjectAcl":
        return action == PUT_TAGS
    owner, writer = owner_of(call.owner), owner_of(call.caller.name or call.owner)
    given = acl.from_params(call.params, writer, owner, lambda name: name)
    return given is None or all(each.user in (owner, writer) for each in given.grants)


def _within(session: Policy | None, request: AccessRequest) -> bool:
    return session is None or policy.evaluate([session], request) is Decision.ALLOW


def _own(known: KeyOwner | None) -> Policy | None:
    return _user_policy(known.policy).policy if known is not None and known.policy else None


def _session(known: KeyOwner | None) -> Policy | None:
    return _user_policy(known.session_policy).policy if known and known.session_policy else None


@functools.lru_cache(_REMEMBERED)
def _user_policy(document: str) -> _UserPolicy:
    parsed = policy.parse_user_policy(document)
    return _UserPolicy(parsed, all(_allows_all(each) for each in parsed.statements))


def _allows_all(statement: policy.Statement) -> bool:
    everything = "*" in statement.actions and "*" in statement.resources
    return statement.allows and everything and not statement.conditions and not statement.negated


@functools.lru_cache(_REMEMBERED)
def _bucket_policy(document: str) -> Policy:
    return policy.parse_bucket_policy(document)


@functools.lru_cache(_REMEMBERED)
def _loaded(document: str) -> Any:
    return msgspec.json.decode(document)


def _request(
    call: "Call", action: str, key: str, facts: Facts | None, *, any_object: bool = False
) -> AccessRequest:
    resource = policy.bucket_arn(call.bucket, key or None) if call.bucket else "*"
    unknown = () if _request_tags(call) is not None else (REQUEST_TAGS,)
    if any_object:
        unknown = (*unknown, policy.RESOURCE)
    values = _values(call, facts)
    if action == "s3:ListBucket" and call.key:
        # A caller that may list a key may be told that it is absent, whatever else the query says.
        values["s3:prefix"] = (call.key,)
    return AccessRequest(call.caller, action, resource, values, unknown)


def _values(call: "Call", facts: Facts | None) -> dict[str, tuple[str, ...]]:
    signed = None
    if call.verified is not None:
        name = "AWS4-HMAC-SHA256" if call.verified.version == 4 else "AWS"
        age = max(0.0, call.now.timestamp() - call.verified.signed_at)
        signed = SignatureKind(name, call.verified.auth_type.value, int(age * 1000))
    values = request_values(
        caller=call.caller,
        source_ip=call.head.peer[0],
        secure=call.head.secure,
        now=call.now,
        headers=call.headers(),
        query=call.query,
        signed=signed,
    )
    values = with_request_tags(values, _request_tags(call) or {})
    if facts is not None and (kept := facts.metadata.get("tagging")):
        values = with_existing_tags(values, _tags(kept))
    if call.operation in _CREATE_OBJECTS:
        values["s3:objectcreationoperation"] = (_CREATE_OBJECTS[call.operation],)
    return values


def _request_tags(call: "Call") -> Mapping[str, str] | None:
    """Returns the tags that a request gives its object; None: they stand in its document, which has
    not been read yet."""
    if call.operation == "PutObjectTagging":
        document = call.params.get("Tagging")
        if document is None:
            return None
        return {each["Key"]: each["Value"] for each in document.get("TagSet", ())}
    if call.operation == "CopyObject" and call.params.get("TaggingDirective") != "REPLACE":
        return {}  # the source's: no tags of the request
    return _tags(call.fields.get(b"x-amz-tagging", b"").decode("latin-1"))


def _tags(text: str) -> dict[str, str]:
    return dict(parse_qsl(text, keep_blank_values=True))
