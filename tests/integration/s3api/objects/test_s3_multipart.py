"""Uploads in parts, as boto3 makes them."""

import base64
import hashlib
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.s3 import S3, refused

MIB = 1 << 20
PART = 5 * MIB


def data_of(size: int, seed: int = 0) -> bytes:
    """Bytes that differ from page to page."""
    block = hashlib.sha256(seed.to_bytes(4, "big")).digest() * 128
    pages = -(-size // 4096)
    return b"".join(n.to_bytes(4, "big") + block[4:] for n in range(pages))[:size]


def upload(
    client: Any, bucket: str, key: str, bodies: dict[int, bytes], **options: Any
) -> tuple[str, list[dict[str, Any]]]:
    """Begin an upload put its parts in this order; its id, and what completes it."""
    upload_id = client.create_multipart_upload(Bucket=bucket, Key=key, **options)["UploadId"]
    parts = [put_part(client, bucket, key, upload_id, n, body) for n, body in bodies.items()]
    return upload_id, sorted(parts, key=lambda part: int(part["PartNumber"]))


def put_part(
    client: Any, bucket: str, key: str, upload_id: str, number: int, body: bytes, **options: Any
) -> dict[str, Any]:
    told = client.upload_part(
        Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=body, **options
    )
    return {"PartNumber": number, "ETag": told["ETag"]}


def complete(
    client: Any, bucket: str, key: str, upload_id: str, parts: list[dict[str, Any]], **options: Any
) -> dict[str, Any]:
    told: dict[str, Any] = client.complete_multipart_upload(
        Bucket=bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}, **options
    )
    return told


def read(client: Any, bucket: str, key: str, **options: Any) -> bytes:
    body: bytes = client.get_object(Bucket=bucket, Key=key, **options)["Body"].read()
    return body


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [0],
        [PART],
        [PART, 1],
        [PART, PART, PART],
        [8 * MIB, 8 * MIB, 3 * MIB + 17],
        [PART, 6 * MIB, 7 * MIB, 5],
        [PART + 1, PART + 1, 100],
    ],
)
@pytest.mark.parametrize("order", ["first", "last", "middle"])
def test_the_parts_in_any_order_make_the_object(
    s3: S3, bucket: str, sizes: list[int], order: str
) -> None:
    client = s3.client()
    bodies = {n: data_of(size, n) for n, size in enumerate(sizes, 1)}
    numbers = sorted(bodies, reverse=order == "last")
    if order == "middle":
        numbers = numbers[1:] + numbers[:1]
    upload_id, parts = upload(client, bucket, "a/b", {n: bodies[n] for n in numbers})
    told = complete(client, bucket, "a/b", upload_id, parts)
    whole = b"".join(bodies.values())
    assert read(client, bucket, "a/b") == whole
    assert (s3.mount / bucket / "a/b").read_bytes() == whole
    assert told["ETag"].endswith(f'-{len(sizes)}"')
    assert told["Bucket"] == bucket
    assert told["Key"] == "a/b"
    assert told["Location"].endswith(f"/{bucket}/a/b")
    head = client.head_object(Bucket=bucket, Key="a/b")
    assert head["ETag"] == told["ETag"]
    assert head["ContentLength"] == len(whole)
    for n, body in bodies.items():
        if body:
            # Who downloads by parts asks for each with the tag of the first.
            asked = {"PartNumber": n, "IfMatch": told["ETag"]}
            got = client.get_object(Bucket=bucket, Key="a/b", **asked)
            assert got["ETag"] == told["ETag"]
            assert got["Body"].read() == body
            assert got["PartsCount"] == len(sizes)
    assert client.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []


def test_the_etag_is_that_of_the_parts(s3: S3, bucket: str) -> None:
    client = s3.client()
    small = b"0123456789"
    upload_id, parts = upload(client, bucket, "k", {1: small})
    digest = hashlib.md5(small).digest()
    assert parts[0]["ETag"] == f'"{digest.hex()}"'
    told = complete(client, bucket, "k", upload_id, parts)
    assert told["ETag"] == f'"{hashlib.md5(digest).hexdigest()}-1"'


