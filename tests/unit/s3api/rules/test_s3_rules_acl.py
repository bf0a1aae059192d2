"""ACLs: canned, in headers, in documents; their meaning; ownership and Block Public Access."""

import json
from typing import Any

import pytest

from s3api.http.s3_errors import S3Error
from s3api.rules.access import acl, ownership
from s3api.rules.access.acl import (
    ALL_USERS,
    AUTHENTICATED_USERS,
    Acl,
    Grant,
    Owner,
    canned,
    document,
    from_document,
    from_params,
    load,
    policy_of_bucket,
    policy_of_object,
)
from s3api.rules.access.policy import (
    AccessRequest,
    Decision,
    Requester,
    evaluate,
    new_bucket_policy,
)
from s3api.rules.access.public_access import PublicAccessBlock

ANN, BOB = Owner("c-ann", "ann"), Owner("c-bob", "bob")
CALLERS = {
    "ann": Requester("ann", "1", "c-ann"),
    "bob": Requester("bob", "2", "c-bob"),
    "anybody": Requester(),
}
NAMES = {"c-ann": "ann", "c-bob": "bob"}


def who_may(policy: Any, action: str, resource: str) -> set[str]:
    found = set()
    for name, caller in CALLERS.items():
        values = {"aws:username": (caller.name,)} if caller.name else {}
        if evaluate([policy], AccessRequest(caller, action, resource, values)) is Decision.ALLOW:
            found.add(name)
    return found


def code_of(call: Any, *arguments: Any) -> str:
    with pytest.raises(S3Error) as caught:
        call(*arguments)
    return caught.value.code


@pytest.mark.parametrize(
    ("name", "readers", "writers"),
    [
        ("private", {"ann"}, {"ann"}),
        ("public-read", {"ann", "bob", "anybody"}, {"ann"}),
        ("public-read-write", {"ann", "bob", "anybody"}, {"ann", "bob", "anybody"}),
        ("authenticated-read", {"ann", "bob"}, {"ann"}),
    ],
)
def test_canned_acls(name: str, readers: set[str], writers: set[str]) -> None:
    made = canned(name, ANN, ANN)
    bucket = policy_of_bucket(made, "b")
    assert who_may(bucket, "s3:ListBucket", "arn:aws:s3:::b") == readers
    assert who_may(bucket, "s3:ListBucket", "arn:aws:s3:::other") == set()
    assert who_may(bucket, "s3:PutObject", "arn:aws:s3:::b/x") == writers
    assert who_may(bucket, "s3:GetObject", "arn:aws:s3:::b/x") == set()
    assert who_may(bucket, "s3:PutBucketAcl", "arn:aws:s3:::b") == {"ann"}
    of_object = policy_of_object(made)
    assert who_may(of_object, "s3:GetObject", "arn:aws:s3:::b/x") == readers
    assert who_may(of_object, "s3:GetObjectAcl", "arn:aws:s3:::b/x") == {"ann"}
    assert who_may(of_object, "s3:DeleteObject", "arn:aws:s3:::b/x") == set()
    assert load(json.loads(json.dumps(document(made)))) == made


def test_acls_of_objects_in_another_bucket() -> None:
    assert canned("bucket-owner-read", ANN, BOB).grants[1] == Grant("READ", user=BOB)
    assert canned("bucket-owner-full-control", ANN, BOB).grants[1].permission == "FULL_CONTROL"
    assert len(canned("bucket-owner-full-control", ANN, ANN).grants) == 1
    assert code_of(canned, "public-everything", ANN, ANN) == "InvalidArgument"


def test_grants_in_headers() -> None:
    assert from_params({}, ANN, ANN, NAMES.get) is None
    found = from_params({"ACL": "private"}, ANN, ANN, NAMES.get)
    assert found == canned("private", ANN, ANN)
    params = {"GrantRead": f'id="c-bob", uri="{ALL_USERS}"', "GrantWriteACP": "id=c-ann"}
    found = from_params(params, ANN, ANN, NAMES.get)
    assert found is not None
    assert set(found.grants) == {
        Grant("READ", user=BOB),
        Grant("READ", group=ALL_USERS),
        Grant("WRITE_ACP", user=ANN),
    }


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"ACL": "private", "GrantRead": "id=c-bob"}, "InvalidRequest"),
        ({"GrantRead": "c-bob"}, "InvalidArgument"),
        ({"GrantRead": "id=c-bob,"}, "InvalidArgument"),
        ({"GrantRead": "id=c-bob id=c-ann"}, "InvalidArgument"),
        ({"GrantRead": "id=c-nobody"}, "InvalidArgument"),
        ({"GrantRead": 'uri="http://example.com/"'}, "InvalidArgument"),
        ({"GrantRead": 'emailAddress="a@example.com"'}, "UnresolvableGrantByEmailAddress"),
    ],
)
def test_bad_headers(params: dict[str, str], code: str) -> None:
    assert code_of(from_params, params, ANN, ANN, NAMES.get) == code


