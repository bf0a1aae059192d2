"""ACLs of buckets and objects, and whose objects are, with two owners."""

import json
from typing import Any

import pytest

from tests.integration.s3 import S3, refused, serving

ALL = "http://acs.amazonaws.com/groups/global/AllUsers"
AUTHENTICATED = "http://acs.amazonaws.com/groups/global/AuthenticatedUsers"
Json = dict[str, Any]


def grant(permission: str, user: str = "", group: str = "") -> Json:
    if group:
        return {"Grantee": {"Type": "Group", "URI": group}, "Permission": permission}
    named = {"Type": "CanonicalUser", "ID": user, "DisplayName": user}
    return {"Grantee": named, "Permission": permission}


OWN = grant("FULL_CONTROL", "main")


def by_name(grants: list[Json]) -> list[str]:
    return sorted(json.dumps(each, sort_keys=True) for each in grants)


def grants_of(client: Any, bucket: str) -> list[Json]:
    found: list[Json] = client.get_bucket_acl(Bucket=bucket)["Grants"]
    return found


CANNED: dict[str, list[Json]] = {
    "private": [OWN],
    "public-read": [OWN, grant("READ", group=ALL)],
    "public-read-write": [OWN, grant("READ", group=ALL), grant("WRITE", group=ALL)],
    "authenticated-read": [OWN, grant("READ", group=AUTHENTICATED)],
}


@pytest.mark.parametrize("name", CANNED)
def test_canned_acls_of_a_bucket(s3: S3, bucket: str, name: str) -> None:
    client, wanted = s3.client(), by_name(CANNED[name])
    made = s3.new_bucket(ACL=name)
    assert by_name(grants_of(client, made)) == wanted
    client.put_bucket_acl(Bucket=bucket, ACL=name)
    assert by_name(grants_of(client, bucket)) == wanted
    assert client.get_bucket_acl(Bucket=bucket)["Owner"] == {"ID": "main", "DisplayName": "main"}
    s3.remove_bucket(made)


def test_what_canned_acls_of_a_bucket_allow(s3: S3, bucket: str) -> None:
    client, alt, nobody = s3.client(), s3.client("alt"), s3.client(None)
    expected = {
        "private": (False, False, False),
        "public-read": (True, True, False),
        "public-read-write": (True, True, True),
        "authenticated-read": (True, False, False),
    }
    for name, (alt_lists, nobody_lists, writes) in expected.items():
        client.put_bucket_acl(Bucket=bucket, ACL=name)
        allowed_or_not(alt_lists, alt.list_objects_v2, Bucket=bucket)
        allowed_or_not(nobody_lists, nobody.list_objects, Bucket=bucket)
        for other in (alt, nobody):
            allowed_or_not(writes, other.put_object, Bucket=bucket, Key="a", Body=b"x")
            allowed_or_not(writes, other.delete_object, Bucket=bucket, Key="a")
            allowed_or_not(False, other.get_bucket_acl, Bucket=bucket)
            allowed_or_not(False, other.put_bucket_acl, Bucket=bucket, ACL="private")


def allowed_or_not(allowed: bool, call: Any, **arguments: object) -> None:
    if allowed:
        call(**arguments)
        return
    with refused(403, "AccessDenied"):
        call(**arguments)


@pytest.mark.parametrize(
    ("bucket_acl", "object_acl", "reads", "lists", "writes"),
    [
        ("private", "private", False, False, False),
        ("private", "public-read", True, False, False),
        ("private", "public-read-write", True, False, False),
        ("public-read", "private", False, True, False),
        ("public-read", "public-read", True, True, False),
        ("public-read", "public-read-write", True, True, False),
        ("public-read-write", "private", False, True, True),
        ("public-read-write", "public-read", True, True, True),
        ("public-read-write", "public-read-write", True, True, True),
    ],
)
def test_acls_of_bucket_and_object_together(
    s3: S3, bucket: str, bucket_acl: str, object_acl: str, reads: bool, lists: bool, writes: bool
) -> None:
    client, alt = s3.client(), s3.client("alt")
    client.put_object(Bucket=bucket, Key="foo", Body=b"foo")
    client.put_object(Bucket=bucket, Key="bar", Body=b"bar")
    client.put_bucket_acl(Bucket=bucket, ACL=bucket_acl)
    client.put_object_acl(Bucket=bucket, Key="foo", ACL=object_acl)
    allowed_or_not(reads, alt.get_object, Bucket=bucket, Key="foo")
    allowed_or_not(False, alt.get_object, Bucket=bucket, Key="bar")
    allowed_or_not(lists, alt.list_objects_v2, Bucket=bucket)
    allowed_or_not(writes, alt.put_object, Bucket=bucket, Key="foo", Body=b"new")
    allowed_or_not(writes, alt.put_object, Bucket=bucket, Key="baz", Body=b"new")


