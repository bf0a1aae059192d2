"""Block Public Access: the four switches of a bucket, and their effects.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-control-block-public-access.html
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from s3api.http.s3_errors import S3Error
from s3api.rules.access.acl import ALL_USERS, AUTHENTICATED_USERS, Acl
from s3api.rules.access.policy import Policy, Requester, is_public


@dataclass(frozen=True, slots=True)
class PublicAccessBlock:
    """The four switches, off if a bucket has no configuration."""

    block_acls: bool = False
    ignore_acls: bool = False
    block_policy: bool = False
    restrict_buckets: bool = False

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "PublicAccessBlock":
        """Parses a PublicAccessBlockConfiguration."""
        return cls(
            bool(document.get("BlockPublicAcls")),
            bool(document.get("IgnorePublicAcls")),
            bool(document.get("BlockPublicPolicy")),
            bool(document.get("RestrictPublicBuckets")),
        )

    def document(self) -> dict[str, bool]:
        """Returns the PublicAccessBlockConfiguration."""
        return {
            "BlockPublicAcls": self.block_acls,
            "IgnorePublicAcls": self.ignore_acls,
            "BlockPublicPolicy": self.block_policy,
            "RestrictPublicBuckets": self.restrict_buckets,
        }

    def check_acl(self, acl: Acl) -> None:
        """Checks an ACL before it is set. Raises AccessDenied."""
        if self.block_acls and acl.is_public:
            raise S3Error("AccessDenied")

    def check_policy(self, policy: Policy) -> None:
        """Checks a bucket's policy before it is set. Raises AccessDenied."""
        if self.block_policy and is_public(policy):
            raise S3Error("AccessDenied")

    def effective_acl(self, acl: Acl) -> Acl:
        """Returns the part of an ACL that counts."""
        if not self.ignore_acls:
            return acl
        groups = (ALL_USERS, AUTHENTICATED_USERS)
        return Acl(acl.owner, tuple(each for each in acl.grants if each.group not in groups))

    def effective_policy(self, policy: Policy, caller: Requester, owner_account: str) -> Policy:
        """Returns the part of a bucket's policy that counts for a caller: from a public policy, a
        caller from outside the owner's account keeps only the denials."""
        if not self.restrict_buckets or not is_public(policy):
            return policy
        if caller.name is not None and caller.account == owner_account:
            return policy
        denied = tuple(each for each in policy.statements if not each.allows)
        return Policy(denied, policy.variables)
