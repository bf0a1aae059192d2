"""Policies of buckets and users, and the switches against public access."""

import json
from typing import Any

import pytest

from s3api.server.users import ALLOW_ALL
from tests.integration.s3 import S3, refused

Json = dict[str, Any]


def document(*statements: Json) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def allow(action: object, *resources: str, principal: object = "*", **others: object) -> Json:
    found = {"Effect": "Allow", "Principal": principal, "Action": action}
    return {**found, "Resource": [f"arn:aws:s3:::{each}" for each in resources], **others}


def deny(action: object, *resources: str, **others: object) -> Json:
    return {**allow(action, *resources), "Effect": "Deny", **others}


def test_a_policy_is_put_read_and_deleted(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "NoSuchBucketPolicy"):
        client.get_bucket_policy(Bucket=bucket)
    text = document(allow("s3:ListBucket", bucket, principal={"AWS": "arn:aws:iam:::user/alt"}))
    response = client.put_bucket_policy(Bucket=bucket, Policy=text)
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 204
    assert client.get_bucket_policy(Bucket=bucket)["Policy"] == text
    s3.client("alt").list_objects_v2(Bucket=bucket)
    with refused(403, "AccessDenied"):
        s3.client(None).list_objects_v2(Bucket=bucket)
    with refused(403, "AccessDenied"):
        s3.client("alt").get_bucket_policy(Bucket=bucket)
    client.delete_bucket_policy(Bucket=bucket)
    with refused(403, "AccessDenied"):
        s3.client("alt").list_objects_v2(Bucket=bucket)


@pytest.mark.parametrize(
    "policy",
    [
        "",
        "{}",
        "no json",
        document(allow("s3:ListBucket", "another-bucket")),
        document(deny("s3:PutObject", "{bucket}")),  # of objects, but says the bucket
        document(allow("s3:NoSuch!Action", "{bucket}")),
        document({**allow("s3:ListBucket", "{bucket}"), "Effect": "Perhaps"}),
        document(allow("s3:ListBucket", "{bucket}", Condition={"Perhaps": {"aws:Referer": "x"}})),
        "x" * 30_000,
    ],
)
def test_policies_that_are_none(s3: S3, bucket: str, policy: str) -> None:
    code = "MalformedPolicy" if policy else "MissingRequestBodyError"
    with refused(400, code):
        s3.client().put_bucket_policy(Bucket=bucket, Policy=policy.replace("{bucket}", bucket))


