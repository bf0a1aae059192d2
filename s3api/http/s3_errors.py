"""The errors of the S3 API: code, HTTP status, message, and the XML document that tells them.

A layer raises `S3Error`; the service turns it into a response with `error_response`. Codes with
their statuses and descriptions follow "List of error codes" of the S3 API reference
(https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html); the model that ships with
botocore names few of them. Codes which that list lacks but S3 sends, and SDKs know, are marked.

It knows nothing of requests: their readers raise these errors.
"""

import re
from collections.abc import Mapping
from typing import Final
from xml.sax.saxutils import escape

Headers = list[tuple[bytes, bytes]]

# Every document starts with it. Where an answer must begin before it is known, this may be sent
# first, then white space as long as it takes, then the document without it.
DECLARATION: Final = b'<?xml version="1.0" encoding="UTF-8"?>\n'

# code -> (HTTP status, message where the raiser gives none)
CODES: Final[Mapping[str, tuple[int, str]]] = {
    "AccessControlListNotSupported": (400, "The bucket does not allow ACLs"),
    "AccessDenied": (403, "Access Denied"),
    "AnnotationLimitExceeded": (
        400,
        "The request would exceed the maximum number of annotations allowed per object.",
    ),
    "AuthorizationHeaderMalformed": (400, "The authorization header you provided is invalid."),
    "AuthorizationQueryParametersError": (
        400,
        "The authorization query parameters that you provided are not valid.",
    ),
    "BadDigest": (
        400,
        "The Content-MD5 or checksum value you specified did not match what we received.",
    ),
    "BadRequest": (400, "The request is not a valid request."),
    "BucketAlreadyExists": (
        409,
        "The requested bucket name is not available. The bucket namespace is shared by all users "
        "of the system. Please select a different name and try again.",
    ),
    "BucketAlreadyOwnedByYou": (
        409,
        "Your previous request to create the named bucket succeeded and you already own it.",
    ),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty."),
    "BucketReadOnly": (  # not S3's: SDKs try again by the status
        503,
        "The metadata server is away: objects can be read, and changed again when it is back.",
    ),
    "ConditionalRequestConflict": (
        409,
        "A conflicting operation occurred during the request. Try again.",
    ),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed object size."),
    "EntityTooSmall": (
        400,
        "Your proposed upload is smaller than the minimum allowed object size.",
    ),
    "ExpiredToken": (400, "The provided token has expired."),
    "IllegalLocationConstraintException": (
        400,
        "The specified location constraint is not that of this endpoint.",
    ),
    "IllegalVersioningConfigurationException": (
        400,
        "The versioning configuration specified in the request is not valid.",
    ),
    "IncompleteBody": (
        400,
        "You did not provide the number of bytes specified by the Content-Length HTTP header.",
    ),
    "IncorrectNumberOfFilesInPostRequest": (
        400,
        "POST requires exactly one file upload per request.",
    ),
    "InsufficientStorage": (507, "The store, or the capacity of the bucket, is full."),  # not S3's
    "InternalError": (500, "An internal error occurred. Try again."),
    "InvalidAccessKeyId": (
        403,
        "The access key ID that you provided does not exist in our records.",
    ),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidBucketAclWithObjectOwnership": (
        400,
        "Bucket cannot have ACLs set with ObjectOwnership's BucketOwnerEnforced setting",
    ),
    "InvalidBucketState": (409, "The request is not valid for the current state of the bucket."),
    "InvalidDigest": (400, "The Content-MD5 or checksum value that you specified is not valid."),
    "InvalidEncryptionAlgorithmError": (
        400,
        "The encryption request that you specified is not valid. The valid value is AES256.",
    ),
    "InvalidLocationConstraint": (400, "The specified location constraint is not valid."),
    "InvalidObjectState": (
        403,
        "The operation is not valid for the current state of the object.",
    ),
    "InvalidPart": (
        400,
        "One or more of the specified parts could not be found. The part might not have been "
        "uploaded, or the specified entity tag might not have matched the part's entity tag.",
    ),
    "InvalidPartNumber": (416, "The requested partnumber is not satisfiable"),
    "InvalidPartOrder": (
        400,
        "The list of parts was not in ascending order. The parts list must be specified in order "
        "by part number.",
    ),
    "InvalidPolicyDocument": (
        400,
        "The content of the form does not meet the conditions specified in the policy document.",
    ),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "InvalidRequest": (400, "Invalid Request"),
    "InvalidRetentionPeriod": (400, "The retention period is not valid."),
    "InvalidSecurity": (403, "The provided security credentials are not valid."),
    "InvalidStorageClass": (400, "The storage class you specified is not valid"),
    "InvalidTag": (
        400,
        "Your request contains tag input that is not valid.",
    ),
    "InvalidTargetBucketForLogging": (
        400,
        "The target bucket for logging does not exist, is not owned by you, or does not have the "
        "appropriate grants for the log-delivery group.",
    ),
    "InvalidToken": (400, "The provided token is malformed or otherwise not valid."),
    "InvalidURI": (400, "The specified URI couldn't be parsed."),
    "InvalidWriteOffset": (
        400,
        "The write offset value that you specified does not match the current object size.",
    ),
    "KeyTooLongError": (400, "Your key is too long"),
    "MalformedACLError": (
        400,
        "The ACL that you provided was not well formed or did not validate against our published "
        "schema.",
    ),
    "MalformedPOSTRequest": (
        400,
        "The body of your POST request is not well-formed multipart/form-data.",
    ),
    "MalformedPolicy": (400, "Your policy contains a principal or statement that is not valid."),
    "MalformedXML": (
        400,
        "The XML you provided was not well-formed or did not validate against our published schema",
    ),
    "MalformedTrailerError": (
        400,
        "The request contained trailing data that was not well-formed or did not conform to our "
        "published schema.",
    ),
    "MaxMessageLengthExceeded": (400, "Your request was too large."),
    "MaxPostPreDataLengthExceededError": (
        400,
        "Your POST request fields preceding the upload file were too large.",
    ),
    "MetadataTooLarge": (
        400,
        "Your metadata headers exceed the maximum allowed metadata size.",
    ),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "MissingRequestBodyError": (400, "Request Body is empty"),
    "MissingSecurityElement": (400, "The request is missing a security element."),
    "MissingSecurityHeader": (400, "Your request is missing a required header."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchBucketPolicy": (404, "The bucket policy does not exist"),
    "NoSuchConfiguration": (404, "The specified configuration does not exist."),
    "NoSuchCORSConfiguration": (404, "The CORS configuration does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchLifecycleConfiguration": (404, "The lifecycle configuration does not exist"),
    "NoSuchObjectLockConfiguration": (
        404,
        "The specified object does not have a ObjectLock configuration",
    ),
    "NoSuchPublicAccessBlockConfiguration": (
        404,
        "The public access block configuration was not found",
    ),
    "NoSuchTagSet": (404, "The TagSet does not exist"),
    "NoSuchUpload": (
        404,
        "The specified multipart upload does not exist. The upload ID might not be valid, or the "
        "multipart upload might have been aborted or completed.",
    ),
    "NoSuchVersion": (404, "The specified version does not exist."),
    "NoSuchWebsiteConfiguration": (
        404,
        "The specified bucket does not have a website configuration",
    ),
    "NotImplemented": (
        501,
        "A header or query you provided requested a function that is not implemented.",
    ),
    "NotModified": (304, "Not Modified"),
    "ObjectLockConfigurationNotFoundError": (
        404,
        "Object Lock configuration does not exist for this bucket",
    ),
    "OperationAborted": (
        409,
        "A conflicting conditional operation is currently in progress against this resource. Try "
        "again.",
    ),
    "OwnershipControlsNotFoundError": (404, "The bucket ownership controls were not found"),
    "PermanentRedirect": (
        301,
        "The bucket that you are attempting to access must be addressed using the specified "
        "endpoint. Send all future requests to this endpoint.",
    ),
    "PreconditionFailed": (
        412,
        "At least one of the pre-conditions you specified did not hold",
    ),
    "QuotaExceeded": (507, "The capacity of the bucket is used up."),  # not S3's
    "ReplicationConfigurationNotFoundError": (
        404,
        "The replication configuration was not found",
    ),
    "RequestHeaderSectionTooLarge": (
        400,
        "Your request header section exceeds the maximum allowed size.",
    ),
    "RequestIsNotMultiPartContent": (
        412,
        "A bucket POST request must be of the enclosure-type multipart/form-data.",
    ),
    "RequestTimeTooSkewed": (
        403,
        "The difference between the request time and the server's time is too large.",
    ),
    "RequestTimeout": (
        400,
        "Your socket connection to the server was not read from or written to within the timeout "
        "period.",
    ),
    "ServerSideEncryptionConfigurationNotFoundError": (
        404,
        "The server side encryption configuration was not found",
    ),
    "ServiceUnavailable": (503, "Service is unable to handle request."),
    "SignatureDoesNotMatch": (
        403,
        "The request signature that the server calculated does not match the signature that you "
        "provided. Check your secret access key and signing method.",
    ),
    "SlowDown": (503, "Please reduce your request rate."),
    "TokenRefreshRequired": (400, "The provided token must be refreshed."),
    "TooManyBuckets": (
        400,
        "You have attempted to create more buckets than are allowed for this account.",
    ),
    "TooManyParts": (
        400,
        "You have attempted to add more parts than the maximum of 10000 that are allowed.",
    ),
    "UnexpectedContent": (400, "This request contains unsupported content."),
    "UnresolvableGrantByEmailAddress": (
        400,
        "The email address that you provided does not match any account on record.",
    ),
    "UnsupportedArgument": (400, "The request contained an unsupported argument."),
    "UnsupportedSignature": (400, "The provided request is signed with an unsupported signature."),
    "UserKeyMustBeSpecified": (
        400,
        "The bucket POST request must contain the specified field name. If it is specified, check "
        "the order of the fields.",
    ),
    # Of STS: https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html
    "InvalidAction": (400, "The action or operation requested is not valid."),
    "MissingAuthenticationToken": (403, "The request must contain a valid access key."),
    "PackedPolicyTooLarge": (400, "The session policy is too large."),
    "ValidationError": (400, "A parameter of the request is missing or not valid."),
    # Sent by S3, absent from the list.
    "AccessForbidden": (
        403,
        "CORSResponse: This CORS request is not allowed. This is usually because the evaluation "
        "of Origin, request method / Access-Control-Request-Method or Access-Control-Request-"
        "Headers are not whitelisted by the resource's CORS spec.",
    ),
    "XAmzContentChecksumMismatch": (
        400,
        "The provided 'x-amz-checksum' header does not match what was computed.",
    ),
    "XAmzContentSHA256Mismatch": (
        400,
        "The provided 'x-amz-content-sha256' header does not match what was computed.",
    ),
}


class S3Error(Exception):
    """An error for the client: `code`, `message`, HTTP `status`.

    `extra` are further elements of the document (BucketName, Key, ArgumentName, Condition…) in the
    order given, `headers` go with the response. Message and status default to the table's; a code
    that the table does not know needs a status.
    """

    def __init__(
        self,
        code: str,
        message: str = "",
        status: int = 0,
        extra: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        usual_status, usual_message = CODES.get(code, (0, code))
        self.code = code
        self.message = message or usual_message
        self.status = status or usual_status
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})
        assert self.status, f"no status for the S3 error code {code}"
        super().__init__(f"{code}: {self.message}")


