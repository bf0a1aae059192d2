"""What changes between a request's head and the end of its body: what is decided by the head alone
must hold for what is there at the end."""

import contextlib
import hashlib
import http.client
import socket
import threading
from collections.abc import Iterator

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.integration.s3 import REGION, S3, refused
from tests.integration.s3api.access.test_s3_policies import allow, deny, document

GROUP = "http://acs.amazonaws.com/groups/global/AllUsers"
XSI = "http://www.w3.org/2001/XMLSchema-instance"
PUBLIC = (
    "<AccessControlPolicy><Owner><ID>main</ID></Owner><AccessControlList><Grant>"
    f'<Grantee xmlns:xsi="{XSI}" xsi:type="Group"><URI>{GROUP}</URI></Grantee>'
    "<Permission>READ</Permission></Grant></AccessControlList></AccessControlPolicy>"
).encode()


class Slow:
    """A request of which all but the last byte was sent, and of which the server has begun to read
    the body, or has answered already."""

    def __init__(self, peer: socket.socket, body: bytes) -> None:
        self._peer = peer
        self._body = body
        self._told = peer.recv(4096)  # leave to go on, or the answer

    def end(self) -> bytes:
        """The rest is sent; the answer."""
        with contextlib.suppress(ConnectionError):
            self._peer.sendall(self._body)
            while part := self._peer.recv(65536):
                self._told += part
        return self._told.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")


@contextlib.contextmanager
def slow(s3: S3, user: str | None, method: str, target: str, body: bytes) -> Iterator[Slow]:
    """The body is not sent before the server asks for it, which it does when it has decided."""
    request = AWSRequest(method, s3.endpoint + target, {}, body)
    request.headers["x-amz-content-sha256"] = hashlib.sha256(body).hexdigest()
    if user is not None:
        pair = s3.users[user]
        S3SigV4Auth(Credentials(pair.access_key, pair.secret), "s3", REGION).add_auth(request)
    fields = {
        **dict(request.headers.items()),
        "Host": f"{s3.host}:{s3.port}",
        "Content-Length": str(len(body)),
        "Connection": "close",
        "Expect": "100-continue",
    }
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {fields[name]}" for name in fields)]
    with s3.connect() as peer:
        peer.sendall("\r\n".join([*lines, "", ""]).encode())
        yield Slow(peer, body)


def test_an_object_that_comes_after_the_head_is_not_made_public(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_bucket_policy(Bucket=bucket, Policy=document(allow("s3:ListBucket", bucket)))
    with refused(404, "NoSuchKey"):  # who may list is told
        s3.client("alt").put_object_acl(Bucket=bucket, Key="a", ACL="public-read")
    with slow(s3, "alt", "PUT", f"/{bucket}/a?acl", PUBLIC) as request:
        client.put_object(Bucket=bucket, Key="a", Body=b"secret")
        assert not request.end().startswith(b"HTTP/1.1 200")
    with refused(403, "AccessDenied"):
        s3.client(None).get_object(Bucket=bucket, Key="a")


def test_an_object_that_takes_the_place_of_ones_own_is_not_made_public(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"of both", GrantWriteACP="id=alt")
    with slow(s3, "alt", "PUT", f"/{bucket}/a?acl", PUBLIC) as request:
        client.put_object(Bucket=bucket, Key="a", Body=b"secret")
        assert request.end().startswith(b"HTTP/1.1 403")
    with refused(403, "AccessDenied"):
        s3.client(None).get_object(Bucket=bucket, Key="a")


def test_what_is_forbidden_meanwhile_is_not_deleted(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    every = f"{bucket}/*"
    client.put_bucket_policy(Bucket=bucket, Policy=document(allow("s3:DeleteObject", every)))
    doomed = b"<Delete><Object><Key>a</Key></Object></Delete>"
    with slow(s3, None, "POST", f"/{bucket}?delete", doomed) as request:
        client.put_bucket_policy(Bucket=bucket, Policy=document(deny("s3:DeleteObject", every)))
        assert b"<Code>AccessDenied</Code>" in request.end()
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"x"


def test_versions_that_are_kept_meanwhile_stay(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"first")
    with slow(s3, "main", "PUT", f"/{bucket}/a", b"slow") as request:
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        second = client.put_object(Bucket=bucket, Key="a", Body=b"second")["VersionId"]
        assert b"x-amz-version-id: " in request.end()
    told = client.list_object_versions(Bucket=bucket)["Versions"]
    assert [each["VersionId"] for each in told][1:] == [second, "null"]


def test_an_object_that_comes_while_it_is_looked_for_is_not_read(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_bucket_policy(Bucket=bucket, Policy=document(allow("s3:ListBucket", bucket)))
    told: set[int] = set()
    ended = threading.Event()

    def read() -> None:
        connection = http.client.HTTPConnection(s3.host, s3.port, timeout=30)
        with contextlib.closing(connection):
            while not ended.is_set():
                connection.request("GET", f"/{bucket}/a")
                answer = connection.getresponse()
                answer.read()
                told.add(answer.status)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for each in readers:
        each.start()
    try:
        for _ in range(150):
            client.put_object(Bucket=bucket, Key="a", Body=b"secret")
            client.delete_object(Bucket=bucket, Key="a")
    finally:
        ended.set()
        for each in readers:
            each.join()
    assert told <= {403, 404}
