"""Policies of buckets and users: documents, and their decisions.

The language is that of IAM
(https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements.html): an explicit
Deny wins, then an Allow, else nothing is said and the caller refuses. A bucket's policy names
principals and is about that bucket alone; a user's policy names none.

A caller is known by its name, `arn:aws:iam::<account>:user/<name>`, and by a canonical id, which
ACLs use. Anonymous callers match the principal `*` alone. The service collects the values of a
request, by condition key in lower case (`AccessRequest.values`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from s3api.http.s3_errors import S3Error
from s3api.rules.access import actions, condition_operators
from s3api.rules.access.glob import is_fixed, literal, matches

SIZE_LIMIT_BYTES: Final = 20 << 10
ARN: Final = "arn:aws:s3:::"
_VERSIONS: Final = frozenset({"2012-10-17", "2008-10-17"})
_FIELDS: Final = frozenset({"Version", "Id", "Statement"})
_STATEMENT_FIELDS: Final = frozenset(
    {
        "Sid",
        "Effect",
        "Principal",
        "NotPrincipal",
        "Action",
        "NotAction",
        "Resource",
        "NotResource",
        "Condition",
    }
)
_ACTION: Final = re.compile(r"\*|s3:[A-Za-z*?]+|sts:[A-Za-z*?]+|iam:[A-Za-z*?]+", re.IGNORECASE)
_ACCOUNT: Final = re.compile(r"[A-Za-z0-9_-]*")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z][^}',]*?)(?:\s*,\s*'([^']*)')?\s*\}")
# Keys whose fixed values make a statement for everybody one for some:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-control-block-public-access.html
_NARROWING: Final = frozenset(
    {
        "aws:principalorgid",
        "aws:sourceaccount",
        "aws:sourcearn",
        "aws:sourceip",
        "aws:sourceowner",
        "aws:sourcevpc",
        "aws:sourcevpce",
        "aws:userid",
        "s3:x-amz-server-side-encryption-aws-kms-key-id",
    }
)
_NARROWING_OPERATORS: Final = frozenset(
    {"stringequals", "stringlike", "stringequalsignorecase", "ipaddress", "arnequals", "arnlike"}
)


RESOURCE: Final = "resource"


class Decision(Enum):
    """The decision of policies on a request; NONE if no statement is about it."""

    DENY = "deny"
    ALLOW = "allow"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Requester:
    """The caller; `name` is None for an anonymous one."""

    name: str | None = None
    account: str = ""
    canonical_id: str = ""

    @property
    def arn(self) -> str:
        """The name in policies."""
        return f"arn:aws:iam::{self.account}:user/{self.name}"


@dataclass(frozen=True, slots=True)
class AccessRequest:
    """`action` as in `s3:GetObject`, `resource` an ARN, `values` by condition key in lower case.

    `unknown`: condition keys (their beginnings) whose values are not known yet, and RESOURCE. There
    an Allow is taken to hold, a Deny not to: a caller that is not even allowed so never is."""

    caller: Requester
    action: str
    resource: str
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement. `principals` are (kind, name), None in a user's policy; `negated` names the
    elements that stand there as Not…; conditions are (operator, key, values)."""

    allows: bool
    principals: tuple[tuple[str, str], ...] | None
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    conditions: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    negated: frozenset[str] = frozenset()

    def applies(self, request: AccessRequest, *, variables: bool) -> bool:
        """Returns whether it is about the request. `variables`: `${…}` are replaced."""
        return (
            self._speaks("Action", _any_action(self.actions, request.action))
            and self._names(request.caller)
            and self._covers(request, variables)
            and all(
                self.allows if _is_unknown(each[1], request) else _holds(each, request, variables)
                for each in self.conditions
            )
        )

    def _covers(self, request: AccessRequest, variables: bool) -> bool:
        if RESOURCE in request.unknown:
            return self.allows
        return self._speaks("Resource", _any_resource(self.resources, request, variables))

    def _names(self, caller: Requester) -> bool:
        if self.principals is None:
            return True
        named = any(_is_principal(kind, name, caller) for kind, name in self.principals)
        return self._speaks("Principal", named)

    def _speaks(self, element: str, found: bool) -> bool:
        return found is not (element in self.negated)


