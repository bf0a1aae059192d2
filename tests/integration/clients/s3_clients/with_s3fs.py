"""s3fs: fsspec's filesystem, above aiobotocore."""

import tempfile
import warnings
from pathlib import Path

from common import BUCKET, beside, both_ways
from configured import fs
from objects import MIB, content


def path(key: str) -> str:
    return f"{BUCKET}/{key}"


def put(key: str, data: bytes) -> None:
    fs.pipe_file(path(key), data)


def names() -> list[str]:
    fs.invalidate_cache()
    return [name.removeprefix(f"{BUCKET}/") for name in fs.find(BUCKET)]


def delete(key: str) -> None:
    fs.rm_file(path(key))


def files() -> None:
    with fs.open(path("written"), "wb", block_size=5 * MIB) as file:
        for start in range(0, 13 * MIB, MIB):
            file.write(content(13 * MIB)[start : start + MIB])
    assert beside("written").read_bytes() == content(13 * MIB)
    with fs.open(path("written"), "rb") as file:
        file.seek(6 * MIB)
        assert file.read(100) == content(13 * MIB)[6 * MIB :][:100]
    assert fs.cat_file(path("written"), start=5, end=12) == content(13 * MIB)[5:12]
    with fs.open(path("written"), "ab") as file:  # its old bytes become a copied part
        file.write(b"more")
    assert beside("written").read_bytes() == content(13 * MIB) + b"more"
    assert fs.info(path("written"))["size"] == 13 * MIB + 4
    fs.touch(path("touched"))
    assert beside("touched").read_bytes() == b""
    assert fs.exists(path("touched"))
    assert not fs.exists(path("untouched"))


def trees() -> None:
    """put, get, glob, walk, cp, mv and rm of directories."""
    with tempfile.TemporaryDirectory() as home:
        source, copy = Path(home) / "source", Path(home) / "copy"
        for name in ("a.bin", "sub/b.bin", "sub/deep/c c.bin"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(content(len(name)))
        fs.put(f"{source}/", path("tree/"), recursive=True)
        assert beside("tree/sub/deep/c c.bin").read_bytes() == content(16)
        beside("tree/of-the-mount.bin").write_bytes(b"m")
        fs.invalidate_cache()
        fs.get(path("tree/"), f"{copy}/", recursive=True)
        assert (copy / "sub" / "b.bin").read_bytes() == content(9)
        assert (copy / "of-the-mount.bin").read_bytes() == b"m"
    assert fs.ls(path("tree"), detail=False) == [
        path("tree/a.bin"),
        path("tree/of-the-mount.bin"),
        path("tree/sub"),
    ]
    assert fs.glob(path("tree/**/*.bin")) == sorted(fs.find(path("tree")))
    assert fs.isdir(path("tree/sub"))
    assert fs.isfile(path("tree/a.bin"))
    assert fs.du(path("tree")) == 5 + 9 + 16 + 1
    fs.cp(path("tree/sub"), path("copy"), recursive=True)
    fs.mv(path("tree/a.bin"), path("moved.bin"))
    assert beside("moved.bin").read_bytes() == content(5)
    fs.rm(path("tree"), recursive=True)
    assert not beside("tree").exists()


def attributes() -> None:
    fs.setxattr(path("moved.bin"), colour="green")
    assert fs.getxattr(path("moved.bin"), "colour") == "green"
    fs.put_tags(path("moved.bin"), {"a": "b c"})
    assert fs.get_tags(path("moved.bin")) == {"a": "b c"}
    assert "Signature=" in fs.sign(path("moved.bin"), expiration=60)


def buckets() -> None:
    name = BUCKET + "-more"
    fs.mkdir(name)
    assert name in fs.ls("", detail=False, refresh=True)
    fs.rmdir(name)
    assert not fs.exists(name)


warnings.simplefilter("ignore", ResourceWarning)
both_ways(put, lambda key: fs.cat_file(path(key)), names, delete, also=("two//slashes",))
files()
trees()
attributes()
buckets()
fs.rm(f"{BUCKET}/*", recursive=True)
assert not names()
