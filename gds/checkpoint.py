"""The files of a checkpoint: one, several, or the shards that an index names."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path as LocalPath
from typing import Final, NamedTuple

from gds.safetensors import Header, read_header
from gds.source import Source
from kvfs.client.backing import open_backing
from kvfs.errors import Corrupt, Invalid, NotFound

Path = str | os.PathLike[str]
_INDEX: Final = ".safetensors.index.json"
_SUFFIX: Final = ".safetensors"
_MOST_INDEX_BYTES: Final = 100 << 20


class Checkpoint(NamedTuple):
    """Open files and their headers, in the same order."""

    sources: tuple[Source, ...]
    headers: tuple[Header, ...]

    def check_unchanged(self) -> None:
        """Raises Conflict where one was written to since it was opened."""
        for source in self.sources:
            source.check_unchanged()


@contextlib.contextmanager
def open_checkpoint(paths: Path | Sequence[Path]) -> Iterator[Checkpoint]:
    """Open files, which stay what they are until the block ends, also when they are replaced or
    evicted meanwhile.

    Raises NotFound, Corrupt, Invalid (a name in two files, nothing to load), OSError."""
    with contextlib.ExitStack() as stack:
        sources, headers = [], []
        for shard in shards_of(paths):
            source = _opened(shard.path)
            stack.callback(source.close)
            sources.append(source)
            headers.append(read_header(source.fd, source.where))
            _require_all(shard, headers[-1])
        _require_names_once(sources, headers)
        yield Checkpoint(tuple(sources), tuple(headers))


class Shard(NamedTuple):
    """One file to load."""

    path: LocalPath
    names: frozenset[str]
    """Of tensors that the index says it has; it may have others."""


def shards_of(paths: Path | Sequence[Path]) -> list[Shard]:
    """Raises NotFound, Corrupt, Invalid, OSError."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = [file for path in given for file in _files(LocalPath(path))]
    if not found:
        raise Invalid("no files to load: name some")
    return found


def _files(path: LocalPath) -> list[Shard]:
    if path.name.endswith(_INDEX):
        return _shards(path)
    if not path.is_dir():
        return [Shard(path, frozenset())]
    indexes = sorted(path.glob("*" + _INDEX))
    if len(indexes) > 1:
        raise Invalid(f"{path} has {len(indexes)} indexes: name the one to load")
    if indexes:
        return _shards(indexes[0])
    found = sorted(path.glob("*" + _SUFFIX))
    if not found:
        raise NotFound(f"{path} has no *{_SUFFIX} files")
    return [Shard(each, frozenset()) for each in found]


def _shards(index: LocalPath) -> list[Shard]:
    """That the index names, sorted."""
    try:
        with open(index, "rb") as file:
            found = json.loads(file.read(_MOST_INDEX_BYTES))
    except FileNotFoundError:
        raise NotFound(f"{index}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{index}: no JSON: {error}") from None
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise Corrupt(f"{index}: it has no weight_map of tensors and files")
    files = sorted(set(weights.values()))
    for name in files:
        if LocalPath(name).is_absolute() or ".." in LocalPath(name).parts:
            raise Corrupt(f"{index}: {name!r} leads out of its directory")
        if not (index.parent / name).is_file():
            raise NotFound(f"{index.parent / name}: no such file, though {index.name} names it")
    return [
        Shard(index.parent / name, frozenset(t for t, file in weights.items() if file == name))
        for name in files
    ]


def _require_all(shard: Shard, header: Header) -> None:
    missing = shard.names - {tensor.name for tensor in header.tensors}
    if missing:
        raise Corrupt(
            f"{shard.path}: it lacks tensor {min(missing)!r}, which its index says it has"
        )


def _opened(path: LocalPath) -> Source:
    try:
        fd = open_backing(path).fd
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Invalid(f"{path} is no regular file")
    return Source(fd, str(path))


def _require_names_once(sources: Sequence[Source], headers: Sequence[Header]) -> None:
    seen: dict[str, str] = {}
    for source, header in zip(sources, headers, strict=True):
        for tensor in header.tensors:
            if tensor.name in seen:
                raise Invalid(
                    f"tensor {tensor.name!r} is in both {seen[tensor.name]} and {source.where}"
                )
            seen[tensor.name] = source.where