@dataclass(frozen=True, slots=True)
class Policy:
    """A document's statements."""

    statements: tuple[Statement, ...]
    variables: bool = True


def evaluate(policies: Iterable[Policy], request: AccessRequest) -> Decision:
    """Returns the decision of the policies together: a Deny anywhere wins."""
    decision = Decision.NONE
    for policy in policies:
        for statement in policy.statements:
            if statement.allows and decision is Decision.ALLOW:
                continue
            if statement.applies(request, variables=policy.variables):
                if not statement.allows:
                    return Decision.DENY
                decision = Decision.ALLOW
    return decision


def is_public(policy: Policy) -> bool:
    """Returns whether a bucket's policy allows everybody something, by the rules of Block Public
    Access: statements that name principals, or restrict a narrowing key to fixed values, are not
    public."""
    return any(_is_public(statement) for statement in policy.statements)


def bucket_arn(bucket: str, key: str | None = None) -> str:
    """Returns the ARN of a bucket, or of an object."""
    return f"{ARN}{bucket}" if key is None else f"{ARN}{bucket}/{key}"


def parse_bucket_policy(document: bytes | str) -> Policy:
    """Parses a bucket's policy as it is kept. Raises MalformedPolicy."""
    return _parse(document, has_principals=True)


def new_bucket_policy(document: bytes | str, bucket: str) -> Policy:
    """Parses a policy that is set for a bucket: like `parse_bucket_policy`, but refuses one that
    cannot be meant so. A stored one stays in force when this gets stricter. Raises
    MalformedPolicy."""
    policy = parse_bucket_policy(document)
    for statement in policy.statements:
        for resource in statement.resources:
            _check_resource(resource, bucket)
        if statement.allows:
            # One that reaches nothing does no harm, and other servers take it.
            _check_named(statement)
        elif not statement.negated & {"Action", "Resource"}:
            _check_reach(statement, bucket)
    return policy


def parse_user_policy(document: bytes | str) -> Policy:
    """Parses a user's policy. Raises MalformedPolicy."""
    return _parse(document, has_principals=False)


# --- evaluation


def _any_action(patterns: Iterable[str], action: str) -> bool:
    lowered = action.lower()
    return any(matches(each, lowered) for each in patterns)


def _any_resource(patterns: Iterable[str], request: AccessRequest, variables: bool) -> bool:
    for pattern in patterns:
        filled = _fill(pattern, request.values) if variables else _plain(pattern)
        if filled is not None and matches(filled, request.resource):
            return True
    return False


def _holds(
    condition: tuple[str, str, tuple[str, ...]], request: AccessRequest, variables: bool
) -> bool:
    operator, key, patterns = condition
    filled = [_fill(each, request.values) if variables else _plain(each) for each in patterns]
    known = [each for each in filled if each is not None]
    return condition_operators.holds(operator, known, request.values.get(key))


def _is_unknown(key: str, request: AccessRequest) -> bool:
    return bool(request.unknown) and key.startswith(request.unknown)


def _fill(pattern: str, values: Mapping[str, tuple[str, ...]]) -> str | None:
    """Returns the pattern with its variables replaced; None if one has no single value and no
    default. Values are taken literally: a user named `*` is not everybody."""
    if "${" not in pattern:
        return pattern
    missing = False

    def value_of(match: re.Match[str]) -> str:
        nonlocal missing
        found = values.get(match[1].strip().lower(), ())
        if len(found) == 1:
            return literal(found[0])
        missing = missing or match[2] is None
        return literal(match[2] or "")

    filled = _VARIABLE.sub(value_of, pattern)
    return None if missing else filled


