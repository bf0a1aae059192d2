"""Changes of the metadata of an existing version."""

from collections.abc import Callable, Sequence

from kvfs.objects.object_attributes import Metadata
from kvfs.objects.object_info import Facts
from s3api.http.request_context import Call
from s3api.operations.object.object_version import find, marked

Change = Callable[[Facts], tuple[Metadata, Sequence[str]]]
"""Returns the attributes to set and the names to remove, given the version; may be called more than
once."""


async def update(call: Call, change: Change) -> Facts:
    """Returns the version as it was found, in the transaction that changed it. Raises the S3Error
    of `find`, and what `change` raises."""
    find(call)

    def checked(facts: Facts) -> tuple[Metadata, Sequence[str]]:
        if facts.delete_marker:
            raise marked(call, facts)
        return change(facts)

    return await call.blocking(
        lambda: call.store.update(call.raw_bucket, call.raw_key, call.version, checked)
    )
