"""The description of a backup by itself, and the list of those that a place has.

A manifest is a line with the digest of the rest, and JSON. Its name is the time of its content, by
which backups are sorted and chosen.
"""

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from kvfs.admin.backup.repository import Repository
from kvfs.base.encryption import KEY_SIZE
from kvfs.base.errors import Conflict, Corrupt, Invalid, NotFound, NotSupported

FORMAT: Final = 1
_BELOW: Final = "backups"
_SUFFIX: Final = ".json"
_DIGEST: Final = re.compile("[0-9a-f]{64}")
_SOURCE: Final = re.compile("[0-9A-Za-z-]{1,64}")
_KEY: Final = re.compile(f"[0-9A-Za-z+/]{{{-(-KEY_SIZE * 4 // 3)}}}=?")
_NAME: Final = "%Y%m%dT%H%M%S.%fZ"


class SortedTable(msgspec.Struct):
    """A map with sorted keys, as its pages."""

    pages: list[str] = []
    """Their digests, in the order of their keys."""
    entries: int = 0


class Manifest(msgspec.Struct, kw_only=True):
    """One whole backup."""

    format: int = FORMAT
    name: str
    made_ns: int
    """The time of its content, since the epoch."""
    version: str
    """The version of KVFS that made it."""
    source: str
    """The store, or the cluster, that it is of."""
    schema: str
    """The schema of its metadata."""
    records: SortedTable
    contents: SortedTable
    packs: list[str]
    large: int = 0
    """Contents with an object of their own."""
    files: int = 0
    """Files of durable namespaces whose content is in it."""
    bytes: int = 0
    added_bytes: int = 0
    """Bytes that this backup put, beside what earlier ones had."""
    in_cold_tier: int = 0
    """Files whose content is in the cold tier alone, and not in the backup."""
    left_out: int = 0
    """Files without their content in it: being written, damaged, or on no node that answered."""
    secret_key: str = ""
    """The key of the secrets of S3's users, in base64; empty: it is not in the backup."""


class ListedBackup(NamedTuple):
    """A backup of a place; None: its manifest is damaged."""

    name: str
    manifest: Manifest | None


def name_at(time_ns: int) -> str:
    """Returns the name of a backup of this time."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime(_NAME)


def write(repository: Repository, manifest: Manifest) -> None:
    """Makes the backup one of the place's."""
    text = msgspec.json.encode(manifest)
    repository.put(_object(manifest.name), _digest(text) + b"\n" + text + b"\n")
    repository.settle()


def read(repository: Repository, name: str) -> Manifest:
    """Raises NotFound, Corrupt, NotSupported."""
    digest, _, text = repository.get(_object(name)).partition(b"\n")
    if _digest(text.rstrip(b"\n")) != digest:
        raise Corrupt(f"the backup {name} in {repository.shown} is damaged: its manifest differs")
    try:
        found = msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the backup {name} in {repository.shown} is damaged: {error}") from None
    if found.format != FORMAT:
        raise NotSupported(
            f"the backup {name} has format {found.format}, this KVFS reads {FORMAT}: use the"
            " version that made it"
        )
    if not _is_possible(found):
        raise Corrupt(f"the backup {name} in {repository.shown} is damaged: it names no objects")
    return found


def is_digest(name: str) -> bool:
    """Returns whether it can be the name of a page or of a pack: never one of another directory."""
    return _DIGEST.fullmatch(name) is not None


def _is_possible(found: Manifest) -> bool:
    named = (*found.records.pages, *found.contents.pages, *found.packs)
    return (
        all(map(is_digest, named))
        and _SOURCE.fullmatch(found.source) is not None
        and (not found.secret_key or _KEY.fullmatch(found.secret_key) is not None)
    )


def names(repository: Repository) -> list[str]:
    """Returns the names of all backups, the oldest first."""
    found = (each.rpartition("/")[2] for each in repository.names(_BELOW))
    return sorted(each.removesuffix(_SUFFIX) for each in found if each.endswith(_SUFFIX))


def listed(repository: Repository) -> list[ListedBackup]:
    """Returns all backups, the oldest first."""
    found = []
    for name in names(repository):
        try:
            found.append(ListedBackup(name, read(repository, name)))
        except NotFound:  # it has just been deleted
            continue
        except Corrupt:
            found.append(ListedBackup(name, None))
    return found


def newest_whole(repository: Repository) -> Manifest | None:
    """Returns the newest backup whose manifest can be read; None: there is none."""
    for name in reversed(names(repository)):
        try:
            return read(repository, name)
        except (Corrupt, NotFound, NotSupported):
            continue
    return None


def chosen(repository: Repository, at: str) -> Manifest:
    """Returns the backup that `chosen_name` chooses. Raises what that and `read` raise."""
    return read(repository, chosen_name(repository, at))


def chosen_name(repository: Repository, at: str) -> str:
    """Returns the backup of this name, or the newest one that is not later than this time (ISO
    8601; without a zone it is local); of no text the newest. Raises NotFound, Invalid."""
    found = names(repository)
    if not found:
        raise NotFound(f"there are no backups in {repository.shown}")
    if at in found or not at:
        return at or found[-1]
    try:
        wanted = name_at(int(datetime.fromisoformat(at).timestamp() * 1e9))
    except ValueError:
        raise Invalid(
            f"'{at}' is no backup of {repository.shown}, and no time like 2030-01-31T12:00"
        ) from None
    earlier = [each for each in found if each <= wanted]
    if not earlier:
        raise NotFound(f"the first backup in {repository.shown} is {found[0]}, later than {at}")
    return earlier[-1]


def require_past(repository: Repository, time_ns: int) -> None:
    """Raises Conflict if there is a backup that is not earlier than this: the next one would count
    as older than that, and be the first to be deleted."""
    if (found := names(repository)) and found[-1] >= name_at(time_ns):
        raise Conflict(
            f"the newest backup in {repository.shown}, {found[-1]}, is of a time to come: set the"
            f" clock, or delete {repository.shown}/{_object(found[-1])}"
        )


def delete(repository: Repository, gone: Sequence[str]) -> None:
    """Deletes manifests: their backups are none any more."""
    for name in gone:
        repository.delete(_object(name))
    repository.settle()


def _object(name: str) -> str:
    return f"{_BELOW}/{name}{_SUFFIX}"


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32).hexdigest().encode()