def _plain(pattern: str) -> str:
    """Returns the pattern in a document whose version knows no variables: `$` is a character."""
    return pattern.replace("$", "${$}")


def _is_principal(kind: str, name: str, caller: Requester) -> bool:
    if name == "*":
        return kind in ("*", "AWS")
    if caller.name is None:
        return False
    if kind == "CanonicalUser":
        return name == caller.canonical_id
    if kind != "AWS":
        return False
    whole_account = (
        {caller.account, f"arn:aws:iam::{caller.account}:root"} if caller.account else ()
    )
    return name in (caller.name, caller.arn) or name in whole_account


def _is_public(statement: Statement) -> bool:
    if not statement.allows or statement.principals is None:
        return False
    anybody = "Principal" in statement.negated or any(
        name == "*" for _, name in statement.principals
    )
    return anybody and not any(_narrows(each) for each in statement.conditions)


def _narrows(condition: tuple[str, str, tuple[str, ...]]) -> bool:
    operator, key, patterns = condition
    if key not in _NARROWING or operator not in _NARROWING_OPERATORS:
        return False
    if key == "aws:sourceip":
        return all(condition_operators.is_narrow_network(each) for each in patterns)
    return all(is_fixed(each) and "${" not in each for each in patterns)


# --- documents


def _parse(document: bytes | str, *, has_principals: bool) -> Policy:
    data = document.encode() if isinstance(document, str) else document
    if len(data) > SIZE_LIMIT_BYTES:
        raise _malformed(f"Policies are limited to {SIZE_LIMIT_BYTES} bytes")
    try:
        content = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise _malformed("Policies must be valid JSON and the first byte must be '{'") from None
    if not isinstance(content, dict):
        raise _malformed("Policies must be valid JSON and the first byte must be '{'")
    _check_fields(content, _FIELDS)
    version = content.get("Version", "2008-10-17")
    if not isinstance(version, str) or version not in _VERSIONS:
        raise _malformed("The policy must contain a valid version string")
    statements = _listed(content.get("Statement"))
    if not statements:
        raise _malformed("Missing required field Statement")
    parsed = tuple(_statement(each, has_principals) for each in statements)
    return Policy(parsed, version == "2012-10-17")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the members as a dict. Raises ValueError for two of one name: it is not clear which
    one the writer meant."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _statement(content: Any, has_principals: bool) -> Statement:
    if not isinstance(content, dict):
        raise _malformed("A statement must be an object")
    _check_fields(content, _STATEMENT_FIELDS)
    if content.get("Effect") not in ("Allow", "Deny"):
        raise _malformed(f"Invalid effect: {content.get('Effect')}")
    if not isinstance(content.get("Sid", ""), str):
        raise _malformed("Invalid Sid")
    negated: set[str] = set()
    actions_ = _strings(_one_of(content, "Action", negated), "action")
    resources = _strings(_one_of(content, "Resource", negated), "resource")
    for each in actions_:
        if not _ACTION.fullmatch(each):
            raise _malformed("Policy has invalid action")
    principals = _principals(content, negated, has_principals)
    return Statement(
        content["Effect"] == "Allow",
        principals,
        tuple(each.lower() for each in actions_),
        resources,
        _conditions(content.get("Condition", {})),
        frozenset(negated),
    )


def _one_of(content: Mapping[str, Any], element: str, negated: set[str]) -> Any:
    """Returns the value of an element or of its Not form, whichever exists."""
    if (element in content) == (f"Not{element}" in content):
        raise _malformed(f"Missing required field {element}, or both {element} and Not{element}")
    if element in content:
        return content[element]
    negated.add(element)
    return content[f"Not{element}"]


