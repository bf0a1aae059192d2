"""The table of operations as the documents have it: `python -m s3api.operations.documented`."""

import sys
from collections.abc import Collection, Mapping
from typing import Final

from s3api.model.routing import OPTIONS_OBJECT, POST_OBJECT, STS
from s3api.model.service_model import service
from s3api.operations import HANDLERS, SPECIAL
from s3api.operations.bucket import refused_configurations

SUPPORTED: Final = "supported"
NOT_IMPLEMENTED: Final = "NotImplemented"
_ELSEWHERE: Final = "never asked for: {} is what its requests mean"
_TWINS: Final = {
    "GetBucketLifecycle": "GetBucketLifecycleConfiguration",
    "GetBucketNotification": "GetBucketNotificationConfiguration",
    "ListDirectoryBuckets": "ListBuckets",
    "PutBucketLifecycle": "PutBucketLifecycleConfiguration",
    "PutBucketNotification": "PutBucketNotificationConfiguration",
}


def operations_table(
    supported: Collection[str], refused: Mapping[str, str] | None = None
) -> list[tuple[str, str]]:
    """Returns each operation's name, in order, and "supported" or the error that it gets:
    NotImplemented unless `refused` names another. Raises ValueError for a name that S3 does not
    have."""
    names = {*service().operations, POST_OBJECT, OPTIONS_OBJECT}
    other = refused or {}
    if unknown := ({*supported} | other.keys()) - names:
        raise ValueError(f"S3 has no such operations: {', '.join(sorted(unknown))}")
    return [(name, _fate(name, supported, other)) for name in sorted(names)]


def markdown_table(rows: list[tuple[str, str]]) -> str:
    """Returns the table as the documents have it."""
    lines = ["| operation | |", "|---|---|", *(f"| `{name}` | {fate} |" for name, fate in rows)]
    return "\n".join(lines) + "\n"


def _fate(name: str, supported: Collection[str], refused: Mapping[str, str]) -> str:
    if name in supported:
        return SUPPORTED
    if twin := _TWINS.get(name):
        return _ELSEWHERE.format(f"`{twin}`")
    if name == "WriteGetObjectResponse":
        return "MethodNotAllowed"
    return refused.get(name, NOT_IMPLEMENTED)


FATES: Final[Mapping[str, str]] = {
    **refused_configurations.FATES,
    "PutBucketEncryption": "AES256 where the storage is encrypted, else NotImplemented",
    "RestoreObject": "InvalidObjectState: nothing is archived",
}
"""The treatment of operations that have a handler and yet are not supported."""


def table() -> str:
    """Returns each operation of S3 with its treatment here, in Markdown."""
    served = {*HANDLERS, *SPECIAL} - {STS} - FATES.keys()
    return markdown_table(operations_table(served, FATES))


if __name__ == "__main__":
    sys.stdout.write(table())
