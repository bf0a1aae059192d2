"""Buckets as such, and what is set for them, with boto3."""

import pytest

from tests.integration.s3 import REGION, S3, refused

BAD_NAMES = (
    "aa",
    "a" * 64,
    "-alpha",
    "alpha-",
    "al_pha",
    "Alpha",
    "alpha..beta",
    "alpha.-beta",
    "192.168.5.123",
    "xn--alpha",
    "alpha-s3alias",
)


def test_a_bucket_is_made_looked_at_listed_and_deleted(s3: S3) -> None:
    client, name = s3.client(), s3.new_bucket()
    assert client.head_bucket(Bucket=name)["BucketRegion"] == REGION
    assert client.get_bucket_location(Bucket=name)["LocationConstraint"] is None
    listed = client.list_buckets()
    assert name in [each["Name"] for each in listed["Buckets"]]
    assert listed["Owner"] == {"ID": "main", "DisplayName": "main"}
    assert (s3.mount / name).is_dir()
    client.delete_bucket(Bucket=name)
    assert not (s3.mount / name).exists()
    with refused(404, "404"):
        client.head_bucket(Bucket=name)
    with refused(404, "NoSuchBucket"):
        client.delete_bucket(Bucket=name)
    with refused(404, "NoSuchBucket"):
        client.list_objects_v2(Bucket=name)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_no_bucket_may_have(s3: S3, name: str) -> None:
    answer = s3.exchange(f"HEAD /{name} HTTP/1.1\r\nHost: {s3.host}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 "), answer
    client = s3.client()
    client.meta.events.register_first("before-parameter-build.s3", _allow_any_name)
    with refused(400, "InvalidBucketName"):
        client.create_bucket(Bucket=name)


def _allow_any_name(context: dict[str, object], **_: object) -> None:
    context["ignore_bucket_name"] = True


def test_what_the_mount_has_under_no_legal_name_is_absent(s3: S3) -> None:
    (s3.mount / "Not_A_Bucket").mkdir()
    (s3.mount / "made-on-the-mount").mkdir()
    (s3.mount / "Not_A_Bucket" / "a").write_text("x")
    admin = s3.client("admin")
    names = [each["Name"] for each in admin.list_buckets()["Buckets"]]
    assert "Not_A_Bucket" not in names
    assert "made-on-the-mount" in names
    with refused(404, "NoSuchBucket"):
        admin.get_object(Bucket="Not_A_Bucket", Key="a")
    with refused(404, "NoSuchBucket"):
        admin.put_object(Bucket="Not_A_Bucket", Key="b", Body=b"x")
    assert not (s3.mount / "Not_A_Bucket" / "b").exists()
    assert admin.get_bucket_acl(Bucket="made-on-the-mount")["Owner"]["ID"] == "admin"
    with refused(403, "AccessDenied"):
        s3.client().list_objects_v2(Bucket="made-on-the-mount")


