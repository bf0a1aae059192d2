"""AWS's common runtime as inference engines drive it.

LMCache's connector: the bucket in the host's name, large objects in managed parts with checksums
behind them, GETs that it splits into ranges. Run:ai's streamer: 8 ranges of 8 MiB at a time. NIXL:
a probe that must be told 404, keys that begin with `/`.
"""

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from awscrt import auth, s3
from awscrt.http import HttpHeaders, HttpRequest
from awscrt.io import (
    ClientBootstrap,
    ClientTlsContext,
    DefaultHostResolver,
    EventLoopGroup,
    TlsConnectionOptions,
    TlsContextOptions,
)
from common import ACCESS_KEY, BUCKET, HOST, REGION, SECRET, beside
from objects import MIB, ODD, SIZES, content

VIRTUAL = f"{BUCKET}.localhost:{HOST.rpartition(':')[2]}"
CHECKSUMS = s3.S3ChecksumAlgorithm
ALGORITHMS = (
    CHECKSUMS.CRC32,
    CHECKSUMS.CRC32C,
    CHECKSUMS.CRC64NVME,
    CHECKSUMS.SHA1,
    CHECKSUMS.SHA256,
)


class Client:
    """Requests of one S3Client; parts are of 5 MiB unless told."""

    def __init__(self, part_size: int = 5 * MIB) -> None:
        group = EventLoopGroup(2)
        bootstrap = ClientBootstrap(group, DefaultHostResolver(group))
        self.credentials = auth.AwsCredentialsProvider.new_static(ACCESS_KEY, SECRET)
        tls = TlsConnectionOptions(ClientTlsContext(TlsContextOptions()))
        tls.set_alpn_list(["h2", "http/1.1"])
        self.client = s3.S3Client(
            bootstrap=bootstrap,
            region=REGION,
            part_size=part_size,
            multipart_upload_threshold=part_size,
            tls_connection_options=tls,
            tls_mode=s3.S3RequestTlsMode.DISABLED,
        )

    def ask(
        self,
        kind: s3.S3RequestType,
        method: str,
        target: str,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        **options: object,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer; raises where the runtime sees an error."""
        got: dict[str, Any] = {}
        parts: dict[int, bytes] = {}
        lock = threading.Lock()

        def on_headers(status_code: int, headers: list[tuple[str, str]], **_: object) -> None:
            got.update(status=status_code, headers={k.lower(): v for k, v in headers})

        def on_body(chunk: bytes, offset: int, **_: object) -> None:
            with lock:
                parts[offset] = bytes(chunk)

        fields = HttpHeaders([("Host", VIRTUAL), *(headers or {}).items()])
        stream = None
        if body is not None:
            fields.add("Content-Length", str(len(body)))
            stream = io.BytesIO(body)
        request = s3.S3Request(
            client=self.client,
            type=kind,
            request=HttpRequest(method, target, fields, stream),
            credential_provider=self.credentials,
            region=REGION,
            on_headers=on_headers,
            on_body=on_body,
            **options,
        )
        try:
            request.finished_future.result(60)
        except Exception as error:
            if "status" not in got:
                raise
            error.add_note(str(got))
            if got["status"] != 404:
                raise
        whole = b"".join(parts[offset] for offset in sorted(parts))
        return got["status"], got["headers"], whole

    def put(
        self, key: str, data: bytes, algorithm: s3.S3ChecksumAlgorithm = CHECKSUMS.CRC32
    ) -> None:
        config = s3.S3ChecksumConfig(algorithm, s3.S3ChecksumLocation.TRAILER)
        kind = s3.S3RequestType.PUT_OBJECT
        status, _, _ = self.ask(kind, "PUT", target(key), body=data, checksum_config=config)
        assert status == 200

    def get(self, key: str, headers: dict[str, str] | None = None) -> bytes:
        config = s3.S3ChecksumConfig(validate_response=True)
        kind = s3.S3RequestType.GET_OBJECT
        status, _, data = self.ask(kind, "GET", target(key), headers, checksum_config=config)
        assert status in (200, 206)
        return data

    def head(self, key: str) -> tuple[int, dict[str, str]]:
        kind = s3.S3RequestType.DEFAULT
        return self.ask(kind, "HEAD", target(key), operation_name="HeadObject")[:2]

    def delete(self, key: str) -> None:
        kind = s3.S3RequestType.DEFAULT
        status, _, _ = self.ask(kind, "DELETE", target(key), operation_name="DeleteObject")
        assert status == 204


def target(key: str) -> str:
    return "/" + quote(key)


def checksums() -> None:
    """Each kind, behind the body of a PUT and behind each part's; checked again at GET."""
    for algorithm in ALGORITHMS:
        for size in (SIZES["small"], SIZES["above-a-part"]):
            key = f"{algorithm.name}-{size}"
            client.put(key, content(size), algorithm)
            assert beside(key).read_bytes() == content(size)
            assert client.get(key) == content(size)


def streamer() -> None:
    beside("weights").write_bytes(content(64 * MIB))
    wide = Client(8 * MIB)
    starts = range(0, 64 * MIB, 8 * MIB)
    with ThreadPoolExecutor(8) as pool:
        ranges = [{"Range": f"bytes={start}-{start + 8 * MIB - 1}"} for start in starts]
        parts = list(pool.map(lambda header: wide.get("weights", header), ranges))
    assert b"".join(parts) == content(64 * MIB)
    assert wide.get("weights") == content(64 * MIB)


def nixl() -> None:
    assert client.head("__nixl_probe__/connectivity_test")[0] == 404
    for key in ("/leading", "//two", "/tmp/kv//block"):
        client.put(key, key.encode())
        assert client.get(key) == key.encode()
        status, headers = client.head(key)
        assert (status, headers["content-length"]) == (200, str(len(key)))
    assert beside("/tmp/kv//block").read_bytes() == b"/tmp/kv//block"
    kind = s3.S3RequestType.DEFAULT
    query = "/?list-type=2&prefix=/&delimiter="
    status, _, document = client.ask(kind, "GET", query, operation_name="ListObjectsV2")
    assert status == 200
    positions = [document.index(f"<Key>{key}</Key>".encode()) for key in ("//two", "/leading")]
    assert positions == sorted(positions)


client = Client()
for name, size in SIZES.items():
    client.put(name, content(size))
    assert beside(name).read_bytes() == content(size)
    assert client.get(name) == content(size)
    client.delete(name)
    assert client.head(name)[0] == 404
for key in ODD:
    client.put(key, key.encode())
    assert client.get(key) == key.encode()
checksums()
streamer()
nixl()
