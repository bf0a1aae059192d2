"""obstore: the object_store of Rust's Arrow, from Python."""

from common import ACCESS_KEY, BUCKET, ENDPOINT, REGION, SECRET, beside, both_ways
from objects import MIB, content
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store

store = S3Store(
    BUCKET,
    endpoint=ENDPOINT,
    access_key_id=ACCESS_KEY,
    secret_access_key=SECRET,
    region=REGION,
    client_options={"allow_http": True},
    virtual_hosted_style_request=False,
)


def put(key: str, data: bytes) -> None:
    store.put(key, data, chunk_size=5 * MIB)


def get(key: str) -> bytes:
    return bytes(store.get(key).bytes())


def names(prefix: str = "") -> list[str]:
    return [entry["path"] for page in store.list(prefix) for entry in page]


def ranges() -> None:
    put("object", content(20 * MIB))
    whole = content(20 * MIB)
    assert bytes(store.get_range("object", start=7, end=19)) == whole[7:19]
    starts = [0, 5 * MIB - 1, 19 * MIB]
    parts = store.get_ranges("object", starts=starts, lengths=[3, 4 * MIB, MIB])
    lengths = [3, 4 * MIB, MIB]
    for start, length, part in zip(starts, lengths, parts, strict=True):
        assert bytes(part) == whole[start : start + length]
    streamed = b"".join(bytes(part) for part in store.get("object").stream())
    assert streamed == whole
    assert store.head("object")["size"] == len(whole)


def conditions() -> None:
    made = store.put("once", b"first", mode="create")
    try:
        store.put("once", b"second", mode="create")
    except AlreadyExistsError:
        assert get("once") == b"first"
    else:
        raise AssertionError("it was made twice")
    store.put("once", b"third", mode={"e_tag": made["e_tag"]})
    try:
        store.put("once", b"fourth", mode={"e_tag": made["e_tag"]})
    except PreconditionError:
        assert get("once") == b"third"
    else:
        raise AssertionError("an old ETag was taken")


def moves() -> None:
    store.copy("object", "dir/copy of it")
    assert beside("dir/copy of it").read_bytes() == content(20 * MIB)
    store.rename("dir/copy of it", "renamed")
    assert get("renamed") == content(20 * MIB)
    assert not beside("dir/copy of it").exists()
    put("dir/sub/one", b"1")
    listed = store.list_with_delimiter("dir")
    assert list(listed["common_prefixes"]) == ["dir/sub"]


def removal() -> None:
    store.delete(names())
    assert not names()
    try:
        store.head("object")
    except FileNotFoundError:
        pass
    else:
        raise AssertionError("it is still there")


both_ways(put, get, names, store.delete)
ranges()
conditions()
moves()
removal()
