"""The access log: a line for each request, in the format of S3's server access logs
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/LogFormat.html).

Workers append to one file; a line is one write, so lines do not mix. Signatures and session tokens
in a query are left out: a reader of the log must not be able to make the request. A log that was
moved away (logrotate) is begun anew within a second.
"""

import logging
import os
import re
import time
from collections.abc import Iterable
from typing import Final

from kvfs.http.api import FileRange, Head, Response
from s3api.http.outcome import AccessLogEntry, RequestOutcome
from s3api.http.request_context import Call

_REOPEN_S: Final = 1.0
_HIDDEN: Final = re.compile(
    r"(?i)((?:^|[?&])(?:x-amz-signature|x-amz-security-token|signature)=)[^&]*"
)
# Whose names there are not REST, the method and the resource.
_OPERATIONS: Final = {
    "AbortMultipartUpload": "REST.DELETE.UPLOAD",
    "CompleteMultipartUpload": "REST.POST.UPLOAD",
    "CopyObject": "REST.COPY.OBJECT",
    "CreateMultipartUpload": "REST.POST.UPLOADS",
    "DeleteObjects": "REST.POST.MULTI_OBJECT_DELETE",
    "ListBuckets": "REST.GET.SERVICE",
    "ListMultipartUploads": "REST.GET.UPLOADS",
    "ListObjectVersions": "REST.GET.BUCKETVERSIONS",
    "ListParts": "REST.GET.UPLOAD",
    "OptionsObject": "REST.OPTIONS.PREFLIGHT",
    "UploadPart": "REST.PUT.PART",
    "UploadPartCopy": "REST.COPY.PART",
}
# Sub-resources, by the ends of operations' names.
_RESOURCES: Final = {
    "BucketAcl": "ACL",
    "BucketCors": "CORS",
    "BucketEncryption": "ENCRYPTION",
    "BucketLifecycle": "LIFECYCLE",
    "BucketLifecycleConfiguration": "LIFECYCLE",
    "BucketLocation": "LOCATION",
    "BucketLogging": "LOGGING_STATUS",
    "BucketNotificationConfiguration": "NOTIFICATION",
    "BucketOwnershipControls": "OWNERSHIP_CONTROLS",
    "BucketPolicy": "BUCKETPOLICY",
    "BucketPolicyStatus": "POLICY_STATUS",
    "BucketReplication": "REPLICATION",
    "BucketRequestPayment": "REQUEST_PAYMENT",
    "BucketTagging": "TAGGING",
    "BucketVersioning": "VERSIONING",
    "BucketWebsite": "WEBSITE",
    "ObjectAcl": "ACL",
    "ObjectAttributes": "OBJECT_ATTRIBUTES",
    "ObjectLegalHold": "LEGAL_HOLD",
    "ObjectLockConfiguration": "OBJECT_LOCK_CONFIGURATION",
    "ObjectRetention": "RETENTION",
    "ObjectTagging": "OBJECT_TAGGING",
    "PublicAccessBlock": "PUBLIC_ACCESS_BLOCK",
}
_UPLOADS: Final = frozenset(("PutObject", "UploadPart"))
_VERB: Final = re.compile("^(?:Delete|Get|Put)")
log = logging.getLogger(__name__)


