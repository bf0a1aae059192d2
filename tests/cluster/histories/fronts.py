"""The ways by which a host's programs reach its node: the mount, the S3 API, the Python client.

Each does an operation and says how it ended by what it raises: Refused, Unknown (a change that may
have been made), Failed (nothing was learnt, nothing changed). Used by one thread.
"""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import boto3
import urllib3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, EndpointConnectionError

import kvfs
from kvfs.base import errors
from s3api.auth.credentials import Credentials
from tests.cluster.histories.events import ABSENT, Failed, Refused, Unknown
from tests.cluster.histories.hand import Hand
from tests.cluster.histories.values import content, value_of

subprocess._USE_VFORK = False
"""All threads of this process stand still until the child of a vfork has closed what it inherited;
the node that has to answer that may be waiting for a commit of one of them."""
_PART_BYTES: Final = 5 << 20
_FAILURES: Final = (BotoCoreError, ClientError, urllib3.exceptions.HTTPError, OSError)


class Front(Protocol):
    """Names are relative to a namespace."""

    name: str

    def put(self, name: str, value: int) -> None: ...

    def put_new(self, name: str, value: int) -> None: ...

    def read(self, name: str) -> int: ...

    def remove(self, name: str) -> None: ...

    def close(self) -> None: ...


class Mount:
    name = "mount"

    def __init__(self, root: Path) -> None:
        """`root`: the namespace's directory."""
        self._root = root
        self._hand = Hand()

    def put(self, name: str, value: int) -> None:
        draft = self._drafted(value)
        with _changing(), self._mounted() as root:
            os.rename(draft.name, name, src_dir_fd=root, dst_dir_fd=root)

    def _drafted(self, value: int) -> Path:
        draft = self._root / f".draft-{value}"
        with _asking():
            draft.write_bytes(content(value))
        return draft

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[int]:
        """A descriptor of the root. While a node starts, its mount is away for a moment: then
        nothing that is missing below was removed."""
        with _asking():
            root = os.open(self._root, os.O_PATH)
        try:
            yield root
        finally:
            os.close(root)

    def write(self, name: str, value: int) -> None:
        """In place."""
        with _changing():
            number = self._hand.open(self._root / name)
        self.publish(number, value)

    def write_below(self, name: str, value: int) -> None:
        """The same, in a directory that may not be there."""
        with _changing(), self._mounted():
            try:
                number = self._hand.open(self._root / name)
            except FileNotFoundError:
                raise Refused from None
        self.publish(number, value)

    def mkdir(self, name: str) -> None:
        with _changing(), self._mounted() as root:
            try:
                os.mkdir(name, dir_fd=root)
            except FileExistsError:
                raise Refused from None

    def rmdir(self, name: str) -> None:
        with _changing(), self._mounted() as root:
            try:
                os.rmdir(name, dir_fd=root)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTEMPTY):
                    raise Refused from None
                if error.errno == errno.EBUSY:
                    raise Failed(_name(error)) from None
                raise

    def append(self, name: str, value: int) -> None:
        with _changing():
            self._hand.append(self._root / name, value)

    def reserve(self, name: str) -> int:
        """The number of a file that nobody else may make."""
        with _changing():
            try:
                return self._hand.reserve(self._root / name)
            except FileExistsError:
                raise Refused from None

    def publish(self, number: int, value: int) -> None:
        """The file was cut or made before: whatever fails now leaves that."""
        try:
            self._hand.publish(number, value)
        except OSError as error:
            raise Unknown(_name(error)) from None

    def put_new(self, name: str, value: int) -> None:
        draft = self._drafted(value)
        with _changing(), self._mounted() as root:
            try:
                os.link(draft.name, name, src_dir_fd=root, dst_dir_fd=root)
            except FileExistsError:
                raise Refused from None

    def read(self, name: str) -> int:
        with _asking(), self._mounted() as root:
            try:
                fd = os.open(name, os.O_RDONLY, dir_fd=root)
            except FileNotFoundError:
                return ABSENT
            with open(fd, "rb") as file:
                return value_of(file.read())

    def remove(self, name: str) -> None:
        with _changing(), self._mounted() as root:
            try:
                os.unlink(name, dir_fd=root)
            except FileNotFoundError:
                raise Refused from None

    def rename(self, name: str, other: str) -> None:
        with _changing(), self._mounted() as root:
            try:
                os.rename(name, other, src_dir_fd=root, dst_dir_fd=root)
            except FileNotFoundError:
                raise Refused from None

    def close(self) -> None:
        self._hand.close()


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """An error says that nothing was changed that has a name in the history."""
    try:
        yield
    except OSError as error:
        raise Failed(_name(error)) from None


