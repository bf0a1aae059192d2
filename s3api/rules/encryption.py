"""Encryption at rest: what is refused.

Objects are plain files of the store, so no request is told that its object is encrypted: asking for
it is NotImplemented, whatever the method. Encrypt the disk or the filesystem under the store.
"""

from collections.abc import Iterable
from typing import Final

from s3api.errors import S3Error

_PREFIXES: Final = (
    "x-amz-server-side-encryption",
    "x-amz-copy-source-server-side-encryption",
)
_REASON: Final = "this server keeps objects as plain files; encrypt the store's filesystem instead"


def refuse_headers(names: Iterable[str]) -> None:
    """Raises NotImplemented where a request (its header names or form fields, in lower case) asks
    for encryption."""
    for name in names:
        if name.startswith(_PREFIXES):
            raise S3Error("NotImplemented", f"The header {name} is not implemented: {_REASON}")


def refuse_configuration() -> S3Error:
    """The refusal of PutBucketEncryption, in whatever form."""
    return S3Error("NotImplemented", f"Default encryption is not implemented: {_REASON}")


def no_configuration() -> S3Error:
    """The answer to GetBucketEncryption: nothing is encrypted."""
    return S3Error("ServerSideEncryptionConfigurationNotFoundError")