def test_a_bucket_that_is_there_already(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.create_bucket(Bucket=bucket)
    with refused(409, "BucketAlreadyExists"):
        s3.client("alt").create_bucket(Bucket=bucket)
    with refused(409, "BucketAlreadyExists"):
        client.create_bucket(Bucket=bucket, ACL="public-read")
    client.put_bucket_acl(Bucket=bucket, ACL="public-read")
    with refused(409, "BucketAlreadyExists"):
        client.create_bucket(Bucket=bucket)
    client.create_bucket(Bucket=bucket, ACL="public-read")


def test_the_location_is_that_of_the_endpoint(s3: S3) -> None:
    client = s3.client()
    with refused(400, "IllegalLocationConstraintException"):
        client.create_bucket(
            Bucket="elsewhere-1", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
        )
    s3.new_bucket(CreateBucketConfiguration={"LocationConstraint": REGION})


def test_lists_of_buckets_have_pages_and_prefixes(s3: S3) -> None:
    client = s3.client("alt")
    made = sorted(s3.new_bucket("alt") for _ in range(3))
    first = client.list_buckets(MaxBuckets=1, Prefix="test-")
    assert len(first["Buckets"]) == 1
    assert first["Prefix"] == "test-"
    found = [each["Name"] for each in first["Buckets"]]
    pages = client.get_paginator("list_buckets").paginate(
        Prefix="test-", PaginationConfig={"PageSize": 2}
    )
    names = [each["Name"] for page in pages for each in page["Buckets"]]
    assert names == made
    assert names[:1] == found
    assert client.list_buckets(Prefix="none-such")["Buckets"] == []
    assert s3.client(None).list_buckets()["Buckets"] == []
    with refused(400, "InvalidArgument"):
        client.list_buckets(ContinuationToken="@@@")


def test_a_bucket_with_something_in_it_stays(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a/b", Body=b"x")
    with refused(409, "BucketNotEmpty"):
        client.delete_bucket(Bucket=bucket)
    client.delete_object(Bucket=bucket, Key="a/b")
    upload = client.create_multipart_upload(Bucket=bucket, Key="big")["UploadId"]
    client.upload_part(Bucket=bucket, Key="big", UploadId=upload, PartNumber=1, Body=b"x")
    client.delete_bucket(Bucket=bucket)


def test_tags_of_a_bucket(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "NoSuchTagSet"):
        client.get_bucket_tagging(Bucket=bucket)
    tags = [{"Key": "Hello", "Value": "World"}, {"Key": "team", "Value": ""}]
    assert _status(client.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": tags})) == 204
    assert client.get_bucket_tagging(Bucket=bucket)["TagSet"] == tags
    with refused(400, "InvalidTag"):
        client.put_bucket_tagging(Bucket=bucket, Tagging={"TagSet": [tags[0], tags[0]]})
    assert _status(client.delete_bucket_tagging(Bucket=bucket)) == 204
    with refused(404, "NoSuchTagSet"):
        client.get_bucket_tagging(Bucket=bucket)


def test_versioning_is_switched_on_and_suspended(s3: S3, bucket: str) -> None:
    client = s3.client()
    assert "Status" not in client.get_bucket_versioning(Bucket=bucket)
    for status in ("Enabled", "Suspended", "Enabled"):
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})
        assert client.get_bucket_versioning(Bucket=bucket)["Status"] == status
    with refused(501, "NotImplemented"):
        client.put_bucket_versioning(
            Bucket=bucket, VersioningConfiguration={"Status": "Enabled", "MFADelete": "Enabled"}
        )
    with refused(400, "IllegalVersioningConfigurationException"):
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={})
    with refused(400, "MalformedXML"):
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "On"})


def test_object_lock_of_a_bucket(s3: S3, bucket: str) -> None:
    client, locked = s3.client(), s3.new_bucket(ObjectLockEnabledForBucket=True)
    assert client.get_bucket_versioning(Bucket=locked)["Status"] == "Enabled"
    found = client.get_object_lock_configuration(Bucket=locked)["ObjectLockConfiguration"]
    assert found == {"ObjectLockEnabled": "Enabled"}
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    wanted = {"ObjectLockEnabled": "Enabled", "Rule": rule}
    client.put_object_lock_configuration(Bucket=locked, ObjectLockConfiguration=wanted)
    found = client.get_object_lock_configuration(Bucket=locked)["ObjectLockConfiguration"]
    assert found == wanted
    with refused(409, "InvalidBucketState"):
        client.put_bucket_versioning(Bucket=locked, VersioningConfiguration={"Status": "Suspended"})
    with refused(404, "ObjectLockConfigurationNotFoundError"):
        client.get_object_lock_configuration(Bucket=bucket)
    with refused(409, "InvalidBucketState"):
        client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=wanted)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=wanted)
    s3.remove_bucket(locked)


