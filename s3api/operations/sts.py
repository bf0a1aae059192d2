"""Temporary credentials for jobs: AssumeRole, GetSessionToken and GetCallerIdentity of AWS STS.

`POST /` with a form, signed for the service `sts`, on the same endpoint. There are no roles: the
credentials of AssumeRole act as the user who asked for them, until they expire, and with a `Policy`
within that; the RoleArn means nothing. Parameters and answers follow botocore's model of STS
(data/sts/2011-06-15).
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from kvfs.http.api import BodyStalled, BodyTooLarge, BodyTruncated, Response
from s3api.auth import credentials
from s3api.auth.authenticate import authenticate
from s3api.auth.credentials import Credentials
from s3api.auth.verified import Payload, Verified
from s3api.http.error_map import s3_error
from s3api.http.request_context import Call
from s3api.http.s3_errors import S3Error
from s3api.model.time_formats import iso8601
from s3api.rules.access.policy import parse_user_policy

_XMLNS: Final = "https://sts.amazonaws.com/doc/2011-06-15/"
_VERSION: Final = "2011-06-15"
_FORM_BYTES: Final = 16 << 10
_ROLE_DURATION_S: Final = 3600
_TOKEN_DURATION_S: Final = 12 * 3600
_is_session_name: Final = re.compile(r"[\w+=,.@-]{2,64}", re.ASCII).fullmatch
_CODES: Final = {
    "InvalidAccessKeyId": "InvalidClientTokenId",
    "InvalidToken": "InvalidClientTokenId",
    "AccessDenied": "AccessDenied",
    "ExpiredToken": "ExpiredTokenException",
    "InternalError": "InternalFailure",
    "MalformedPolicy": "MalformedPolicyDocument",
    "AuthorizationHeaderMalformed": "IncompleteSignature",
}
"""Codes for which STS has a name of its own."""

Members = Mapping[str, "str | Members"]


async def answer(call: Call) -> Response:
    """Returns the answer, or STS's own form of an error."""
    try:
        form = await _form(call)
        action = form.get("Action", "")
        make = ACTIONS.get(action)
        if make is None or form.get("Version", _VERSION) != _VERSION:
            raise S3Error("InvalidAction", f"There is no action {action} here")
        result = make(call, form)
    except Exception as error:
        return _refusal(call, error)
    members: Members = {
        f"{action}Result": result,
        "ResponseMetadata": {"RequestId": call.request_id},
    }
    return _document(200, f"{action}Response", members)


async def _form(call: Call) -> Mapping[str, str]:
    """Returns the parameters, once their signer is known. Raises S3Error."""
    try:
        body = await call.body.read(_FORM_BYTES)
    except BodyTruncated:
        raise S3Error("IncompleteBody") from None
    except BodyStalled:
        raise S3Error("RequestTimeout") from None
    except BodyTooLarge:
        raise S3Error("MaxMessageLengthExceeded") from None
    verified = _verified(call, hashlib.sha256(body).hexdigest().encode())
    if verified.service != b"sts":
        raise S3Error("SignatureDoesNotMatch", "The request is signed for another service than sts")
    call.sign(verified)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100))
    except ValueError:
        raise S3Error("ValidationError", "The form is malformed") from None


def _verified(call: Call, body_sha256: bytes) -> Verified:
    head = call.head
    verified = authenticate(
        head.method,
        head.target,
        head.headers,
        call.service.identities.secret_of,
        call.now.timestamp(),
        body_sha256=body_sha256,
    )
    if verified is None:
        raise S3Error("MissingAuthenticationToken")
    if verified.payload is not Payload.DIGEST or verified.payload_sha256 != body_sha256:
        # Else who overhears a harmless request could send another form under its signature.
        raise S3Error("SignatureDoesNotMatch", "The signature does not cover the body")
    return verified


def _assume_role(call: Call, form: Mapping[str, str]) -> Members:
    name = form.get("RoleSessionName", "")
    if not form.get("RoleArn", "").startswith("arn:"):
        raise S3Error("ValidationError", "RoleArn is missing or no ARN")
    if not _is_session_name(name):
        raise S3Error("ValidationError", "RoleSessionName has 2 to 64 of A-Z a-z 0-9 _ + = , . @ -")
    for each in form:
        if each.startswith(("PolicyArns.", "Tags.", "TransitiveTagKeys.")):
            raise S3Error("ValidationError", f"{each} is not implemented by this server")
    made = _start(call, form, _ROLE_DURATION_S, form.get("Policy", ""))
    user = call.caller.name
    return {
        "Credentials": _shown(made),
        "AssumedRoleUser": {
            "AssumedRoleId": f"{user}:{name}",
            "Arn": f"arn:aws:sts::{call.caller.account}:assumed-role/{user}/{name}",
        },
    }


def _get_session_token(call: Call, form: Mapping[str, str]) -> Members:
    if form.get("TokenCode") or form.get("SerialNumber"):
        raise S3Error("ValidationError", "There are no MFA devices here")
    return {"Credentials": _shown(_start(call, form, _TOKEN_DURATION_S, ""))}


def _get_caller_identity(call: Call, _: Mapping[str, str]) -> Members:
    caller = call.caller
    return {"UserId": caller.canonical_id, "Account": caller.account, "Arn": caller.arn}


def _start(call: Call, form: Mapping[str, str], duration_s: int, policy: str) -> Credentials:
    verified = call.verified
    assert verified is not None
    if verified.session_token:
        raise S3Error("AccessDenied", "Temporary credentials cannot be used to get others")
    if policy:
        parse_user_policy(policy)
        policy = json.dumps(json.loads(policy), separators=(",", ":"))
    given = form.get("DurationSeconds", str(duration_s))
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise S3Error("ValidationError", "DurationSeconds must be a whole number")
    return credentials.start_session(
        call.service.identities.key,
        verified.access_key,
        now=call.now.timestamp(),
        duration_s=int(given),
        policy=policy,
    )


def _shown(made: Credentials) -> Members:
    return {
        "AccessKeyId": made.access_key,
        "SecretAccessKey": made.secret,
        "SessionToken": made.session_token,
        "Expiration": iso8601(datetime.fromtimestamp(made.expires, UTC)),
    }


def _refusal(call: Call, error: Exception) -> Response:
    told = s3_error(error)
    if told.status >= 500:
        raise error
    code = _CODES.get(told.code, told.code)
    members: Members = {
        "Error": {"Type": "Sender", "Code": code, "Message": told.message},
        "RequestId": call.request_id,
    }
    return _document(told.status, "ErrorResponse", members)


def _document(status: int, root: str, members: Members) -> Response:
    text = f'<{root} xmlns="{_XMLNS}">{_elements(members)}</{root}>'
    return Response(status, [(b"content-type", b"text/xml")], text.encode())


def _elements(members: Members) -> str:
    return "".join(
        f"<{name}>{escape(value) if isinstance(value, str) else _elements(value)}</{name}>"
        for name, value in members.items()
    )


ACTIONS: Final[Mapping[str, Callable[[Call, Mapping[str, str]], Members]]] = {
    "AssumeRole": _assume_role,
    "GetCallerIdentity": _get_caller_identity,
    "GetSessionToken": _get_session_token,
}