@contextlib.contextmanager
def _changing() -> Iterator[None]:
    """An error leaves it unknown whether the change was made, but for ENOTCONN: the node had gone
    before it was asked."""
    try:
        yield
    except OSError as error:
        kind = Failed if error.errno == errno.ENOTCONN else Unknown
        raise kind(_name(error)) from None


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))


class ByS3:
    name = "s3"

    def __init__(self, endpoint: str, keys: Credentials, namespace: str) -> None:
        """`namespace`: or a directory in one. The thread that uses it is on a host already."""
        self._bucket, _, directory = namespace.partition("/")
        self._prefix = directory and f"{directory}/"
        self._s3: Any = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=keys.access_key,
            aws_secret_access_key=keys.secret,
            config=Config(
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
                connect_timeout=5,
                read_timeout=30,
            ),
        )

    def put(self, name: str, value: int) -> None:
        data = content(value)
        if len(data) > _PART_BYTES:
            self._put_parts(name, data)
        elif value % 4 == 2:
            self._put_copy(name, value)
        else:
            self._change("put_object", name, Body=data)

    def _put_copy(self, name: str, value: int) -> None:
        """Of another object, which is nobody's else: until it is copied nothing has changed."""
        draft = f"{self._prefix}.draft-{value}"
        try:
            self._s3.put_object(Bucket=self._bucket, Key=draft, Body=content(value))
        except _FAILURES as error:
            raise Failed(type(error).__name__) from None
        source = {"Bucket": self._bucket, "Key": draft}
        self._change("copy_object", name, CopySource=source)

    def _put_parts(self, name: str, data: bytes) -> None:
        """Until it is completed nothing has changed."""
        where = {"Bucket": self._bucket, "Key": self._prefix + name}
        done = []
        try:
            upload = self._s3.create_multipart_upload(**where)["UploadId"]
            for number, start in enumerate(range(0, len(data), _PART_BYTES), 1):
                part = {**where, "UploadId": upload, "PartNumber": number}
                body = data[start : start + _PART_BYTES]
                tag = self._s3.upload_part(**part, Body=body)["ETag"]
                done.append({"PartNumber": number, "ETag": tag})
        except _FAILURES as error:
            raise Failed(type(error).__name__) from None
        parts = {"Parts": done}
        self._change("complete_multipart_upload", name, UploadId=upload, MultipartUpload=parts)

    def put_new(self, name: str, value: int) -> None:
        self._change("put_object", name, Body=content(value), IfNoneMatch="*")

    def remove(self, name: str) -> None:
        """Nobody says whether it was there."""
        self._change("delete_object", name)

    def _change(self, operation: str, name: str, **asked: object) -> None:
        try:
            getattr(self._s3, operation)(Bucket=self._bucket, Key=self._prefix + name, **asked)
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            raise (Refused() if status == 412 else Unknown(str(status))) from None
        except EndpointConnectionError as error:  # nobody listened: it was not sent
            raise Failed(type(error).__name__) from None
        except (BotoCoreError, urllib3.exceptions.HTTPError, OSError) as error:
            raise Unknown(type(error).__name__) from None

    def read(self, name: str) -> int:
        try:
            answer = self._s3.get_object(Bucket=self._bucket, Key=self._prefix + name)
            return value_of(answer["Body"].read())
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == 404:
                return ABSENT
            raise Failed(str(status)) from None
        except (BotoCoreError, urllib3.exceptions.HTTPError, OSError) as error:
            raise Failed(type(error).__name__) from None

    def close(self) -> None:
        self._s3.close()


class ByClient:
    name = "client"

    def __init__(self, store: Path, namespace: str) -> None:
        self._namespace = namespace
        self._client = kvfs.Client(store)

    def _path(self, name: str) -> str:
        return f"/{self._namespace}/{name}"

    def put(self, name: str, value: int) -> None:
        self._change(lambda: self._client.put(self._path(name), content(value)))

    def put_new(self, name: str, value: int) -> None:
        self._change(lambda: self._client.put(self._path(name), content(value), exclusive=True))

    def remove(self, name: str) -> None:
        self._change(lambda: self._client.remove(self._path(name)))

    def rename(self, name: str, other: str) -> None:
        self._change(lambda: self._client.rename(self._path(name), self._path(other)))

    def _change(self, do: Any) -> None:
        try:
            do()
        except (errors.Exists, errors.NotFound):
            raise Refused from None
        except (errors.KvfsError, OSError) as error:
            raise Unknown(type(error).__name__) from None

    def read(self, name: str) -> int:
        try:
            return value_of(self._client.get(self._path(name)))
        except errors.NotFound:
            return ABSENT
        except (errors.KvfsError, OSError) as error:
            raise Failed(type(error).__name__) from None

    def close(self) -> None:
        self._client.close()
