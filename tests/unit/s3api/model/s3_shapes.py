"""Members of operations drawn by shape, for botocore's own serialiser and parser of S3."""

import functools
from datetime import UTC, datetime
from typing import Any

from botocore.loaders import Loader
from botocore.model import OperationModel, ServiceModel
from hypothesis import strategies as st

TOKEN = "abcdefghijklmnopqrstuvwxyz0123456789-_."
# What XML 1.0 can hold and a reader does not change.
XML_TEXT = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufffe\uffff")
)
HEADER_TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TIMES = st.datetimes(datetime(1971, 1, 1), datetime(2200, 1, 1)).map(
    lambda time: time.replace(microsecond=0, tzinfo=UTC)
)


@functools.cache
def botocore_model() -> ServiceModel:
    # Without the extras, which make a time of Expires: S3 gives back whatever text was sent.
    loader = Loader(include_default_extras=False)
    return ServiceModel(loader.load_service_model("s3", "service-2"), "s3")


def operation_model(name: str) -> OperationModel:
    return botocore_model().operation_model(name)


@st.composite
def members(draw: st.DrawFn, shape: Any, depth: int = 0) -> dict[str, Any]:
    """A structure: what is required, and some of the rest."""
    optional = [name for name in shape.members if name not in shape.required_members]
    if shape.metadata.get("union"):
        chosen = [draw(st.sampled_from(optional))]
    else:
        some = st.lists(st.sampled_from(optional), max_size=max(6 - 2 * depth, 1), unique=True)
        chosen = list(shape.required_members) + (draw(some) if optional else [])
    return {
        name: draw(values(shape.members[name], depth))
        for name in chosen
        if not shape.members[name].serialization.get("streaming")
    }


def values(shape: Any, depth: int) -> st.SearchStrategy[Any]:
    place = shape.serialization.get("location", "body")
    if shape.type_name == "structure":
        return members(shape, depth + 1)
    if shape.type_name == "list":
        flat = shape.serialization.get("flattened") or place != "body"
        inner = shape.member if place == "body" else None
        text = values(inner, depth + 1) if inner else st.sampled_from(shape.member.enum)
        return st.lists(text, min_size=1 if flat else 0, max_size=2)
    if shape.type_name == "map":
        return st.dictionaries(st.text(TOKEN, min_size=1, max_size=8), HEADER_TEXT, min_size=1)
    return _scalars(shape, place)


def _scalars(shape: Any, place: str) -> st.SearchStrategy[Any]:
    outside = place != "body"
    if shape.type_name in ("integer", "long"):
        limit = (1 << 31 if shape.type_name == "integer" else 1 << 63) - 1
        bounds = shape.metadata.get("min", 0), shape.metadata.get("max", limit)
        return st.integers(*bounds) if outside else st.integers(-limit - 1, limit)
    if shape.type_name == "boolean":
        return st.booleans()
    if shape.type_name == "timestamp":
        return TIMES
    if shape.type_name == "blob":
        return st.just(b"")
    if shape.enum:
        return st.sampled_from(shape.enum)
    if shape.name == "Policy":
        return XML_TEXT.filter(bool)
    if place == "uri":
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
    return {"querystring": ANY_TEXT, "body": XML_TEXT}.get(place, HEADER_TEXT)
