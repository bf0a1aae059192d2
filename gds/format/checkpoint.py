"""The files of a checkpoint: one, several, or the shards that an index names."""

import contextlib
import errno
import functools
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as LocalPath
from typing import Final, NamedTuple

from gds.format.excerpt import no_json, shown
from gds.format.safetensors import Header, read_header
from gds.io.checked_source import CheckedSource, sums_of
from gds.io.source import SourceFile
from kvfs.base.errors import Corrupt, Invalid, NoSpace, NotFound, Unavailable
from kvfs.client.mount.backing_file import open_backings
from kvfs.session.uninterruptible import uninterrupted

Path = str | bytes | os.PathLike[str]
_INDEX: Final = ".safetensors.index.json"
_SUFFIX: Final = ".safetensors"
_MOST_JSON_BYTES: Final = 100 << 20


class Checkpoint(NamedTuple):
    """Open files and their headers, in the same order."""

    sources: tuple[SourceFile, ...]
    headers: tuple[Header, ...]

    def check_unchanged(self) -> None:
        """Raises Conflict if a file was written to since it was opened."""
        for source in self.sources:
            source.check_unchanged()


@contextlib.contextmanager
def open_checkpoint(paths: Path | Sequence[Path], *, verify: bool = False) -> Iterator[Checkpoint]:
    """Opens files, which keep their content until the block ends, even if they are replaced or
    evicted meanwhile. `verify`: the data read are compared with the store's checksums.

    Raises NotFound, Corrupt, Invalid (a name in two files, nothing to load), Unavailable and
    NoSpace (for data on other nodes), OSError."""
    shards = shards_of(paths)
    opened = uninterrupted(functools.partial(_opened, shards, verify=verify), _close)
    try:
        yield opened
    finally:
        _close(opened)


def read_headers(paths: Path | Sequence[Path]) -> list[tuple[str, Header]]:
    """Returns the files and their headers. Data of large files on other nodes need not arrive for
    that. Raises what `open_checkpoint` raises."""
    found = []
    for shard in shards_of(paths):
        if shard.path.exists() and not shard.path.is_file():
            raise Invalid(f"{shard.path} is no regular file")
        with _unmissed(), open(shard.path, "rb", buffering=0) as file:
            found.append((str(shard.path), read_header(file.fileno(), str(shard.path))))
        _require_all(shard, found[-1][1])
    _require_names_once(found)
    return found


def config_beside(path: Path) -> Mapping[str, object] | None:
    """Returns the contents of the config.json beside a file of a checkpoint; None: there is none.
    Raises Corrupt, Invalid, OSError."""
    config = _local(path).parent / "config.json"
    try:
        found = _json(config)
    except FileNotFoundError:
        return None
    if not isinstance(found, dict):
        raise Corrupt(f"{config}: no JSON object")
    return found


class Shard(NamedTuple):
    """One file to load."""

    path: LocalPath
    names: frozenset[str]
    """Names of tensors that the index says it has; it may have others."""


def shards_of(paths: Path | Sequence[Path]) -> list[Shard]:
    """Raises NotFound, Corrupt, Invalid, OSError."""
    is_one = isinstance(paths, str | bytes | os.PathLike)
    given = paths if isinstance(paths, Iterable) and not is_one else [paths]
    found = [file for path in given for file in _files(_local(path))]
    if not found:
        raise Invalid("no files to load: name some")
    for path, number in Counter(shard.path for shard in found).items():
        if number > 1:
            raise Invalid(f"{path} is named {number} times: once is wanted")
    return found


def is_index(path: LocalPath) -> bool:
    """Returns whether the path, by its own name, is an index of shards."""
    return path.name.endswith(_INDEX)


def indexes_in(directory: LocalPath) -> list[LocalPath]:
    """Returns the indexes in a directory, sorted."""
    return sorted(directory.glob("*" + _INDEX))


