"""Policies that speak of tags: those that a request brings, wherever it brings them, and those of
the source of a copy."""

from typing import Any

from tests.integration.s3 import S3, refused
from tests.integration.s3_raw import ask
from tests.integration.s3api.access.test_s3_policies import Json, allow, deny, document

PUBLIC: Json = {"TagSet": [{"Key": "security", "Value": "public"}]}
SECRET: Json = {"TagSet": [{"Key": "security", "Value": "secret"}]}
IF_PUBLIC: Json = {"StringEquals": {"s3:RequestObjectTag/security": "public"}}
IF_SECRET: Json = {"StringEquals": {"s3:RequestObjectTag/security": "secret"}}


def put_policy(s3: S3, bucket: str, *statements: Json) -> None:
    s3.client().put_bucket_policy(Bucket=bucket, Policy=document(*statements))


def test_tags_in_a_document_are_tags_of_the_request(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"x")
    alt = s3.client("alt")
    put_policy(s3, bucket, allow("s3:PutObjectTagging", f"{bucket}/*", Condition=IF_PUBLIC))
    alt.put_object_tagging(Bucket=bucket, Key="a", Tagging=PUBLIC)
    tagging: Any
    for tagging in (SECRET, {"TagSet": []}):
        with refused(403, "AccessDenied"):
            alt.put_object_tagging(Bucket=bucket, Key="a", Tagging=tagging)
    put_policy(
        s3,
        bucket,
        allow("s3:PutObjectTagging", f"{bucket}/*"),
        deny("s3:PutObjectTagging", f"{bucket}/*", Condition=IF_SECRET),
    )
    alt.put_object_tagging(Bucket=bucket, Key="a", Tagging=PUBLIC)
    with refused(403, "AccessDenied"):
        alt.put_object_tagging(Bucket=bucket, Key="a", Tagging=SECRET)
    kept = s3.client().get_object_tagging(Bucket=bucket, Key="a")["TagSet"]
    assert kept == PUBLIC["TagSet"]


def test_an_upload_in_parts_brings_its_tags_when_it_begins(s3: S3, bucket: str) -> None:
    put_policy(s3, bucket, allow("s3:PutObject", f"{bucket}/*", Condition=IF_PUBLIC))
    alt = s3.client("alt")
    alt.create_multipart_upload(Bucket=bucket, Key="a", Tagging="security=public")
    for tagging in ("security=secret", ""):
        with refused(403, "AccessDenied"):
            alt.create_multipart_upload(Bucket=bucket, Key="a", Tagging=tagging)


def test_a_copy_brings_tags_only_where_it_replaces_them(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"x", Tagging="security=secret")
    readable = allow(["s3:GetObject", "s3:GetObjectTagging"], f"{bucket}/a")
    writable = allow("s3:PutObject", f"{bucket}/b", Condition=IF_PUBLIC)
    put_policy(s3, bucket, readable, writable)
    asked: Any = {"Bucket": bucket, "Key": "b", "CopySource": f"{bucket}/a"}
    alt = s3.client("alt")
    alt.copy_object(TaggingDirective="REPLACE", Tagging="security=public", **asked)
    with refused(403, "AccessDenied"):
        alt.copy_object(TaggingDirective="REPLACE", Tagging="security=secret", **asked)
    with refused(403, "AccessDenied"):  # the header would say what the copy does not get
        alt.copy_object(Tagging="security=public", **asked)


def test_who_copies_tags_must_be_allowed_to_read_and_to_set_them(s3: S3, bucket: str) -> None:
    client, alt, theirs = s3.client(), s3.client("alt"), s3.new_bucket("alt")
    client.put_object(Bucket=bucket, Key="tagged", Body=b"x", Tagging="security=public")
    client.put_object(Bucket=bucket, Key="plain", Body=b"x")
    put_policy(s3, bucket, allow("s3:GetObject", f"{bucket}/*"))
    asked: Any = {"Bucket": theirs, "Key": "copy", "CopySource": f"{bucket}/tagged"}
    with refused(403, "AccessDenied"):
        alt.copy_object(**asked)
    alt.copy_object(TaggingDirective="REPLACE", **asked)
    alt.copy_object(Bucket=theirs, Key="copy", CopySource=f"{bucket}/plain")
    existing = {"StringEquals": {"s3:ExistingObjectTag/security": "public"}}
    put_policy(
        s3,
        bucket,
        allow("s3:GetObject", f"{bucket}/*"),
        allow("s3:GetObjectTagging", f"{bucket}/*", Condition=existing),
    )
    alt.copy_object(**asked)
    assert alt.get_object_tagging(Bucket=theirs, Key="copy")["TagSet"] == PUBLIC["TagSet"]
    # The bucket's owner may set tags there, unless a policy denies it.
    denied = deny("s3:PutObjectTagging", f"{theirs}/*")
    alt.put_bucket_policy(Bucket=theirs, Policy=document(denied))
    with refused(403, "AccessDenied"):
        alt.copy_object(**asked)
    s3.remove_bucket(theirs)


def test_a_source_is_read_by_its_own_tags(s3: S3, bucket: str) -> None:
    client, alt, theirs = s3.client(), s3.client("alt"), s3.new_bucket("alt")
    for value in ("public", "secret"):
        client.put_object(Bucket=bucket, Key=value, Body=b"x", Tagging=f"security={value}")
    when = {"StringEquals": {"s3:ExistingObjectTag/security": "public"}}
    put_policy(
        s3,
        bucket,
        allow(["s3:GetObject", "s3:GetObjectTagging"], f"{bucket}/*", Condition=when),
    )
    upload = alt.create_multipart_upload(Bucket=theirs, Key="parts")["UploadId"]
    part: Any = {"Bucket": theirs, "Key": "parts", "UploadId": upload, "PartNumber": 1}
    alt.copy_object(Bucket=theirs, Key="copy", CopySource=f"{bucket}/public")
    alt.upload_part_copy(CopySource=f"{bucket}/public", **part)
    with refused(403, "AccessDenied"):
        alt.copy_object(Bucket=theirs, Key="copy", CopySource=f"{bucket}/secret")
    with refused(403, "AccessDenied"):
        alt.upload_part_copy(CopySource=f"{bucket}/secret", **part)
    s3.remove_bucket(theirs)


def test_a_stranger_makes_nobody_read_a_list_of_keys(s3: S3, bucket: str) -> None:
    """The refusal comes before the body does, which is no list at all."""
    s3.client().put_object(Bucket=bucket, Key="mine/a", Body=b"x")

    def delete(body: bytes, user: str | None = None) -> tuple[int, str]:
        answer = ask(s3, "POST", f"/{bucket}?delete", body, user=user)
        return answer.status, answer.code

    assert delete(b"no list", None) == (403, "AccessDenied")
    with s3.connect() as peer:
        head = f"POST /{bucket}?delete HTTP/1.1\r\nHost: {s3.host}:{s3.port}\r\n"
        peer.sendall(head.encode() + b"Content-Length: 1000000\r\n\r\n")
        assert peer.recv(100).startswith(b"HTTP/1.1 403 ")
    put_policy(s3, bucket, allow("s3:DeleteObject", f"{bucket}/other/*"))
    assert delete(b"no list", None)[0] == 400
    put_policy(s3, bucket, allow("s3:DeleteObjectVersion", f"{bucket}/*"))
    assert delete(b"no list", None)[0] == 400
    put_policy(s3, bucket, allow("s3:GetObject", f"{bucket}/*"))
    assert delete(b"no list", None)[0] == 403
    assert delete(b"no list", "alt")[0] == 400
