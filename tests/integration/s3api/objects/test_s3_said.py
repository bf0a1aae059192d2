"""What is said about objects: tags, ACLs, locks, attributes."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.integration.s3 import S3, refused
from tests.integration.s3_raw import ask

FAR = datetime(2140, 1, 1, tzinfo=UTC)
TAGS = [{"Key": "a", "Value": "1"}, {"Key": "b c", "Value": ""}]


@pytest.fixture
def there(s3: S3, bucket: str) -> dict[str, str]:
    """An object, by the parameters that name it."""
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"abc")
    return {"Bucket": bucket, "Key": "a"}


@pytest.fixture
def lockable(s3: S3) -> Any:
    """A bucket for locked objects."""
    name = s3.new_bucket(ObjectLockEnabledForBucket=True)
    yield name
    s3.remove_bucket(name)


# --- tags


def test_tags(s3: S3, there: dict[str, str]) -> None:
    client = s3.client()
    assert client.get_object_tagging(**there)["TagSet"] == []
    assert "TagCount" not in client.head_object(**there)
    client.put_object_tagging(**there, Tagging={"TagSet": TAGS})
    assert client.get_object_tagging(**there)["TagSet"] == TAGS
    assert client.head_object(**there)["TagCount"] == 2
    assert client.get_object(**there)["TagCount"] == 2
    client.put_object_tagging(**there, Tagging={"TagSet": TAGS[1:]})
    assert client.get_object_tagging(**there)["TagSet"] == TAGS[1:]
    client.delete_object_tagging(**there)
    assert client.get_object_tagging(**there)["TagSet"] == []
    client.put_object_tagging(**there, Tagging={"TagSet": TAGS})
    client.put_object_tagging(**there, Tagging={"TagSet": []})
    assert client.get_object_tagging(**there)["TagSet"] == []


def test_tags_in_a_header(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"", Tagging="foo=bar&bar&%C3%A9=%20x")
    assert client.get_object_tagging(Bucket=bucket, Key="a")["TagSet"] == [
        {"Key": "bar", "Value": ""},
        {"Key": "foo", "Value": "bar"},
        {"Key": "\u00e9", "Value": " x"},
    ]
    for text in ("a=1&a=2", "&".join(f"k{n}=v" for n in range(11)), "a=" + "v" * 257):
        with pytest.raises(Exception, match=r"Invalid(Tag|Argument)"):
            client.put_object(Bucket=bucket, Key="b", Body=b"", Tagging=text)
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 1


def test_limits_of_tags(s3: S3, there: dict[str, str]) -> None:
    client = s3.client()
    most = [{"Key": f"{n}" + "k" * 127, "Value": "v" * 256} for n in range(10)]
    client.put_object_tagging(**there, Tagging={"TagSet": most})
    assert client.get_object_tagging(**there)["TagSet"] == most
    for tags in (
        [{"Key": f"k{n}", "Value": "v"} for n in range(11)],
        [{"Key": "k" * 129, "Value": "v"}],
        [{"Key": "k", "Value": "v" * 257}],
        [{"Key": "aws:k", "Value": "v"}],
        [{"Key": "k", "Value": "v"}] * 2,
    ):
        with refused(400, "InvalidTag"):
            client.put_object_tagging(**there, Tagging={"TagSet": tags})
    assert client.get_object_tagging(**there)["TagSet"] == most


def test_tags_of_versions(s3: S3, there: dict[str, str]) -> None:
    client = s3.client()
    client.put_bucket_versioning(
        Bucket=there["Bucket"], VersioningConfiguration={"Status": "Enabled"}
    )
    version = client.put_object(**there, Body=b"2")["VersionId"]
    done = client.put_object_tagging(**there, VersionId="null", Tagging={"TagSet": TAGS})
    assert done["VersionId"] == "null"
    assert client.get_object_tagging(**there)["TagSet"] == []
    got = client.get_object_tagging(**there, VersionId="null")
    assert (got["TagSet"], got["VersionId"]) == (TAGS, "null")
    assert client.delete_object_tagging(**there)["VersionId"] == version
    marker = client.delete_object(**there)["VersionId"]
    with refused(404, "NoSuchKey"):
        client.get_object_tagging(**there)
    change: Callable[[], object]
    for change in (
        lambda: client.get_object_tagging(**there, VersionId=marker),
        lambda: client.put_object_tagging(**there, VersionId=marker, Tagging={"TagSet": TAGS}),
        lambda: client.delete_object_tagging(**there, VersionId=marker),
    ):
        with refused(405, "MethodNotAllowed"):
            change()


def test_tags_of_what_is_not_there(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "NoSuchKey"):
        client.get_object_tagging(Bucket=bucket, Key="none")
    with refused(404, "NoSuchKey"):
        client.put_object_tagging(Bucket=bucket, Key="none", Tagging={"TagSet": TAGS})
    with refused(404, "NoSuchKey"):
        client.delete_object_tagging(Bucket=bucket, Key="none")


# --- ACLs


def _granted(document: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted(
        (each["Grantee"].get("ID") or each["Grantee"]["URI"].rpartition("/")[2], each["Permission"])
        for each in document["Grants"]
    )


FULL = ("main", "FULL_CONTROL")


@pytest.mark.parametrize(
    ("name", "granted"),
    [
        ("private", [FULL]),
        ("public-read", [("AllUsers", "READ"), FULL]),
        ("public-read-write", [("AllUsers", "READ"), ("AllUsers", "WRITE"), FULL]),
        ("authenticated-read", [("AuthenticatedUsers", "READ"), FULL]),
        ("bucket-owner-read", [FULL]),
        ("bucket-owner-full-control", [FULL]),
    ],
)
def test_canned_acls(
    s3: S3, there: dict[str, str], name: str, granted: list[tuple[str, str]]
) -> None:
    client = s3.client()
    client.put_object_acl(**there, ACL=name)
    found = client.get_object_acl(**there)
    assert found["Owner"] == {"ID": "main", "DisplayName": "main"}
    assert _granted(found) == granted
    client.put_object(**there, Body=b"x", ACL=name)
    assert _granted(client.get_object_acl(**there)) == granted


def test_an_acl_by_document(s3: S3, there: dict[str, str]) -> None:
    client = s3.client()
    policy = {
        "Owner": {"ID": "main", "DisplayName": "main"},
        "Grants": [
            {"Grantee": {"ID": "alt", "Type": "CanonicalUser"}, "Permission": "READ"},
            {"Grantee": {"ID": "main", "Type": "CanonicalUser"}, "Permission": "FULL_CONTROL"},
        ],
    }
    client.put_object_acl(**there, AccessControlPolicy=policy)
    assert _granted(client.get_object_acl(**there)) == [("alt", "READ"), FULL]
    assert s3.client("alt").get_object(**there)["Body"].read() == b"abc"
    with refused(403, "AccessDenied"):
        s3.client("alt").get_object_acl(**there)
    client.put_object_acl(**there, GrantReadACP="id=alt", GrantRead='id="alt", id="main"')
    assert _granted(s3.client("alt").get_object_acl(**there)) == [
        ("alt", "READ"),
        ("alt", "READ_ACP"),
        ("main", "READ"),
    ]
    nobody = {"Grantee": {"ID": "nobody-there", "Type": "CanonicalUser"}, "Permission": "READ"}
    with refused(400, "InvalidArgument"):
        client.put_object_acl(**there, AccessControlPolicy=policy | {"Grants": [nobody]})
    with refused(403, "AccessDenied"):
        owner = {"ID": "alt", "DisplayName": "alt"}
        client.put_object_acl(**there, AccessControlPolicy=policy | {"Owner": owner})


def test_acls_that_say_nothing_or_too_much(s3: S3, there: dict[str, str]) -> None:
    target = f"/{there['Bucket']}/a?acl"
    told = ask(s3, "PUT", target)
    assert (told.status, told.code) == (400, "MissingSecurityHeader")
    told = ask(s3, "PUT", target, b"<AccessControlPolicy/>")
    assert (told.status, told.code) == (400, "MalformedACLError")
    told = ask(s3, "PUT", target, b"", {"x-amz-acl": "public-ready"})
    assert (told.status, told.code) == (400, "InvalidArgument")
    told = ask(s3, "PUT", target, b"", {"x-amz-acl": "private", "x-amz-grant-read": "id=alt"})
    assert (told.status, told.code) == (400, "InvalidRequest")


def test_public_objects(s3: S3, there: dict[str, str]) -> None:
    s3.client().put_object_acl(**there, ACL="public-read")
    for user in ("alt", None):
        assert s3.client(user).get_object(**there)["Body"].read() == b"abc"
        assert s3.client(user).head_object(**there)["ContentLength"] == 3
        with refused(403, "AccessDenied"):
            s3.client(user).put_object(**there, Body=b"")
    with refused(400, "InvalidRequest"):
        s3.client(None).get_object(**there, ResponseContentType="text/html")
    s3.client().put_object(**there, Body=b"anew")
    with refused(403, "AccessDenied"):
        s3.client(None).get_object(**there)


def test_an_object_of_somebody_else(s3: S3) -> None:
    """Who wrote it owns it, and may give it away."""
    bucket = s3.new_bucket(ACL="public-read-write")
    asked = {"Bucket": bucket, "Key": "a"}
    alt = s3.client("alt")
    try:
        alt.put_object(**asked, Body=b"x")
        found = alt.get_object_acl(**asked)
        assert found["Owner"]["ID"] == "alt"
        assert _granted(found) == [("alt", "FULL_CONTROL")]
        with refused(403, "AccessDenied"):
            s3.client().get_object(**asked)
        alt.put_object_acl(**asked, ACL="bucket-owner-read")
        assert _granted(alt.get_object_acl(**asked)) == [("alt", "FULL_CONTROL"), ("main", "READ")]
        assert s3.client().get_object(**asked)["Body"].read() == b"x"
        alt.put_object_acl(**asked, ACL="bucket-owner-full-control")
        found = s3.client().get_object_acl(**asked)
        assert _granted(found) == [("alt", "FULL_CONTROL"), FULL]
        assert found["Owner"]["ID"] == "alt"
        version = s3.client().list_object_versions(Bucket=bucket)["Versions"][0]
        assert version["Owner"]["ID"] == "alt"
    finally:
        s3.remove_bucket(bucket)


def test_grants_in_headers_of_a_put(s3: S3, bucket: str) -> None:
    names = ("GrantFullControl", "GrantRead", "GrantReadACP", "GrantWriteACP")
    asked = {"Bucket": bucket, "Key": "a"}
    s3.client().put_object(**asked, Body=b"", **dict.fromkeys(names, "id=alt"))
    assert _granted(s3.client().get_object_acl(**asked)) == [
        ("alt", "FULL_CONTROL"),
        ("alt", "READ"),
        ("alt", "READ_ACP"),
        ("alt", "WRITE_ACP"),
    ]
    assert s3.client("alt").get_object(**asked)["Body"].read() == b""


def test_acls_of_versions(s3: S3, there: dict[str, str]) -> None:
    client = s3.client()
    client.put_bucket_versioning(
        Bucket=there["Bucket"], VersioningConfiguration={"Status": "Enabled"}
    )
    version = client.put_object(**there, Body=b"2")["VersionId"]
    client.put_object_acl(**there, VersionId="null", ACL="public-read")
    assert _granted(client.get_object_acl(**there, VersionId=version)) == [FULL]
    assert _granted(client.get_object_acl(**there, VersionId="null"))[1:] == [FULL]
    anybody = s3.client(None)
    assert anybody.get_object(**there, VersionId="null")["Body"].read() == b"abc"
    with refused(403, "AccessDenied"):
        anybody.get_object(**there)


def test_acls_do_not_count_where_the_owner_owns_all(s3: S3) -> None:
    bucket = s3.new_bucket(ObjectOwnership="BucketOwnerEnforced")
    client = s3.client()
    try:
        client.put_object(Bucket=bucket, Key="a", Body=b"", ACL="bucket-owner-full-control")
        with refused(400, "AccessControlListNotSupported"):
            client.put_object(Bucket=bucket, Key="a", Body=b"", ACL="public-read")
        with refused(400, "AccessControlListNotSupported"):
            client.put_object_acl(Bucket=bucket, Key="a", ACL="public-read")
        assert _granted(client.get_object_acl(Bucket=bucket, Key="a")) == [FULL]
    finally:
        s3.remove_bucket(bucket)


# --- locks


def test_retention(s3: S3, lockable: str) -> None:
    client = s3.client()
    asked = {"Bucket": lockable, "Key": "a"}
    version = client.put_object(**asked, Body=b"abc")["VersionId"]
    with refused(404, "NoSuchObjectLockConfiguration"):
        client.get_object_retention(**asked)
    retention = {"Mode": "GOVERNANCE", "RetainUntilDate": FAR}
    client.put_object_retention(**asked, Retention=retention)
    assert client.get_object_retention(**asked)["Retention"] == retention
    head = client.head_object(**asked)
    assert head["ObjectLockMode"] == "GOVERNANCE"
    assert head["ObjectLockRetainUntilDate"] == FAR
    with refused(403, "AccessDenied"):
        client.delete_object(**asked, VersionId=version)
    done = client.delete_objects(
        Bucket=lockable, Delete={"Objects": [{"Key": "a", "VersionId": version}]}
    )
    (error,) = done["Errors"]
    assert (error["Code"], error["Key"], error["VersionId"]) == ("AccessDenied", "a", version)
    longer = retention | {"RetainUntilDate": FAR + timedelta(days=2)}
    client.put_object_retention(**asked, Retention=longer)
    with refused(403, "AccessDenied"):
        client.put_object_retention(**asked, Retention=retention)
    client.put_object_retention(**asked, Retention=retention, BypassGovernanceRetention=True)
    # A new version or a marker over it is always allowed.
    marker = client.delete_object(**asked)
    assert marker["DeleteMarker"] is True
    client.delete_object(**asked, VersionId=marker["VersionId"])
    client.delete_object(**asked, VersionId=version, BypassGovernanceRetention=True)
    with refused(404, "NoSuchKey"):
        client.get_object(**asked)


def test_modes(s3: S3, lockable: str) -> None:
    client = s3.client()
    soon = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=5)
    asked = {"Bucket": lockable, "Key": "a"}
    client.put_object(
        **asked, Body=b"", ObjectLockMode="GOVERNANCE", ObjectLockRetainUntilDate=soon
    )
    comply = {"Mode": "COMPLIANCE", "RetainUntilDate": soon}
    with refused(403, "AccessDenied"):
        client.put_object_retention(**asked, Retention=comply)
    client.put_object_retention(**asked, Retention=comply, BypassGovernanceRetention=True)
    govern = {"Mode": "GOVERNANCE", "RetainUntilDate": soon}
    with refused(403, "AccessDenied"):
        client.put_object_retention(**asked, Retention=govern, BypassGovernanceRetention=True)
    for mode in ("governance", "abc"):
        with refused(400, "MalformedXML"):
            client.put_object_retention(**asked, Retention={"Mode": mode, "RetainUntilDate": FAR})
    with refused(400, "InvalidArgument"):
        client.put_object_retention(
            **asked, Retention={"Mode": "GOVERNANCE", "RetainUntilDate": datetime(2000, 1, 1)}
        )


def test_legal_hold(s3: S3, lockable: str) -> None:
    client = s3.client()
    asked = {"Bucket": lockable, "Key": "a"}
    version = client.put_object(**asked, Body=b"", ObjectLockLegalHoldStatus="ON")["VersionId"]
    assert client.get_object_legal_hold(**asked)["LegalHold"] == {"Status": "ON"}
    assert client.head_object(**asked)["ObjectLockLegalHoldStatus"] == "ON"
    with refused(403, "AccessDenied"):
        client.delete_object(**asked, VersionId=version, BypassGovernanceRetention=True)
    client.put_object_legal_hold(**asked, LegalHold={"Status": "OFF"})
    assert client.get_object_legal_hold(**asked)["LegalHold"] == {"Status": "OFF"}
    with refused(400, "MalformedXML"):
        client.put_object_legal_hold(**asked, LegalHold={"Status": "on"})
    client.delete_object(**asked, VersionId=version)


def test_locks_need_a_bucket_for_them(s3: S3, there: dict[str, str]) -> None:
    client = s3.client()
    with refused(400, "InvalidRequest"):
        client.put_object_retention(
            **there, Retention={"Mode": "GOVERNANCE", "RetainUntilDate": FAR}
        )
    with refused(400, "InvalidRequest"):
        client.get_object_retention(**there)
    with refused(400, "InvalidRequest"):
        client.put_object_legal_hold(**there, LegalHold={"Status": "ON"})
    with refused(400, "InvalidRequest"):
        client.get_object_legal_hold(**there)
    with refused(400, "InvalidRequest"):
        client.put_object(**there, Body=b"", ObjectLockLegalHoldStatus="ON")
    assert client.get_object(**there)["Body"].read() == b"abc"


def test_a_copy_has_the_lock_that_it_asks_for(s3: S3, lockable: str) -> None:
    client = s3.client()
    client.put_object(Bucket=lockable, Key="a", Body=b"", ObjectLockLegalHoldStatus="ON")
    client.copy_object(Bucket=lockable, Key="b", CopySource=f"{lockable}/a")
    assert "ObjectLockLegalHoldStatus" not in client.head_object(Bucket=lockable, Key="b")
    client.put_object_legal_hold(Bucket=lockable, Key="a", LegalHold={"Status": "OFF"})


# --- attributes


def test_attributes(s3: S3, there: dict[str, str]) -> None:
    client = s3.client()
    names = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"]
    told = client.get_object_attributes(**there, ObjectAttributes=names)
    head = client.head_object(**there, ChecksumMode="ENABLED")
    assert f'"{told["ETag"]}"' == head["ETag"]
    assert told["ObjectSize"] == 3
    assert told["StorageClass"] == "STANDARD"
    assert told["LastModified"] == head["LastModified"]
    assert told["Checksum"]["ChecksumCRC32"] == head["ChecksumCRC32"]
    assert "ObjectParts" not in told
    assert "VersionId" not in told
    told = client.get_object_attributes(**there, ObjectAttributes=["ETag"])
    assert not {"ObjectSize", "StorageClass", "Checksum"} & told.keys()
    with refused(404, "NoSuchKey"):
        client.get_object_attributes(**there | {"Key": "none"}, ObjectAttributes=names)
    with refused(400, "InvalidArgument"):
        client.get_object_attributes(**there, ObjectAttributes=["Size"])
    told_raw = ask(s3, "GET", f"/{there['Bucket']}/a?attributes")
    assert (told_raw.status, told_raw.code) == (400, "InvalidRequest")


def test_attributes_of_parts(s3: S3, bucket: str) -> None:
    client = s3.client()
    asked = {"Bucket": bucket, "Key": "a"}
    upload = client.create_multipart_upload(**asked, ChecksumAlgorithm="SHA256")["UploadId"]
    parts = []
    for number in range(1, 4):
        told = client.upload_part(
            **asked,
            UploadId=upload,
            PartNumber=number,
            Body=b"x" * ((5 << 20) + number),
            ChecksumAlgorithm="SHA256",
        )
        names = ("ETag", "ChecksumSHA256")
        parts.append({"PartNumber": number} | {name: told[name] for name in names})
    done = client.complete_multipart_upload(
        **asked, UploadId=upload, MultipartUpload={"Parts": parts}
    )
    told = client.get_object_attributes(**asked, ObjectAttributes=["ObjectParts", "Checksum"])
    assert told["Checksum"] == {
        "ChecksumSHA256": done["ChecksumSHA256"],
        "ChecksumType": "COMPOSITE",
    }
    found = told["ObjectParts"]
    assert (found["TotalPartsCount"], found["IsTruncated"]) == (3, False)
    assert [(each["PartNumber"], each["Size"]) for each in found["Parts"]] == [
        (n, (5 << 20) + n) for n in range(1, 4)
    ]
    assert [each["ChecksumSHA256"] for each in found["Parts"]] == [
        each["ChecksumSHA256"] for each in parts
    ]
    page = client.get_object_attributes(
        **asked, ObjectAttributes=["ObjectParts"], MaxParts=1, PartNumberMarker=1
    )["ObjectParts"]
    assert (page["PartNumberMarker"], page["NextPartNumberMarker"]) == (1, 2)
    assert (page["MaxParts"], page["IsTruncated"], len(page["Parts"])) == (1, True, 1)
    page = client.get_object_attributes(
        **asked, ObjectAttributes=["ObjectParts"], MaxParts=10, PartNumberMarker=2
    )["ObjectParts"]
    assert (page["NextPartNumberMarker"], page["IsTruncated"]) == (3, False)