def _local(path: object) -> LocalPath:
    """Raises Invalid."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise Invalid(f"{shown(path)} is no path")
    return LocalPath(os.fsdecode(path))


def _files(path: LocalPath) -> list[Shard]:
    if is_index(path):
        return _shards(path)
    if not path.is_dir():
        return [Shard(path, frozenset())]
    indexes = indexes_in(path)
    if len(indexes) > 1:
        raise Invalid(f"{path} has {len(indexes)} indexes: name the one to load")
    if indexes:
        return _shards(indexes[0])
    found = sorted(path.glob("*" + _SUFFIX))
    if not found:
        raise NotFound(f"{path} has no *{_SUFFIX} files")
    return [Shard(each, frozenset()) for each in found]


def _shards(index: LocalPath) -> list[Shard]:
    """Returns the shards that the index names, sorted."""
    try:
        found = _json(index)
    except FileNotFoundError:
        raise NotFound(f"{index}: no such file") from None
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise Corrupt(f"{index}: it has no weight_map of tensors and files")
    if not weights:
        raise Corrupt(f"{index}: its weight_map is empty")
    files = sorted(set(weights.values()))
    for name in files:
        if LocalPath(name).is_absolute() or ".." in LocalPath(name).parts:
            raise Corrupt(f"{index}: {shown(name)} leads out of its directory")
        if not (index.parent / name).is_file():
            raise NotFound(f"{index.parent / name}: no such file, though {index.name} names it")
    return [
        Shard(index.parent / name, frozenset(t for t, file in weights.items() if file == name))
        for name in files
    ]


def _json(path: LocalPath) -> object:
    """Raises Corrupt, Invalid, FileNotFoundError and other OSErrors."""
    if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would wait for somebody who writes into it
        raise Invalid(f"{path} is no regular file")
    # By C functions alone: between an opener's steps an interrupt would lose the descriptor.
    with open(path, "rb") as file:
        try:
            return json.loads(file.read(_MOST_JSON_BYTES))
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"{path}: no JSON: {no_json(error)}") from None


def _require_all(shard: Shard, header: Header) -> None:
    missing = shard.names - {tensor.name for tensor in header.tensors}
    if missing:
        raise Corrupt(
            f"{shard.path}: it lacks tensor {shown(min(missing))}, which its index says it has"
        )


def _opened(shards: Sequence[Shard], *, verify: bool) -> Checkpoint:
    """Raises what `open_checkpoint` raises."""
    sources = _sources([shard.path for shard in shards], verify=verify)
    found = Checkpoint(sources, ())
    try:
        for shard, source in zip(shards, sources, strict=True):
            header = read_header(source.fd, source.where)
            if isinstance(source, CheckedSource):
                source.check_header(header)
            _require_all(shard, header)
            found = found._replace(headers=(*found.headers, header))
        _require_names_once(zip((source.where for source in sources), found.headers, strict=True))
    except BaseException:
        _close(found)
        raise
    return found


def _close(checkpoint: Checkpoint) -> None:
    for source in checkpoint.sources:
        source.close()


def _sources(paths: Sequence[LocalPath], *, verify: bool) -> tuple[SourceFile, ...]:
    """Returns sources of the files, once their data on other nodes have arrived. Raises NotFound,
    Invalid, NoSpace, Unavailable, OSError; to verify them also NotSupported, AccessDenied."""
    with _unmissed():
        found = open_backings(paths, sums=verify)
    sources: list[SourceFile] = []
    try:
        for path, backing in zip(paths, found, strict=True):
            if not stat.S_ISREG(os.fstat(backing.fd).st_mode):
                raise Invalid(f"{path} is no regular file")
            if verify:
                sources.append(CheckedSource(backing.fd, str(path), sums_of(backing, path)))
            else:
                sources.append(SourceFile(backing.fd, str(path)))
    except BaseException:
        for source in sources:
            source.close()
        for backing in found[len(sources) :]:
            os.close(backing.fd)
        raise
    return tuple(sources)


@contextlib.contextmanager
def _unmissed() -> Iterator[None]:
    """Raises errors in the form that callers expect: NotFound, NoSpace, Unavailable, OSError."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{error.filename}: no such file") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(
                f"{error.filename}: there is no room here for what other nodes have of it: free "
                "some, or raise the node's capacity"
            ) from None
        if error.errno != errno.EIO:
            raise
        raise Unavailable(
            f"{error.filename}: its data cannot be had now: nodes that have them do not answer, or "
            "a disk fails"
        ) from None


def _require_names_once(files: Iterable[tuple[str, Header]]) -> None:
    seen: dict[str, str] = {}
    for where, header in files:
        for tensor in header.tensors:
            if tensor.name in seen:
                name = shown(tensor.name)
                raise Invalid(f"tensor {name} is in both {seen[tensor.name]} and {where}")
            seen[tensor.name] = where
