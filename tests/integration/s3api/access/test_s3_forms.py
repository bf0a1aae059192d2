"""Uploads with forms, as browsers make them: built by hand, signed by boto3 or by a policy."""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import socket
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.integration.s3 import S3
from tests.integration.s3api.access.test_s3_policies import allow, document

BOUNDARY = "----0123456789abcdef"
Fields = list[tuple[str, str]]


class Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect."""

    def redirect_request(self, *_: object) -> None:
        return None


def part(name: str, value: bytes, file_name: str = "") -> bytes:
    shown = f'; filename="{file_name}"' if file_name else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def form(fields: Fields, file: bytes = b"bar", file_name: str = "foo.txt") -> bytes:
    parts = [part(name, value.encode()) for name, value in fields]
    return b"".join([*parts, part("file", file, file_name), f"--{BOUNDARY}--\r\n".encode()])


def post(url: str, body: bytes, referer: str = "") -> tuple[int, Any, bytes]:
    """Status, headers and body of the answer."""
    request = urllib.request.Request(url, data=body, method="POST")
    if referer:
        request.add_header("Referer", referer)
    request.add_header("Content-Type", f"multipart/form-data; boundary={BOUNDARY}")
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=30) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def code(answer: tuple[int, Any, bytes]) -> tuple[int, str]:
    status, _, document = answer
    return status, ET.fromstring(document).findtext("Code") or "" if document else ""


def in_an_hour() -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")


CONDITIONS: list[Any] = [
    ["starts-with", "$key", "foo"],
    {"acl": "private"},
    ["starts-with", "$Content-Type", "text/plain"],
    ["content-length-range", 0, 1024],
]
PLAIN: Fields = [("acl", "private"), ("Content-Type", "text/plain")]


def signed(
    s3: S3,
    bucket: str,
    fields: Fields,
    conditions: list[Any] | None = None,
    *,
    policy: object = None,
    user: str = "main",
) -> Fields:
    """The fields, with a policy that allows them, signed with version 2 as suites do."""
    wanted = [{"bucket": bucket}, *(CONDITIONS if conditions is None else conditions)]
    document = policy or {"expiration": in_an_hour(), "conditions": wanted}
    encoded = base64.b64encode(json.dumps(document).encode())
    pair = s3.users[user]
    signature = base64.b64encode(hmac.digest(pair.secret.encode(), encoded, hashlib.sha1))
    signing = [
        ("AWSAccessKeyId", pair.access_key),
        ("signature", signature.decode()),
        ("policy", encoded.decode()),
    ]
    return [*fields, *signing]


@pytest.fixture
def url(s3: S3, bucket: str) -> str:
    return f"{s3.endpoint}/{bucket}"


def read(s3: S3, bucket: str, key: str) -> bytes:
    body: bytes = s3.client().get_object(Bucket=bucket, Key=key)["Body"].read()
    return body


def test_anybody_where_the_bucket_is_open_to_all(s3: S3, bucket: str, url: str) -> None:
    fields = [("key", "foo.txt"), ("acl", "public-read"), ("Content-Type", "text/plain")]
    assert code(post(url, form(fields))) == (403, "AccessDenied")
    s3.client().put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    status, headers, _ = post(url, form(fields))
    assert status == 204
    found = s3.client(None).get_object(Bucket=bucket, Key="foo.txt")
    assert found["Body"].read() == b"bar"
    assert found["ContentType"] == "text/plain"
    assert headers["ETag"] == found["ETag"] == f'"{hashlib.md5(b"bar").hexdigest()}"'
    assert (s3.mount / bucket / "foo.txt").read_bytes() == b"bar"


def test_policies_see_the_headers_of_the_browser(s3: S3, bucket: str, url: str) -> None:
    ours = {"StringLikeIfExists": {"aws:Referer": "https://ours.example/*"}}
    statement = allow("s3:PutObject", f"{bucket}/*", Condition=ours)
    s3.client().put_bucket_policy(Bucket=bucket, Policy=document(statement))
    body = form([("key", "foo.txt")])
    assert code(post(url, body, "https://theirs.example/")) == (403, "AccessDenied")
    assert post(url, body, "https://ours.example/upload")[0] == 204


def test_boto3_presigns_forms(s3: S3, bucket: str) -> None:
    for version in ("s3v4", "s3"):
        client = s3.client(signature_version=version)
        made = client.generate_presigned_post(
            bucket,
            "dir/${filename}",
            Fields={"x-amz-meta-color": "red", "success_action_status": "201"},
            Conditions=[
                ["starts-with", "$key", "dir/"],
                {"x-amz-meta-color": "red"},
                {"success_action_status": "201"},
            ],
        )
        status, headers, document = post(
            made["url"], form(list(made["fields"].items()), file_name=f"C:\\tmp\\{version}.txt")
        )
        assert status == 201, document
        told = ET.fromstring(document)
        assert told.findtext("Key") == f"dir/{version}.txt"
        assert told.findtext("Bucket") == bucket
        assert told.findtext("ETag") == headers["ETag"]
        location = f"{s3.endpoint}/{bucket}/dir/{version}.txt"
        assert told.findtext("Location") == headers["Location"] == location
        found = client.head_object(Bucket=bucket, Key=f"dir/{version}.txt")
        assert found["Metadata"] == {"color": "red"}


def test_statuses_of_success(s3: S3, bucket: str, url: str) -> None:
    s3.client().put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    for asked, status in (("200", 200), ("201", 201), ("204", 204), ("404", 204), ("", 204)):
        answer = post(url, form([("key", "foo"), ("success_action_status", asked)]))
        assert answer[0] == status
        assert bool(answer[2]) == (status == 201)


def test_the_browser_is_sent_on(s3: S3, bucket: str, url: str) -> None:
    s3.client().put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    fields = [("key", "foo.txt"), ("success_action_redirect", url)]
    status, headers, _ = post(url, form(fields))
    etag = hashlib.md5(b"bar").hexdigest()
    assert status == 303
    assert headers["Location"] == f"{url}?bucket={bucket}&key=foo.txt&etag=%22{etag}%22"
    with urllib.request.urlopen(headers["Location"], timeout=30) as response:
        assert response.status == 200
    for bad in ("javascript:alert(1)", "http://a\r\nSet-Cookie: x", "no url"):
        assert post(url, form([("key", "foo"), ("success_action_redirect", bad)]))[0] == 204


def test_tags_metadata_and_checksums(s3: S3, bucket: str, url: str) -> None:
    tags = "<Tagging><TagSet><Tag><Key>a</Key><Value>b c</Value></Tag></TagSet></Tagging>"
    sha256 = base64.b64encode(hashlib.sha256(b"bar").digest()).decode()
    fields = [
        ("key", "foo"),
        ("tagging", tags),
        ("x-amz-meta-Color", "red"),
        ("Cache-Control", "no-cache"),
        ("x-amz-checksum-sha256", sha256),
        ("x-ignore-this", "whatever"),
    ]
    conditions = [
        ["starts-with", f"${name}", ""] for name, _ in fields if not name.startswith("x-ignore")
    ]
    assert post(url, form(signed(s3, bucket, fields, conditions)))[0] == 204
    client = s3.client()
    found = client.head_object(Bucket=bucket, Key="foo", ChecksumMode="ENABLED")
    assert found["Metadata"] == {"color": "red"}
    assert found["CacheControl"] == "no-cache"
    assert found["ChecksumSHA256"] == sha256
    assert client.get_object_tagging(Bucket=bucket, Key="foo")["TagSet"] == [
        {"Key": "a", "Value": "b c"}
    ]
    wrong = [
        ("x-amz-checksum-sha256", "AAAA" + sha256[4:]) if n == fields[4][0] else (n, v)
        for n, v in fields
    ]
    answer = post(url, form(signed(s3, bucket, wrong, conditions), b"baz"))
    assert code(answer) == (400, "BadDigest")
    assert read(s3, bucket, "foo") == b"bar"


def test_names_of_fields_have_no_case(s3: S3, bucket: str, url: str) -> None:
    fields = [("kEy", "foo.txt"), ("aCl", "private"), ("Content-Type", "text/plain")]
    conditions = [["StArTs-WiTh", "$KeY", "foo"], {"AcL": "private"}, CONDITIONS[2]]
    sent = [(name.swapcase(), value) for name, value in signed(s3, bucket, fields, conditions)]
    assert post(url, form(sent))[0] == 204


def test_only_what_stands_before_the_file_counts(s3: S3, bucket: str, url: str) -> None:
    s3.client().put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    body = form([("key", "first")])
    end = f"--{BOUNDARY}--\r\n".encode()
    body = body.removesuffix(end) + part("key", b"second") + part("x-amz-meta-a", b"b") + end
    assert post(url, body)[0] == 204
    assert s3.client().head_object(Bucket=bucket, Key="first")["Metadata"] == {}


@pytest.mark.parametrize("size", [0, 1, 65_536, 262_144, 3_000_001])
def test_files_of_any_size(s3: S3, bucket: str, url: str, size: int) -> None:
    """Also with what looks like the end of the file, across the ends of buffers."""
    s3.client().put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    near = f"\r\n--{BOUNDARY}"[:-1].encode()
    data = (near * (size // len(near) + 1))[:size] if size < 300_000 else os.urandom(size)
    assert post(url, form([("key", "foo")], data))[0] == 204
    assert read(s3, bucket, "foo") == data


REFUSED: list[tuple[str, Fields, list[Any] | None, object, int, str]] = [
    ("no key", PLAIN, CONDITIONS[1:], None, 400, "UserKeyMustBeSpecified"),
    ("key of another prefix", [("key", "bar"), *PLAIN], None, None, 403, "AccessDenied"),
    ("a field is missing", [("key", "foo"), PLAIN[1]], None, None, 403, "AccessDenied"),
    ("a field too many", [("key", "foo"), *PLAIN, ("x-amz-meta-a", "b")], None, None, 403,
     "AccessDenied"),
    ("another value", [("key", "foo"), ("acl", "public-read"), PLAIN[1]], None, None, 403,
     "AccessDenied"),
    ("too long", [("key", "foo"), *PLAIN], [*CONDITIONS[:3], ["content-length-range", 0, 0]], None,
     400, "EntityTooLarge"),
    ("too short", [("key", "foo"), *PLAIN], [*CONDITIONS[:3], ["content-length-range", 9, 99]],
     None, 400, "EntityTooSmall"),
    ("half a range", [("key", "foo"), *PLAIN], [*CONDITIONS[:3], ["content-length-range", 0]],
     None, 400, "InvalidPolicyDocument"),
    ("negative range", [("key", "foo"), *PLAIN],
     [*CONDITIONS[:3], ["content-length-range", -1, 0]], None, 400, "InvalidPolicyDocument"),
    ("expired", [("key", "foo"), *PLAIN], None,
     {"expiration": "2020-01-01T00:00:00Z", "conditions": CONDITIONS}, 403, "AccessDenied"),
    ("no date", [("key", "foo"), *PLAIN], None,
     {"expiration": "tomorrow", "conditions": CONDITIONS}, 400, "InvalidPolicyDocument"),
    ("no expiration", [("key", "foo"), *PLAIN], None, {"conditions": CONDITIONS}, 400,
     "InvalidPolicyDocument"),
    ("case of its name", [("key", "foo"), *PLAIN], None,
     {"EXPIRATION": "2099-01-01T00:00:00Z", "conditions": CONDITIONS}, 400,
     "InvalidPolicyDocument"),
    ("no conditions", [("key", "foo"), *PLAIN], None, {"expiration": "2099-01-01T00:00:00Z"}, 400,
     "InvalidPolicyDocument"),
    ("an empty condition", [("key", "foo"), *PLAIN], [{}], None, 400, "InvalidPolicyDocument"),
    ("another bucket", [("key", "foo"), *PLAIN], [*CONDITIONS, {"bucket": "other"}], None, 403,
     "AccessDenied"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "conditions", "policy", "status", "refusal"),
    [each[1:] for each in REFUSED],
    ids=[each[0] for each in REFUSED],
)
def test_forms_that_are_refused(
    s3: S3,
    bucket: str,
    url: str,
    fields: Fields,
    conditions: list[Any] | None,
    policy: object,
    status: int,
    refusal: str,
) -> None:
    answer = post(url, form(signed(s3, bucket, fields, conditions, policy=policy)))
    assert code(answer) == (status, refusal)
    assert "Contents" not in s3.client().list_objects_v2(Bucket=bucket)


def test_signatures_that_are_wrong(s3: S3, bucket: str, url: str) -> None:
    good = signed(s3, bucket, [("key", "foo"), *PLAIN])
    assert post(url, form(good))[0] == 204

    def without(name: str) -> Fields:
        return [field for field in good if field[0] != name]

    def changed(name: str, value: str) -> Fields:
        return [*without(name), (name, value)]

    wrong = changed("signature", base64.b64encode(bytes(20)).decode())
    assert code(post(url, form(wrong))) == (403, "SignatureDoesNotMatch")
    assert code(post(url, form(changed("AWSAccessKeyId", "foo")))) == (403, "InvalidAccessKeyId")
    assert code(post(url, form(without("signature")))) == (400, "InvalidArgument")
    assert code(post(url, form(without("policy")))) == (400, "InvalidArgument")
    of_alt = signed(s3, bucket, [("key", "foo"), *PLAIN], user="alt")
    assert code(post(url, form(of_alt))) == (403, "AccessDenied")


def test_bodies_that_are_no_forms(s3: S3, bucket: str, url: str) -> None:
    s3.client().put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    whole = form([("key", "foo")])
    cases = {
        b"": "MalformedPOSTRequest",
        b"no form at all": "MalformedPOSTRequest",
        whole[:-30]: "MalformedPOSTRequest",
        whole.replace(b"name=", b"nom="): "MalformedPOSTRequest",
        form([("key", "foo"), ("key", "bar")]): "MalformedPOSTRequest",
        part("key", b"\xff") + whole: "MalformedPOSTRequest",
        part("key", b"foo") + f"--{BOUNDARY}--\r\n".encode(): "IncorrectNumberOfFilesInPostRequest",
        form([("key", "foo"), ("x-ignore-a", "b" * 70_000)]): "MaxPostPreDataLengthExceededError",
        form([("key", "k" * 1025)]): "KeyTooLongError",
        form([("key", "foo"), ("acl", "everybody")]): "InvalidArgument",
        form([("key", "foo"), ("tagging", "<a>")]): "MalformedXML",
        form([("key", "foo"), ("x-amz-storage-class", "GLACIER")]): "InvalidStorageClass",
    }
    for body, wanted in cases.items():
        assert code(post(url, body)) == (400, wanted), body[:100]
    encrypted = form([("key", "foo"), ("x-amz-server-side-encryption", "AES256")])
    assert code(post(url, encrypted)) == (501, "NotImplemented")
    assert "Contents" not in s3.client().list_objects_v2(Bucket=bucket)


def test_a_form_that_comes_byte_by_byte_or_breaks_off(s3: S3, bucket: str) -> None:
    s3.client().put_bucket_acl(Bucket=bucket, ACL="public-read-write")
    body = form([("key", "slow")], b"x" * 50)
    head = (
        f"POST /{bucket} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n"
    ).encode()
    with s3.connect() as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(head)
        for at in range(len(body)):
            peer.sendall(body[at : at + 1])
        assert peer.recv(65536).startswith(b"HTTP/1.1 204 ")
    assert read(s3, bucket, "slow") == b"x" * 50
    with s3.connect() as peer, contextlib.suppress(OSError):
        peer.sendall(
            head.replace(b"Host", b"X-A: b\r\nHost") + body[:-20].replace(b"slow", b"gone")
        )
        peer.shutdown(socket.SHUT_WR)
        peer.recv(65536)
    time.sleep(0.1)
    keys = [each["Key"] for each in s3.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert keys == ["slow"]
