"""Checksums of bodies: those that a request asks for, their computation, and S3's verdicts.

Values travel as base64 of the big-endian digest. A FULL_OBJECT value is of the whole body; the
COMPOSITE value of a multipart upload is the hash of its parts' digests, written `base64-N`. The
algorithms of each type:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity-upload.html.

Everything runs in C over the caller's buffer; measured on one core: CRC32C and CRC64NVME 57 GB/s,
CRC32 4.3 (zlib; awscrt 3.1), SHA256 1.8, SHA1 1.9, MD5 0.8.
"""

import base64
import binascii
import functools
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
import xxhash
from awscrt import checksums as crt

from s3api.http.s3_errors import S3Error
from s3api.rules import etag

FULL_OBJECT: Final = "FULL_OBJECT"
COMPOSITE: Final = "COMPOSITE"
DEFAULT: Final = "CRC64NVME"
"""The algorithm that S3 uses if the client names none."""

_PREFIX: Final = "x-amz-checksum-"
_OTHER_HEADERS: Final = frozenset({_PREFIX + "algorithm", _PREFIX + "mode", _PREFIX + "type"})
_SDK: Final = "x-amz-sdk-checksum-algorithm"


class Hasher(Protocol):
    """A running digest, as hashlib has them."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


Step = Callable[[memoryview, int], int]
"""Returns the CRC of what has the second argument as its CRC, followed by these bytes."""


class _Crc:
    """A running CRC of `digest_bytes` bytes."""

    __slots__ = ("_digest_bytes", "_step", "_value")

    def __init__(self, step: Step, digest_bytes: int) -> None:
        self._step = step
        self._digest_bytes = digest_bytes
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._step(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._digest_bytes, "big")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`name` as in x-amz-checksum-algorithm; `combine(a, b, length of b)` only of CRCs;
    `types`, the default one of multipart uploads first. What follows from the name is computed
    once."""

    name: str
    digest_bytes: int
    new: Callable[[], Hasher]
    combine: Callable[[int, int, int], int] | None
    types: tuple[str, ...]
    step: Step | None = None
    """That of a CRC; None: it is none."""
    header: str = field(init=False)
    """The header or trailer that carries a value."""
    member: str = field(init=False)
    """The member of botocore's shapes that carries a value."""
    kept_as: str = field(init=False)
    """The name under which an object's checksum is kept."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", _PREFIX + self.name.lower())
        object.__setattr__(self, "member", f"Checksum{self.name}")
        object.__setattr__(self, "kept_as", f"checksum.{self.name.lower()}")


def _crc(
    name: str,
    digest_bytes: int,
    step: Step,
    combine: Callable[[int, int, int], int],
    types: tuple[str, ...],
) -> Algorithm:
    return Algorithm(name, digest_bytes, lambda: _Crc(step, digest_bytes), combine, types, step)


def _sha1() -> Hasher:
    return hashlib.sha1(usedforsecurity=False)


ALGORITHMS: Final = {
    each.name: each
    for each in (
        _crc("CRC32", 4, zlib.crc32, crt.combine_crc32, (COMPOSITE, FULL_OBJECT)),
        _crc("CRC32C", 4, crt.crc32c, crt.combine_crc32c, (COMPOSITE, FULL_OBJECT)),
        _crc("CRC64NVME", 8, crt.crc64nvme, crt.combine_crc64nvme, (FULL_OBJECT,)),
        Algorithm("SHA1", 20, _sha1, None, (COMPOSITE,)),
        Algorithm("SHA256", 32, hashlib.sha256, None, (COMPOSITE,)),
    )
}
_BY_HEADER: Final = {each.header: each for each in ALGORITHMS.values()}


class StoredChecksum(msgspec.Struct, frozen=True):
    """A stored checksum: `value` as it stands in headers, `type` FULL_OBJECT or COMPOSITE."""

    algorithm: Algorithm
    value: str
    type: str


class WantedChecksum(msgspec.Struct, frozen=True):
    """The checksum that a request wants computed: `expected` the digest that its header names,
    `trailer` the name of the trailer that will name it; neither if S3 computes it for itself."""

    algorithm: Algorithm
    expected: bytes | None = None
    trailer: str | None = None


def algorithm(name: str) -> Algorithm:
    """Returns the algorithm of that name, in any case of letters. Raises InvalidRequest."""
    found = ALGORITHMS.get(name.upper())
    if found is None:
        raise _invalid(
            "Checksum algorithm provided is unsupported. Please try again with any of the valid"
            f" types: [{', '.join(ALGORITHMS)}]"
        )
    return found


def are_named(fields: Mapping[bytes, bytes]) -> bool:
    """Returns whether headers (names in lower case) name a checksum: else `wanted` needs none of
    them."""
    return b"checksum" in b" ".join(fields) or b"x-amz-trailer" in fields


def wanted(headers: Mapping[str, str], fallback: str = DEFAULT) -> WantedChecksum:
    """Returns the checksum that a PUT or UploadPart with these headers (names in lower case) wants;
    `fallback` names the algorithm of the upload or the bucket. Raises InvalidRequest, BadDigest."""
    if not headers:
        return _by_itself(fallback)
    given = [name for name in headers if name.startswith(_PREFIX) and name not in _OTHER_HEADERS]
    trailer = headers.get("x-amz-trailer", "").strip().lower()
    if len(given) + bool(trailer) > 1:
        raise _invalid(
            "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed."
        )
    if trailer:
        found = WantedChecksum(_of_trailer(trailer), trailer=trailer)
    elif given:
        named = algorithm(given[0].removeprefix(_PREFIX))
        found = WantedChecksum(named, expected=_of_header(named, headers[given[0]]))
    else:
        found = WantedChecksum(algorithm(fallback))
    _check_sdk(headers.get(_SDK), found, named=bool(given or trailer))
    return found


@functools.cache
def _by_itself(name: str) -> WantedChecksum:
    """Returns what is wanted of a body whose client asks for nothing."""
    return WantedChecksum(algorithm(name))


def encode(digest: bytes) -> str:
    """Returns the base64 form of a digest."""
    return binascii.b2a_base64(digest, newline=False).decode("ascii")


def decode(value: str, digest_bytes: int) -> bytes | None:
    """Returns the digest of `digest_bytes` bytes that `value` encodes, or None."""
    try:
        digest = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return None
    return digest if len(digest) == digest_bytes else None


def content_md5(value: str | None) -> bytes | None:
    """Returns the digest of a Content-MD5 header, None without one. Raises InvalidDigest."""
    if value is None:
        return None
    digest = decode(value.strip(), 16)
    if digest is None:
        raise S3Error(
            "InvalidDigest",
            "The Content-MD5 you specified was invalid.",
            extra={"Content-MD5": value},
        )
    return digest


class Digests(msgspec.Struct, frozen=True):
    """The digests of a received body: size in bytes, tag without quotes (empty if none was asked
    for), checksum, and the one that was computed besides."""

    size: int
    etag: str
    checksum: StoredChecksum
    besides: StoredChecksum | None = None


class FirstPass:
    """Computes everything that a body needs while it is received, each view read once.

    `content_sha256` is the payload's digest in hexadecimal if the signature covers it, else None;
    `content_md5` the digest of that header; `size` the announced number of bytes, if known;
    `besides` another algorithm to compute. For an ETag: `tag`.
    """

    __slots__ = (
        "_besides",
        "_content_md5",
        "_content_sha256",
        "_hashers",
        "_md5",
        "_sha256",
        "_size",
        "_step",
        "_sum",
        "_value",
        "_wanted",
        "_xxh3",
        "size",
        "slow",
    )

    def __init__(
        self,
        wanted: WantedChecksum,
        *,
        size: int | None,
        content_sha256: str | None = None,
        content_md5: bytes | None = None,
        besides: Algorithm | None = None,
    ) -> None:
        self.size = 0
        self.slow: Hasher | None = None
        """The hasher that takes longer than all else, and may run beside it: the MD5."""
        self._size = size
        self._wanted = wanted
        self._content_sha256 = content_sha256
        self._content_md5 = content_md5
        self._step = wanted.algorithm.step
        """The wanted checksum, if it is a CRC: then `_value` runs, else `_sum`."""
        self._value = 0
        self._sum = wanted.algorithm.new() if self._step is None else None
        self._sha256: Hasher | None = None
        self._md5: Hasher | None = None
        self._xxh3: Hasher | None = None
        self._hashers: list[Hasher] = [] if self._sum is None else [self._sum]
        self._besides: tuple[Algorithm, Hasher] | None = None
        if besides is not None and besides is not wanted.algorithm:
            self._besides = besides, besides.new()
            self._hashers.append(self._besides[1])
        if content_sha256 is not None:
            if wanted.algorithm.name == "SHA256":
                self._sha256 = self._sum
            else:
                self._sha256 = hashlib.sha256()
                self._hashers.append(self._sha256)
        if content_md5 is not None:
            self.slow = self._md5 = hashlib.md5(usedforsecurity=False)

    def tag(self, *, fast: bool) -> None:
        """Gives the body an ETag, with `fast` one that is no MD5 if that would take long; to be
        called before the first bytes."""
        hashed = self._md5 is not None or self._wanted.algorithm.combine is None
        if fast and not etag.wants_md5(self._size, hashed=hashed):
            self._xxh3 = xxhash.xxh3_128()
            self._hashers.append(self._xxh3)
        elif self._md5 is None:
            self.slow = self._md5 = hashlib.md5(usedforsecurity=False)

    def update(self, view: memoryview) -> None:
        """Takes the next bytes; the buffer may be reused afterwards."""
        self.size += view.nbytes
        if self._step is not None:
            self._value = self._step(view, self._value)
        for hasher in self._hashers:
            hasher.update(view)
        if self.slow is not None:
            self.slow.update(view)

    def update_quickly(self, view: memoryview) -> None:
        """Takes the next bytes, except into `slow`, which the caller feeds."""
        self.size += view.nbytes
        if self._step is not None:
            self._value = self._step(view, self._value)
        for hasher in self._hashers:
            hasher.update(view)

    def finish(self, trailers: Mapping[str, str]) -> Digests:
        """Verifies the whole body. `trailers` are those that came behind it, names in lower case.

        Raises XAmzContentSHA256Mismatch, BadDigest, MalformedTrailerError."""
        if self._content_sha256 is not None:
            self._check_payload()
        if self._content_md5 is not None:
            self._check_md5()
        digest = (
            self._value.to_bytes(self._wanted.algorithm.digest_bytes, "big")
            if self._sum is None
            else self._sum.digest()
        )
        if self._wanted.expected is not None or self._wanted.trailer is not None:
            self._check_sum(digest, trailers)
        besides = None
        if self._besides is not None:
            found, hasher = self._besides
            besides = StoredChecksum(found, encode(hasher.digest()), FULL_OBJECT)
        value = binascii.b2a_base64(digest, newline=False).decode("ascii")
        checksum = StoredChecksum(self._wanted.algorithm, value, FULL_OBJECT)
        tag = ""
        if self._md5 is not None:
            tag = self._md5.digest().hex()
        elif self._xxh3 is not None:
            tag = etag.fast_etag(self._xxh3.digest())
        return Digests(self.size, tag, checksum, besides)

    def _check_payload(self) -> None:
        if self._sha256 is None or self._content_sha256 is None:
            return
        computed = self._sha256.digest().hex()
        if computed != self._content_sha256:
            raise S3Error(
                "XAmzContentSHA256Mismatch",
                "The provided 'x-amz-content-sha256' header does not match what was computed.",
                extra={
                    "ClientComputedContentSHA256": self._content_sha256,
                    "S3ComputedContentSHA256": computed,
                },
            )

    def _check_md5(self) -> None:
        if self._content_md5 is None:
            return
        assert self._md5 is not None
        computed = self._md5.digest()
        if computed != self._content_md5:
            raise S3Error(
                "BadDigest",
                "The Content-MD5 you specified did not match what we received.",
                extra={
                    "ExpectedDigest": encode(self._content_md5),
                    "CalculatedDigest": encode(computed),
                },
            )

    def _check_sum(self, digest: bytes, trailers: Mapping[str, str]) -> None:
        expected = self._wanted.expected
        if self._wanted.trailer is not None:
            value = trailers.get(self._wanted.trailer)
            if value is None:
                raise S3Error(
                    "MalformedTrailerError",
                    "The request contained trailing data that was not well-formed or did not"
                    " conform to our published schema.",
                )
            expected = _of_header(self._wanted.algorithm, value)
        if expected is not None and expected != digest:
            raise mismatch(self._wanted.algorithm)


def multipart_type(name: str | None, type_: str | None) -> tuple[Algorithm, str]:
    """Returns algorithm and type of a multipart upload created with these. Raises
    InvalidRequest."""
    if name is None:
        if type_ is not None:
            raise _invalid(
                "The x-amz-checksum-type header can only be used with the x-amz-checksum-algorithm"
                " header."
            )
        return ALGORITHMS[DEFAULT], FULL_OBJECT
    found = algorithm(name)
    if type_ is None:
        return found, found.types[0]
    check_type(found, type_)
    return found, type_


def check_type(found: Algorithm, type_: str) -> None:
    """Raises InvalidRequest if the algorithm does not have the type."""
    if type_ not in (FULL_OBJECT, COMPOSITE):
        raise _invalid("Value for x-amz-checksum-type header is invalid.")
    if type_ not in found.types:
        raise _invalid(
            f"The {type_} checksum type cannot be used with the {found.name.lower()} checksum"
            " algorithm."
        )


def whole(found: Algorithm, type_: str, parts: Sequence[tuple[str, int]]) -> StoredChecksum:
    """Returns the checksum of a completed upload from its parts' (base64 value, bytes), in order.

    Nothing is read: CRCs are combined."""
    digests = [base64.b64decode(value) for value, _ in parts]
    if type_ == COMPOSITE:
        hasher = found.new()
        hasher.update(memoryview(b"".join(digests)))
        return StoredChecksum(found, f"{encode(hasher.digest())}-{len(parts)}", COMPOSITE)
    assert found.combine is not None
    value = 0
    for digest, (_, length) in zip(digests, parts, strict=True):
        value = found.combine(value, int.from_bytes(digest, "big"), length)
    return StoredChecksum(found, encode(value.to_bytes(found.digest_bytes, "big")), FULL_OBJECT)


def check_whole(computed: StoredChecksum, header: str | None) -> None:
    """Compares the value that the client names for a completed upload with the computed one; the
    `-N` of a COMPOSITE value may be left out. Raises BadDigest."""
    if header is None:
        return
    value = header.strip()
    if computed.type == COMPOSITE and "-" not in value:
        value += computed.value[computed.value.index("-") :]
    if value != computed.value:
        raise mismatch(computed.algorithm)


def mismatch(found: Algorithm) -> S3Error:
    """Returns the refusal of a body whose checksum is another than the client's."""
    return S3Error(
        "BadDigest", f"The {found.name} you specified did not match the calculated checksum."
    )


def _of_header(found: Algorithm, value: str) -> bytes:
    digest = decode(value.strip(), found.digest_bytes)
    if digest is None:  # no body has it
        raise S3Error("BadDigest", f"Value for {found.header} header is invalid.")
    return digest


def _of_trailer(name: str) -> Algorithm:
    found = _BY_HEADER.get(name)
    if found is None:
        raise _invalid("The value specified in the x-amz-trailer header is not supported")
    return found


def _check_sdk(sdk: str | None, found: WantedChecksum, *, named: bool) -> None:
    if sdk is None:
        return
    announced = ALGORITHMS.get(sdk.strip().upper())
    if announced is None or (named and announced is not found.algorithm):
        raise _invalid(f"Value for {_SDK} header is invalid.")
    if not named:
        raise _invalid(
            f"{_SDK} specified, but no corresponding x-amz-checksum-* or x-amz-trailer headers were"
            " found."
        )


def _invalid(message: str) -> S3Error:
    return S3Error("InvalidRequest", message)
