"""One bucket of any S3 endpoint, through boto3: the only module that knows botocore's errors.

Credentials come by the usual AWS chain (environment, shared files, instance roles), and so do
settings that are not given here (AWS_ENDPOINT_URL, AWS_REGION, AWS_CA_BUNDLE). Every call blocks,
for a worker thread, and ends by a deadline, which `Patience` says.

Bytes of objects pass through boto3: callers hand in parts of bounded size.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from kvfs.base.errors import (
    AccessDenied,
    Conflict,
    Invalid,
    KvfsError,
    NotFound,
    NotSupported,
    Unavailable,
)

_CONNECTIONS: Final = 32
_PARTIAL: Final = 206
_SCHEME: Final = "s3://"
_MISSING: Final = frozenset(("404", "NoSuchKey", "NoSuchBucket", "NoSuchUpload", "NotFound"))
_REFUSED: Final = frozenset(
    (
        *("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
        *("ExpiredToken", "RequestTimeTooSkewed", "AccountProblem"),
    )
)
_CHANGED: Final = frozenset(("412", "PreconditionFailed"))
_LATER: Final = frozenset(("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout"))


NOTHING_TOLD: Final[Mapping[str, str]] = MappingProxyType({})


class ColdLocation(msgspec.Struct, frozen=True):
    """A bucket, and the beginning of all keys in it (no slash at either end; may be empty)."""

    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.prefix}".rstrip("/")


def parse(text: str) -> ColdLocation:
    """Parses `s3://bucket/prefix`. Raises Invalid."""
    bucket, _, prefix = text.removeprefix(_SCHEME).partition("/")
    if not text.startswith(_SCHEME) or not bucket:
        raise Invalid(f"'{text}' is no place in an object store: write s3://BUCKET/PREFIX")
    return ColdLocation(bucket, prefix.strip("/"))


class Patience(NamedTuple):
    """The patience with an endpoint."""

    connect_s: float = 5.0
    read_s: float = 30.0
    """Seconds for an answer that stands still."""
    attempts: int = 4


USUAL: Final = Patience()


class Remote(NamedTuple):
    """An object as a list or its head describes it."""

    key: str
    size: int
    etag: str
    modified: datetime


class ColdPart(NamedTuple):
    """A part of a multipart upload that the store has."""

    number: int
    size: int
    etag: str


class UnfinishedUpload(NamedTuple):
    """A multipart upload that is under way, or was given up."""

    key: str
    upload: str
    age_s: float
    """Seconds since it was begun, by the store's clock."""


class Endpoint:
    """One bucket; any thread. Every method raises Unavailable (away, or too busy), AccessDenied,
    Invalid, and NotFound if the bucket is missing."""

    def __init__(self, bucket: str, url: str | None = None, patience: Patience = USUAL) -> None:
        """`url`: that of the endpoint; None: from the AWS settings. Raises NotSupported if boto3 is
        not installed, Invalid."""
        self.bucket = bucket
        self.url = url
        with _translated(bucket):
            self._client = _connect(url, patience)

    def close(self) -> None:
        """Closes its connections; idempotent."""
        self._client.close()

    def head(self, key: str) -> Remote | None:
        """Returns the object, or None."""
        try:
            with _translated(self.bucket):
                found = self._client.head_object(Bucket=self.bucket, Key=key)
        except NotFound:
            return None
        return Remote(key, found["ContentLength"], found["ETag"], found["LastModified"])

    def objects(self, prefix: str) -> Iterator[Remote]:
        """Yields all objects whose keys begin so, in pages, in the order of their keys."""
        following: dict[str, str] = {}
        while True:
            with _translated(self.bucket):
                page = self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **following)
            for each in page.get("Contents", ()):
                yield Remote(each["Key"], each["Size"], each["ETag"], each["LastModified"])
            if not page.get("IsTruncated"):
                return
            following = {"ContinuationToken": page["NextContinuationToken"]}

    @contextlib.contextmanager
    def reading(self, key: str, start: int, size: int, etag: str | None = None) -> Iterator[Any]:
        """Opens a stream with `read(amount)` of this range. With `etag`, Conflict if the object is
        another one by now. Raises NotFound, also while it is read."""
        wanted = {"Range": f"bytes={start}-{start + size - 1}"} if size else {}
        if etag is not None:
            wanted["IfMatch"] = etag
        with _translated(self.bucket):
            answer = self._client.get_object(Bucket=self.bucket, Key=key, **wanted)
            body = answer["Body"]
            try:
                if start and answer["ResponseMetadata"]["HTTPStatusCode"] != _PARTIAL:
                    raise NotSupported(f"the object store of {self.bucket} gives no ranges")
                yield body
            finally:
                body.close()

    def told(self, key: str) -> dict[str, str] | None:
        """Returns what was told of an object when it was put; None: there is no such object."""
        try:
            with _translated(self.bucket):
                found = self._client.head_object(Bucket=self.bucket, Key=key)
        except NotFound:
            return None
        return dict(found["Metadata"])

    def put(self, key: str, data: bytes, told: Mapping[str, str] = NOTHING_TOLD) -> None:
        """Puts a whole object, over an existing one. `told`: ASCII text by name, up to 2 kB."""
        with _translated(self.bucket):
            self._client.put_object(Bucket=self.bucket, Key=key, Body=data, Metadata=dict(told))

    def delete(self, key: str) -> None:
        """Deletes an object, whether it exists or not."""
        with _translated(self.bucket):
            self._client.delete_object(Bucket=self.bucket, Key=key)

    def begin(self, key: str, told: Mapping[str, str] = NOTHING_TOLD) -> str:
        """Begins an upload in parts; returns its id. `told`: as for `put`."""
        with _translated(self.bucket):
            made = self._client.create_multipart_upload(
                Bucket=self.bucket, Key=key, Metadata=dict(told)
            )
        return str(made["UploadId"])

    def begun(self, key: str) -> str | None:
        """Returns the id of the last upload of this key that was begun and not finished; None:
        there is none."""
        with _translated(self.bucket):
            page = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=key)
        found = [each for each in page.get("Uploads", ()) if each["Key"] == key]
        if not found:
            return None
        return str(max(found, key=lambda each: each["Initiated"])["UploadId"])

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        """Yields the unfinished uploads of keys that begin so, in pages. Raises NotSupported if the
        store does not tell when they were begun, or where a list goes on."""
        following: dict[str, str] = {}
        while True:
            with _translated(self.bucket):
                page = self._client.list_multipart_uploads(
                    Bucket=self.bucket, Prefix=prefix, **following
                )
            try:
                found, following = _uploads_of(page)
            except (KeyError, TypeError, ValueError) as error:
                raise NotSupported(
                    f"the object store of {self.bucket} lists its unfinished uploads without"
                    f" {error}: have a rule of the bucket end them"
                ) from error
            yield from found
            if not following:
                return

    def abort(self, key: str, upload: str) -> None:
        """Ends an upload, and drops its parts; it may have ended already."""
        with contextlib.suppress(NotFound), _translated(self.bucket):
            self._client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)

    def parts(self, key: str, upload: str) -> list[ColdPart]:
        """Returns the parts of an upload that are there already."""
        found: list[ColdPart] = []
        marker = 0
        while True:
            with _translated(self.bucket):
                page = self._client.list_parts(
                    Bucket=self.bucket, Key=key, UploadId=upload, PartNumberMarker=marker
                )
            found += [
                ColdPart(each["PartNumber"], each["Size"], each["ETag"])
                for each in page.get("Parts", ())
            ]
            if not page.get("IsTruncated"):
                return found
            marker = page["NextPartNumberMarker"]

    def put_part(self, key: str, upload: str, number: int, data: bytes) -> ColdPart:
        """Puts one part. Raises NotFound if the upload is not there any more."""
        with _translated(self.bucket):
            done = self._client.upload_part(
                Bucket=self.bucket, Key=key, UploadId=upload, PartNumber=number, Body=data
            )
        return ColdPart(number, len(data), done["ETag"])

    def complete(self, key: str, upload: str, parts: list[ColdPart]) -> None:
        """Makes the object of its parts. Raises NotFound like `put_part`."""
        listed = [{"PartNumber": each.number, "ETag": each.etag} for each in parts]
        with _translated(self.bucket):
            self._client.complete_multipart_upload(
                Bucket=self.bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": listed}
            )