def test_a_part_sent_again_takes_the_place_of_the_first(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, _ = upload(client, bucket, "k", {1: data_of(PART, 1), 2: data_of(PART, 2)})
    put_part(client, bucket, "k", upload_id, 3, data_of(7, 3))
    for seed, size in ((5, PART), (6, 6 * MIB), (7, PART)):
        put_part(client, bucket, "k", upload_id, 2, data_of(size, seed))
    listed = client.list_parts(Bucket=bucket, Key="k", UploadId=upload_id)["Parts"]
    assert [part["Size"] for part in listed] == [PART, PART, 7]
    parts = [{"PartNumber": part["PartNumber"], "ETag": part["ETag"]} for part in listed]
    complete(client, bucket, "k", upload_id, parts)
    assert read(client, bucket, "k") == data_of(PART, 1) + data_of(PART, 7) + data_of(7, 3)


def test_a_part_that_breaks_off_leaves_the_one_before(s3: S3, bucket: str) -> None:
    client = s3.client()
    body = data_of(PART, 1)
    upload_id, parts = upload(client, bucket, "k", {1: body, 2: data_of(9, 2)})
    url = client.generate_presigned_url(
        "upload_part", {"Bucket": bucket, "Key": "k", "UploadId": upload_id, "PartNumber": 1}
    )
    target = url.removeprefix(s3.endpoint)
    head = f"PUT {target} HTTP/1.1\r\nHost: {s3.host}:{s3.port}\r\nContent-Length: {PART}\r\n\r\n"
    s3.exchange(head.encode() + bytes(3 * MIB))
    complete(client, bucket, "k", upload_id, parts)
    assert read(client, bucket, "k") == body + data_of(9, 2)


def test_parts_that_are_left_out_are_not_in_the_object(s3: S3, bucket: str) -> None:
    client = s3.client()
    bodies = {n: data_of(PART, n) for n in (1, 2, 3, 4)}
    for chosen in ((1, 2), (1, 3), (2, 4), (4,)):
        upload_id, parts = upload(client, bucket, "k", bodies)
        complete(client, bucket, "k", upload_id, [p for p in parts if p["PartNumber"] in chosen])
        assert read(client, bucket, "k") == b"".join(bodies[n] for n in chosen)


def test_numbers_need_not_follow_each_other(s3: S3, bucket: str) -> None:
    client = s3.client()
    bodies = {10_000: b"end", 7: data_of(PART, 7), 1000: data_of(PART, 8)}
    upload_id, parts = upload(client, bucket, "k", bodies)
    complete(client, bucket, "k", upload_id, parts)
    assert read(client, bucket, "k") == data_of(PART, 7) + data_of(PART, 8) + b"end"
    head = client.head_object(Bucket=bucket, Key="k", PartNumber=3)
    assert (head["ContentLength"], head["PartsCount"]) == (3, 3)


def test_many_writers_at_once(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id = client.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    bodies = {n: data_of(PART if n < 12 else 12345, n) for n in range(1, 13)}
    with ThreadPoolExecutor(6) as pool:
        parts = list(
            pool.map(lambda n: put_part(client, bucket, "k", upload_id, n, bodies[n]), bodies)
        )
    complete(client, bucket, "k", upload_id, parts)
    assert read(client, bucket, "k") == b"".join(bodies.values())


# ---- what is refused


def test_no_parts(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, _ = upload(client, bucket, "k", {})
    with refused(400, "MalformedXML"):
        complete(client, bucket, "k", upload_id, [])


def test_small_parts(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {1: bytes(10), 2: bytes(10)})
    with refused(400, "EntityTooSmall") as told:
        complete(client, bucket, "k", upload_id, parts)
    error = told.response["Error"]
    assert (error["PartNumber"], error["ProposedSize"]) == ("1", "10")
    assert (error["MinSizeAllowed"], error["ETag"]) == (str(PART), parts[0]["ETag"].strip('"'))


def test_missing_and_wrong_parts(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {1: bytes(10)})
    tag = parts[0]["ETag"]
    with refused(400, "InvalidPart") as told:
        complete(client, bucket, "k", upload_id, [{"PartNumber": 9999, "ETag": tag}])
    assert told.response["Error"]["PartNumber"] == "9999"
    with refused(400, "InvalidPart"):
        complete(client, bucket, "k", upload_id, [{"PartNumber": 1, "ETag": "f" * 32}])
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket=bucket, Key="k")
    complete(client, bucket, "k", upload_id, [{"PartNumber": 1, "ETag": tag.strip('"')}])


def test_order(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {1: bytes(PART), 2: bytes(10)})
    with refused(400, "InvalidPartOrder"):
        complete(client, bucket, "k", upload_id, parts[::-1])


def test_of_a_part_that_is_named_twice_the_last_naming_counts(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, (old,) = upload(client, bucket, "k", {1: b"old"})
    new = {"PartNumber": 1, "ETag": put_part(client, bucket, "k", upload_id, 1, b"new")["ETag"]}
    with refused(400, "InvalidPart"):
        complete(client, bucket, "k", upload_id, [new, old])
    complete(client, bucket, "k", upload_id, [old, new])
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"new"


@pytest.mark.parametrize("number", [0, 10_001])
def test_numbers_of_parts(s3: S3, bucket: str, number: int) -> None:
    client = s3.client()
    upload_id, _ = upload(client, bucket, "k", {})
    with refused(400, "InvalidArgument"):
        put_part(client, bucket, "k", upload_id, number, b"")


def test_uploads_that_are_not_there(s3: S3, bucket: str) -> None:
    client = s3.client()
    gone, parts = upload(client, bucket, "k", {1: b"x"})
    client.abort_multipart_upload(Bucket=bucket, Key="k", UploadId=gone)
    for upload_id in (gone, "56788", "0" * 40, "\u00fc", "a/b"):
        with refused(404, "NoSuchUpload"):
            client.abort_multipart_upload(Bucket=bucket, Key="k", UploadId=upload_id)
        with refused(404, "NoSuchUpload"):
            put_part(client, bucket, "k", upload_id, 1, b"x")
        with refused(404, "NoSuchUpload"):
            client.list_parts(Bucket=bucket, Key="k", UploadId=upload_id)
        with refused(404, "NoSuchUpload"):
            complete(client, bucket, "k", upload_id, parts)


def test_an_upload_is_one_of_its_key(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {1: b"x"})
    with refused(404, "NoSuchUpload"):
        put_part(client, bucket, "other", upload_id, 2, b"x")
    with refused(404, "NoSuchUpload"):
        complete(client, bucket, "other", upload_id, parts)


def test_others_may_not(s3: S3, bucket: str) -> None:
    upload_id, parts = upload(s3.client(), bucket, "k", {1: b"x"})
    alt = s3.client("alt")
    with refused(403, "AccessDenied"):
        put_part(alt, bucket, "k", upload_id, 1, b"y")
    with refused(403, "AccessDenied"):
        complete(alt, bucket, "k", upload_id, parts)
    with refused(403, "AccessDenied"):
        alt.list_parts(Bucket=bucket, Key="k", UploadId=upload_id)
    with refused(403, "AccessDenied"):
        alt.list_multipart_uploads(Bucket=bucket)
    with refused(403, "AccessDenied"):
        alt.abort_multipart_upload(Bucket=bucket, Key="k", UploadId=upload_id)
    with refused(403, "AccessDenied"):
        alt.create_multipart_upload(Bucket=bucket, Key="k")


# ---- completing


def test_completed_again_it_gives_the_same_answer(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {1: data_of(PART), 2: b"x"})
    first = complete(client, bucket, "k", upload_id, parts)
    again = complete(client, bucket, "k", upload_id, parts)
    for told in (first, again):
        told.pop("ResponseMetadata")
    assert again == first
    with refused(404, "NoSuchUpload"):
        put_part(client, bucket, "k", upload_id, 1, b"y")


def test_completed_by_many_at_once_it_is_completed_once(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {1: data_of(PART), 2: b"x"})
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(complete, client, bucket, "k", upload_id, parts) for _ in range(6)]
        tags = {each.result()["ETag"] for each in asked}
    assert len(tags) == 1
    assert read(client, bucket, "k") == data_of(PART) + b"x"


def test_conditions(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {1: b"new"})
    with refused(404, "NoSuchKey"):
        complete(client, bucket, "k", upload_id, parts, IfMatch='"abc"')
    tag = client.put_object(Bucket=bucket, Key="k", Body=b"old")["ETag"]
    with refused(412, "PreconditionFailed"):
        complete(client, bucket, "k", upload_id, parts, IfNoneMatch="*")
    with refused(412, "PreconditionFailed"):
        complete(client, bucket, "k", upload_id, parts, IfMatch='"abc"')
    assert read(client, bucket, "k") == b"old"
    complete(client, bucket, "k", upload_id, parts, IfMatch=tag)
    assert read(client, bucket, "k") == b"new"


def test_one_of_many_creators_wins(s3: S3, bucket: str) -> None:
    client = s3.client()
    begun = [upload(client, bucket, "k", {1: data_of(PART, n), 2: b"x"}) for n in range(4)]
    barrier = threading.Barrier(len(begun))

    def run(number: int) -> int:
        barrier.wait()
        try:
            complete(client, bucket, "k", *begun[number], IfNoneMatch="*")
        except client.exceptions.ClientError as error:
            status: int = error.response["ResponseMetadata"]["HTTPStatusCode"]
            return status
        return 200

    with ThreadPoolExecutor(len(begun)) as pool:
        statuses = list(pool.map(run, range(len(begun))))
    assert sorted(statuses) == [200, 412, 412, 412]
    assert read(client, bucket, "k") == data_of(PART, statuses.index(200)) + b"x"


def test_the_size_that_the_client_says(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {1: b"abc"})
    with refused(400, "InvalidRequest"):
        complete(client, bucket, "k", upload_id, parts, MpuObjectSize=4)
    complete(client, bucket, "k", upload_id, parts, MpuObjectSize=3)


def test_what_was_said_at_the_beginning(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(
        client,
        bucket,
        "k",
        {1: b"abc"},
        ContentType="text/x-thing",
        Metadata={"a": "b"},
        CacheControl="no-store",
        Tagging="t=1&u=2",
    )
    complete(client, bucket, "k", upload_id, parts)
    head = client.head_object(Bucket=bucket, Key="k")
    assert head["ContentType"] == "text/x-thing"
    assert head["Metadata"] == {"a": "b"}
    assert head["CacheControl"] == "no-store"
    assert os.getxattr(s3.mount / bucket / "k", "user.s3.meta.a") == b"b"
    assert not [name for name in os.listxattr(s3.mount / bucket / "k") if "upload" in name]


# ---- checksums


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def test_the_whole_objects_checksum_is_put_together(s3: S3, bucket: str) -> None:
    client = s3.client()
    bodies = {1: data_of(PART, 1), 2: data_of(PART, 2), 3: b"rest"}
    whole = b"".join(bodies.values())
    upload_id, parts = upload(
        client, bucket, "k", bodies, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT"
    )
    with refused(400, "BadDigest"):
        complete(client, bucket, "k", upload_id, parts, ChecksumCRC32=crc32(b"other"))
    told = complete(
        client,
        bucket,
        "k",
        upload_id,
        parts,
        ChecksumCRC32=crc32(whole),
        ChecksumType="FULL_OBJECT",
    )
    assert (told["ChecksumCRC32"], told["ChecksumType"]) == (crc32(whole), "FULL_OBJECT")
    head = client.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (head["ChecksumCRC32"], head["ChecksumType"]) == (crc32(whole), "FULL_OBJECT")


def test_checksums_of_parts_need_not_be_said_again(s3: S3, bucket: str) -> None:
    client, options = s3.client(), {"ChecksumAlgorithm": "SHA256"}
    begun = client.create_multipart_upload(Bucket=bucket, Key="k", **options)
    part = put_part(client, bucket, "k", begun["UploadId"], 1, b"x", **options)
    told = complete(client, bucket, "k", begun["UploadId"], [part])
    of_parts = base64.b64encode(hashlib.sha256(base64.b64decode(sha256(b"x"))).digest()).decode()
    assert told["ChecksumSHA256"] == f"{of_parts}-1"


def test_the_checksum_of_checksums(s3: S3, bucket: str) -> None:
    client = s3.client()
    bodies = {1: data_of(PART, 1), 2: b"rest"}
    options = {"ChecksumAlgorithm": "SHA256"}
    begun = client.create_multipart_upload(Bucket=bucket, Key="k", **options)
    assert (begun["ChecksumAlgorithm"], begun["ChecksumType"]) == ("SHA256", "COMPOSITE")
    upload_id = begun["UploadId"]
    with refused(400, "InvalidRequest"):
        put_part(client, bucket, "k", upload_id, 1, b"x", ChecksumAlgorithm="CRC32C")
    parts = [
        put_part(client, bucket, "k", upload_id, n, body, **options) for n, body in bodies.items()
    ]
    for part in parts:
        part["ChecksumSHA256"] = sha256(bodies[part["PartNumber"]])
    with refused(400, "InvalidPart"):
        complete(
            client, bucket, "k", upload_id, [parts[0], parts[1] | {"ChecksumSHA256": sha256(b"")}]
        )
    with refused(400, "BadDigest"):
        complete(client, bucket, "k", upload_id, parts, ChecksumSHA256="bad")
    digests = b"".join(hashlib.sha256(body).digest() for body in bodies.values())
    expected = sha256(digests) + "-2"
    told = complete(client, bucket, "k", upload_id, parts, ChecksumSHA256=expected)
    assert (told["ChecksumSHA256"], told["ChecksumType"]) == (expected, "COMPOSITE")
    again = complete(client, bucket, "k", upload_id, parts, ChecksumSHA256=expected)
    assert again["ChecksumSHA256"] == expected
    tags = b"".join(hashlib.md5(body).digest() for body in bodies.values())
    assert told["ETag"] == again["ETag"] == f'"{hashlib.md5(tags).hexdigest()}-2"'


@pytest.mark.parametrize("type_", ["COMPOSITE", "FULL_OBJECT"])
def test_a_part_that_is_read_has_its_own_checksum(s3: S3, bucket: str, type_: str) -> None:
    client = s3.client()
    begun = client.create_multipart_upload(
        Bucket=bucket, Key="k", ChecksumAlgorithm="CRC32", ChecksumType=type_
    )
    bodies, upload_id = {1: data_of(PART, 1), 2: b"rest"}, begun["UploadId"]
    parts = []
    for n, body in bodies.items():
        value = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
        told = put_part(client, bucket, "k", upload_id, n, body, ChecksumCRC32=value)
        parts.append(told | {"ChecksumCRC32": value})
    complete(client, bucket, "k", upload_id, parts)
    asked = {"Bucket": bucket, "Key": "k", "ChecksumMode": "ENABLED"}
    for part in parts:
        got = client.get_object(PartNumber=part["PartNumber"], **asked)
        assert got["Body"].read() == bodies[part["PartNumber"]]
        head = client.head_object(PartNumber=part["PartNumber"], **asked)
        for each in (got, head):
            assert (each["ChecksumCRC32"], each["ChecksumType"]) == (part["ChecksumCRC32"], type_)


def test_a_part_with_another_checksum_than_it_says(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, _ = upload(client, bucket, "k", {}, ChecksumAlgorithm="SHA256")
    with refused(400, "BadDigest"):
        put_part(client, bucket, "k", upload_id, 1, b"x", ChecksumSHA256=sha256(b"y"))
    with refused(400, "BadDigest"):
        md5 = base64.b64encode(hashlib.md5(b"y").digest()).decode()
        put_part(
            client, bucket, "k", upload_id, 1, b"x", ContentMD5=md5, ChecksumAlgorithm="SHA256"
        )
    assert "Parts" not in client.list_parts(Bucket=bucket, Key="k", UploadId=upload_id)


@pytest.mark.parametrize(
    "options",
    [
        {"ChecksumAlgorithm": "SHA1", "ChecksumType": "FULL_OBJECT"},
        {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "COMPOSITE"},
        {"ChecksumType": "FULL_OBJECT"},
    ],
)
def test_types_that_an_algorithm_does_not_know(
    s3: S3, bucket: str, options: dict[str, str]
) -> None:
    with refused(400, "InvalidRequest"):
        s3.client().create_multipart_upload(Bucket=bucket, Key="k", **options)


def test_without_an_algorithm_the_object_has_a_checksum(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {1: data_of(PART), 2: b"x"})
    told = complete(client, bucket, "k", upload_id, parts)
    client.put_object(
        Bucket=bucket, Key="whole", Body=data_of(PART) + b"x", ChecksumAlgorithm="CRC64NVME"
    )
    head = client.head_object(Bucket=bucket, Key="whole", ChecksumMode="ENABLED")
    assert told["ChecksumCRC64NVME"] == head["ChecksumCRC64NVME"]
    assert told["ChecksumType"] == "FULL_OBJECT"


# ---- copies of parts


def test_copies_of_ranges(s3: S3, bucket: str) -> None:
    client = s3.client()
    source = data_of(12 * MIB)
    client.put_object(Bucket=bucket, Key="a source?&", Body=source)
    where = {"Bucket": bucket, "Key": "a source?&"}
    upload_id, _ = upload(client, bucket, "k", {})
    ranges = {1: (0, 5 * MIB), 2: (5 * MIB, 11 * MIB + 3), 3: (11 * MIB + 3, 12 * MIB)}
    parts = []
    for number, (start, end) in ranges.items():
        told = client.upload_part_copy(
            Bucket=bucket,
            Key="k",
            UploadId=upload_id,
            PartNumber=number,
            CopySource=where,
            CopySourceRange=f"bytes={start}-{end - 1}",
        )["CopyPartResult"]
        parts.append({"PartNumber": number, "ETag": told["ETag"]})
    told = complete(client, bucket, "k", upload_id, parts)
    assert read(client, bucket, "k") == source
    head = client.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    client.put_object(Bucket=bucket, Key="w", Body=source, ChecksumAlgorithm="CRC64NVME")
    other = client.head_object(Bucket=bucket, Key="w", ChecksumMode="ENABLED")
    assert head["ChecksumCRC64NVME"] == other["ChecksumCRC64NVME"]


@pytest.mark.parametrize("key", [" ", "_", "__", "?versionId", "\u00fc+%"])
def test_copies_of_special_names(s3: S3, bucket: str, key: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key=key, Body=b"abcdefghij")
    upload_id, _ = upload(client, bucket, "k", {})
    told = client.upload_part_copy(
        Bucket=bucket,
        Key="k",
        UploadId=upload_id,
        PartNumber=1,
        CopySource={"Bucket": bucket, "Key": key},
    )["CopyPartResult"]
    complete(client, bucket, "k", upload_id, [{"PartNumber": 1, "ETag": told["ETag"]}])
    assert read(client, bucket, "k") == b"abcdefghij"


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ("bytes=0-21", 416, "InvalidRange"),
        ("0-2", 400, "InvalidArgument"),
        ("bytes=0", 400, "InvalidArgument"),
        ("bytes=hello-world", 400, "InvalidArgument"),
        ("bytes=0-bar", 400, "InvalidArgument"),
        ("bytes=hello-", 400, "InvalidArgument"),
        ("bytes=0-2,3-5", 400, "InvalidArgument"),
    ],
)
def test_ranges_that_are_none(s3: S3, bucket: str, asked: str, status: int, code: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="s", Body=b"abcde")
    upload_id, _ = upload(client, bucket, "k", {})
    with refused(status, code):
        client.upload_part_copy(
            Bucket=bucket,
            Key="k",
            UploadId=upload_id,
            PartNumber=1,
            CopySource={"Bucket": bucket, "Key": "s"},
            CopySourceRange=asked,
        )


def test_copies_need_the_source(s3: S3, bucket: str) -> None:
    client, alt = s3.client(), s3.client("alt")
    theirs = s3.new_bucket("alt")
    alt.put_object(Bucket=theirs, Key="s", Body=b"secret")
    tag = client.put_object(Bucket=bucket, Key="s", Body=b"abc")["ETag"]
    upload_id, _ = upload(client, bucket, "k", {})
    asked: dict[str, Any] = {
        "Bucket": bucket,
        "Key": "k",
        "UploadId": upload_id,
        "PartNumber": 1,
    }
    with refused(403, "AccessDenied"):
        client.upload_part_copy(CopySource=f"{theirs}/s", **asked)
    with refused(404, "NoSuchKey"):
        client.upload_part_copy(CopySource=f"{bucket}/none", **asked)
    with refused(404, "NoSuchBucket"):
        client.upload_part_copy(CopySource="no-such-bucket-here/s", **asked)
    with refused(412, "PreconditionFailed"):
        client.upload_part_copy(CopySource=f"{bucket}/s", CopySourceIfMatch='"x"', **asked)
    with refused(412, "PreconditionFailed"):
        client.upload_part_copy(CopySource=f"{bucket}/s", CopySourceIfNoneMatch=tag, **asked)
    client.upload_part_copy(CopySource=f"{bucket}/s", CopySourceIfMatch=tag, **asked)
    s3.remove_bucket(theirs)


# ---- lists


def test_the_list_of_parts_has_pages(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload_id, parts = upload(client, bucket, "k", {n: bytes(n) for n in (3, 1, 7, 2)})
    asked = {"Bucket": bucket, "Key": "k", "UploadId": upload_id}
    first = client.list_parts(MaxParts=2, **asked)
    assert first["IsTruncated"] is True
    assert first["NextPartNumberMarker"] == 2
    assert first["MaxParts"] == 2
    second = client.list_parts(PartNumberMarker=2, **asked)
    assert second["IsTruncated"] is False
    listed = first["Parts"] + second["Parts"]
    assert [(part["PartNumber"], part["ETag"]) for part in listed] == [
        (part["PartNumber"], part["ETag"]) for part in parts
    ]
    assert [part["Size"] for part in listed] == [1, 2, 3, 7]
    assert first["Owner"] == first["Initiator"] == {"ID": "main", "DisplayName": "main"}
    assert first["StorageClass"] == "STANDARD"


def test_the_list_of_uploads(s3: S3, bucket: str) -> None:
    client = s3.client()
    begun = [
        (key, client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"])
        for key in ("b", "a/x", "a/y", "b", "c d")
    ]
    whole = client.list_multipart_uploads(Bucket=bucket)
    assert whole["IsTruncated"] is False
    expected = sorted(begun, key=lambda each: each[0])
    assert [(each["Key"], each["UploadId"]) for each in whole["Uploads"]] == expected
    assert whole["Uploads"][0]["Owner"] == {"ID": "main", "DisplayName": "main"}
    assert whole["Uploads"][0]["Initiator"] == {"ID": "main", "DisplayName": "main"}
    found: list[tuple[str, str]] = []
    marker: dict[str, str] = {}
    while True:
        page = client.list_multipart_uploads(Bucket=bucket, MaxUploads=2, **marker)
        found += [(each["Key"], each["UploadId"]) for each in page["Uploads"]]
        if not page["IsTruncated"]:
            break
        marker = {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page["NextUploadIdMarker"],
        }
    assert found == expected
    grouped = client.list_multipart_uploads(Bucket=bucket, Delimiter="/")
    assert [each["Prefix"] for each in grouped["CommonPrefixes"]] == ["a/"]
    assert [each["Key"] for each in grouped["Uploads"]] == ["b", "b", "c d"]
    below = client.list_multipart_uploads(Bucket=bucket, Prefix="a/", EncodingType="url")
    assert [each["Key"] for each in below["Uploads"]] == ["a/x", "a/y"]
    encoded = client.list_multipart_uploads(Bucket=bucket, Prefix="c", EncodingType="url")
    assert [each["Key"] for each in encoded["Uploads"]] == ["c%20d"]
    for key, upload_id in begun:
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


def test_uploads_are_seen_neither_on_the_mount_nor_as_objects(s3: S3, bucket: str) -> None:
    client = s3.client()
    upload(client, bucket, "k", {1: data_of(PART)})
    assert os.listdir(s3.mount / bucket) == []
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    client.delete_bucket(Bucket=bucket)


def test_each_completion_makes_a_version(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    made = []
    for number in (1, 2):
        upload_id, parts = upload(client, bucket, "k", {1: data_of(PART, number), 2: b"x"})
        told = complete(client, bucket, "k", upload_id, parts)
        made.append(told["VersionId"])
        again = complete(client, bucket, "k", upload_id, parts)
        assert again["VersionId"] == told["VersionId"]
    listed = client.list_object_versions(Bucket=bucket)["Versions"]
    assert [each["VersionId"] for each in listed] == made[::-1]
    for number, version in enumerate(made, 1):
        assert read(client, bucket, "k", VersionId=version) == data_of(PART, number) + b"x"
    upload_id, _ = upload(client, bucket, "copy", {})
    told = client.upload_part_copy(
        Bucket=bucket,
        Key="copy",
        UploadId=upload_id,
        PartNumber=1,
        CopySource={"Bucket": bucket, "Key": "k", "VersionId": made[0]},
    )
    assert told["CopySourceVersionId"] == made[0]
    tag = told["CopyPartResult"]["ETag"]
    complete(client, bucket, "copy", upload_id, [{"PartNumber": 1, "ETag": tag}])
    assert read(client, bucket, "copy") == data_of(PART, 1) + b"x"
    client.delete_object(Bucket=bucket, Key="k")
    upload_id, _ = upload(client, bucket, "copy", {})
    with refused(404, "NoSuchKey"):
        client.upload_part_copy(
            Bucket=bucket, Key="copy", UploadId=upload_id, PartNumber=1, CopySource=f"{bucket}/k"
        )


def test_the_parts_of_an_object_are_told(s3: S3, bucket: str) -> None:
    client = s3.client()
    bodies = {1: data_of(PART, 1), 2: b"rest"}
    options = {"ChecksumAlgorithm": "SHA256"}
    upload_id = client.create_multipart_upload(Bucket=bucket, Key="k", **options)["UploadId"]
    parts = [
        put_part(client, bucket, "k", upload_id, n, body, **options)
        | {"ChecksumSHA256": sha256(body)}
        for n, body in bodies.items()
    ]
    complete(client, bucket, "k", upload_id, parts)
    told = client.get_object_attributes(
        Bucket=bucket, Key="k", ObjectAttributes=["ObjectParts", "Checksum", "ObjectSize"]
    )
    assert told["ObjectParts"]["TotalPartsCount"] == 2
    assert [(part["Size"], part["ChecksumSHA256"]) for part in told["ObjectParts"]["Parts"]] == [
        (len(body), sha256(body)) for body in bodies.values()
    ]
    assert told["Checksum"]["ChecksumType"] == "COMPOSITE"