@pytest.mark.parametrize(
    ("status", "retention", "code"),
    [
        ("Enabled", {"Mode": "GOVERNANCE", "Days": 1, "Years": 1}, "MalformedXML"),
        ("Enabled", {"Mode": "GOVERNANCE", "Days": 0}, "InvalidRetentionPeriod"),
        ("Enabled", {"Mode": "GOVERNANCE", "Years": -1}, "InvalidRetentionPeriod"),
        ("Enabled", {"Mode": "abc", "Years": 1}, "MalformedXML"),
        ("Enabled", {"Mode": "governance", "Years": 1}, "MalformedXML"),
        ("Disabled", {"Mode": "GOVERNANCE", "Years": 1}, "MalformedXML"),
    ],
)
def test_object_lock_that_is_refused(
    s3: S3, status: str, retention: dict[str, object], code: str
) -> None:
    bucket = s3.new_bucket(ObjectLockEnabledForBucket=True)
    with refused(400, code):
        s3.client().put_object_lock_configuration(
            Bucket=bucket,
            ObjectLockConfiguration={
                "ObjectLockEnabled": status,
                "Rule": {"DefaultRetention": retention},
            },
        )
    s3.remove_bucket(bucket)


def test_no_encryption_is_promised(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "ServerSideEncryptionConfigurationNotFoundError"):
        client.get_bucket_encryption(Bucket=bucket)
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
    with refused(501, "NotImplemented"):
        client.put_bucket_encryption(
            Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": [rule]}
        )
    with refused(501, "NotImplemented"):
        client.put_object(Bucket=bucket, Key="a", Body=b"", ServerSideEncryption="AES256")
    client.delete_bucket_encryption(Bucket=bucket)


def test_configurations_that_nothing_carries_out(s3: S3, bucket: str) -> None:
    client = s3.client()
    assert client.get_bucket_request_payment(Bucket=bucket)["Payer"] == "BucketOwner"
    assert "LoggingEnabled" not in client.get_bucket_logging(Bucket=bucket)
    assert "Status" not in client.get_bucket_accelerate_configuration(Bucket=bucket)
    assert "TopicConfigurations" not in client.get_bucket_notification_configuration(Bucket=bucket)
    assert not client.list_bucket_metrics_configurations(Bucket=bucket)["IsTruncated"]
    with refused(404, "NoSuchWebsiteConfiguration"):
        client.get_bucket_website(Bucket=bucket)
    with refused(404, "ReplicationConfigurationNotFoundError"):
        client.get_bucket_replication(Bucket=bucket)
    with refused(404, "NoSuchConfiguration"):
        client.get_bucket_inventory_configuration(Bucket=bucket, Id="a")
    client.put_bucket_request_payment(
        Bucket=bucket, RequestPaymentConfiguration={"Payer": "BucketOwner"}
    )
    client.put_bucket_notification_configuration(Bucket=bucket, NotificationConfiguration={})
    with refused(501, "NotImplemented"):
        client.put_bucket_request_payment(
            Bucket=bucket, RequestPaymentConfiguration={"Payer": "Requester"}
        )
    with refused(501, "NotImplemented"):
        client.put_bucket_notification_configuration(
            Bucket=bucket,
            NotificationConfiguration={
                "TopicConfigurations": [
                    {"TopicArn": "arn:aws:sns:::t", "Events": ["s3:ObjectCreated:*"]}
                ]
            },
        )
    with refused(501, "NotImplemented"):
        client.put_bucket_website(
            Bucket=bucket, WebsiteConfiguration={"IndexDocument": {"Suffix": "index.html"}}
        )
    with refused(501, "NotImplemented"):
        client.put_bucket_accelerate_configuration(
            Bucket=bucket, AccelerateConfiguration={"Status": "Enabled"}
        )


def _status(response: dict[str, dict[str, int]]) -> int:
    return response["ResponseMetadata"]["HTTPStatusCode"]