def test_a_deny_wins_and_the_owner_cannot_lock_itself_out(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    client.put_bucket_acl(Bucket=bucket, ACL="authenticated-read")
    s3.client("alt").list_objects_v2(Bucket=bucket)
    text = document(deny("s3:*", bucket, f"{bucket}/*"), allow("s3:*", bucket, f"{bucket}/*"))
    client.put_bucket_policy(Bucket=bucket, Policy=text)
    for user in ("main", "alt", "admin", None):
        with refused(403, "AccessDenied"):
            s3.client(user).list_objects_v2(Bucket=bucket)
    with refused(403, "AccessDenied"):
        client.get_object(Bucket=bucket, Key="a")
    assert client.get_bucket_policy(Bucket=bucket)["Policy"] == text
    client.put_bucket_policy(Bucket=bucket, Policy=text)
    client.delete_bucket_policy(Bucket=bucket)
    client.get_object(Bucket=bucket, Key="a")


def test_what_is_missing_is_told_to_who_may_list(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    client.put_bucket_policy(Bucket=bucket, Policy=document(allow("s3:GetObject", f"{bucket}/*")))
    with refused(403, "AccessDenied"):
        alt.get_object(Bucket=bucket, Key="none")
    client.put_bucket_policy(
        Bucket=bucket,
        Policy=document(allow("s3:GetObject", f"{bucket}/*"), allow("s3:ListBucket", bucket)),
    )
    with refused(404, "NoSuchKey"):
        alt.get_object(Bucket=bucket, Key="none")
    with refused(404, "NoSuchKey"):
        s3.client(None).get_object(Bucket=bucket, Key="none")
    client.put_bucket_policy(Bucket=bucket, Policy=document(allow("s3:ListBucket", bucket)))
    with refused(404, "404"):
        s3.client(None).head_object(Bucket=bucket, Key="none")


def test_conditions_on_the_prefix(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    only = {"StringEquals": {"s3:prefix": "foo/"}}
    client.put_bucket_policy(
        Bucket=bucket, Policy=document(allow("s3:ListBucket", bucket, Condition=only))
    )
    alt.list_objects(Bucket=bucket, Prefix="foo/")
    alt.list_objects_v2(Bucket=bucket, Prefix="foo/")
    with refused(403, "AccessDenied"):
        alt.list_objects(Bucket=bucket)
    with refused(403, "AccessDenied"):
        alt.list_objects_v2(Bucket=bucket, Prefix="bar/")


def test_who_may_list_a_prefix_is_told_what_is_missing_there(s3: S3, bucket: str) -> None:
    alt, only = s3.client("alt"), {"StringLike": {"s3:prefix": "public/*"}}
    s3.client().put_bucket_policy(
        Bucket=bucket,
        Policy=document(
            allow("s3:GetObject", f"{bucket}/*"), allow("s3:ListBucket", bucket, Condition=only)
        ),
    )
    with refused(404, "404"):
        alt.head_object(Bucket=bucket, Key="public/none")
    with refused(403, "403"):
        alt.head_object(Bucket=bucket, Key="private/none")
    with refused(403, "AccessDenied"):
        alt.get_object(Bucket=bucket, Key="private/none")


def test_conditions_can_be_made_a_duty(s3: S3, bucket: str) -> None:
    """Writes only of new objects, but for the steps of an upload; deletes only of known ones."""
    client, alt = s3.client(), s3.client("alt")
    blind = {"Null": {"s3:if-none-match": "true"}, "Bool": {"s3:ObjectCreationOperation": "true"}}
    unaware = {"Null": {"s3:if-match": "true"}}
    client.put_bucket_policy(
        Bucket=bucket,
        Policy=document(
            allow(["s3:PutObject", "s3:DeleteObject"], f"{bucket}/*"),
            deny("s3:PutObject", f"{bucket}/*", Condition=blind),
            deny("s3:DeleteObject", f"{bucket}/*", Condition=unaware),
        ),
    )
    with refused(403, "AccessDenied"):
        alt.put_object(Bucket=bucket, Key="a", Body=b"x")
    tag = alt.put_object(Bucket=bucket, Key="a", Body=b"x", IfNoneMatch="*")["ETag"]
    asked = {"Bucket": bucket, "Key": "b"}
    asked["UploadId"] = alt.create_multipart_upload(**asked)["UploadId"]
    part = {"PartNumber": 1, "ETag": alt.upload_part(PartNumber=1, Body=b"x", **asked)["ETag"]}
    done = {"MultipartUpload": {"Parts": [part]}}
    with refused(403, "AccessDenied"):
        alt.complete_multipart_upload(**done, **asked)
    alt.complete_multipart_upload(IfNoneMatch="*", **done, **asked)
    with refused(403, "AccessDenied"):
        alt.delete_object(Bucket=bucket, Key="a")
    wanted = [{"Key": "a", "ETag": tag}, {"Key": "b"}]
    told = alt.delete_objects(Bucket=bucket, Delete={"Objects": wanted})
    assert [each["Key"] for each in told["Deleted"]] == ["a"]
    assert [(each["Key"], each["Code"]) for each in told["Errors"]] == [("b", "AccessDenied")]


def test_conditions_on_tags_of_the_object(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    for key, tags in (("public", "security=public"), ("private", "security=private"), ("no", "")):
        client.put_object(Bucket=bucket, Key=key, Body=b"x", Tagging=tags)
    when = {"StringEquals": {"s3:ExistingObjectTag/security": "public"}}
    client.put_bucket_policy(
        Bucket=bucket,
        Policy=document(
            allow(["s3:GetObject", "s3:GetObjectTagging"], f"{bucket}/*", Condition=when)
        ),
    )
    assert alt.get_object(Bucket=bucket, Key="public")["Body"].read() == b"x"
    assert alt.get_object_tagging(Bucket=bucket, Key="public")["TagSet"]
    for key in ("private", "no", "none"):
        with refused(403, "AccessDenied"):
            alt.get_object(Bucket=bucket, Key=key)
        with refused(403, "AccessDenied"):
            alt.get_object_tagging(Bucket=bucket, Key=key)
    with refused(403, "AccessDenied"):
        alt.get_object_acl(Bucket=bucket, Key="public")


def test_conditions_on_what_a_put_says(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    put = ["s3:PutObject", "s3:PutObjectTagging", "s3:PutObjectAcl"]
    tagged = {"StringEquals": {"s3:RequestObjectTag/security": "public"}}
    public = {"StringLike": {"s3:x-amz-acl": "public*"}}
    client.put_bucket_policy(
        Bucket=bucket,
        Policy=document(
            allow(put, f"{bucket}/tagged/*", Condition=tagged),
            allow(put, f"{bucket}/acl/*"),
            deny(put, f"{bucket}/acl/*", Condition=public),
        ),
    )
    alt.put_object(Bucket=bucket, Key="tagged/a", Body=b"x", Tagging="security=public&b=c")
    alt.put_object(Bucket=bucket, Key="acl/a", Body=b"x", ACL="private")
    with refused(403, "AccessDenied"):
        alt.put_object(Bucket=bucket, Key="tagged/b", Body=b"x")
    with refused(403, "AccessDenied"):
        alt.put_object(Bucket=bucket, Key="tagged/b", Body=b"x", Tagging="security=private")
    with refused(403, "AccessDenied"):
        alt.put_object(Bucket=bucket, Key="acl/b", Body=b"x", ACL="public-read")
    # Tags and harmless ACLs come with the write, unless they are denied.
    client.put_bucket_policy(Bucket=bucket, Policy=document(allow("s3:PutObject", f"{bucket}/*")))
    alt.put_object(Bucket=bucket, Key="c", Body=b"x", Tagging="a=b")
    alt.put_object(Bucket=bucket, Key="c", Body=b"x", GrantFullControl='id="main"')
    assert client.get_object_acl(Bucket=bucket, Key="c")["Owner"]["ID"] == "alt"
    for acl in ("public-read", "authenticated-read"):
        with refused(403, "AccessDenied"):
            alt.put_object(Bucket=bucket, Key="c", Body=b"x", ACL=acl)
    client.put_bucket_policy(
        Bucket=bucket,
        Policy=document(
            allow("s3:PutObject", f"{bucket}/*"), deny("s3:PutObjectTagging", f"{bucket}/*")
        ),
    )
    with refused(403, "AccessDenied"):
        alt.put_object(Bucket=bucket, Key="c", Body=b"x", Tagging="a=b")


def test_the_owner_that_is_expected(s3: S3, bucket: str) -> None:
    s3.client().put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    for user in ("main", None):
        client = s3.client(user)
        client.list_objects(Bucket=bucket, ExpectedBucketOwner="main")
        client.put_object(Bucket=bucket, Key="a", Body=b"x", ExpectedBucketOwner="main")
        with refused(403, "AccessDenied"):
            client.list_objects(Bucket=bucket, ExpectedBucketOwner="mainfoo")
        with refused(403, "AccessDenied"):
            client.put_object(Bucket=bucket, Key="a", Body=b"y", ExpectedBucketOwner="mainfoo")
        with refused(403, "AccessDenied"):
            client.delete_objects(
                Bucket=bucket, Delete={"Objects": [{"Key": "a"}]}, ExpectedBucketOwner="mainfoo"
            )


def test_conditions_on_address_transport_and_referer(s3: S3, bucket: str) -> None:
    client, nobody = s3.client(), s3.client(None)
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    cases = [
        ({"IpAddress": {"aws:SourceIp": "127.0.0.0/8"}}, True),
        ({"IpAddress": {"aws:SourceIp": "10.0.0.0/8"}}, False),
        ({"NotIpAddress": {"aws:SourceIp": "127.0.0.1"}}, False),
        ({"Bool": {"aws:SecureTransport": "false"}}, True),
        ({"Bool": {"aws:SecureTransport": "true"}}, False),
        ({"StringLike": {"aws:Referer": "http://www.example.com/*"}}, False),
        ({"StringLikeIfExists": {"aws:Referer": "http://www.example.com/*"}}, True),
        ({"Null": {"aws:UserAgent": "false"}}, True),
    ]
    for condition, allowed in cases:
        statement = allow("s3:GetObject", f"{bucket}/*", Condition=condition)
        client.put_bucket_policy(Bucket=bucket, Policy=document(statement))
        if allowed:
            nobody.get_object(Bucket=bucket, Key="a")
        else:
            with refused(403, "AccessDenied"):
                nobody.get_object(Bucket=bucket, Key="a")


def test_variables_stand_for_the_caller(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    home = allow("s3:*Object", f"{bucket}/home/${{aws:username}}/*", principal={"AWS": "*"})
    client.put_bucket_policy(Bucket=bucket, Policy=document(home))
    alt.put_object(Bucket=bucket, Key="home/alt/a", Body=b"x")
    alt.get_object(Bucket=bucket, Key="home/alt/a")
    with refused(403, "AccessDenied"):
        alt.put_object(Bucket=bucket, Key="home/main/a", Body=b"x")
    with refused(403, "AccessDenied"):
        s3.client(None).put_object(Bucket=bucket, Key="home/alt/a", Body=b"x")


def test_a_copy_needs_both_ends(s3: S3, bucket: str) -> None:
    client, alt, theirs = s3.client(), s3.client("alt"), s3.new_bucket("alt")
    client.put_object(Bucket=bucket, Key="public/a", Body=b"x")
    client.put_object(Bucket=bucket, Key="private/a", Body=b"x")
    client.put_bucket_policy(
        Bucket=bucket, Policy=document(allow("s3:GetObject", f"{bucket}/public/*"))
    )
    alt.copy_object(Bucket=theirs, Key="a", CopySource=f"{bucket}/public/a")
    with refused(403, "AccessDenied"):
        alt.copy_object(Bucket=theirs, Key="b", CopySource=f"{bucket}/private/a")
    with refused(403, "AccessDenied"):
        alt.copy_object(Bucket=bucket, Key="public/b", CopySource=f"{bucket}/public/a")
    statement = allow(
        "s3:PutObject",
        f"{bucket}/*",
        Condition={"StringLike": {"s3:x-amz-copy-source": f"{bucket}/public/*"}},
    )
    client.put_bucket_policy(
        Bucket=bucket,
        Policy=document(statement, allow("s3:GetObject", f"{bucket}/*")),
    )
    alt.copy_object(Bucket=bucket, Key="c", CopySource=f"{bucket}/public/a")
    with refused(403, "AccessDenied"):
        alt.copy_object(Bucket=bucket, Key="c", CopySource=f"{bucket}/private/a")
    with refused(403, "AccessDenied"):
        alt.put_object(Bucket=bucket, Key="c", Body=b"x")
    s3.remove_bucket(theirs)


def test_objects_of_a_list_are_deleted_each_with_its_own_permission(s3: S3, bucket: str) -> None:
    client = s3.client()
    for key in ("a/1", "b/1"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    client.put_bucket_policy(
        Bucket=bucket, Policy=document(allow("s3:DeleteObject", f"{bucket}/a/*"))
    )
    doomed = {"Objects": [{"Key": "a/1"}, {"Key": "b/1"}]}
    told = s3.client("alt").delete_objects(Bucket=bucket, Delete=doomed)
    assert [each["Key"] for each in told["Deleted"]] == ["a/1"]
    assert [(each["Key"], each["Code"]) for each in told["Errors"]] == [("b/1", "AccessDenied")]


def test_policies_of_users(s3: S3, bucket: str) -> None:
    reader = document({"Effect": "Allow", "Action": "s3:Get*", "Resource": "*"})
    own = document({"Effect": "Deny", "Action": "s3:CreateBucket", "Resource": "*"})
    s3.add_user("reader", reader)
    s3.add_user("bound", own)
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"x")
    assert s3.client("reader").get_object(Bucket=bucket, Key="a")["Body"].read() == b"x"
    with refused(403, "AccessDenied"):
        s3.client("reader").put_object(Bucket=bucket, Key="a", Body=b"y")
    with refused(403, "AccessDenied"):
        s3.client("bound").create_bucket(Bucket="bound-1")
    s3.client("bound").list_buckets()


def test_an_administrator_may_do_all_but_what_a_bucket_denies(s3: S3, bucket: str) -> None:
    s3.add_user("second-admin", ALLOW_ALL)
    client = s3.client("second-admin")
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    client.get_object(Bucket=bucket, Key="a")
    s3.client().put_bucket_policy(
        Bucket=bucket, Policy=document(deny("s3:GetObject", f"{bucket}/*"))
    )
    with refused(403, "AccessDenied"):
        client.get_object(Bucket=bucket, Key="a")


def test_whether_a_bucket_is_public(s3: S3, bucket: str) -> None:
    client = s3.client()

    def is_public() -> bool:
        status = client.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"]
        return bool(status["IsPublic"])

    assert not is_public()
    client.put_bucket_acl(Bucket=bucket, ACL="public-read")
    assert is_public()
    client.put_bucket_acl(Bucket=bucket, ACL="authenticated-read")
    assert is_public()
    client.put_bucket_acl(Bucket=bucket, ACL="private")
    client.put_bucket_policy(Bucket=bucket, Policy=document(allow("s3:ListBucket", bucket)))
    assert is_public()
    narrow = {"IpAddress": {"aws:SourceIp": "10.0.0.0/32"}}
    client.put_bucket_policy(
        Bucket=bucket, Policy=document(allow("s3:ListBucket", bucket, Condition=narrow))
    )
    assert not is_public()
    named = allow("s3:ListBucket", bucket, principal={"AWS": "arn:aws:iam:::user/alt"})
    client.put_bucket_policy(Bucket=bucket, Policy=document(named))
    assert not is_public()


SWITCHES = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")


def block(client: Any, bucket: str, *on: str) -> None:
    switches = {name: name in on for name in SWITCHES}
    client.put_public_access_block(Bucket=bucket, PublicAccessBlockConfiguration=switches)
    found = client.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"]
    assert found == switches


def test_public_acls_are_blocked(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "NoSuchPublicAccessBlockConfiguration"):
        client.get_public_access_block(Bucket=bucket)
    block(client, bucket, "BlockPublicAcls")
    for acl in ("public-read", "public-read-write", "authenticated-read"):
        with refused(403, "AccessDenied"):
            client.put_bucket_acl(Bucket=bucket, ACL=acl)
        with refused(403, "AccessDenied"):
            client.put_object(Bucket=bucket, Key="a", Body=b"x", ACL=acl)
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    with refused(403, "AccessDenied"):
        client.put_object_acl(Bucket=bucket, Key="a", ACL="public-read")
    client.delete_public_access_block(Bucket=bucket)
    client.put_bucket_acl(Bucket=bucket, ACL="public-read")


def test_public_acls_are_ignored(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    client.put_bucket_acl(Bucket=bucket, ACL="public-read")
    client.put_object(Bucket=bucket, Key="a", Body=b"x", ACL="public-read")
    alt.list_objects_v2(Bucket=bucket)
    alt.get_object(Bucket=bucket, Key="a")
    block(client, bucket, "IgnorePublicAcls")
    with refused(403, "AccessDenied"):
        alt.list_objects_v2(Bucket=bucket)
    with refused(403, "AccessDenied"):
        alt.get_object(Bucket=bucket, Key="a")
    client.get_object(Bucket=bucket, Key="a")


def test_public_policies_are_blocked_and_restricted(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    public = document(allow("s3:GetObject", f"{bucket}/*"))
    block(client, bucket, "BlockPublicPolicy")
    with refused(403, "AccessDenied"):
        client.put_bucket_policy(Bucket=bucket, Policy=public)
    named = allow("s3:GetObject", f"{bucket}/*", principal={"AWS": "arn:aws:iam:::user/alt"})
    client.put_bucket_policy(Bucket=bucket, Policy=document(named))
    block(client, bucket)
    client.put_bucket_policy(Bucket=bucket, Policy=public)
    alt.get_object(Bucket=bucket, Key="a")
    block(client, bucket, "RestrictPublicBuckets")
    with refused(403, "AccessDenied"):
        alt.get_object(Bucket=bucket, Key="a")
    with refused(403, "AccessDenied"):
        s3.client(None).get_object(Bucket=bucket, Key="a")
    client.get_object(Bucket=bucket, Key="a")


def test_who_may_not_ask_is_told_so_whatever_it_sends(s3: S3, bucket: str) -> None:
    """Permission comes before the document."""
    answer = s3.exchange(
        b"PUT /%b?policy HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        b"Connection: close\r\n\r\nno policy" % bucket.encode()
    )
    assert answer.startswith(b"HTTP/1.1 403 "), answer


def test_policies_see_the_version_that_is_deleted_or_copied(s3: S3, bucket: str) -> None:
    client, alt, own = s3.client(), s3.client("alt"), s3.new_bucket("alt")
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    one, two = (client.put_object(Bucket=bucket, Key="a", Body=b"x")["VersionId"] for _ in range(2))
    only_one = {"StringEquals": {"s3:VersionId": one}}
    readable = allow("s3:GetObjectVersion", f"{bucket}/*", Condition=only_one)
    every = allow("s3:DeleteObjectVersion", f"{bucket}/*")
    but_one = deny("s3:DeleteObjectVersion", f"{bucket}/*", Condition=only_one)
    client.put_bucket_policy(Bucket=bucket, Policy=document(readable, every, but_one))
    source = {"Bucket": bucket, "Key": "a"}
    alt.copy_object(Bucket=own, Key="b", CopySource={**source, "VersionId": one})
    with refused(403, "AccessDenied"):
        alt.copy_object(Bucket=own, Key="b", CopySource={**source, "VersionId": two})
    doomed = [{"Key": "a", "VersionId": each} for each in (one, two)]
    told = alt.delete_objects(Bucket=bucket, Delete={"Objects": doomed})
    assert [each["VersionId"] for each in told["Deleted"]] == [two]
    assert [(each["VersionId"], each["Code"]) for each in told["Errors"]] == [(one, "AccessDenied")]
    s3.remove_bucket(own)
