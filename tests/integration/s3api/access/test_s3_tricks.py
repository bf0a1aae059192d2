"""Targets that try to lead out of their bucket: each is a key of that bucket, or refused, and
nothing else on the mount changes. Nobody signs them: in `bucket` everybody may do everything, in
`other` only its owner."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote_to_bytes

import pytest

from tests.integration.s3 import S3
from tests.integration.s3_raw import ask
from tests.integration.s3api.access.test_s3_policies import allow, document

# Raw keys as they go over the wire; OTHER stands for the other bucket.
KEYS = [
    "../OTHER/secret",
    "..%2FOTHER%2Fsecret",
    "%2e%2e/OTHER/secret",
    "%2E%2E%2FOTHER%2Fsecret",
    ".%2e/OTHER/secret",
    "%252e%252e%252fOTHER%252fsecret",
    "..%5COTHER%5Csecret",
    "..\\OTHER\\secret",
    "a/../../OTHER/secret",
    "a/%2e%2e/%2e%2e/OTHER/secret",
    "/../OTHER/secret",
    "//OTHER/secret",
    "%2Fetc%2Fpasswd",
    "./../OTHER/secret",
    "..;/OTHER/secret",
    "../../../../../../etc/passwd",
    "..",
    "%2e%2e",
    "../",
    ".",
    "%2F",
]
IMPOSSIBLE = [
    "%00",
    "a%00b",
    "..%00/OTHER/secret",
    "%00uploads",
    "%00uploads/a",
    "a/%00data",
    "%00completed",
    "%c0%ae%c0%ae/OTHER/secret",  # overlong forms of '.', '/', NUL
    "%c0%af",
    "%e0%80%af",
    "%f0%80%80%af",
    "%c0%80",
    "%ff",
    "%fe%fe%ff%ff",
    "%ed%a0%80",  # a surrogate
    "%ed%a0%bd%ed%b8%80",
    "%f5%80%80%80",  # beyond Unicode
    "%e4%b8",  # cut off
    "%",
    "%2",
    "%zz",
    "%u002e%u002e/OTHER/secret",
]


@pytest.fixture
def bucket(bucket: str, s3: S3) -> str:
    """A fresh bucket of `main`, open to all."""
    policy = document(allow("s3:*", bucket, f"{bucket}/*"))
    s3.client().put_bucket_policy(Bucket=bucket, Policy=policy)
    return bucket


@pytest.fixture
def other(s3: S3) -> Iterator[str]:
    """Another bucket of the same owner, with something in it."""
    name = s3.new_bucket()
    s3.client().put_object(Bucket=name, Key="secret", Body=b"secret")
    yield name
    s3.remove_bucket(name)


def look(s3: S3, other: str) -> tuple[list[str], list[tuple[str, bytes]]]:
    """What is on the mount beside the bucket."""
    files = [each for each in (s3.mount / other).rglob("*") if each.is_file()]
    return os.listdir(s3.mount), sorted((str(each), each.read_bytes()) for each in files)


Style = Callable[[str, str], tuple[str, dict[str, str]]]


def in_path(bucket: str, key: str) -> tuple[str, dict[str, str]]:
    return f"/{bucket}/{key}", {}


def in_host(bucket: str, key: str) -> tuple[str, dict[str, str]]:
    return f"/{key}", {"Host": f"{bucket}.localhost"}


@pytest.mark.parametrize("style", [in_path, in_host])
def test_a_key_stays_in_its_bucket(s3: S3, bucket: str, other: str, style: Style) -> None:
    client = s3.client()
    before = look(s3, other)
    for each in KEYS:
        raw = each.replace("OTHER", other)
        target, headers = style(bucket, raw)
        assert ask(s3, "PUT", target, b"mine", headers, user=None).status == 200, raw
        assert ask(s3, "GET", target, b"", headers, user=None).body == b"mine", raw
        listed = client.list_objects_v2(Bucket=bucket)["Contents"]
        assert [each["Key"] for each in listed] == [unquote_to_bytes(raw).decode()]
        assert look(s3, other) == before, raw
        assert ask(s3, "DELETE", target, b"", headers, user=None).status == 204, raw
        assert "Contents" not in client.list_objects_v2(Bucket=bucket), raw
        assert look(s3, other) == before, raw


@pytest.mark.parametrize("style", [in_path, in_host])
def test_what_is_no_key_is_refused(s3: S3, bucket: str, other: str, style: Style) -> None:
    before = look(s3, other)
    for raw in IMPOSSIBLE:
        target, headers = style(bucket, raw.replace("OTHER", other))
        code = "InvalidArgument" if "%00" in raw else "InvalidURI"
        for method, query in (("PUT", ""), ("GET", ""), ("DELETE", ""), ("POST", "?uploads")):
            body = b"mine" if method == "PUT" else b""
            answer = ask(s3, method, target + query, body, headers, user=None)
            assert (answer.status, answer.code) == (400, code), (method, raw, answer)
    assert "Contents" not in s3.client().list_objects_v2(Bucket=bucket)
    assert os.listdir(s3.mount / bucket) == []
    assert look(s3, other) == before


BUCKETS = ["..", ".", "%2e%2e", "%2e", "%2F", "..%2f..", "%00", "a%00b", "\\", "..\\..", "%c0%ae"]


def test_a_bucket_is_a_bucket(s3: S3) -> None:
    before = os.listdir(s3.mount)
    for raw in BUCKETS:
        for method in ("PUT", "GET", "DELETE"):
            for target in (f"/{raw}/key", f"/{raw}"):
                body = b"x" if method == "PUT" else b""
                answer = ask(s3, method, target, body, user=None)
                assert 400 <= answer.status < 500, (method, target, answer)
    assert os.listdir(s3.mount) == before


def sources(bucket: str, other: str) -> list[str]:
    """What leads from a bucket that may be read to one that may not, if anything did."""
    raw = [each for each in KEYS + IMPOSSIBLE if "OTHER" in each]
    found = [f"{bucket}/{each}".replace("OTHER", other) for each in raw]
    return [*found, f"..%2f{other}%2fsecret", f"/../{other}/secret", f"%2e%2e/{other}/secret"]


def test_a_copys_source_stays_in_its_bucket(s3: S3, bucket: str, other: str) -> None:
    for source in sources(bucket, other):
        headers = {"x-amz-copy-source": source}
        answer = ask(s3, "PUT", f"/{bucket}/copy", headers=headers, user=None)
        assert 400 <= answer.status < 500, (source, answer)
    assert "Contents" not in s3.client().list_objects_v2(Bucket=bucket)


def test_nothing_is_renamed(s3: S3, bucket: str, other: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"x")
    for source in ("a", f"../{other}/secret"):
        headers = {"x-amz-rename-source": f"/{bucket}/{source}"}
        answer = ask(
            s3, "PUT", f"/{bucket}/..%2F{other}%2Fb?renameObject", headers=headers, user=None
        )
        assert (answer.status, answer.code) == (501, "NotImplemented")
    listed = s3.client().list_objects_v2(Bucket=bucket)["Contents"]
    assert [each["Key"] for each in listed] == ["a"]


def test_other_places_that_name_keys(s3: S3, bucket: str, other: str) -> None:
    """A list of keys to delete, a prefix, a marker, the key of a form."""
    client = s3.client()
    body = f"<Delete><Object><Key>../{other}/secret</Key></Object></Delete>".encode()
    assert ask(s3, "POST", f"/{bucket}?delete", body, user=None).status == 200
    for query in (f"prefix=../{other}/", f"prefix=..%2F{other}%2F&start-after=..%2F"):
        answer = ask(s3, "GET", f"/{bucket}?list-type=2&{query}", user=None)
        assert answer.status == 200
        assert b"<Contents>" not in answer.body
    answer = ask(s3, "GET", f"/{bucket}?list-type=2&prefix=%ff", user=None)
    assert (answer.status, answer.code) == (400, "InvalidURI")
    assert client.get_object(Bucket=other, Key="secret")["Body"].read() == b"secret"


def test_the_mount_sees_none_of_it(s3: S3, bucket: str) -> None:
    """What is stored under a trick is under a name that leads nowhere else."""
    client = s3.client()
    for key in ("../up", "../../etc/passwd", "a/../../b", "/root"):
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    top = (s3.mount / bucket).resolve()
    found: set[bytes] = set()
    for directory, _, names in os.walk(top):
        for name in names:
            path = Path(directory, name)
            assert path.resolve().is_relative_to(top)
            found.add(path.read_bytes())
    assert found == {b"../up", b"../../etc/passwd", b"a/../../b", b"/root"}
