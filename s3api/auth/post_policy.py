"""Browser uploads (POST with a form): the signed policy document and its permissions.

Sources: "Authenticating Requests in Browser-Based Uploads" and "POST Policy" of the S3 API
reference. The form's fields are read before the file: `verify` judges them and tells how large the
file may be; `Bounds.check` judges its length.

The caller has put the file's name in place of `${filename}` in the key already, since the policy
means the resulting key.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any, Final

import msgspec

from s3api.auth import sigv2
from s3api.auth.scope import Credential, parse_credential
from s3api.auth.signing import ALGORITHM, signing_key
from s3api.auth.signing_times import parse_basic
from s3api.auth.sigv4 import mismatch, unknown_key
from s3api.auth.verified import AuthType, SecretOf, Verified
from s3api.http.s3_errors import S3Error

MAX_POLICY: Final = 64 << 10
"""Bytes of a policy in base64."""
MAX_LENGTH: Final = 1 << 53
_UNNAMED: Final = frozenset(("policy", "file", "signature", "awsaccesskeyid", "x-amz-signature"))
"""Fields that no condition need name, besides those that begin with one of `_FREE`."""
_FREE: Final = ("x-ignore-", "x-amz-checksum-")
"""Beginnings of fields that need no condition. A checksum allows nothing: it can only refuse
damaged bodies."""
_EXPIRATION: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.\d{1,9})?Z", re.ASCII
).fullmatch

_decode_json: Final = msgspec.json.Decoder(dict[str, Any]).decode


class Bounds(msgspec.Struct, frozen=True):
    """The number of bytes that a file may have."""

    least: int = 0
    most: int = MAX_LENGTH

    def check(self, length: int) -> None:
        """Raises EntityTooSmall, EntityTooLarge; to be called with the bytes so far and at the
        end."""
        if length > self.most:
            raise S3Error("EntityTooLarge", extra=self._shown(length))
        if length < self.least:
            raise S3Error("EntityTooSmall", extra=self._shown(length))

    def _shown(self, length: int) -> dict[str, str]:
        return {
            "ProposedSize": str(length),
            "MinSizeAllowed": str(self.least),
            "MaxSizeAllowed": str(self.most),
        }


class SignedForm(msgspec.Struct, frozen=True):
    """A form whose signature is right and whose policy allows its fields."""

    verified: Verified
    bounds: Bounds


class _Policy(msgspec.Struct):
    expiration: datetime
    conditions: list[tuple[str, str, str]]
    """Operator (eq, starts-with), field in lower case, value."""
    bounds: Bounds


def verify(
    fields: Mapping[str, str],
    bucket: str,
    secret_of: SecretOf,
    now: float,
    *,
    version_2: bool = False,
) -> SignedForm | None:
    """Judges the fields that stood before the file, by name in any case; None: nobody signed it.

    `now` is in seconds since the epoch, the region is any, `version_2` allows signatures of version
    2. Raises S3Error: AccessDenied, InvalidPolicyDocument, InvalidArgument, InvalidAccessKeyId,
    SignatureDoesNotMatch, MalformedPOSTRequest.
    """
    form = {name.lower(): value for name, value in fields.items()}
    if len(form) != len(fields):
        raise S3Error("MalformedPOSTRequest")
    if "policy" not in form:
        if form.keys() & {"signature", "x-amz-signature"}:
            raise _missing("policy")
        return None
    verified = _signer(form, secret_of, version_2)
    policy = _parse(form["policy"])
    _check(policy, form | {"bucket": bucket}, now)
    return SignedForm(verified, policy.bounds)


def _signer(form: Mapping[str, str], secret_of: SecretOf, version_2: bool) -> Verified:
    if "x-amz-signature" in form or "x-amz-algorithm" in form:
        return _version_4(form, secret_of)
    if "signature" not in form or "awsaccesskeyid" not in form:
        raise _missing("signature" if "awsaccesskeyid" in form else "AWSAccessKeyId")
    if not version_2:
        raise S3Error(
            "InvalidRequest",
            "The authorization mechanism you have provided is not supported. Please use "
            "AWS4-HMAC-SHA256.",
        )
    return _version_2(form, secret_of)


def _version_4(form: Mapping[str, str], secret_of: SecretOf) -> Verified:
    if _field(form, "x-amz-algorithm") != ALGORITHM:
        raise _invalid("X-Amz-Algorithm", 'X-Amz-Algorithm only supports "AWS4-HMAC-SHA256"')
    credential = _credential(_field(form, "x-amz-credential"))
    timestamp = _field(form, "x-amz-date")
    signed_at = parse_basic(timestamp)
    if signed_at is None or timestamp[:8] != credential.date:
        raise _invalid("X-Amz-Date", "X-Amz-Date is malformed or not of the credential's date")
    token = form.get("x-amz-security-token", "")
    secret = secret_of(credential.access_key, token)
    if secret is None:
        raise unknown_key(credential.access_key)
    key = signing_key(secret, credential.date, credential.region, credential.service)
    policy, signature = _bytes(form["policy"]), _field(form, "x-amz-signature")
    if not compare_digest(key.sign(policy), signature):
        raise mismatch(credential.access_key, policy, signature)
    return Verified(
        access_key=credential.access_key,
        auth_type=AuthType.POST,
        version=4,
        signed_at=signed_at,
        session_token=token,
        service=credential.service,
        timestamp=timestamp,
        scope=credential.scope,
        signing_key=key,
        signature=signature,
    )


def _credential(text: bytes) -> Credential:
    credential = parse_credential(text)
    if credential is None or credential.service != b"s3":
        raise _invalid("X-Amz-Credential", "The X-Amz-Credential is malformed")
    return credential


def _version_2(form: Mapping[str, str], secret_of: SecretOf) -> Verified:
    access_key, token = form["awsaccesskeyid"], form.get("x-amz-security-token", "")
    secret = secret_of(access_key, token)
    if secret is None:
        raise unknown_key(access_key)
    policy, signature = _bytes(form["policy"]), _bytes(form["signature"])
    if not compare_digest(sigv2.sign(secret, policy), signature):
        raise mismatch(access_key, policy, signature)
    return Verified(
        access_key=access_key,
        auth_type=AuthType.POST,
        version=2,
        signed_at=0,
        session_token=token,
    )


def _parse(encoded: str) -> _Policy:
    if len(encoded) > MAX_POLICY:
        raise S3Error("MaxPostPreDataLengthExceededError")
    try:
        document = _decode_json(b64decode(_bytes(encoded), validate=True))
    except (msgspec.DecodeError, Base64Error, UnicodeDecodeError, RecursionError):
        raise _invalid_policy("Invalid JSON.") from None
    conditions = document.get("conditions")
    if not isinstance(conditions, list):
        raise _invalid_policy("Policy missing conditions.")
    policy = _Policy(_expiration(document.get("expiration")), [], Bounds())
    for condition in conditions:
        _add(policy, condition)
    return policy


def _expiration(value: object) -> datetime:
    if value is None:
        raise _invalid_policy("Policy missing expiration.")
    match = _EXPIRATION(value) if isinstance(value, str) else None
    try:
        if match is not None:
            return datetime(*map(int, match.groups()), tzinfo=UTC)  # type: ignore[misc,arg-type]
    except ValueError:
        pass
    raise _invalid_policy(f"Invalid 'expiration' value: '{value}'")


def _add(policy: _Policy, condition: object) -> None:
    if isinstance(condition, dict):
        if len(condition) != 1:
            raise _invalid_policy(
                "Invalid Simple-Condition: Simple-Conditions must have exactly one property "
                "specified."
            )
        name, value = next(iter(condition.items()))
        condition = ["eq", f"${name}", value]
    if not isinstance(condition, list) or len(condition) != 3 or not isinstance(condition[0], str):
        raise _invalid_policy("Invalid condition: an operator and two arguments are needed.")
    operator, first, second = condition[0].lower(), condition[1], condition[2]
    if operator == "content-length-range":
        policy.bounds = _narrowed(policy.bounds, _length(first), _length(second))
    elif operator in ("eq", "starts-with"):
        wanted = _value(second)
        policy.conditions.append((operator, _name(first, operator, wanted), wanted))
    else:
        raise _invalid_policy(f"Invalid operator: '{operator}'")


def _narrowed(bounds: Bounds, least: int, most: int) -> Bounds:
    if least > most:
        raise _invalid_policy("Invalid content-length-range: the minimum is above the maximum.")
    return Bounds(max(bounds.least, least), min(bounds.most, most))


def _length(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_LENGTH:
        raise _invalid_policy("Invalid content-length-range: its limits must be whole numbers.")
    return value


def _name(value: object, operator: str, wanted: str) -> str:
    if not isinstance(value, str) or len(value) < 2:
        raise _invalid_policy("Invalid condition: a field is named '$name'.")
    if not value.startswith("$"):  # no field has such a name, so no form meets it
        raise _failed(operator, value, wanted)
    return value[1:].lower()


def _value(value: object) -> str:
    if not isinstance(value, str):
        raise _invalid_policy("Invalid condition: a field's value must be a string.")
    return value


_OPERATORS: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "eq": str.__eq__,
    "starts-with": str.startswith,
}


def _check(policy: _Policy, form: Mapping[str, str], now: float) -> None:
    if now > policy.expiration.timestamp():
        raise _forbidden("Policy expired.")
    for operator, name, value in policy.conditions:
        test = _OPERATORS[operator]
        if not all(test(sent, value) for sent in _sent(form, operator, name)):
            raise _failed(operator, f"${name}", value)
    named = {name for _, name, _ in policy.conditions} | _UNNAMED
    for name in sorted(form.keys() - named):
        if not name.startswith(_FREE):
            raise _forbidden(f"Extra input fields: {name}")


def _sent(form: Mapping[str, str], operator: str, name: str) -> Iterator[str]:
    """Yields the values of a field; several types of content may stand in one, with commas
    between."""
    value = form.get(name, "")
    if operator == "starts-with" and name == "content-type":
        yield from (part.strip() for part in value.split(","))
    else:
        yield value


def _field(form: Mapping[str, str], name: str) -> bytes:
    if not form.get(name):
        raise _missing(name)
    return _bytes(form[name])


def _bytes(value: str) -> bytes:
    return value.encode("utf-8", "replace")


def _missing(name: str) -> S3Error:
    return _invalid(name, f"Bucket POST must contain a field named '{name}'.")


def _invalid(name: str, message: str) -> S3Error:
    return S3Error("InvalidArgument", message, extra={"ArgumentName": name})


def _invalid_policy(reason: str) -> S3Error:
    return S3Error("InvalidPolicyDocument", f"Invalid Policy: {reason}")


def _failed(operator: str, name: str, value: str) -> S3Error:
    return _forbidden(f'Policy Condition failed: ["{operator}", "{name}", "{value}"]')


def _forbidden(reason: str) -> S3Error:
    return S3Error("AccessDenied", f"Invalid according to Policy: {reason}")
