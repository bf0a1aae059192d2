"""The table of operations as the documents have it: `python -m s3api.operations.documented`."""

import sys
from collections.abc import Mapping
from typing import Final

from s3api.model.routing import STS
from s3api.model.table import markdown_table, operations_table
from s3api.operations import HANDLERS, SPECIAL
from s3api.operations.bucket import refused_configurations

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
