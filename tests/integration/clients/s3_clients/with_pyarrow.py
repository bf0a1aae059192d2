"""pyarrow's S3FileSystem: AWS's SDK for C++."""

import pyarrow
from common import ACCESS_KEY, BUCKET, HOST, REGION, SECRET, beside, both_ways
from configured import s3 as store
from objects import MIB, content
from pyarrow import fs, parquet


def path(key: str) -> str:
    return f"{BUCKET}/{key}"


def put(key: str, data: bytes) -> None:
    with store.open_output_stream(path(key)) as stream:
        stream.write(data)


def get(key: str) -> bytes:
    with store.open_input_stream(path(key)) as stream:
        return stream.read()


def found(below: str = "") -> list[fs.FileInfo]:
    root = f"{BUCKET}/{below}".rstrip("/")
    return store.get_file_info(fs.FileSelector(root, recursive=True))


def names() -> list[str]:
    files = [entry for entry in found() if entry.type == fs.FileType.File]
    return [entry.path.removeprefix(f"{BUCKET}/") for entry in files]


def delete(key: str) -> None:
    store.delete_file(path(key))


def table() -> None:
    rows = pyarrow.table({"n": list(range(100_000)), "s": [str(n) for n in range(100_000)]})
    parquet.write_table(rows, path("tables/t.parquet"), filesystem=store, row_group_size=10_000)
    assert parquet.read_table(path("tables/t.parquet"), filesystem=store) == rows
    assert parquet.read_table(beside("tables/t.parquet")) == rows  # off the mount
    parquet.write_table(rows, beside("from-the-mount.parquet"))
    some = parquet.read_table(path("from-the-mount.parquet"), columns=["n"], filesystem=store)
    assert some == rows.select(["n"])


def stream() -> None:
    """A body of unknown length, in parts; then random reads of it."""
    with store.open_output_stream(path("stream"), metadata={"Content-Type": "text/x"}) as out:
        for start in range(0, 23 * MIB, MIB):
            out.write(content(23 * MIB)[start : start + MIB])
    assert beside("stream").read_bytes() == content(23 * MIB)
    with store.open_input_file(path("stream")) as file:
        assert file.size() == 23 * MIB
        assert file.read_at(1000, 11 * MIB) == content(23 * MIB)[11 * MIB :][:1000]
        assert file.metadata()["Content-Type"] == b"text/x"


def directories() -> None:
    store.create_dir(path("made/deep"), recursive=True)
    assert beside("made/deep").is_dir()
    put("made/deep/er/file", b"x")
    kinds = {entry.path.removeprefix(f"{BUCKET}/"): entry.type for entry in found("made")}
    assert kinds == {
        "made/deep": fs.FileType.Directory,
        "made/deep/er": fs.FileType.Directory,
        "made/deep/er/file": fs.FileType.File,
    }
    store.copy_file(path("stream"), path("made/copy"))
    assert get("made/copy") == content(23 * MIB)
    store.move(path("made/copy"), path("made/moved"))
    assert not beside("made/copy").exists()
    assert beside("made/moved").stat().st_size == 23 * MIB
    store.delete_dir(path("made"))
    assert not beside("made").exists()
    assert store.get_file_info(path("made")).type == fs.FileType.NotFound


def buckets() -> None:
    maker = fs.S3FileSystem(
        access_key=ACCESS_KEY,
        secret_key=SECRET,
        region=REGION,
        scheme="http",
        endpoint_override=HOST,
        allow_bucket_creation=True,
        allow_bucket_deletion=True,
    )
    name = BUCKET + "-more"
    maker.create_dir(name)
    assert name in [entry.path for entry in maker.get_file_info(fs.FileSelector(""))]
    maker.delete_dir(name)
    assert maker.get_file_info(name).type == fs.FileType.NotFound


both_ways(put, get, names, delete)
table()
stream()
directories()
buckets()
store.delete_dir_contents(BUCKET)
assert not names()
