"""Tags: both forms and S3's limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.rules.tagging import document, encode, parse_document, parse_header

letters = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20)


@given(
    st.dictionaries(letters.filter(lambda key: not key.lower().startswith("aws:")), letters).filter(
        lambda tags: len(tags) <= 10
    )
)
def test_both_forms_give_the_same_tags(tags: dict[str, str]) -> None:
    assert parse_header(encode(tags)) == tags
    assert parse_document(document(tags)) == tags


def test_documents_are_in_the_order_of_keys() -> None:
    told = document(parse_header("foo=bar&bar&Z=1"))
    assert [tag["Key"] for tag in told["TagSet"]] == ["Z", "bar", "foo"]


def test_header_forms() -> None:
    assert parse_header("") == {}
    assert parse_header("a=1&b=&c=x%20y+z&d") == {"a": "1", "b": "", "c": "x y z", "d": ""}
    for bad in ("a&a", "a=1&a=2", "a=%ff", "&"):
        with pytest.raises(S3Error) as caught:
            parse_header(bad)
        assert caught.value.code == "InvalidArgument"


@pytest.mark.parametrize(
    "pairs",
    [
        [("", "v")],
        [("k" * 129, "v")],
        [("k", "v" * 257)],
        [("k", "1"), ("k", "2")],
        [("aws:x", "v")],
        [("AWS:x", "v")],
        [("k?", "v")],
        [("k", "a<b")],
        [("k", "a\nb")],
        [(f"k{i}", "v") for i in range(11)],
    ],
)
def test_limits(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(S3Error) as caught:
        parse_document({"TagSet": [{"Key": key, "Value": value} for key, value in pairs]})
    assert caught.value.code == "InvalidTag"


def test_what_is_just_allowed() -> None:
    pairs = [("k" * 128, "v" * 256), ("a +-=._:/@", "é"), *((f"k{i}", "") for i in range(8))]
    tags = parse_document({"TagSet": [{"Key": key, "Value": value} for key, value in pairs]})
    assert len(tags) == 10
    many = {"TagSet": [{"Key": f"k{i}", "Value": ""} for i in range(50)]}
    assert len(parse_document(many, limit=50)) == 50
