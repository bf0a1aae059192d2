"""Dispatch of a request to its response: address, operation, signature, permission, parameters,
handler.

Every failure on the way becomes S3's XML error here, at one point; a bug is logged and reported as
InternalError, without its text.
"""

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final

import msgspec

from kvfs.base.detach import aside
from kvfs.base.errors import KvfsError
from kvfs.http.api import Head, RequestBody, Response
from kvfs.objects.object_errors import NoSuchBucket
from s3api.auth import authorization
from s3api.auth.authenticate import authenticate
from s3api.auth.verified import SecretOf, Verified
from s3api.http.body_receiver import Receiver
from s3api.http.error_map import s3_error
from s3api.http.outcome import RequestOutcome
from s3api.http.parsed_request import Attested, asked_of
from s3api.http.request_context import Call, WorkerContext, new_request_id
from s3api.http.response_cache import repeat
from s3api.http.s3_errors import S3Error, error_response
from s3api.model.addressing import bucket_of_host
from s3api.model.documents import body_limit
from s3api.model.parsing import parser
from s3api.model.routing import OPTIONS_OBJECT
from s3api.operations import (
    BEFORE_DOCUMENT,
    HANDLERS,
    OF_EXISTING_OBJECTS,
    OPEN,
    SPECIAL,
    STEPS,
    cors_headers,
)
from s3api.operations.object.object_version import check_version_id, find, search
from s3api.rules.access import actions
from s3api.rules.encryption import AES256, check_headers

HOST_ID: Final = "kvfs"
log = logging.getLogger(__name__)


class Application:
    """Answers every request of one worker."""

    def __init__(self, service: WorkerContext) -> None:
        self._service = service

    async def handle(self, head: Head, body: RequestBody) -> Response:
        """Returns the response; never raises unless cancelled. Goes aside before it waits."""
        request_id = new_request_id()
        head.handled = outcome = RequestOutcome(request_id)
        call = None
        try:
            service = self._service
            asked = asked_of(head, service.domains)
            call = outcome.call = Call(
                service,
                service.store,
                head,
                body,
                asked,
                asked.operation,
                asked.bucket,
                asked.key,
                asked.query,
                asked.fields,
                _NOBODY,
                datetime.now(UTC),
                request_id,
            )
            if service.freshness.is_needed:
                admits = partial(self._admits, call)
                await service.freshness.before(call.raw_bucket, call.operation, admits)
            call.generation = service.store.cache.generation()
            response = repeat(call) if asked.answered is not None else None
            if response is None:
                response = await self._answer(call)
        except Exception as error:  # translated at this one point
            response = self._refusal(head, error, outcome)
        outcome.response, outcome.answered = response, time.monotonic()
        response.lines = b"x-amz-request-id: %b\r\n" % request_id.encode()
        if self._service.encrypted and call is not None and response.status < 300:
            response.further = (*response.further, *_ENCRYPTED.get(call.operation, ()))
        if call is not None and b"origin" in call.fields and call.operation != OPTIONS_OBJECT:
            response.further = (*response.further, *cors_headers.headers(call))
        return response

    def refuse(self, status: int, reason: str) -> Response:
        """Returns the answer to bytes that are no request."""
        code = _OF_STATUS.get(status, "InvalidRequest")
        error = S3Error(code, reason, status=status)
        return _error(error, "", new_request_id())

    async def _answer(self, call: Call) -> Response:
        if call.operation not in STEPS:
            await aside()
        if special := SPECIAL.get(call.operation):
            return await special(call)
        self._authenticate(call)
        return await self._perform(call)

    def _admits(self, call: Call) -> bool:
        """Returns whether a request may have the node begin to follow its bucket; False: it does
        without, or finds out by itself. Raises S3Error, NoSuchBucket: it would be refused in any
        case."""
        if call.operation in SPECIAL:
            return False
        seen = msgspec.structs.replace(call)  # what it reads is older than what it waits for
        verified = self._verified(call, self._service.identities.secret_of)
        if verified is not None:
            seen.sign(verified)
        self._service.access.refuse_excluded(seen)
        return True

    def _authenticate(self, call: Call) -> None:
        if call.asked.attested is not None and _is_attested(call, call.asked.attested):
            call.is_again = True
            return
        verified = self._verified(call, call.secret_of)
        if verified is None:
            return
        known = call.known
        assert known is not None, "a signature is right for a secret"
        call.take_signer(verified, known)
        if call.head.memo is not None:
            call.asked.attested = Attested(verified, known.secret)

    def _verified(self, call: Call, secret_of: SecretOf) -> Verified | None:
        """Returns who signed a request, by its head; None: nobody. Raises S3Error."""
        head, host_bucket = call.head, b""
        if self._service.version_2:
            host = head.fields.get(b"host", b"").decode("latin-1")
            host_bucket = (bucket_of_host(host, self._service.domains) or "").encode()
        verified = authenticate(
            head.method,
            head.target,
            head.headers,
            secret_of,
            call.now.timestamp(),
            version_2=self._service.version_2,
            host_bucket=host_bucket,
        )
        if verified is not None and verified.service != b"s3":
            raise S3Error(
                "AuthorizationHeaderMalformed",
                "The authorization header is malformed; incorrect service: this is s3",
            )
        return verified

    async def _perform(self, call: Call) -> Response:
        handler = HANDLERS.get(call.operation)
        if handler is None:
            raise S3Error("NotImplemented", f"{call.operation} is not supported")
        parsing, asked = parser(call.operation), call.asked
        if asked.params is None:
            asked.params = parsing.parse(
                call.bucket or None, call.key or None, call.query, call.fields
            )
        call.params = dict(asked.params)
        if not _NAMED.isdisjoint(call.params):
            _check_named(call)
        if call.operation not in OPEN:
            await self._authorise(call)
        elif ask := BEFORE_DOCUMENT.get(call.operation):
            ask(call)
        if asked.about_encryption:
            reads = call.head.method in ("GET", "HEAD")
            check_headers(call.headers(), reads=reads, encrypted=self._service.encrypted)
        if parsing.payload is not None and not parsing.streams:
            # A caller that may not ask for anything must not make us read a document.
            document = await Receiver(call).document(body_limit(call.operation))
            parsing.take_document(call.params, document)
            # It has a say in what is allowed, and took as long as its sender liked: what was
            # decided before may be about another object.
            call.look_again()
            if call.operation not in OPEN:
                await self._authorise(call)
        return await handler(call)

    async def _authorise(self, call: Call) -> None:
        needed, access = actions.needed(call.operation, call.params), self._service.access
        is_decided = access.is_decided(call, needed)
        of_object = call.operation in OF_EXISTING_OBJECTS
        if of_object and not is_decided:
            await search(call, [call.key])  # what another node holds has tags and an ACL, too
        if not is_decided and not access.authorise(call, needed, of_object=of_object):
            find(call)
            raise S3Error("AccessDenied")  # it has come meanwhile

    def _refusal(self, head: Head, error: Exception, outcome: RequestOutcome) -> Response:
        told = s3_error(error)
        if isinstance(error, NoSuchBucket) and _is_of_object(outcome):
            self._service.store.misses.found_nothing(error)
        outcome.code, request_id = told.code, outcome.request_id
        if not isinstance(error, S3Error | KvfsError | OSError):
            log.error("request %s failed by a bug", request_id, exc_info=error)
        elif told.status >= 500 and told.status != 501:  # clients may ask for what is not there
            # It may name a key, whose line feeds would begin lines of their own.
            log.warning("request %s: %s", request_id, ascii(str(error)))
        path = head.target.partition(b"?")[0].decode("latin-1")
        return _error(told, path, request_id)