def test_documents() -> None:
    grants = [
        {"Grantee": {"Type": "CanonicalUser", "ID": "c-bob"}, "Permission": "READ"},
        {"Grantee": {"Type": "Group", "URI": AUTHENTICATED_USERS}, "Permission": "READ_ACP"},
    ]
    content = {"Owner": {"ID": "c-ann"}, "Grants": grants}
    found = from_document(content, ANN, NAMES.get)
    assert found.grants == (Grant("READ_ACP", group=AUTHENTICATED_USERS), Grant("READ", user=BOB))
    assert document(found)["Grants"][1]["Grantee"]["DisplayName"] == "bob"
    assert found.is_public


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ({"Grants": []}, "MalformedACLError"),
        ({"Owner": {"ID": "c-ann"}}, "MalformedACLError"),
        ({"Owner": {"ID": "c-bob"}, "Grants": []}, "AccessDenied"),
        ({"Owner": {"ID": "c-ann"}, "Grants": [{"Permission": "READ"}]}, "MalformedACLError"),
    ],
)
def test_bad_documents(content: dict[str, Any], code: str) -> None:
    assert code_of(from_document, content, ANN, NAMES.get) == code


@pytest.mark.parametrize(
    ("grantee", "permission", "code"),
    [
        ({"Type": "CanonicalUser"}, "READ", "MalformedACLError"),
        ({"Type": "Alien", "ID": "c-bob"}, "READ", "MalformedACLError"),
        ({"Type": "CanonicalUser", "ID": "c-bob"}, "FLY", "MalformedACLError"),
        ({"Type": "CanonicalUser", "ID": "_foo"}, "READ", "InvalidArgument"),
        (
            {"Type": "AmazonCustomerByEmail", "EmailAddress": "doesnotexist@example.com"},
            "READ",
            "UnresolvableGrantByEmailAddress",
        ),
    ],
)
def test_bad_grants(grantee: dict[str, str], permission: str, code: str) -> None:
    grants = [{"Grantee": grantee, "Permission": permission}]
    content = {"Owner": {"ID": "c-ann"}, "Grants": grants}
    assert code_of(from_document, content, ANN, NAMES.get) == code


def test_ownership() -> None:
    enforced = ownership.parse_ownership("BucketOwnerEnforced")
    writer = ownership.parse_controls({"Rules": [{"ObjectOwnership": "ObjectWriter"}]})
    assert ownership.parse_controls(ownership.controls(writer)) == writer
    bad: dict[str, Any]
    for bad in ({}, {"Rules": []}, {"Rules": [{}]}, {"Rules": [{"ObjectOwnership": "Mine"}]}):
        assert code_of(ownership.parse_controls, bad) == "MalformedXML"
    public = {"ACL": "public-read"}
    acl.check_object(public, writer)
    acl.check_bucket(public, writer)
    acl.check_object({}, enforced)
    acl.check_object({"ACL": "bucket-owner-full-control"}, enforced)
    acl.check_bucket({"ACL": "private"}, enforced)
    for params in (public, {"GrantRead": "id=c-bob"}):
        assert code_of(acl.check_object, params, enforced) == "AccessControlListNotSupported"
        assert code_of(acl.check_bucket, params, enforced) == "InvalidBucketAclWithObjectOwnership"
    assert acl.not_supported().status == 400


def public_policy() -> Any:
    allowed = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": "arn:aws:s3:::b/*",
    }
    denied = allowed | {"Effect": "Deny", "Resource": "arn:aws:s3:::b/secret"}
    return new_bucket_policy(json.dumps({"Statement": [allowed, denied]}), "b")


def test_block_public_access() -> None:
    none = PublicAccessBlock()
    all_on = PublicAccessBlock.parse(
        {
            "BlockPublicAcls": True,
            "IgnorePublicAcls": True,
            "BlockPublicPolicy": True,
            "RestrictPublicBuckets": True,
        }
    )
    assert PublicAccessBlock.parse(all_on.document()) == all_on
    assert PublicAccessBlock.parse({}) == none
    public, private = canned("public-read", ANN, ANN), canned("private", ANN, ANN)
    policy = public_policy()
    for switches in (none, all_on):
        switches.check_acl(private)
    none.check_acl(public)
    none.check_policy(policy)
    assert code_of(all_on.check_acl, public) == "AccessDenied"
    assert code_of(all_on.check_policy, policy) == "AccessDenied"
    assert none.effective_acl(public) == public
    assert all_on.effective_acl(public) == private


def test_a_restricted_public_policy_counts_for_the_owners_account_alone() -> None:
    restricted, policy = PublicAccessBlock(restrict_buckets=True), public_policy()
    for name, decision in (("ann", "ALLOW"), ("bob", "NONE"), ("anybody", "NONE")):
        caller = CALLERS[name]
        effective = restricted.effective_policy(policy, caller, "1")
        request = AccessRequest(caller, "s3:GetObject", "arn:aws:s3:::b/x")
        assert evaluate([effective], request) is Decision[decision]
        secret = AccessRequest(caller, "s3:GetObject", "arn:aws:s3:::b/secret")
        assert evaluate([effective], secret) is Decision.DENY


def test_an_acl_of_nobody_is_not_public() -> None:
    assert not Acl(ANN, ()).is_public