def _principals(
    content: Mapping[str, Any], negated: set[str], has_principals: bool
) -> tuple[tuple[str, str], ...] | None:
    if not has_principals:
        if "Principal" in content or "NotPrincipal" in content:
            raise _malformed("A user's policy must not name principals")
        return None
    value = _one_of(content, "Principal", negated)
    if value == "*":
        return (("*", "*"),)
    if not isinstance(value, dict) or not value:
        raise _malformed("Invalid principal in policy")
    found = [(kind, name) for kind in value for name in _strings(value[kind], "principal")]
    for kind, name in found:
        if kind not in ("AWS", "CanonicalUser", "Service", "Federated"):
            raise _malformed("Invalid principal in policy")
        if name != "*" and ("*" in name or (kind == "AWS" and not _is_user(name))):
            raise _malformed("Invalid principal in policy")
    return tuple(found)


def _is_user(name: str) -> bool:
    """Returns whether it is an ARN of a user, role or account, an account id, or a plain name."""
    if not name.startswith("arn:"):
        return bool(name) and "/" not in name and ":" not in name
    parts = name.split(":", 5)
    if len(parts) != 6 or parts[2] not in ("iam", "sts") or not _ACCOUNT.fullmatch(parts[4]):
        return False
    return parts[5] == "root" or parts[5].startswith(("user/", "role/", "assumed-role/"))


def _conditions(content: Any) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    if not isinstance(content, dict):
        raise _malformed("Invalid Condition type")
    found: list[tuple[str, str, tuple[str, ...]]] = []
    for operator, keys in content.items():
        lowered = operator.lower()
        if not condition_operators.is_known(lowered):
            raise _malformed(f"Invalid Condition type : {operator}")
        if not isinstance(keys, dict) or not keys:
            raise _malformed(f"Policy has an invalid condition: {operator}")
        for key, values in keys.items():
            patterns = tuple(_scalar(each, key) for each in _listed(values))
            if not _is_key(key) or not condition_operators.are_valid(lowered, patterns):
                raise _malformed(f"Policy has an invalid condition key or value: {key}")
            found.append((lowered, key.lower(), patterns))
    return tuple(found)


def _is_key(key: str) -> bool:
    return key.lower().startswith(("aws:", "s3:", "jwt:", "ldap:"))


def _scalar(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise _malformed(f"Policy has an invalid condition value: {key}")
    return str(value)


def _strings(value: Any, what: str) -> tuple[str, ...]:
    found = _listed(value)
    if not found or not all(isinstance(each, str) and each for each in found):
        raise _malformed(f"Policy has invalid {what}")
    return tuple(found)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _check_fields(content: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in content:
        if name not in known:
            raise _malformed(f"Unknown field {name}")


def _check_resource(resource: str, bucket: str) -> None:
    name = resource.removeprefix(ARN).partition("/")[0]
    if resource == "*" or not resource.startswith(ARN) or not matches(_plain(name), bucket):
        raise _malformed("Policy has invalid resource")


def _check_named(statement: Statement) -> None:
    """Refuses an Allow for all but some callers: it would allow anonymous ones."""
    if "Principal" in statement.negated:
        raise _malformed("Allow with NotPrincipal is not allowed")


def _check_reach(statement: Statement, bucket: str) -> None:
    """Refuses a Deny of an action of buckets on objects alone, or the reverse, which would deny
    nothing."""
    on_bucket = any(
        "/" not in each or matches(each, bucket_arn(bucket)) for each in statement.resources
    )
    on_objects = any("/" in each or each.endswith("*") for each in statement.resources)
    for action in statement.actions:
        if not is_fixed(action):
            continue
        of_bucket = action in _LOWERED_BUCKET_ACTIONS
        if not (on_bucket if of_bucket else on_objects):
            raise _malformed("Action does not apply to any resource(s) in statement")


_LOWERED_BUCKET_ACTIONS: Final = frozenset(
    permissions.plain.lower()
    for permissions in actions.PERMISSIONS.values()
    if actions.concerns_bucket(permissions.plain)
)


def _malformed(message: str) -> S3Error:
    return S3Error("MalformedPolicy", message)