def _is_attested(call: Call, attested: Attested) -> bool:
    """Returns whether the signature of an equal head was right: then it still is, while it is valid
    and its key has the same secret. Takes over who signed it. Raises what `Identities.find`
    raises."""
    verified = attested.verified
    if not verified.is_valid(call.now.timestamp()):
        return False
    known = call.look_up(verified.access_key, verified.session_token)
    if known is None or known.secret != attested.secret:
        return False
    call.take_signer(verified, known)
    return True


def _is_of_object(outcome: RequestOutcome) -> bool:
    """Returns whether the request was for an object that should exist."""
    return outcome.call is not None and outcome.call.operation in OF_EXISTING_OBJECTS


def _check_named(call: Call) -> None:
    """Checks what any operation may name: a version, and the bucket's expected owner. Raises
    S3Error."""
    check_version_id(call.params.get("VersionId"))
    expected = call.params.get("ExpectedBucketOwner")
    if expected is not None and expected != call.owner:
        raise S3Error("AccessDenied")


def _error(error: S3Error, resource: str, request_id: str) -> Response:
    status, headers, document = error_response(error, resource, request_id, HOST_ID)
    return Response(status, headers, document)


_NOBODY: Final = authorization.caller_of(None)
_NAMED: Final = frozenset({"VersionId", "ExpectedBucketOwner"})
_ENCRYPTED: Final = dict.fromkeys(
    (
        *("CompleteMultipartUpload", "CopyObject", "CreateMultipartUpload", "GetObject"),
        *("HeadObject", "PostObject", "PutObject", "UploadPart", "UploadPartCopy"),
    ),
    ((b"x-amz-server-side-encryption", AES256.encode()),),
)
"""Operations whose answers tell whether and how the object is encrypted."""
_OF_STATUS: Final[Mapping[int, str]] = {
    400: "BadRequest",
    408: "RequestTimeout",
    411: "MissingContentLength",
    413: "EntityTooLarge",
    414: "KeyTooLongError",
    417: "ExpectationFailed",
    431: "RequestHeaderSectionTooLarge",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}