def invalid_argument(name: str, value: str, message: str = "") -> S3Error:
    """Returns InvalidArgument, with the name and value of the argument in the document."""
    return S3Error("InvalidArgument", message, extra={"ArgumentName": name, "ArgumentValue": value})


def error_document(error: S3Error, resource: str, request_id: str, host_id: str) -> bytes:
    """Returns the XML document of an error; `resource` is the requested path."""
    fields = {"Code": error.code, "Message": error.message, **error.extra}
    fields |= {"Resource": resource, "RequestId": request_id, "HostId": host_id}
    inner = "".join(f"<{name}>{_text(value)}</{name}>" for name, value in fields.items())
    return DECLARATION + f"<Error>{inner}</Error>".encode()


def error_response(
    error: S3Error, resource: str, request_id: str, host_id: str
) -> tuple[int, Headers, bytes]:
    """Returns status, headers and body of the answer to a failed request.

    The body is empty if HTTP allows none (304). For HEAD the caller leaves it out: Content-Length
    is the server's to say.
    """
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    if error.status == 304:
        return error.status, headers, b""
    headers.append((b"content-type", b"application/xml"))
    return error.status, headers, error_document(error, resource, request_id, host_id)


_ILLEGAL: Final = re.compile("[^\t\n\r\x20-\ufffd\U00010000-\U0010ffff]")


def _text(value: str) -> str:
    # What XML 1.0 cannot hold at all is shown as the replacement character: a request can hold it.
    legal = _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", value)
    return escape(legal.encode(errors="replace").decode(), {"\r": "&#13;"})