@pytest.mark.parametrize("permission", ["FULL_CONTROL", "READ", "READ_ACP", "WRITE", "WRITE_ACP"])
def test_grants_of_a_bucket(s3: S3, bucket: str, permission: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    owner, wanted = {"ID": "main"}, [OWN, grant(permission, "alt")]
    client.put_bucket_acl(Bucket=bucket, AccessControlPolicy={"Owner": owner, "Grants": wanted})
    assert by_name(grants_of(client, bucket)) == by_name(wanted)
    full = permission == "FULL_CONTROL"
    if full or permission == "READ":
        alt.head_bucket(Bucket=bucket)
    else:
        with refused(403, "403"):
            alt.head_bucket(Bucket=bucket)
    allowed_or_not(full or permission == "READ_ACP", alt.get_bucket_acl, Bucket=bucket)
    allowed_or_not(full or permission == "WRITE", alt.put_object, Bucket=bucket, Key="a", Body=b"x")
    allowed_or_not(
        full or permission == "WRITE_ACP", alt.put_bucket_acl, Bucket=bucket, ACL="public-read"
    )


def test_grants_in_headers(s3: S3) -> None:
    client, alt = s3.client(), s3.client("alt")
    header = 'id="alt"'
    bucket = s3.new_bucket(GrantFullControl=header, GrantRead=f"{header}, uri={ALL}")
    wanted = [grant("FULL_CONTROL", "alt"), grant("READ", "alt"), grant("READ", group=ALL)]
    assert by_name(grants_of(client, bucket)) == by_name(wanted)
    alt.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    alt.put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    s3.remove_bucket(bucket)


def test_every_grant_in_headers_of_an_object(s3: S3, bucket: str) -> None:
    client, permissions = s3.client(), ["READ", "WRITE", "READ_ACP", "WRITE_ACP", "FULL_CONTROL"]
    names = [each.lower().replace("_", "-") for each in permissions]
    headers = {f"x-amz-grant-{each}": "id=alt" for each in names}
    signed = s3.client(signature_version="s3v4")

    def add(request: Any, **_: Any) -> None:
        for name, value in headers.items():
            request.headers[name] = value

    signed.meta.events.register("before-sign.s3.PutObject", add)
    signed.put_object(Bucket=bucket, Key="a", Body=b"x")
    signed.meta.events.unregister("before-sign.s3.PutObject", add)
    found = client.get_object_acl(Bucket=bucket, Key="a")["Grants"]
    assert found == [grant(each, "alt") for each in permissions]


def test_an_owner_without_grants_keeps_the_acl_alone(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="foo", Body=b"bar")
    empty = {"Owner": {"ID": "main"}, "Grants": []}
    client.put_bucket_acl(Bucket=bucket, AccessControlPolicy=empty)
    client.get_object(Bucket=bucket, Key="foo")
    with refused(403, "AccessDenied"):
        client.put_object(Bucket=bucket, Key="baz", Body=b"a")
    assert grants_of(client, bucket) == []
    client.put_bucket_acl(Bucket=bucket, ACL="private")
    client.put_object(Bucket=bucket, Key="baz", Body=b"a")


def test_acls_that_are_refused(s3: S3, bucket: str) -> None:
    client, owner = s3.client(), {"ID": "main"}
    with refused(400, "InvalidArgument"):
        client.put_bucket_acl(
            Bucket=bucket,
            AccessControlPolicy={"Owner": owner, "Grants": [grant("FULL_CONTROL", "_foo")]},
        )
    with refused(400, "UnresolvableGrantByEmailAddress"):
        email = {"Type": "AmazonCustomerByEmail", "EmailAddress": "none@example.com"}
        client.put_bucket_acl(
            Bucket=bucket,
            AccessControlPolicy={
                "Owner": owner,
                "Grants": [{"Grantee": email, "Permission": "READ"}],
            },
        )
    with refused(400, "InvalidArgument"):
        client.put_bucket_acl(Bucket=bucket, ACL="public-reads")
    with refused(400, "InvalidRequest"):
        client.put_bucket_acl(Bucket=bucket, ACL="private", GrantRead='id="alt"')
    with refused(400, "MissingSecurityHeader"):
        client.put_bucket_acl(Bucket=bucket)
    with refused(400, "MalformedACLError"):
        client.put_bucket_acl(
            Bucket=bucket,
            AccessControlPolicy={"Owner": owner, "Grants": [grant("EVERYTHING", "alt")]},
        )
    assert grants_of(client, bucket) == [OWN]


def test_objects_of_others_are_theirs(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    client.put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    alt.put_object(Bucket=bucket, Key="a", Body=b"x")
    for refuse in (client.get_object, client.get_object_acl):
        with refused(403, "AccessDenied"):
            refuse(Bucket=bucket, Key="a")
    with refused(403, "403"):
        client.head_object(Bucket=bucket, Key="a")
    alt.get_object(Bucket=bucket, Key="a")
    assert alt.get_object_acl(Bucket=bucket, Key="a")["Owner"]["ID"] == "alt"
    alt.put_object_acl(Bucket=bucket, Key="a", ACL="bucket-owner-read")
    client.get_object(Bucket=bucket, Key="a")
    with refused(403, "AccessDenied"):
        client.get_object_acl(Bucket=bucket, Key="a")
    alt.put_object_acl(Bucket=bucket, Key="a", ACL="bucket-owner-full-control")
    wanted = [grant("FULL_CONTROL", "alt"), OWN]
    assert by_name(client.get_object_acl(Bucket=bucket, Key="a")["Grants"]) == by_name(wanted)
    client.delete_object(Bucket=bucket, Key="a")


def controls(client: Any, bucket: str, owned: str) -> None:
    client.put_bucket_ownership_controls(
        Bucket=bucket, OwnershipControls={"Rules": [{"ObjectOwnership": owned}]}
    )


def owned(client: Any, bucket: str) -> str:
    found = client.get_bucket_ownership_controls(Bucket=bucket)["OwnershipControls"]["Rules"]
    return str(found[0]["ObjectOwnership"])


def test_the_bucket_owner_is_preferred(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    client.put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    assert owned(client, bucket) == "ObjectWriter"
    controls(client, bucket, "BucketOwnerPreferred")
    assert owned(client, bucket) == "BucketOwnerPreferred"
    alt.put_object(Bucket=bucket, Key="given", Body=b"x", ACL="bucket-owner-full-control")
    alt.put_object(Bucket=bucket, Key="kept", Body=b"x")
    assert client.get_object_acl(Bucket=bucket, Key="given")["Owner"]["ID"] == "main"
    with refused(403, "AccessDenied"):
        client.get_object(Bucket=bucket, Key="kept")
    client.delete_bucket_ownership_controls(Bucket=bucket)
    with refused(404, "OwnershipControlsNotFoundError"):
        client.get_bucket_ownership_controls(Bucket=bucket)


def test_the_bucket_owner_is_enforced(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    client.put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    alt.put_object(Bucket=bucket, Key="a", Body=b"x")
    with refused(400, "InvalidBucketAclWithObjectOwnership"):
        controls(client, bucket, "BucketOwnerEnforced")
    client.put_bucket_acl(Bucket=bucket, ACL="private")
    controls(client, bucket, "BucketOwnerEnforced")
    client.get_object(Bucket=bucket, Key="a")
    with refused(403, "AccessDenied"):
        alt.get_object(Bucket=bucket, Key="a")
    for canned in ("public-read", "private"):
        with refused(400, "AccessControlListNotSupported"):
            client.put_bucket_acl(Bucket=bucket, ACL=canned)
    with refused(400, "AccessControlListNotSupported"):
        client.put_object(Bucket=bucket, Key="b", Body=b"x", ACL="public-read")
    client.put_object(Bucket=bucket, Key="b", Body=b"x", ACL="bucket-owner-full-control")
    assert client.get_object_acl(Bucket=bucket, Key="a")["Owner"]["ID"] == "main"
    made = s3.new_bucket(ObjectOwnership="BucketOwnerEnforced")
    assert owned(client, made) == "BucketOwnerEnforced"
    s3.remove_bucket(made)
    with refused(400, "InvalidBucketAclWithObjectOwnership"):
        s3.new_bucket(ObjectOwnership="BucketOwnerEnforced", ACL="public-read")


def test_acls_do_not_count_in_new_buckets_unless_somebody_says_so() -> None:
    with serving() as s3:
        s3.add_user("main")
        client, nobody = s3.client(), s3.client(None)
        with refused(400, "InvalidBucketAclWithObjectOwnership"):
            s3.new_bucket(ACL="public-read")
        bucket = s3.new_bucket()
        assert owned(client, bucket) == "BucketOwnerEnforced"
        with refused(400, "AccessControlListNotSupported"):
            client.put_bucket_acl(Bucket=bucket, ACL="public-read")
        with refused(400, "AccessControlListNotSupported"):
            client.put_object(Bucket=bucket, Key="k", Body=b"x", ACL="public-read")
        client.put_object(Bucket=bucket, Key="k", Body=b"x")
        with refused(403, "AccessDenied"):
            nobody.get_object(Bucket=bucket, Key="k")
        (s3.mount / "made").mkdir()
        with refused(400, "AccessControlListNotSupported"):
            s3.client("admin").put_bucket_acl(Bucket="made", ACL="public-read")
        controls(client, bucket, "ObjectWriter")
        client.put_object(Bucket=bucket, Key="k", Body=b"x", ACL="public-read")
        nobody.get_object(Bucket=bucket, Key="k")


def test_who_began_an_upload_may_look_at_it_and_end_it(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    client.put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    own = alt.create_multipart_upload(Bucket=bucket, Key="a")["UploadId"]
    other = client.create_multipart_upload(Bucket=bucket, Key="a")["UploadId"]
    client.put_bucket_acl(Bucket=bucket, ACL="private")
    for refuse in (alt.list_parts, alt.abort_multipart_upload, s3.client(None).list_parts):
        with refused(403, "AccessDenied"):
            refuse(Bucket=bucket, Key="a", UploadId=other)
    assert alt.list_parts(Bucket=bucket, Key="a", UploadId=own)["Initiator"]["ID"] == "alt"
    alt.abort_multipart_upload(Bucket=bucket, Key="a", UploadId=own)
    left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [each["UploadId"] for each in left] == [other]
