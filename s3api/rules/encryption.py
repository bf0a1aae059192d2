"""Encryption at rest: accepted and refused requests.

Objects are plain files of the store. If everything that the store lies on is encrypted
(`disk_encryption`, or the administrator says so), AES256, by which S3 means its own keys, is what
every object has, and may be asked for. Elsewhere asking for it is NotImplemented, and keys of the
client or of a key service are so everywhere.
"""

import hashlib
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from typing import Any, Final

from s3api.http.s3_errors import S3Error, invalid_argument

_PREFIXES: Final = (
    "x-amz-server-side-encryption",
    "x-amz-copy-source-server-side-encryption",
)
_METHOD: Final = "x-amz-server-side-encryption"
_METHODS: Final = frozenset({"AES256", "aws:fsx", "aws:kms", "aws:kms:dsse"})
_KMS_KEY: Final = "x-amz-server-side-encryption-aws-kms-key-id"
_CUSTOMER: Final = "x-amz-server-side-encryption-customer-"
_CUSTOMER_PARTS: Final = frozenset({"algorithm", "key", "key-md5"})
AES256: Final = "AES256"
_REASON: Final = (
    "this server's storage is not known to be encrypted; put the store on fscrypt or dm-crypt, or"
    " start it with encrypted_storage = yes where it is encrypted otherwise"
)
_KEYS: Final = "objects are encrypted by the storage, with its own key (AES256), and no other way"


def check_headers(
    headers: Mapping[str, str], *, reads: bool = False, encrypted: bool = False
) -> None:
    """Raises NotImplemented if a request (its headers or form fields, names in lower case) asks for
    encryption that it does not get; InvalidArgument if its wish would be nonsense anywhere. If it
    `reads`, there is no key of the client: InvalidRequest. `encrypted`: the storage is."""
    asked = [name for name in headers if name.startswith(_PREFIXES)]
    if not asked:
        return
    _check_method(headers)
    _check_customer_key(headers)
    if reads:
        raise S3Error(
            "InvalidRequest", "The encryption parameters are not applicable to this object."
        )
    if encrypted and asked == [_METHOD] and headers[_METHOD] == AES256:
        return
    reason = _KEYS if encrypted else _REASON
    raise S3Error("NotImplemented", f"The header {asked[0]} is not implemented: {reason}")


def _check_method(headers: Mapping[str, str]) -> None:
    method, key_id = headers.get(_METHOD), headers.get(_KMS_KEY)
    if method is not None and method not in _METHODS:
        raise invalid_argument(_METHOD, method, "The encryption method specified is not supported")
    if method is not None and f"{_CUSTOMER}algorithm" in headers:
        raise invalid_argument(
            _METHOD,
            method,
            "Server Side Encryption with Customer provided key is incompatible with the encryption"
            " method specified",
        )
    if key_id is not None and (method is None or not method.startswith("aws:kms")):
        message = f"Server Side Encryption with AWS KMS managed key requires HTTP header {_METHOD}"
        raise invalid_argument(_METHOD, method or "", f"{message} : aws:kms")


def _check_customer_key(headers: Mapping[str, str]) -> None:
    given = {name for name in _CUSTOMER_PARTS if _CUSTOMER + name in headers}
    if given and (missing := _CUSTOMER_PARTS - given):
        raise invalid_argument(
            _CUSTOMER + min(missing),
            "",
            "Requests specifying Server Side Encryption with Customer provided keys must provide"
            " the algorithm, the key and its MD5.",
        )
    algorithm = headers.get(f"{_CUSTOMER}algorithm")
    if algorithm not in (None, "AES256"):
        raise S3Error("InvalidEncryptionAlgorithmError")
    if given and _md5_of(headers[f"{_CUSTOMER}key"]) != headers[f"{_CUSTOMER}key-md5"]:
        raise invalid_argument(
            f"{_CUSTOMER}key-md5",
            headers[f"{_CUSTOMER}key-md5"],
            "The calculated MD5 hash of the key did not match the hash that was provided.",
        )


def _md5_of(key: str) -> str:
    """Returns the MD5 of a key, both in base64; empty if it is none."""
    try:
        return b64encode(hashlib.md5(b64decode(key), usedforsecurity=False).digest()).decode()
    except (Base64Error, ValueError):
        return ""


def check_configuration(configuration: Mapping[str, Any], *, encrypted: bool) -> None:
    """Checks the configuration of PutBucketEncryption. Raises MalformedXML; NotImplemented for
    encryption that objects do not have."""
    rules = configuration.get("Rules", ())
    default = rules[0].get("ApplyServerSideEncryptionByDefault") if len(rules) == 1 else None
    if not default:
        raise S3Error("MalformedXML")
    if not encrypted:
        raise S3Error("NotImplemented", f"Default encryption is not implemented: {_REASON}")
    if default.get("SSEAlgorithm") != AES256 or "KMSMasterKeyID" in default:
        raise S3Error("NotImplemented", f"This default encryption is not implemented: {_KEYS}")


def no_configuration() -> S3Error:
    """Returns the answer to GetBucketEncryption if none was put, or nothing is encrypted."""
    return S3Error("ServerSideEncryptionConfigurationNotFoundError")
