"""Configurations that this server does not support: none can be set, so none ever exists.

Reading one gives S3's answer for a bucket without it; setting one to its only possible value is
allowed, anything else is NotImplemented.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from kvfs.http.api import Response
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer

_EMPTY: Final[Mapping[str, Mapping[str, Any]]] = {
    "DeleteBucketReplication": {},
    "DeleteBucketWebsite": {},
    "GetBucketAccelerateConfiguration": {},
    "GetBucketNotificationConfiguration": {},
    "GetBucketRequestPayment": {"Payer": "BucketOwner"},
    "ListBucketAnalyticsConfigurations": {"IsTruncated": False},
    "ListBucketIntelligentTieringConfigurations": {"IsTruncated": False},
    "ListBucketInventoryConfigurations": {"IsTruncated": False},
    "ListBucketMetricsConfigurations": {"IsTruncated": False},
}
_ABSENT: Final[Mapping[str, str]] = {
    "GetBucketReplication": "ReplicationConfigurationNotFoundError",
    "GetBucketWebsite": "NoSuchWebsiteConfiguration",
    **{
        f"{verb}Bucket{kind}Configuration": "NoSuchConfiguration"
        for verb in ("Get", "Delete")
        for kind in ("Analytics", "IntelligentTiering", "Inventory", "Metrics")
    },
}
REFUSED: Final[Mapping[str, str]] = {
    "PutBucketAccelerateConfiguration": "Transfer acceleration",
    "PutBucketAnalyticsConfiguration": "Analytics",
    "PutBucketIntelligentTieringConfiguration": "Intelligent tiering",
    "PutBucketInventoryConfiguration": "Inventory",
    "PutBucketMetricsConfiguration": "Request metrics of S3",
    "PutBucketReplication": "Replication",
    "PutBucketWebsite": "Website hosting",
}


async def _answer_empty(call: Call) -> Response:
    return answer(call, _EMPTY[call.operation])


async def _answer_absent(call: Call) -> Response:
    raise S3Error(_ABSENT[call.operation], extra={"BucketName": call.bucket})


async def _refuse(call: Call) -> Response:
    raise _not_implemented(REFUSED[call.operation])


async def _put_none(call: Call, member: str, what: str) -> Response:
    """Sets nothing, as when notification is switched off."""
    if any(call.params[member].values()):
        raise _not_implemented(what)
    return answer(call)


async def _put_request_payment(call: Call) -> Response:
    if call.params["RequestPaymentConfiguration"]["Payer"] != "BucketOwner":
        raise _not_implemented("Payment by the requester")
    return answer(call)


def _not_implemented(what: str) -> S3Error:
    return S3Error("NotImplemented", f"{what} is not implemented by this server")


HANDLERS: Final[dict[str, Handler]] = {
    **dict.fromkeys(_EMPTY, _answer_empty),
    **dict.fromkeys(_ABSENT, _answer_absent),
    **dict.fromkeys(REFUSED, _refuse),
    "PutBucketNotificationConfiguration": partial(
        _put_none, member="NotificationConfiguration", what="Event notification"
    ),
    "PutBucketRequestPayment": _put_request_payment,
}

_ONLY_NONE: Final = "supported where it asks for nothing, else NotImplemented"
FATES: Final[Mapping[str, str]] = {
    **dict.fromkeys(_EMPTY, "answers that there is none"),
    **_ABSENT,
    **dict.fromkeys(REFUSED, "NotImplemented"),
    "GetBucketRequestPayment": "answers BucketOwner",
    "PutBucketNotificationConfiguration": _ONLY_NONE,
    "PutBucketRequestPayment": "supported for BucketOwner, else NotImplemented",
}
"""The treatment of each, for the documents."""
