"""From a request to its response: address, operation, signature, permission, parameters, handler.

Whatever goes wrong on the way becomes S3's XML error here, at one point; what is a bug is logged
and told as InternalError, without its words.
"""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from kvfs.errors import KvfsError
from kvfs.objects.finding import Facts
from kvfs.wire.http import Body, Head, Response
from s3api import access
from s3api.auth.authenticate import authenticate
from s3api.call import Call, Service, new_request_id
from s3api.error_map import s3_error
from s3api.errors import S3Error, error_response
from s3api.model.addressing import address, bucket_of_host, split_target, with_hoisted
from s3api.model.documents import body_limit
from s3api.model.parsing import parse, parser
from s3api.model.routing import OPTIONS_OBJECT, route
from s3api.operations import HANDLERS, OF_EXISTING_OBJECTS, OPEN, cors
from s3api.receiving import Receiver
from s3api.rules import actions
from s3api.rules.encryption import refuse_headers

HOST_ID: Final = "kvfs"
log = logging.getLogger(__name__)


class Application:
    """Answers every request of one worker."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, head: Head, body: Body) -> Response:
        """The response; never raises but for cancellation."""
        request_id = new_request_id()
        try:
            response = await self._answer(head, body, request_id)
        except Exception as error:  # translated at this one point
            response = self._refusal(head, error, request_id)
        response.headers = [*response.headers, (b"x-amz-request-id", request_id.encode())]
        return response

    def refuse(self, status: int, reason: str) -> Response:
        """The answer to what is no request."""
        code = _OF_STATUS.get(status, "InvalidRequest")
        error = S3Error(code, reason, status=status)
        return _error(error, "", new_request_id())

    async def _answer(self, head: Head, body: Body, request_id: str) -> Response:
        path, query = split_target(head.target)
        host = (head.get(b"host") or b"").decode("latin-1")
        where = address(path, host, self._service.domains)
        fields = with_hoisted(head.fields, query)
        operation = route(head.method, where.bucket, where.key, query, fields)
        call = Call(
            service=self._service,
            head=head,
            body=body,
            operation=operation,
            bucket=where.bucket or "",
            key=where.key or "",
            query=query,
            fields=fields,
            verified=None,
            known=None,
            caller=access.caller_of(None),
            now=datetime.now(UTC),
            request_id=request_id,
        )
        if operation == OPTIONS_OBJECT:
            return cors.preflight(call)
        self._authenticate(call, host)
        response = await self._perform(call)
        if b"origin" in fields and call.bucket:
            response.headers = [*response.headers, *cors.headers(call)]
        return response

    def _authenticate(self, call: Call, host: str) -> None:
        head = call.head
        bucket = bucket_of_host(host, self._service.domains) or ""
        call.verified = authenticate(
            head.method,
            head.target,
            head.headers,
            self._service.identities.secret_of,
            call.now.timestamp(),
            version_2=self._service.version_2,
            host_bucket=bucket.encode(),
        )
        if call.verified is not None:
            found = self._service.identities.find(
                call.verified.access_key, call.verified.session_token
            )
            if found is None:
                raise S3Error("InvalidAccessKeyId")
            call.known, call.caller = found, access.caller_of(found.user)

    async def _perform(self, call: Call) -> Response:
        handler = HANDLERS.get(call.operation)
        if handler is None:
            raise S3Error("NotImplemented", f"{call.operation} is not supported")
        refuse_headers(name.decode("latin-1") for name in call.fields)
        document = b""
        reads = parser(call.operation)
        if reads.payload is not None and not reads.streams:
            # Nobody may make us read a document who may not ask for anything.
            document = await Receiver(call).document(body_limit(call.operation))
        call.params = parse(
            call.operation,
            call.bucket or None,
            call.key or None,
            call.query,
            call.fields,
            document,
        )
        if call.operation not in OPEN:
            self._authorise(call)
        return await handler(call)

    def _authorise(self, call: Call) -> None:
        facts: Facts | None = None
        if call.operation in OF_EXISTING_OBJECTS and self._asks_about_object(call):
            facts = access.facts_or_none(call)
        self._service.access.require(call, actions.needed(call.operation, call.params), facts)

    def _asks_about_object(self, call: Call) -> bool:
        """Whether the permission may hang on the object's own ACL and tags."""
        return call.caller.name != call.owner or call.settings.get("policy") is not None

    def _refusal(self, head: Head, error: Exception, request_id: str) -> Response:
        told = s3_error(error)
        if not isinstance(error, S3Error | KvfsError | OSError):
            log.error("request %s failed by a bug", request_id, exc_info=error)
        elif told.status >= 500:
            log.warning("request %s: %s", request_id, error)
        path = head.target.partition(b"?")[0].decode("latin-1")
        return _error(told, path, request_id)


def _error(error: S3Error, resource: str, request_id: str) -> Response:
    status, headers, document = error_response(error, resource, request_id, HOST_ID)
    return Response(status, headers, document)


_OF_STATUS: Final[Mapping[int, str]] = {
    400: "BadRequest",
    408: "RequestTimeout",
    411: "MissingContentLength",
    413: "EntityTooLarge",
    414: "KeyTooLongError",
    417: "InvalidArgument",
    431: "RequestHeaderSectionTooLarge",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}