def _connect(url: str | None, patience: Patience) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise NotSupported("object stores of others need boto3: pip install 'kvfs[cold]'") from None
    logging.getLogger("botocore").setLevel(logging.WARNING)
    # Checksums in trailers are asked of nobody: not every store knows them. What is sent without
    # TLS is signed with its SHA-256.
    settings = Config(
        connect_timeout=patience.connect_s,
        read_timeout=patience.read_s,
        retries={"mode": "standard", "total_max_attempts": patience.attempts},
        max_pool_connections=_CONNECTIONS,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if url else "auto"},
    )
    session = boto3.session.Session()
    region = session.region_name or "us-east-1"
    return session.client("s3", endpoint_url=url, region_name=region, config=settings)


def _uploads_of(page: Any) -> tuple[list[UnfinishedUpload], dict[str, str]]:
    """Returns the uploads that a page lists, and where the next one begins; empty: it is the last.
    Raises KeyError, TypeError, ValueError: it is not as S3's."""
    now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
    found = [
        UnfinishedUpload(each["Key"], each["UploadId"], (now - each["Initiated"]).total_seconds())
        for each in page.get("Uploads", ())
    ]
    if not page.get("IsTruncated"):
        return found, {}
    return found, {
        "KeyMarker": page["NextKeyMarker"],
        "UploadIdMarker": page["NextUploadIdMarker"],
    }


@contextlib.contextmanager
def _translated(bucket: str) -> Iterator[None]:
    """Translates errors that boto3 raises into our own."""
    try:
        yield
    except (KvfsError, OSError):
        raise
    except Exception as error:
        found = _translate(error, bucket)
        if found is None:
            raise
        raise found from error


def _translate(error: Exception, bucket: str) -> KvfsError | None:
    """Returns our error; None: it is not botocore's."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    if isinstance(error, exceptions.ClientError):
        return _answered(error.response, bucket)
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return AccessDenied(
            f"no credentials for the bucket {bucket}: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or a profile (AWS_PROFILE)"
        )
    away = (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError)
    if isinstance(error, (*away, HTTPError)):
        return Unavailable(f"the object store of {bucket} does not answer: {error}")
    if isinstance(error, exceptions.BotoCoreError | ValueError):
        return Invalid(f"the bucket {bucket} cannot be asked: {error}")
    return None


def _answered(response: Any, bucket: str) -> KvfsError:
    told = response.get("Error", {})
    code, status = str(told.get("Code", "")), response["ResponseMetadata"].get("HTTPStatusCode", 0)
    text = f"{bucket}: {told.get('Message') or code}"
    if code in _MISSING:
        return NotFound(text)
    if code in _REFUSED:
        return AccessDenied(text)
    if code in _CHANGED:
        return Conflict(text)
    if code in _LATER or status >= 500:
        return Unavailable(text)
    return Invalid(f"{text} ({code})")
