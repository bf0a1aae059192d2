"""Tags of objects."""

from typing import Final

from kvfs.http.api import Response
from kvfs.objects.object_attributes import Metadata
from kvfs.objects.object_info import Facts
from s3api.http.request_context import Call, Handler
from s3api.operations.answers import answer
from s3api.operations.object.object_version import find, version_id
from s3api.operations.object.version_update import update
from s3api.rules import tagging


async def get_object_tagging(call: Call) -> Response:
    """Returns the tags; an empty set if there are none."""
    facts = find(call)
    tags = tagging.parse_kept(facts.metadata.get("tagging", ""))
    return answer(call, {**tagging.document(tags), "VersionId": version_id(call, facts)})


async def put_object_tagging(call: Call) -> Response:
    """Replaces all tags."""
    tags = tagging.parse_document(call.params["Tagging"])
    return await _set(call, tagging.encode(tags))


async def delete_object_tagging(call: Call) -> Response:
    """Deletes all tags."""
    return await _set(call, "")


async def _set(call: Call, encoded: str) -> Response:
    def change(_: Facts) -> tuple[Metadata, tuple[str, ...]]:
        return ({"tagging": encoded}, ()) if encoded else ({}, ("tagging",))

    facts = await update(call, change)
    return answer(call, {"VersionId": version_id(call, facts)})


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteObjectTagging": delete_object_tagging,
    "GetObjectTagging": get_object_tagging,
    "PutObjectTagging": put_object_tagging,
}
