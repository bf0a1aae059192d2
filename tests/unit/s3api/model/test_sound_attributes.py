"""Attributes that somebody set on the mount: what S3 is given of them never fails it."""

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.http.response import render_fields
from kvfs.meta.records import Inode
from kvfs.objects import attribute_validation, object_attributes
from kvfs.objects.object_info import Facts
from s3api.model.frequent_answers import object_headers
from s3api.operations.answers import checksum_members, stored_headers
from s3api.operations.object.get_object import part_sizes
from s3api.operations.object.version_settings import lock_attributes, retention_of
from s3api.rules import parts, tagging
from s3api.rules.access import acl
from s3api.rules.object_lock import ObjectLock, Retention

NOW_S = 1_800_000_000
NAMES = st.sampled_from(
    [
        *(f"trusted.s3.{name}" for name in ("retention", "legal-hold", "acl", "owner", "parts")),
        *(f"user.s3.{name}" for name in ("retention", "legal-hold", "acl", "owner", "parts")),
        *(f"user.s3.{name}" for name in ("parts.1", "part-checksums", "tagging", "content-type")),
        *(f"user.s3.checksum.{name}" for name in ("crc32", "type", "", "a b")),
        *(f"user.s3.meta.{name}" for name in ("a", "ü", "", "a\r\nb", "a b", "\udcff")),
        *("user.s3.", "user.s3.expires", "user.s3.a\n", "user.s3.etag", "trusted.s3.version"),
    ]
).map(lambda name: name.encode(errors="surrogateescape"))
_WORDS = (
    "GOVERNANCE COMPLIANCE ON OFF FULL_OBJECT 1 -1 1* *9999 , = & % %ff ; : { } [ ] Owner ID "
    '99999999999999 1e9 AAAA== " \r \n \t é'
)
_ACL = '{"Owner":{"ID":"a","DisplayName":"b"},"Grants":[]}'
PIECES = st.sampled_from([*_WORDS.split(" "), " ", "\r\n", "\0", _ACL, "GOVERNANCE 4000000000"])
VALUES = st.one_of(
    st.binary(max_size=40),
    st.lists(PIECES, max_size=8).map(lambda found: "".join(found).encode()),
)


def facts_of(said: Mapping[str, str]) -> Facts:
    inode = Inode(
        mode=0o100644, uid=0, gid=0, nlink=1, size=5, atime_ns=0, mtime_ns=0, ctime_ns=0,
        parent=1, name=b"k",
    )  # fmt: skip
    return Facts(b"k", 5, inode, "e", dict(said), "null", True, False)


@given(st.dictionaries(NAMES, VALUES, max_size=8))
def test_whatever_is_set_can_be_read(raw: dict[bytes, bytes]) -> None:
    facts = facts_of(object_attributes.split(raw))
    kept = facts.metadata
    headers = object_headers(facts.etag, facts.mtime_ns, stored_headers(kept, "k"))
    headers += [(b"x", value.encode()) for name, value in kept.items() if "checksum" in name]
    assert render_fields(headers)
    assert sum(part_sizes(facts)) == facts.size
    assert len(parts.checksums_of(kept)) >= 0
    assert len(tagging.parse_kept(kept.get("tagging", ""))) <= tagging.OBJECT_TAGS
    checksum_members(kept)
    if "acl" in kept:
        acl.load(msgspec.json.decode(kept["acl"]))
    held = retention_of(facts)
    given_retention = raw.get(b"trusted.s3.retention")
    assert (held is None) is (given_retention is None)
    assert attribute_validation.is_retained(kept.get("retention"), NOW_S) is (
        held is not None and held.until.timestamp() > NOW_S
    )
    assert kept.get("legal-hold") in (None, "ON", "OFF")
    assert ("legal-hold" in kept) is (b"trusted.s3.legal-hold" in raw)


@given(VALUES)
def test_a_lock_that_cannot_be_read_holds(value: bytes) -> None:
    text = value.decode(errors="surrogateescape")
    if attribute_validation.is_sound("retention", text):
        return
    kept = object_attributes.split({b"trusted.s3.retention": value, b"user.s3.retention": b"OFF"})
    assert attribute_validation.is_retained(kept["retention"], NOW_S, bypass=True)
    assert attribute_validation.weakens(text, None, NOW_S)


@pytest.mark.parametrize("mode", ["GOVERNANCE", "COMPLIANCE"])
def test_what_s3_keeps_is_sound(mode: str) -> None:
    kept = lock_attributes(ObjectLock(Retention(mode, datetime(2100, 1, 1, tzinfo=UTC)), True))
    kept |= parts.attributes([5, 5, 1], ["AAAAAA==", "AAAAAA==", "BBBBBB=="])
    kept |= {"tagging": tagging.encode({"a b": "c/é", "d": ""}), "checksum.crc32": "AAAAAA==-3"}
    owner = acl.Owner("main", "main")
    kept |= {"checksum.type": "COMPOSITE", "meta.x-y_z": "two\nlines", "content-type": "a/b"}
    document = acl.document(acl.canned("public-read", owner, owner))
    kept |= {"acl": msgspec.json.encode(document).decode(), "owner": "main"}
    assert [
        name for name, value in kept.items() if not attribute_validation.is_sound(name, value)
    ] == []


def test_what_is_weaker() -> None:
    old = f"GOVERNANCE {NOW_S + 100}"
    assert attribute_validation.weakens(old, None, NOW_S)
    assert attribute_validation.weakens(old, f"GOVERNANCE {NOW_S + 99}", NOW_S)
    assert attribute_validation.weakens(old, f"COMPLIANCE {NOW_S + 200}", NOW_S)
    assert not attribute_validation.weakens(old, f"GOVERNANCE {NOW_S + 101}", NOW_S)
    assert not attribute_validation.weakens(old, None, NOW_S + 100)