class AccessLog:
    """The access log of one worker. `record` is the server's `on_response`."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._path = path
        self._fd = _open(path)
        self._looked_at = time.monotonic()

    def record(self, head: Head | None, status: int, sent_bytes: int, seconds: float) -> None:
        """Writes the line of one response. A refusal by the disk is logged."""
        if head is None:
            return
        try:
            self._reopen_if_moved()
            now = time.time()
            os.write(self._fd, line(head, status, sent_bytes, seconds, now).encode())
            for entry in entries_of(head):
                os.write(self._fd, line_of(entry, head, now).encode())
        except OSError as error:
            log.warning("the access log %s lacks a line: %s", self._path, error.strerror)

    def _reopen_if_moved(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _REOPEN_S:
            return
        self._looked_at = now
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                return
        except FileNotFoundError:
            pass
        fresh = _open(self._path)
        os.close(self._fd)
        self._fd = fresh

    def close(self) -> None:
        os.close(self._fd)


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)


def line(head: Head, status: int, sent_bytes: int, seconds: float, now: float) -> str:
    """Returns the line of one response, sent at `now` (seconds since the epoch)."""
    outcome = head.handled if isinstance(head.handled, RequestOutcome) else RequestOutcome("")
    call, response = outcome.call, outcome.response
    sending = time.monotonic() - outcome.answered if outcome.answered else 0.0
    fields = (
        _word(_owner(call)),
        _word(call.bucket) if call else "",
        _moment(now),
        _word(head.peer[0]),
        _word(call.caller.name or "") if call else "",
        outcome.request_id,
        _operation(head, outcome),
        _word(call.key) if call else "",
        f'"{_request_line(head)}"',
        str(status),
        outcome.code,
        str(max(0, sent_bytes - (response.head_bytes if response else 0)) or ""),
        _object_size(head, outcome),
        str(int(seconds * 1000)),
        str(max(0, int((seconds - sending) * 1000))),
        _quoted(head.get(b"referer")),
        _quoted(head.get(b"user-agent")),
        _word(_header(response, b"x-amz-version-id")),
        "kvfs",
        *_end(head, call),
    )
    return _joined(fields)


def entries_of(head: Head) -> Iterable[AccessLogEntry]:
    """Returns the further effects of a request that succeeded."""
    outcome = head.handled
    if not isinstance(outcome, RequestOutcome) or outcome.call is None or outcome.code:
        return ()
    return () if outcome.call.entries is None else outcome.call.entries()


def line_of(entry: AccessLogEntry, head: Head, now: float) -> str:
    """Returns the line of a further effect of a request: of the request itself it has what S3 tells
    there."""
    assert isinstance(head.handled, RequestOutcome), "it did something"
    call = head.handled.call
    assert call is not None, "it did something"
    fields = (
        _word(entry.owner),
        _word(entry.bucket),
        _moment(now),
        _word(head.peer[0]),
        _word(call.caller.name or ""),
        head.handled.request_id,
        entry.operation,
        _word(entry.key),
        f'"{_request_line(head)}"',
        str(entry.status),
        entry.code,
        "",  # bytes sent
        "" if entry.size is None else str(entry.size),
        "",  # time, with and without sending
        "",
        _quoted(head.get(b"referer")),
        _quoted(head.get(b"user-agent")),
        _word(entry.version),
        "kvfs",
        *_end(head, call),
    )
    return _joined(fields)


def _end(head: Head, call: Call | None) -> tuple[str, ...]:
    """Returns how it was signed and where it was sent."""
    verified = None if call is None else call.verified
    return (
        "" if verified is None else f"SigV{verified.version}",
        "",  # cipher suite
        "" if verified is None else _auth_type(verified.auth_type.value),
        _word((head.get(b"host") or b"").decode("latin-1")),
        "",  # version of TLS
        "",  # access point
        "Yes" if call and call.by_acl else "",
    )


def _joined(fields: tuple[str, ...]) -> str:
    return " ".join(field or "-" for field in fields) + "\n"


def _moment(now: float) -> str:
    return time.strftime("[%d/%b/%Y:%H:%M:%S +0000]", time.gmtime(now))


def _request_line(head: Head) -> str:
    return f"{head.method} {_shown_target(head)} HTTP/1.{0 if head.http_1_0 else 1}"


def _operation(head: Head, outcome: RequestOutcome) -> str:
    """Returns S3's name for it; if we know none, the operation's own name comes last."""
    if outcome.call is None:
        return ""
    operation = outcome.call.operation
    if operation in _OPERATIONS:
        return _OPERATIONS[operation]
    if resource := _RESOURCES.get(_VERB.sub("", operation)):
        return f"REST.{head.method}.{resource}"
    of_object = outcome.call.key or operation == "PostObject"
    resource = "OBJECT" if of_object else "BUCKET" if outcome.call.bucket else "SERVICE"
    return f"REST.{head.method}.{resource}" + ("" if _is_plain(operation) else f".{operation}")


def _is_plain(operation: str) -> bool:
    return operation.endswith(("Object", "Bucket", "ListObjects", "ListObjectsV2"))


def _auth_type(kind: str) -> str:
    return {"REST-HEADER": "AuthHeader", "REST-QUERY-STRING": "QueryString"}.get(kind, kind)


def _shown_target(head: Head) -> str:
    return _word(_HIDDEN.sub(r"\1-", head.target.decode("latin-1")))


def _word(text: str) -> str:
    """Returns the text without characters that would end a field or a line."""
    return "".join(
        character if "!" <= character <= "~" and character != '"' else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogateescape"))


def _quoted(value: bytes | None) -> str:
    if not value:
        return '"-"'
    text = value.decode("latin-1").replace('"', "%22")
    return f'"{"".join(c if c.isprintable() else _escaped(c) for c in text)}"'


def _object_size(head: Head, outcome: RequestOutcome) -> str:
    """Returns the size of the whole object, if request or answer show it."""
    call, response = outcome.call, outcome.response
    if call is None or response is None or outcome.code:
        return ""
    if call.operation in _UPLOADS:
        decoded = head.get(b"x-amz-decoded-content-length")
        return decoded.decode("latin-1") if decoded else str(head.content_length or "")
    if whole := _header(response, b"content-range").rpartition("/")[2]:
        return whole
    if isinstance(response.body, FileRange):
        return str(response.body.length)
    return str(response.length or "")


def _owner(call: Call | None) -> str:
    """Returns the owner of the bucket, if the request had to read that anyway."""
    return call.owner_if_known if call else ""


def _header(response: Response | None, name: bytes) -> str:
    if response is None:
        return ""
    fields = (*response.headers, *response.further)
    return next((v.decode("latin-1") for n, v in fields if n.lower() == name), "")
