"""Whether a caller may do what a request asks for: policies, ACLs and ownership, put together.

1. A Deny of any policy wins. 2. What a session is restricted to must allow it. 3. The bucket's
owner may; so may whom a user's, the bucket's or an ACL's policy allows. 4. Anybody else may not.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

import msgspec

from kvfs.errors import NotFound
from kvfs.objects.finding import Facts
from s3api.auth.credentials import Known
from s3api.errors import S3Error
from s3api.rules import acl, ownership, policy
from s3api.rules.acl import Acl, Owner
from s3api.rules.policy import Caller, Decision, Policy, Request
from s3api.rules.public_access import PublicAccessBlock
from s3api.rules.request_values import (
    Signed,
    request_values,
    with_existing_tags,
    with_request_tags,
)
from s3api.settings import ACL, POLICY, PUBLIC_ACCESS

if TYPE_CHECKING:
    from s3api.call import Call

_REMEMBERED: Final = 256
_FOR_ALL_USERS: Final = frozenset({"s3:ListAllMyBuckets", "s3:CreateBucket"})
"""What concerns no bucket of somebody else: each user may, unless a policy denies it."""


def caller_of(user: str | None) -> Caller:
    """How policies and ACLs know a user; None: nobody."""
    return Caller() if user is None else Caller(user, "", user)


def owner_of(user: str) -> Owner:
    """How ACLs and lists name a user."""
    return Owner(user, user)


class Access:
    """Decides for one worker. Pure but for what it reads of the bucket and the object."""

    def require(self, call: "Call", actions: Iterable[str], facts: Facts | None = None) -> None:
        """Raises AccessDenied unless the caller may do all of it; NoSuchBucket."""
        for action in actions:
            if not self.allows(call, action, call.key, facts):
                raise S3Error("AccessDenied")

    def allows(
        self,
        call: "Call",
        action: str,
        key: str = "",
        facts: Facts | None = None,
    ) -> bool:
        """Whether the caller may do `action` to the bucket, or with a key to that object of it;
        `facts` where the object is there."""
        known = call.known
        own = _policies_of(known)
        session = _policy(known.session_policy) if known and known.session_policy else None
        if action in _FOR_ALL_USERS:
            return self._allows_service(call, own, session, action)
        is_owner = call.caller.name is not None and call.caller.name == call.owner
        document = call.settings.get(POLICY)
        if is_owner and document is None and session is None and not own:
            return True
        request = _request(call, action, key, facts)
        block = PublicAccessBlock.parse(call.settings.get(PUBLIC_ACCESS) or {})
        policies = list(own)
        if document is not None:
            parsed = _bucket_policy(document, call.bucket)
            account = "" if is_owner else "another"
            policies.append(block.effective_policy(parsed, call.caller, account))
        if not is_owner and ownership.has_acls(call.settings.ownership):
            policies += _acl_policies(call, block, facts)
        decision = policy.evaluate(policies, request)
        if decision is Decision.DENY or not _within(session, request):
            return False
        return is_owner or decision is Decision.ALLOW

    def _allows_service(
        self, call: "Call", own: Sequence[Policy], session: Policy | None, action: str
    ) -> bool:
        request = _request(call, action, "", None)
        decision = policy.evaluate(own, request)
        if call.caller.name is None or decision is Decision.DENY or not _within(session, request):
            return False
        return decision is Decision.ALLOW or action in _FOR_ALL_USERS


def object_acl(call: "Call", facts: Facts) -> Acl:
    """The ACL of an object: the one that was put, else private to its owner."""
    kept = facts.metadata.get("acl")
    if kept is not None:
        return acl.load(_loaded(kept))
    owner = owner_of(facts.metadata.get("owner") or call.owner)
    return acl.canned("private", owner, owner_of(call.owner))


def bucket_acl(call: "Call") -> Acl:
    """Likewise, of the bucket."""
    kept = call.settings.get(ACL)
    owner = owner_of(call.owner)
    return acl.load(kept) if kept is not None else acl.canned("private", owner, owner)


def _acl_policies(call: "Call", block: PublicAccessBlock, facts: Facts | None) -> list[Policy]:
    found = [acl.policy_of_bucket(block.effective_acl(bucket_acl(call)), call.bucket)]
    if facts is not None:
        found.append(acl.policy_of_object(block.effective_acl(object_acl(call, facts))))
    return found


def _within(session: Policy | None, request: Request) -> bool:
    return session is None or policy.evaluate([session], request) is Decision.ALLOW


def _policies_of(known: Known | None) -> list[Policy]:
    return [_policy(known.policy)] if known is not None and known.policy else []


@functools.lru_cache(_REMEMBERED)
def _policy(document: str) -> Policy:
    return policy.parse_user_policy(document)


@functools.lru_cache(_REMEMBERED)
def _bucket_policy(document: str, bucket: str) -> Policy:
    return policy.parse_bucket_policy(document, bucket)


@functools.lru_cache(_REMEMBERED)
def _loaded(document: str) -> Any:
    return msgspec.json.decode(document)


def _request(call: "Call", action: str, key: str, facts: Facts | None) -> Request:
    resource = policy.bucket_arn(call.bucket, key or None) if call.bucket else "*"
    return Request(call.caller, action, resource, _values(call, facts))


def _values(call: "Call", facts: Facts | None) -> dict[str, tuple[str, ...]]:
    signed = None
    if call.verified is not None:
        name = "AWS4-HMAC-SHA256" if call.verified.version == 4 else "AWS"
        age = max(0.0, call.now.timestamp() - call.verified.signed_at)
        signed = Signed(name, call.verified.auth_type.value, int(age * 1000))
    values = request_values(
        caller=call.caller,
        source_ip=call.head.peer[0],
        secure=call.head.secure,
        now=call.now,
        headers=call.headers(),
        query=call.query,
        signed=signed,
    )
    if given := call.fields.get(b"x-amz-tagging"):
        values = with_request_tags(values, _tags(given.decode("latin-1")))
    if facts is not None and (kept := facts.metadata.get("tagging")):
        values = with_existing_tags(values, _tags(kept))
    return values


def _tags(text: str) -> dict[str, str]:
    return dict(parse_qsl(text, keep_blank_values=True))


def facts_or_none(call: "Call") -> Facts | None:
    """The object that a request names, where it is there; for conditions on it."""
    try:
        found = call.store.find(call.raw_bucket, call.raw_key, call.version)
    except NotFound:
        return None
    return None if found.delete_marker else found
