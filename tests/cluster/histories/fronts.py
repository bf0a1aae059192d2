"""The ways by which a host's programs reach its node: the mount, the S3 API, the Python client.

Each does an operation and says how it ended by what it raises: Refused, Unknown (a change that may
have been made), Failed (nothing was learnt, nothing changed). Used by one thread.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import boto3
import urllib3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

import kvfs
from kvfs import errors
from tests.cluster.histories.events import ABSENT, Failed, Refused, Unknown
from tests.cluster.histories.values import content, value_of


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

    def put(self, name: str, value: int) -> None:
        draft = self._root / f".draft-{value}"
        with _changing():
            draft.write_bytes(content(value))
            draft.rename(self._root / name)

    def write(self, name: str, value: int) -> None:
        """In place."""
        with _changing():
            fd = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            _fill(fd, value)

    def reserve(self, name: str) -> int:
        """The descriptor of a file that nobody else may make."""
        with _changing():
            try:
                return os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                raise Refused from None

    def publish(self, fd: int, value: int) -> None:
        with _changing():
            _fill(fd, value)

    def put_new(self, name: str, value: int) -> None:
        draft = self._root / f".draft-{value}"
        with _changing():
            draft.write_bytes(content(value))
            try:
                os.link(draft, self._root / name)
            except FileExistsError:
                raise Refused from None

    def read(self, name: str) -> int:
        try:
            return value_of((self._root / name).read_bytes())
        except FileNotFoundError:
            return ABSENT
        except OSError as error:
            raise Failed(errno.errorcode.get(error.errno or 0, str(error))) from None

    def remove(self, name: str) -> None:
        with _changing():
            try:
                os.unlink(self._root / name)
            except FileNotFoundError:
                raise Refused from None

    def rename(self, name: str, other: str) -> None:
        with _changing():
            try:
                os.rename(self._root / name, self._root / other)
            except FileNotFoundError:
                raise Refused from None

    def close(self) -> None:
        pass


def _fill(fd: int, value: int) -> None:
    data = content(value)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


@contextlib.contextmanager
def _changing() -> Iterator[None]:
    """An error leaves it unknown whether the change was made."""
    try:
        yield
    except OSError as error:
        raise Unknown(errno.errorcode.get(error.errno or 0, str(error))) from None


class ByS3:
    name = "s3"

    def __init__(self, endpoint: str, keys: tuple[str, str], bucket: str) -> None:
        """`keys`: access key and secret. The thread that uses it is on a host already."""
        self._bucket = bucket
        self._s3: Any = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=keys[0],
            aws_secret_access_key=keys[1],
            config=Config(
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
                connect_timeout=5,
                read_timeout=30,
            ),
        )

    def put(self, name: str, value: int) -> None:
        self._change("put_object", Key=name, Body=content(value))

    def put_new(self, name: str, value: int) -> None:
        self._change("put_object", Key=name, Body=content(value), IfNoneMatch="*")

    def remove(self, name: str) -> None:
        """Nobody says whether it was there."""
        self._change("delete_object", Key=name)

    def _change(self, operation: str, **asked: object) -> None:
        try:
            getattr(self._s3, operation)(Bucket=self._bucket, **asked)
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            raise (Refused() if status == 412 else Unknown(str(status))) from None
        except (BotoCoreError, urllib3.exceptions.HTTPError, OSError) as error:
            raise Unknown(type(error).__name__) from None

    def read(self, name: str) -> int:
        try:
            answer = self._s3.get_object(Bucket=self._bucket, Key=name)
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
